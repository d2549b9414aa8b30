"""Operations in flight: as they were submitted, and the transfers they became.

A record outlives the tasks that wait for it. Three kinds of threads read it: the loop, the submit
thread, and threads of serving engines (see `HostFence`). Counters that several threads read are written by
one thread each, after the fields that they make valid.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from asynchicache.errors import DeviceError
from asynchicache.streams.base import Event, Stream
from asynchicache.transfer.plan import CacheOperation, Direction, TransferPlan

Done: TypeAlias = Callable[[BaseException | None], None]
"""Called once, on the loop, when the bytes of an operation have landed, or with the error."""

Reads: TypeAlias = Sequence[tuple[str, Sequence[int]]]
"""(pool, device slots)."""

OnWait: TypeAlias = Callable[[Stream], object]
"""Called, from any thread, with each stream that is made to wait for a transfer."""

NOTHING = CacheOperation(Direction.LOAD, ())
"""Replaces an operation that has ended."""

logger = logging.getLogger(__name__)


class LayerStatus(Enum):
    """How far the bytes of one layer are."""

    PENDING = "pending"  # not enqueued yet: there is no event that a stream could wait for
    SUBMITTED = "submitted"  # enqueued: a fence orders a stream behind the bytes
    COMPLETE = "complete"  # landed
    FAILED = "failed"  # will never land; fences let streams through


# Operations, as they were submitted.


class Submission(msgspec.Struct, eq=False):
    """One operation in flight; its submitter holds a `Ticket`.

    A struct: creating an object with an `__init__` takes about as long as all else that the loop does for one
    operation.

    Attributes:
        tick: the operations it was submitted with; None if there is nothing to wait for.
        operation: what to move. Empty if only `reads` matter; `NOTHING` once it has ended.
        done: called when it has ended; None once it was called.
        after: recorded events that its copies wait for.
        reads: (pool, device slots) that its submitter will read besides.
        on_wait: called with each stream that waits for the bytes.
        own: the transfer that carries it out, if any.
        last_group: the index of the last group of `own` that holds bytes of this operation; -1 if unknown.
        transfers: all transfers that it waits for, `own` first; None while that is not known.
        failure: why it will never be known.
        whole: a task waits for every layer to be enqueued; from any thread.
    """

    tick: Tick | None = None
    operation: CacheOperation = NOTHING
    done: Done | None = None
    after: Sequence[Event] = ()
    reads: Reads = ()
    on_wait: OnWait | None = None
    own: TransferRecord | None = None
    last_group: int = -1
    transfers: Sequence[TransferRecord] | None = None
    failure: BaseException | None = None
    whole: bool = False

    def resolve(self, own: TransferRecord | None, others: Sequence[TransferRecord]) -> None:
        """Set which transfers it waits for; from any thread, before they are enqueued."""
        if self.transfers is None:
            self.own = own  # first: a reader that sees `transfers` looks at `own`
            self.transfers = others if own is None else (own, *others)

    def fail(self, error: BaseException) -> None:
        """Stop waiting for `resolve`, if it has not been called; on the loop."""
        if self.transfers is None:
            self.transfers, self.failure = (), error
            if self.tick is not None:
                self.tick.planned.set()

    def complete(self, error: BaseException | None) -> bool:
        """Call `done`; False if it was called before. On the loop."""
        done, self.done = self.done, None
        if done is None:
            return False
        call_done(done, error)
        return True

    def release(self) -> None:
        """Drop what only the copy needed: a ticket may be kept long after its operation has ended."""
        self.operation, self.after, self.reads = NOTHING, (), ()

    def groups(self, layer: int) -> Iterator[tuple[TransferRecord, int | None]]:
        """For each transfer that it waits for, the index of the group after which the bytes of `layer` are
        there; None where the transfer has no plan."""
        for transfer in self.transfers or ():
            yield transfer, transfer.group_of(layer, self.last_group if transfer is self.own else -1)


@dataclass(slots=True, eq=False)
class Tick:
    """The operations submitted in one iteration of the loop; they may merge.

    Attributes:
        started: when the first was submitted, by the port's clock.
        thread: the loop's.
        operations: those that move something, in order of submission; emptied once all have completed.
        readers: submissions that move nothing and wait for what others bring.
        planned: set, on the loop, once their transfers are known and the first group is enqueued.
        registered: how many of `operations` are counted as in flight.
        completed: how many of them have completed.
    """

    started: float
    operations: list[Submission] = field(default_factory=list)
    readers: list[Submission] = field(default_factory=list)
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    registered: int = 0
    completed: int = 0
    thread: int = field(default_factory=threading.get_ident)

    def settle(self, record: TransferRecord) -> None:
        """One of its transfers is enqueued; on the loop."""
        self.planned.set()
        record.settle()


class InFlightOperations:
    """Operations that have not completed, in order of submission, and readers. Confined to the loop.

    Attributes:
        total: operations registered since the start, without empty ones.
        idle: set while none is in flight.
    """

    def __init__(self) -> None:
        self.total = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._ticks: dict[Tick, None] = {}
        self._read_ticks: list[Tick] = []  # ticks with readers, and perhaps not planned yet

    def __len__(self) -> int:
        return sum(tick.registered - tick.completed for tick in self._ticks)

    def register(self, tick: Tick | None) -> None:
        """Count the operations that `tick`, if there is one, has so far; may be repeated while it is open."""
        if tick is not None and tick.operations:
            self.total += len(tick.operations) - tick.registered
            tick.registered = len(tick.operations)
            self._ticks[tick] = None
            self.idle.clear()

    def add_reader(self, tick: Tick, reader: Submission) -> None:
        if not tick.readers:
            self._read_ticks = [other for other in self._read_ticks if not other.planned.is_set()]
            self._read_ticks.append(tick)
        tick.readers.append(reader)

    def submissions(self) -> list[Submission]:
        return [one for tick in self._ticks for one in tick.operations if one.done is not None]

    def unresolved_readers(self) -> list[Submission]:
        """Readers whose transfers are not known yet."""
        return [one for tick in self._read_ticks for one in tick.readers if one.transfers is None]

    def complete(self, submission: Submission) -> None:
        """A registered operation has completed."""
        tick = submission.tick
        if tick is None:
            return
        tick.completed += 1
        if tick.completed == tick.registered:
            del self._ticks[tick]
            # Tick and submissions refer to each other: without this only a garbage collection frees them.
            tick.operations.clear()
            if not self._ticks:
                self.idle.set()


def call_done(done: Done, error: BaseException | None) -> None:
    """Call `done`. It is the caller's code: an exception is logged, and must not keep others from theirs."""
    try:
        done(error)
    except Exception:
        logger.exception("the completion of a transfer could not be handled")


