"""The leader's side of a group: one ordered log for all followers, and their answers. Sans-IO.

The leader holds the only tree, and every decision is made there. Followers carry out slot numbers. So ranks
cannot disagree: they can be late, or fail, and both are answers.

R1: entries have one order, which `ranks.frames` protects.
R3: an operation has ended when all ranks say so (`ranks.pending`).
R4: outcomes are intersected per page, the worst first (`ranks.group_work`).
R6: answers carry the operation and its status.
R7: nothing waits without a deadline; a rank past it is lost, and the group goes on cold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from asynchicache.controller.statistics import GroupStatistics, RankStatistics
from asynchicache.errors import RankError, RankLostError, RankProtocolError
from asynchicache.ranks.frames import FrameReader, FrameWriter
from asynchicache.ranks.messages import (
    ClearEntry,
    CloseEntry,
    CopyEntry,
    EndAnswer,
    EpochEntry,
    ExistsEntry,
    FailureAnswer,
    FollowerAnswer,
    FreeSlots,
    HeartbeatAnswer,
    HeartbeatEntry,
    LateAnswer,
    LogEntry,
    MarkEntry,
    OutcomesAnswer,
    PoolPages,
    ReadEntry,
    TouchEntry,
    TransferRuns,
    VerifyEntry,
    WriteEntry,
    pack_slots,
)
from asynchicache.ranks.pending import PendingOperations
from asynchicache.transfer.plan import CacheOperation


class RankAnswer(NamedTuple):
    """A follower's answer to one operation.

    Attributes:
        late: None if no engine of the follower uses the slots. Otherwise a future that is done when none does
            any more, or cancelled if that will never be known.
    """

    answer: FollowerAnswer
    late: asyncio.Future[None] | None = None


Answers: TypeAlias = Mapping[int, RankAnswer]
"""The answers to one operation, by rank; empty if the group has failed."""


class RankLeader:
    """Sends the log, and collects what the followers answer. Confined to one event loop.

    Attributes:
        failure: why the group goes on cold; None while it is whole.
        on_failure: called once with `failure`.
        wake: called when there are bytes to `take`.
        step: the last step that was marked.
        log_bytes: bytes of the log so far; each follower gets all of them.
    """

    def __init__(self, ranks: Sequence[int], incarnation: int, now: Callable[[], float]) -> None:
        """
        Args:
            ranks: the followers.
            incarnation: the number of this group, as in `Welcome`.
            now: a monotonic clock, in seconds.
        """
        self.failure: RankError | None = None
        self.on_failure: Callable[[RankError], object] = lambda error: None
        self.wake: Callable[[], object] = lambda: None
        self.step = 0
        self.log_bytes = 0
        self.ranks = tuple(ranks)
        self._now = now
        self._log: FrameWriter[LogEntry] = FrameWriter(incarnation)
        self._readers: dict[int, FrameReader[FollowerAnswer]] = {
            rank: FrameReader(incarnation, FollowerAnswer) for rank in ranks
        }
        self._pending: PendingOperations[RankAnswer] = PendingOperations(ranks)
        self._late: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._heard = dict.fromkeys(ranks, now())
        self._lost: int | None = None
        self._broken = False

    # Bytes

    def take(self) -> bytes:
        """Log entries since the last call, to be sent to every follower."""
        data = self._log.take()
        self.log_bytes += len(data)
        return data

    def feed(self, rank: int, data: bytes) -> None:
        """Take bytes that a follower sent. What does not fit fails the group; it does not raise."""
        if self.failure is not None:
            return
        self._heard[rank] = self._now()
        try:
            for answer in self._readers[rank].feed(data):
                self._take_answer(rank, answer)
        except RankProtocolError as error:
            self.fail(RankProtocolError(f"rank {rank}: {error}"), rank)

    def _take_answer(self, rank: int, answer: FollowerAnswer) -> None:
        match answer:
            case HeartbeatAnswer():
                return
            case FailureAnswer():
                self.fail(RankError(f"rank {rank} failed: {answer.error}"), rank)
            case LateAnswer():
                self._late_ended(rank, answer)
            case _:
                late = None
                if isinstance(answer, OutcomesAnswer) and answer.late:
                    late = asyncio.get_running_loop().create_future()
                    self._late[rank, answer.operation] = late
                self._pending.answer(rank, answer.operation, RankAnswer(answer, late), self._now())

    def _late_ended(self, rank: int, answer: LateAnswer) -> None:
        late = self._late.pop((rank, answer.operation), None)
        if late is None:
            raise RankProtocolError(f"operation {answer.operation} was not late")
        if answer.safe:
            late.set_result(None)
        else:
            late.cancel()

    def lost(self, rank: int, why: str) -> None:
        """A follower's connection has ended."""
        self.fail(RankLostError(f"rank {rank} is lost: {why}"), rank)

    def check(self, silence: float) -> None:
        """Fail the group if an operation is past its deadline, or a follower was silent for too long."""
        if self.failure is not None:
            return
        now = self._now()
        overdue = self._pending.overdue(now)
        if overdue is not None:
            rank, operation, seconds = overdue
            self.lost(rank, f"it has not answered operation {operation} for {seconds:.1f} s")
            return
        for rank, heard in self._heard.items():
            if now - heard > silence:
                self.lost(rank, f"it was silent for {now - heard:.1f} s (limit {silence} s)")
                return

    def fail(self, error: RankError, rank: int | None = None) -> None:
        """End the group: every open operation fails, and nothing more is sent.

        Args:
            rank: the follower that ended it; None if none did.
        """
        if self.failure is not None:
            return
        self.failure, self._lost, self._broken = error, rank, True
        left = self._pending.abandon()
        for late in self._late.values():
            late.cancel()  # its end will never be known
        self._late.clear()
        self.on_failure(error)
        for answered in left:
            answered({})

    # The log

    def _add(self, entry: LogEntry) -> None:
        self._log.add(entry)
        self.wake()

    def heartbeat(self) -> None:
        if self.failure is None and not len(self._log):
            self._add(HeartbeatEntry())

    def mark(self, message: bytes | None = None) -> int:
        """End the copies of a step; returns its number, which the engine sends to the other ranks, or which
        goes along with a `message` of the engine."""
        self.step += 1
        if self.failure is None:
            self._add(MarkEntry(self.step, message))
        return self.step

    def close(self) -> None:
        if self.failure is None:
            self._add(CloseEntry())
            self.failure = RankError("the group is closed")

    def copy(
        self, operation: CacheOperation, seconds: float, ended: Callable[[BaseException | None], object]
    ) -> None:
        """Copy on every follower; `ended` is called with the first error, or None when all have ended."""
        number = self._pending.begin(self._now(), seconds, partial(self._copy_ended, ended))
        transfers = [
            TransferRuns(pool, pack_slots(sources), pack_slots(destinations))
            for pool, sources, destinations in operation.transfers
        ]
        self._add(CopyEntry(number, operation.direction, transfers))

    def _copy_ended(self, ended: Callable[[BaseException | None], object], answers: Answers) -> None:
        if not answers:
            ended(self.failure)
            return
        errors = []
        for rank, (answer, _) in answers.items():
            if not isinstance(answer, EndAnswer):
                errors.append(f"rank {rank} answered a copy with {type(answer).__name__}")
            elif answer.error:
                errors.append(f"rank {rank}: {answer.error}")
        ended(RankError("; ".join(errors)) if errors else None)

    async def read(self, pages: Sequence[PoolPages], seconds: float) -> Answers:
        """Read pages on every follower; the answers by rank, none if the group has failed."""
        return await self._ask(lambda number: ReadEntry(number, list(pages)), seconds)

    async def write(self, pages: Sequence[PoolPages], seconds: float) -> Answers:
        return await self._ask(lambda number: WriteEntry(number, list(pages)), seconds)

    async def exists(
        self, pools: Sequence[str], pages: bytes, seconds: float, *, fresh: bool, everywhere: bool
    ) -> Answers:
        return await self._ask(
            lambda number: ExistsEntry(number, list(pools), pages, fresh, everywhere), seconds
        )

    async def clear(self, seconds: float) -> Answers:
        return await self._ask(ClearEntry, seconds)

    async def begin_epoch(self, weight_version: str, seconds: float) -> Answers:
        """Go on under other weights on every follower."""
        return await self._ask(lambda number: EpochEntry(number, weight_version), seconds)

    async def verify(self, free: Sequence[FreeSlots], seconds: float, *, idle: bool) -> Answers:
        """Ask every follower whether what it does agrees with what is free and open here, as of now."""
        still_open = sorted({*self._pending.numbers, *(operation for _, operation in self._late)})
        return await self._ask(lambda number: VerifyEntry(number, still_open, list(free), idle), seconds)

    def touch(self, pages: Sequence[PoolPages]) -> None:
        if self.failure is None:
            self._add(TouchEntry(list(pages)))

    async def _ask(self, entry: Callable[[int], LogEntry], seconds: float) -> Answers:
        if self.failure is not None:
            return {}
        answered: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()

        def take(answers: Answers) -> None:
            if not answered.done():
                answered.set_result(answers)

        self._add(entry(self._pending.begin(self._now(), seconds, take)))
        return await answered

    # What is open

    def __len__(self) -> int:
        """Operations that some rank has not answered."""
        return len(self._pending)

    def statistics(self) -> GroupStatistics:
        ranks = {
            rank: RankStatistics(self._pending.lags[rank].snapshot(), rank == self._lost)
            for rank in self.ranks
        }
        return GroupStatistics(ranks, self.log_bytes, self.step, len(self._pending), failed=self._broken)

    def lag_seconds(self) -> dict[int, float]:
        """By rank, the longest time to an answer since the last call."""
        slowest = dict(self._pending.slowest)
        for rank in slowest:
            self._pending.slowest[rank] = 0.0
        return slowest
