"""The leader's side of copies and storage calls: run here, sent to every follower, and ended when all ranks
have ended. They stand where the cache of one rank has its transfers and its storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import and_

import msgspec

from asynchicache.controller.storage_pools import (
    SLICE_PAGES,
    Presence,
    worst_outcomes,
)
from asynchicache.errors import RankProtocolError, StorageError
from asynchicache.hashing import PlacedPage
from asynchicache.planner.actions import StorageWrite
from asynchicache.planner.readings import StorageRead
from asynchicache.ranks.leader import Answers, RankLeader
from asynchicache.ranks.messages import (
    REASONS,
    EndAnswer,
    FollowerAnswer,
    OutcomesAnswer,
    PoolPages,
    PresenceAnswer,
    pack_pages,
    pack_slots,
    unpack_outcomes,
)
from asynchicache.ranks.shared_storage import SharedStorage
from asynchicache.ranks.sharing import HostShare
from asynchicache.storage.deadlines import joined
from asynchicache.storage.limits import BatchResult
from asynchicache.streams.base import Event
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import Done, OnWait, Reads, Submission, TransferRecord, record_elsewhere
from asynchicache.transfer.statistics import TransferStatistics
from asynchicache.transfer.ticket import Ticket
from asynchicache.transfer.transfers import Transfers
from asynchicache.types import MissReason, Outcome

_ALONE = HostShare()


class GroupTransfers:
    """Copies on all ranks; see `LocalTransfers`."""

    in_process = True

    def __init__(
        self,
        leader: RankLeader,
        here: Transfers,
        share: HostShare = _ALONE,
        *,
        seconds: float,
        engine_layers: int = 0,
    ) -> None:
        """
        Args:
            here: copies on this rank.
            share: the part of this rank in filling host memory.
            seconds: how long a follower may take for a copy.
            engine_layers: the layers of the model, if engines own the device memory. 0: the cache does.
        """
        self.audit = here.audit
        self._leader = leader
        self._here = here
        self._seconds = seconds
        self._share = share
        self._engine_layers = engine_layers
        self._joint: dict[_JointOperation, CacheOperation] = {}  # and what is copied here of each

    def submit(
        self,
        operation: CacheOperation,
        *,
        after: Sequence[Event] = (),
        reads: Reads = (),
        done: Done,
        on_wait: OnWait | None = None,
    ) -> Ticket:
        """Copy on all ranks. The ticket is about this rank; `done` is called when all ranks have ended.

        If engines own the device memory, the ticket is done when all ranks have ended: the engine may use the
        pages again. Streams are ordered behind the copies of this rank, behind those of a backup not at all.
        """
        if operation.empty or self._leader.failure is not None:
            return self._here.submit(operation, after=after, reads=reads, done=done, on_wait=on_wait)
        own = self._share.own_part(operation)
        everywhere, joint_ticket = None, None
        if self._engine_layers:
            submission = Submission(None, operation, done, (), (), on_wait)
            everywhere = record_elsewhere(0, submission, self._engine_layers)
            joint_ticket, done = Ticket(submission, self._engine_layers), partial(_end, everywhere)
        joint: _JointOperation

        def ended(error: BaseException | None) -> None:
            del self._joint[joint]
            done(error)

        joint = _JointOperation(operation, ended)
        # The log is sent before the copies of this rank start: a thread that runs them would hold it up.
        self._leader.wake()
        ticket = self._here.submit(own, after=after, reads=reads, done=joint.ended, on_wait=on_wait)
        self._joint[joint] = own
        self._leader.copy(operation, self._seconds, joint.ended)
        if joint_ticket is None:
            return ticket
        if operation.direction is Direction.BACKUP:
            return joint_ticket
        return msgspec.structs.replace(ticket, _everywhere=everywhere)

    def in_flight(self) -> Collection[CacheOperation]:
        """Operations whose `done` has not been called."""
        joint = set(map(id, self._joint.values()))
        alone = [one for one in self._here.in_flight() if id(one) not in joint]
        return alone + [one.operation for one in self._joint]

    def statistics(self) -> TransferStatistics:
        return self._here.statistics()

    def end_unstarted(self) -> None:
        self._here.end_unstarted()

    async def aclose(self, deadline_seconds: float) -> int:
        return await self._here.aclose(deadline_seconds)


def _end(record: TransferRecord, error: BaseException | None) -> None:
    for submission in record.land(0) if error is None else record.fail(error):
        submission.release()
    record.release()


class _JointOperation:
    """One operation, here and on the followers."""

    def __init__(self, operation: CacheOperation, done: Done) -> None:
        self.operation = operation
        self._done = done
        self._left = 2
        self._error: BaseException | None = None

    def ended(self, error: BaseException | None) -> None:
        self._left -= 1
        self._error = self._error or error
        if not self._left:
            self._done(self._error)


class GroupStorage(SharedStorage):
    """Storage of all ranks: a page is there if every rank has its shard, and stored if every rank says so."""

    alone = False

    def __init__(
        self,
        sharing: Callable[[int], Iterable[str]],
        leader: RankLeader,
        share: HostShare = _ALONE,
        *,
        seconds: float,
    ) -> None:
        """
        Args:
            sharing: returns the pools that share the slots of a component.
            share: the part of this rank in filling host memory.
            seconds: how long a follower may take for a call, its own deadlines included.
        """
        super().__init__(sharing, share)
        self._leader = leader
        self._seconds = seconds

    async def exists_in_all(
        self, names: Iterable[str], pages: Sequence[PlacedPage], *, fresh: bool, everywhere: bool
    ) -> Presence:
        names = list(names)
        own = super().exists_in_all(names, pages, fresh=fresh, everywhere=everywhere)
        if not self:  # detached, as while the weights change: what followers have now is of no use
            return await own
        asking = self._leader.exists(
            names, pack_pages(pages), self._seconds, fresh=fresh, everywhere=everywhere
        )
        here, answers = await asyncio.gather(own, asking)
        flags, reason = here
        for rank in self._leader.ranks:
            answer, _ = answers.get(rank, _NO_ANSWER)
            if not isinstance(answer, PresenceAnswer) or len(answer.flags) != len(flags):
                return Presence(bytes(len(pages)), MissReason.STORAGE_FAILED)
            flags = bytes(map(and_, flags, answer.flags))
            if answer.reason and reason is MissReason.NONE:
                reason = REASONS[answer.reason]
        return Presence(flags, reason)

    async def put(self, work: StorageWrite) -> list[BatchResult]:
        if not self:
            return await super().put(work)
        if self._leader.failure is not None:  # a rank that is only slow may still write to shared host memory
            return [BatchResult([Outcome.REJECTED] * len(slots)) for _, slots in work.pages.values()]
        calls = [_pages(pool, pages, slots) for pool, (pages, slots) in work.pages.items()]
        here, answers = await asyncio.gather(super().put(work), self._leader.write(calls, self._seconds))
        return [self._merged(batch, index, answers) for index, batch in enumerate(here)]

    async def get(self, read: StorageRead) -> tuple[list[Outcome], list[BatchResult]]:
        if not self:
            return await super().get(read)
        pools = list(self._sharing(read.component_id))
        pages = [_pages(name, read.placed, read.slots) for name in pools]
        (outcomes, late), answers = await asyncio.gather(
            super().get(read), self._leader.read(pages, self._seconds)
        )
        batch = BatchResult(outcomes)
        for index in range(len(pools)):
            batch = self._merged(batch, index, answers)
        return batch.outcomes, late + ([batch] if batch.lingering is not None else [])

    def _merged(self, here: BatchResult, index: int, answers: Answers) -> BatchResult:
        """The worst outcome per page of this rank and the followers', for the pool at `index` of an entry."""
        pages = len(here.outcomes)
        columns, late = [here.outcomes], [] if here.lingering is None else [here.lingering]
        for rank in self._leader.ranks:
            answer, lingering = answers.get(rank, _NO_ANSWER)
            columns.append(self._outcomes(rank, answer, index, pages))
            late += [] if lingering is None else [lingering]
        return BatchResult(worst_outcomes(columns), joined(late))

    def _outcomes(self, rank: int, answer: FollowerAnswer | None, index: int, pages: int) -> list[Outcome]:
        failed = [Outcome.FAILED] * pages
        if answer is None:  # the group has failed
            return failed
        if isinstance(answer, OutcomesAnswer) and len(answer.outcomes) > index:
            try:
                outcomes = unpack_outcomes(answer.outcomes[index])
            except RankProtocolError as error:
                self._leader.fail(RankProtocolError(f"rank {rank}: {error}"), rank)
                return failed
            if len(outcomes) == pages:
                return outcomes
        wrong = RankProtocolError(f"rank {rank} answered {answer!r:.80} for {pages} pages")
        self._leader.fail(wrong, rank)
        return failed

    async def clear(self) -> int:
        here, answers = await asyncio.gather(
            super().clear(), self._leader.clear(self._seconds), return_exceptions=True
        )
        if isinstance(here, BaseException):
            raise here
        if isinstance(answers, BaseException):
            raise answers
        for rank in self._leader.ranks:
            answer, _ = answers.get(rank, _NO_ANSWER)
            if not isinstance(answer, EndAnswer) or answer.error:
                why = answer.error if isinstance(answer, EndAnswer) else f"it answered {answer!r:.80}"
                raise StorageError(f"rank {rank} could not clear its storage: {why}")
            here += answer.count
        return here

    async def touch(self, uses: Mapping[int, Sequence[PlacedPage]]) -> None:
        self._leader.touch(
            [
                PoolPages(name, pack_pages(pages[at : at + SLICE_PAGES]))
                for component_id, pages in uses.items()
                for name in self._sharing(component_id)
                for at in range(0, len(pages), SLICE_PAGES)
            ]
        )
        await super().touch(uses)


_NO_ANSWER: tuple[FollowerAnswer | None, asyncio.Future[None] | None] = (None, None)


def _pages(pool: str, pages: Sequence[PlacedPage], slots: Sequence[int]) -> PoolPages:
    return PoolPages(pool, pack_pages(pages), pack_slots(slots))