# Transfers.


class TransferRecord:
    """A transfer in flight: operations of one direction that are carried out together, group by group.

    Groups are enqueued and land in order, so two counters say which are.

    Attributes:
        number: ascends in the order of enqueueing.
        submissions: the operations, until all groups are enqueued; positions in it are those of the plan.
        after: the callers' events that the copies wait for.
        reads_from: transfers that write what this one reads.
        runs_after: transfers that use what this one writes.
        plan: what is copied; None if there is none, see `error`.
        last_event: recorded behind all that was enqueued so far; None before, and once all has landed.
        error: why it could not be enqueued; set on the submit thread.
        failure: why some of it will not land; set on the loop.
        finished: nothing more will land.
        settled: set once every group is enqueued, or never will be.
    """

    def __init__(
        self,
        number: int,
        direction: Direction,
        submissions: Sequence[Submission],
        watch: Callable[[TransferRecord, int], None],
    ) -> None:
        """
        Args:
            watch: has `land` called when a group has landed, by its index.
        """
        self.number = number
        self.direction = direction
        self.submissions = submissions
        self.after = [event for submission in submissions for event in submission.after]
        self.reads_from: set[TransferRecord] = set()
        self.runs_after: set[TransferRecord] = set()
        self.plan: TransferPlan | None = None
        self.last_event: Event | None = None
        self.error: BaseException | None = None
        self.failure: BaseException | None = None
        self.finished = False
        self.settled = asyncio.Event()
        self._watch = watch
        self._events: list[Event | None] = []  # by group, behind its copies
        self._enqueued = 0  # groups, by the submit thread
        self._landed = 0  # groups whose bytes are there, by the loop
        self._ended = 0  # groups that have landed or never will, by the loop
        self._enqueue_waiters: dict[int, asyncio.Event] = {}
        self._landing_waiters: dict[int, asyncio.Event] = {}  # of many groups, few are waited for one by one
        self._ending: list[list[Submission]] = [list(submissions)]  # by the group that completes them

    @property
    def earlier(self) -> set[TransferRecord]:
        """The transfers that it must be behind."""
        return self.reads_from | self.runs_after

    def start(self, plan: TransferPlan) -> None:
        """Set what will be enqueued."""
        self.plan = plan
        self._events = [None] * len(plan.groups)
        self._ending = [[] for _ in plan.groups]
        for submission, last in zip(self.submissions, plan.last_groups, strict=True):
            submission.last_group = last
            self._ending[last].append(submission)

    def group_of(self, layer: int, last: int = -1) -> int | None:
        """The index of the group after which the bytes of `layer` are there; None without a plan.

        Args:
            last: the last group that matters to the caller, which has no bytes in later ones.
        """
        if self.plan is None:
            return None
        return min(self.plan.group_of(layer), last if last >= 0 else len(self.plan.groups) - 1)

    # On the submit thread.

    def enqueue(self, event: Event) -> int:
        """The next group's copies are enqueued, and `event` is recorded behind them; the group's index."""
        index = self._enqueued
        self._events[index] = self.last_event = event
        self._enqueued = index + 1
        return index

    @property
    def whole(self) -> bool:
        """Whether a task waits for every layer to be enqueued."""
        return any(submission.whole for submission in self.submissions)

    def has_enqueue_waiter(self, index: int) -> bool:
        """Whether a task waits, in `submitted`, for a group to be enqueued."""
        return index in self._enqueue_waiters

    def is_watched(self, index: int) -> bool:
        """Whether the loop is to learn when group `index` has landed: where an operation ends, at the last
        group, and where a task waits for it."""
        return bool(self._ending[index]) or index == len(self._events) - 1 or index in self._landing_waiters

    def release(self) -> None:
        """Drop what only enqueueing needed. Records that refer to each other would never be freed, and
        tickets, which refer to theirs, only by a garbage collection."""
        self.after, self.reads_from, self.runs_after, self.submissions = [], set(), set(), ()

    # On any thread.

    def is_enqueued(self, index: int | None) -> bool:
        return index is not None and index < self._enqueued

    def is_ended(self, index: int | None) -> bool:
        """Whether the loop knows that a group has landed or never will. Of groups that no task waits for it
        may learn late, with the next one that a task waits for."""
        return self.failure is not None if index is None else index < self._ended

    def event(self, index: int | None) -> Event | None:
        """The event behind a group's copies; None before they are enqueued, and once the group has ended."""
        if index is None:
            return None
        event = self._events[index]  # read first: the loop removes it after it has counted the group as ended
        return None if index < self._ended else event

    def status(self, index: int | None) -> LayerStatus:
        event = self.event(index)
        if self.is_ended(index):
            landed = index is not None and index < self._landed
            return LayerStatus.COMPLETE if landed else LayerStatus.FAILED
        if event is None:
            return LayerStatus.PENDING
        try:
            return LayerStatus.COMPLETE if event.query() else LayerStatus.SUBMITTED
        except DeviceError:
            return LayerStatus.FAILED

    def error_of(self, index: int | None) -> BaseException | None:
        """Why a group will not land, as far as is known. Asks the device, whose errors reach the loop
        late."""
        event = self.event(index)
        if event is not None:
            return device_error(event)
        return self.failure_of(index) or self.error

    def failure_of(self, index: int | None) -> BaseException | None:
        """Why a group that has ended did not land."""
        if index is None:
            return self.failure
        return self.failure if self._landed <= index < self._ended else None

    # On the loop.

    async def submitted(self, index: int | None) -> bool:
        """Wait until a group is enqueued, or never will be; whether it is. At once if that is known."""
        if index is None:
            await self.settled.wait()
            return False
        if not (self.is_enqueued(index) or self.settled.is_set()):
            waiter = self._enqueue_waiters.setdefault(index, asyncio.Event())
            # Look again: the submit thread counts the group first and looks for waiters second, so one of the
            # two sees the other.
            if not self.is_enqueued(index):
                await waiter.wait()
        return self.is_enqueued(index)

    async def landed(self, index: int | None) -> BaseException | None:
        """Wait until a group has landed, or will not; why it will not."""
        if index is None:
            await self.settled.wait()
            return self.failure or self.error
        if not self.is_ended(index):
            if not self.is_watched(index):
                if self.status(index) is LayerStatus.COMPLETE:
                    return None
                self._ask_for(index)
            await self._landing_waiters.setdefault(index, asyncio.Event()).wait()
        return self.failure_of(index)

    def _ask_for(self, index: int) -> None:
        self._landing_waiters[index] = asyncio.Event()
        # As in `submitted`: the submit thread counts the group first, and asks whether it is watched second.
        if self.is_enqueued(index):
            self._watch(self, index)

    def wake_enqueue_waiters(self, index: int) -> None:
        self._enqueue_waiters[index].set()

    def settle(self) -> None:
        """Every group is enqueued, or never will be."""
        self.settled.set()
        for waiter in self._enqueue_waiters.values():
            waiter.set()

    def land(self, index: int) -> list[Submission]:
        """Group `index` has landed, and with it those before it, as they are on one stream.

        Returns:
            The submissions that this completed.
        """
        self._landed = max(self._landed, index + 1)
        ended = self._end(index + 1, None)
        if self.finished:
            self.last_event = None
        return ended

    def fail(self, error: BaseException) -> list[Submission]:
        """What has not landed by now never will, as far as waiters are concerned; as `land`."""
        self.failure = error
        ended = self._end(len(self._ending), error)
        self.settle()
        return ended

    def _end(self, stop: int, error: BaseException | None) -> list[Submission]:
        start, self._ended = self._ended, max(self._ended, stop)
        for index in range(start, min(stop, len(self._events))):
            self._events[index] = None  # the device reuses events, however long a ticket is kept
        self.finished = self._ended >= len(self._ending)
        ending = [submission for submissions in self._ending[start:stop] for submission in submissions]
        self._ending[start:stop] = [[]] * (stop - start)
        # `done` is called before waiters run: by then the pages have been given back.
        completed = [submission for submission in ending if submission.complete(error)]
        for index in range(start, stop):
            if index in self._landing_waiters:
                self._landing_waiters[index].set()
        return completed


def record_elsewhere(number: int, submission: Submission, layers: int, nbytes: int = 0) -> TransferRecord:
    """A record of a copy that others carry out: what is known is when all of it has ended, which is told with
    `land(0)` or `fail`. No stream of this process is ever ordered behind it.

    Args:
        number: of the record.
        submission: what is copied; it waits for this record alone.
        nbytes: bytes to be moved.
    """
    direction = submission.operation.direction
    record = TransferRecord(number, direction, [submission], _nothing)
    record.start(TransferPlan(direction, {}, (range(layers),), (0,), nbytes))
    record.settle()
    submission.resolve(record, ())
    return record


def _nothing(record: TransferRecord, index: int) -> None:
    """No completion has to be asked for: the end is told."""


def device_error(event: Event) -> DeviceError | None:
    """The error of an event's device, if it has failed."""
    try:
        event.query()
    except DeviceError as error:
        return error
    return None
