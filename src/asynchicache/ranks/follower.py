"""A follower: carries out the leader's log with its own device, host memory and storage. Sans-IO.

A follower decides nothing and has no tree. It runs slot numbers and digests.

R1: it applies entries in order, and refuses a gap (`ranks.frames`).
R2: a copy waits for this rank's compute stream as of its place in the log. So the leader may free device
    slots when its own stream has passed: on every rank the new write stands behind the old reads.
R5: two lanes. Storage calls touch host slots, which are free only after all ranks are done with them, so
    they run on arrival. Copies run at the engine's step.
R6: it answers each operation once, with its status.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial

from asynchicache.controller.storage_pools import StoragePools
from asynchicache.errors import CacheError, RankError, RankLostError, StorageError
from asynchicache.ranks.frames import FrameReader, FrameWriter
from asynchicache.ranks.messages import (
    REASONS,
    ClearEntry,
    CloseEntry,
    CopyEntry,
    EndAnswer,
    EpochEntry,
    ExistsEntry,
    FailureAnswer,
    FollowerAnswer,
    HeartbeatAnswer,
    HeartbeatEntry,
    LateAnswer,
    LogEntry,
    MarkEntry,
    OutcomesAnswer,
    PoolPages,
    PresenceAnswer,
    ProblemsAnswer,
    ReadEntry,
    TouchEntry,
    VerifyEntry,
    WriteEntry,
    pack_outcomes,
    pack_slots,
    unpack_pages,
    unpack_slots,
)
from asynchicache.ranks.running import RunningOperations
from asynchicache.ranks.sharing import HostShare
from asynchicache.storage.limits import BatchResult
from asynchicache.streams.base import Device, Event, Stream, check_stream
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import Outcome, PoolTransfer

logger = logging.getLogger(__name__)


class AppliedStep:
    """The copies that a forward of a follower depends on."""

    def __init__(self, step: int, loads: Sequence[Ticket]) -> None:
        self.step = step
        self._loads = tuple(loads)

    async def submitted(self, layer: int | None = None) -> None:
        """Wait until the loads are enqueued up to `layer`, so that `wait_on` means something.

        Raises:
            TransferError: a load failed.
        """
        for ticket in self._loads:
            await ticket.submitted(layer)

    def wait_on(self, stream: Stream, layer: int) -> None:
        """Make `stream` wait for the bytes of `layer`; after `submitted(layer)`."""
        for ticket in self._loads:
            ticket.fence(layer).wait_on(stream)

    async def landed(self) -> None:
        """Wait until all bytes have landed, as the host sees it.

        Raises:
            TransferError: some will not.
        """
        for ticket in self._loads:
            await ticket


async def _no_storage(weight_version: str) -> None:
    """There is nothing to open again."""


class RankFollower:
    """Carries out the log. Confined to one event loop.

    Attributes:
        failure: why it stopped; None while it runs.
        closed: whether the leader has closed the group.
        wake: called when there are bytes to `take`.
        spawn: runs a coroutine as a task.
        on_failure: called once with `failure`.
        update_weights: opens storage again under another weight version.
    """

    def __init__(
        self,
        incarnation: int,
        device: Device,
        copies: LocalTransfers,
        pools: Collection[str],
        storage: StoragePools,
        now: Callable[[], float],
        share: HostShare = HostShare(),  # noqa: B008 - immutable
    ) -> None:
        """
        Args:
            incarnation: the number of the group, as in `Welcome`.
            pools: the pools that this rank has; entries may name others, of other pipeline stages.
            now: a monotonic clock, in seconds.
            share: the part of this rank in filling host memory.
        """
        self.failure: RankError | None = None
        self.closed = False
        self.wake: Callable[[], object] = lambda: None
        self.spawn: Callable[[Coroutine[object, object, None]], object] = asyncio.ensure_future
        self.on_failure: Callable[[RankError], object] = lambda error: None
        self.update_weights: Callable[[str], Coroutine[object, object, None]] = _no_storage
        self._device = device
        self._copies = copies
        self._pools = frozenset(pools)
        self._storage = storage
        self._now = now
        self._share = share
        self._heard = now()
        self._reader: FrameReader[LogEntry] = FrameReader(incarnation, LogEntry)
        self._answers: FrameWriter[FollowerAnswer] = FrameWriter(incarnation)
        self._running = RunningOperations()
        self._held: deque[CopyEntry | MarkEntry] = deque()
        self._messages: deque[MarkEntry] = deque()  # that the engine has not taken
        self._segment = 0  # marks that were applied
        self._allowed = 0  # copies behind this many marks may run
        self._step = 0  # the last mark that was reached
        self._applied = 0
        self._stream: Stream | None = None
        self._loads: list[Ticket] = []
        self._moved = asyncio.Event()

    # Bytes

    def take(self) -> bytes:
        """Answers since the last call, to be sent to the leader."""
        return self._answers.take()

    def feed(self, data: bytes) -> None:
        """Take bytes of the log. What does not fit stops the follower; it does not raise."""
        if self.failure is not None or self.closed:
            return
        self._heard = self._now()
        try:
            for entry in self._reader.feed(data):
                self._take_entry(entry)
        except CacheError as error:
            self.fail(error if isinstance(error, RankError) else RankError(str(error)))

    def check(self, silence: float) -> None:
        """Stop if the leader was silent for too long."""
        if self.failure is None and not self.closed and self._now() - self._heard > silence:
            self.fail(RankLostError(f"rank 0 is lost: it was silent for more than {silence} s"))

    def fail(self, error: RankError) -> None:
        """Stop: tell the leader, and let waiters of steps raise."""
        if self.failure is None:
            self.failure = error
            self._answer(FailureAnswer(str(error)))
            self._moved.set()
            self.on_failure(error)

    def leave(self) -> None:
        """Carry out nothing more; waiters of steps raise."""
        if self.failure is None and not self.closed:
            self.failure = RankError("this rank has left the group")
        self._moved.set()

    def heartbeat(self) -> None:
        if self.failure is None and not len(self._answers):
            self._answer(HeartbeatAnswer())

    def _answer(self, answer: FollowerAnswer) -> None:
        self._answers.add(answer)
        self.wake()

    def _take_entry(self, entry: LogEntry) -> None:
        if isinstance(entry, CopyEntry | ReadEntry | WriteEntry):
            self._running.begin(entry)
        match entry:
            case CopyEntry() | MarkEntry():
                self._held.append(entry)
                self._advance()
                if isinstance(entry, MarkEntry) and entry.message is not None:
                    self._messages.append(entry)
                    self._moved.set()
            case VerifyEntry():
                self._answer(ProblemsAnswer(entry.operation, list(self._running.problems(entry))))
            case HeartbeatEntry():
                pass
            case CloseEntry():
                self.closed = True
                self._moved.set()
            case _:
                self.spawn(self._storage_call(entry))

    # The lane of copies

    async def apply(self, step: int, after: Stream) -> AppliedStep:
        """Enqueue all copies that forward `step` depends on; returns what the forward must wait for.

        Args:
            step: the number that the leader marked.
            after: this rank's compute stream, with every forward before `step` enqueued on it.

        Raises:
            RankError: the step was applied before, or the group has failed or is closed.
        """
        if step <= self._applied:
            raise RankError(
                f"step {step} was applied before, or out of order: the last one was {self._applied}"
            )
        check_stream(self._device, after)
        self._stream = after
        while self._step < step:
            self._check()
            self._allowed = self._segment
            self._advance()
            if self._step < step:
                self._moved.clear()
                await self._moved.wait()
        if self._step != step:
            raise RankError(f"step {step} was skipped: the log has reached step {self._step}")
        self._applied = step
        self._loads = [ticket for ticket in self._loads if not ticket.done]
        return AppliedStep(step, self._loads)

    async def next_message(self) -> tuple[int, bytes] | None:
        """The next step that came with a message, and the message; None once the leader has closed the group.

        Raises:
            RankError: the group has failed.
        """
        while not self.closed:
            self._check()
            if self._messages:
                entry = self._messages.popleft()
                return entry.step, entry.message or b""
            self._moved.clear()
            await self._moved.wait()
        return None

    def launched(self, stream: Stream) -> None:
        """The forward of the last applied step is enqueued on `stream`: what depends on it may be copied."""
        self._stream = stream
        self._allowed = self._segment
        self._advance()

    def _check(self) -> None:
        if self.failure is not None:
            raise RankError(f"the group has failed: {self.failure}") from self.failure
        if self.closed:
            raise RankError("the leader has closed the group")

    def _advance(self) -> None:
        """Run held entries as far as the compute stream of this rank allows."""
        events = None
        while self._held and self._segment <= self._allowed and self.failure is None:
            entry = self._held.popleft()
            if isinstance(entry, MarkEntry):
                self._segment += 1
                self._step = entry.step
                self._moved.set()
            else:
                events = self._computed() if events is None else events
                self._copy(entry, events)

    def _computed(self) -> tuple[Event, ...]:
        """The compute stream of this rank as of now (rule R2)."""
        if self._stream is None:
            return ()
        event = self._device.event()
        self._stream.record(event)
        return (event,)

    def _copy(self, entry: CopyEntry, after: Sequence[Event]) -> None:
        transfers = tuple(
            PoolTransfer(one.pool, unpack_slots(one.sources), unpack_slots(one.destinations))
            for one in entry.transfers
            if one.pool in self._pools
        )
        operation = self._share.own_part(CacheOperation(entry.direction, transfers))
        done = partial(self._copied, entry.operation)
        ticket = self._copies.submit(operation, after=after, done=done)
        if entry.direction is not Direction.BACKUP:
            self._loads.append(ticket)

    def _copied(self, operation: int, error: BaseException | None) -> None:
        self._running.end(operation)
        self._answer(EndAnswer(operation, "" if error is None else f"{type(error).__name__}: {error}"))

    # The lane of storage

    async def _storage_call(self, entry: LogEntry) -> None:
        match entry:
            case ReadEntry():
                await self._move(entry.operation, entry.pages, put=False)
            case WriteEntry():
                await self._move(entry.operation, entry.pages, put=True)
            case ExistsEntry():
                names = [name for name in entry.pools if name in self._pools]
                pages = unpack_pages(entry.pages)
                flags, reason = await self._storage.exists_in_all(
                    names, pages, fresh=entry.fresh, everywhere=entry.everywhere
                )
                self._answer(PresenceAnswer(entry.operation, flags, REASONS.index(reason)))
            case TouchEntry():
                for one in entry.pages:
                    await self._storage.touch_pool(one.pool, unpack_pages(one.pages))
            case ClearEntry():
                await self._clear(entry.operation)
            case EpochEntry():
                await self._begin_epoch(entry)

    async def _begin_epoch(self, entry: EpochEntry) -> None:
        try:
            await self.update_weights(entry.weight_version)
        except CacheError as error:
            self._answer(EndAnswer(entry.operation, str(error) or type(error).__name__))
        else:
            self._answer(EndAnswer(entry.operation))

    async def _clear(self, operation: int) -> None:
        try:
            self._answer(EndAnswer(operation, count=await self._storage.clear()))
        except StorageError as error:
            self._answer(EndAnswer(operation, str(error) or type(error).__name__))

    async def _move(self, operation: int, pages: Sequence[PoolPages], *, put: bool) -> None:
        batches = await asyncio.gather(*(self._move_pool(one, put=put) for one in pages))
        late = [batch.lingering for batch in batches if batch.lingering is not None]
        if late:
            self._running.late(operation, [_late(*one) for one in zip(pages, batches, strict=True)])
        else:
            self._running.end(operation)
        self._answer(
            OutcomesAnswer(operation, [pack_outcomes(batch.outcomes) for batch in batches], bool(late))
        )
        if late:
            await asyncio.wait(late)
            self._running.end(operation)
            self._answer(LateAnswer(operation, not any(call.cancelled() for call in late)))

    async def _move_pool(self, pages: PoolPages, *, put: bool) -> BatchResult:
        placed = unpack_pages(pages.pages)
        if pages.pool not in self._pools:  # of another pipeline stage: nothing to do is done
            return BatchResult([Outcome.EXISTS if put else Outcome.HIT] * len(placed))
        slots = unpack_slots(pages.slots)
        if not put and self._copies.audit is not None:
            self._copies.audit.forget(pages.pool, slots)
        return await self._storage.move(pages.pool, placed, slots, put=put)


def _late(pages: PoolPages, batch: BatchResult) -> PoolPages:
    """The pages of a call past its deadline, whose slots it may still use."""
    slots = zip(unpack_slots(pages.slots), batch.outcomes, strict=True)
    late = [slot for slot, outcome in slots if outcome is Outcome.TIMEOUT and batch.lingering is not None]
    return PoolPages(pages.pool, b"", pack_slots(late))
