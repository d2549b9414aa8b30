"""A transfer in flight: which of its layer groups are enqueued, which have landed, whom to tell.

The record belongs to the engine and outlives everyone who waits. Flags that are read by other
threads (`submitted`, `finished`) are written once, after what they speak of.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

import msgspec

from asynchicache.errors import DeviceError
from asynchicache.streams.base import Event, Stream
from asynchicache.transfer.plan import CacheOperation, Direction, TransferPlan

Done: TypeAlias = Callable[[BaseException | None], None]
"""Called on the loop, once, when the bytes of an operation have landed, or with the error."""

Reads: TypeAlias = Sequence[tuple[str, Sequence[int]]]
"""(pool, device slots)."""

NOTHING = CacheOperation(Direction.LOAD, ())
"""Stands where an operation was."""

logger = logging.getLogger(__name__)


class Submission(msgspec.Struct, eq=False, weakref=True):
    """One operation as the loop writes it down.

    A struct, and itself the ticket that its submitter gets: each further object, and an `__init__`, would
    take the loop about as long as all of this one.

    Attributes:
        layers: of the model.
        tick: what it is part of; None if there is nothing to wait for.
        operation: what to move; it may be empty where only `reads` matter. `NOTHING` once it has ended.
        tell: to be called when it has ended; None once it was.
        after: recorded events that its copies wait for.
        reads: (pool, device slots) that its submitter will read besides.
        views: the transfers that it stands for; None while that is not known.
        failure: why nobody will tell what those are.
        ordered: told of each stream that is ordered behind the bytes; from any thread.
    """

    layers: int
    tick: Tick | None = None
    operation: CacheOperation = NOTHING
    tell: Done | None = None
    after: Sequence[Event] = ()
    reads: Reads = ()
    views: Sequence[TransferView] | None = None
    failure: BaseException | None = None
    ordered: Callable[[Stream], object] | None = None

    def resolve(self, views: Sequence[TransferView]) -> None:
        """What it stands for, once that is known; from any thread, before anything is enqueued."""
        if self.views is None:
            self.views = views

    def give_up(self, error: BaseException) -> None:
        """Nobody will tell what it stands for; on the loop."""
        if self.views is None:
            self.views, self.failure = (), error
            if self.tick is not None:
                self.tick.planned.set()

    def end(self, error: BaseException | None) -> bool:
        """Tell that it has ended; False if that was told before. On the loop."""
        tell, self.tell = self.tell, None
        if tell is None:
            return False
        call_done(tell, error)
        return True

    def forget(self) -> None:
        """What only its moving needed: whoever keeps the ticket keeps this too."""
        self.operation, self.after, self.reads = NOTHING, (), ()


@dataclass(slots=True, eq=False)
class Tick:
    """The operations that merge, because one turn of the loop submitted them.

    Attributes:
        started: when the first came, by the port's clock.
        thread: of the loop whose turn this is.
        wishes: what was submitted, in order, until all of it was told; without `onlookers`, whose
            operations are empty.
        planned: set, on the loop, once it is known what becomes of them, and the first of it is enqueued.
        written: how many of the wishes are written down.
        told: how many of them were told that they have ended.
    """

    started: float
    wishes: list[Submission] = field(default_factory=list)
    onlookers: list[Submission] = field(default_factory=list)
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    written: int = 0
    told: int = 0
    thread: int = field(default_factory=threading.get_ident)

    def settle(self, record: TransferRecord) -> None:
        """One of its transfers is enqueued."""
        self.planned.set()
        record.settle()


class Untold:
    """Operations whose end was not told yet, in the order of submission, and who looks on; the loop's.

    Attributes:
        written: operations since the start, without empty ones.
        idle: set while there are none.
    """

    def __init__(self) -> None:
        self.written = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._ticks: dict[Tick, None] = {}
        self._looked_on: list[Tick] = []  # by onlookers, and perhaps not planned yet

    def __len__(self) -> int:
        return sum(tick.written - tick.told for tick in self._ticks)

    def write_down(self, tick: Tick | None) -> None:
        """Take in what `tick`, if there is one, has by now; twice is harmless while it is open."""
        if tick is not None and tick.wishes:
            self.written += len(tick.wishes) - tick.written
            tick.written = len(tick.wishes)
            self._ticks[tick] = None
            self.idle.clear()

    def look_on(self, tick: Tick, onlooker: Submission) -> None:
        """Take in one that moves nothing, and of which it is not known yet what it waits for."""
        if not tick.onlookers:
            self._looked_on = [other for other in self._looked_on if not other.planned.is_set()]
            self._looked_on.append(tick)
        tick.onlookers.append(onlooker)

    def submissions(self) -> list[Submission]:
        return [wish for tick in self._ticks for wish in tick.wishes if wish.tell is not None]

    def onlookers(self) -> list[Submission]:
        """Those of which it is not known what they wait for."""
        return [one for tick in self._looked_on for one in tick.onlookers if one.views is None]

    def strike_out(self, ended: Submission) -> None:
        """The end of it was told."""
        tick = ended.tick
        if tick is None:
            return
        tick.told += 1
        if tick.told == tick.written:
            del self._ticks[tick]
            tick.wishes.clear()  # they hold on to the tick as well, and would not be freed by themselves
            if not self._ticks:
                self.idle.set()


def call_done(done: Done, error: BaseException | None) -> None:
    """Call `done`, which is not ours: what it raises is logged, and the others are told all the same."""
    try:
        done(error)
    except Exception:
        logger.exception("the completion of a transfer could not be handled")


class LayerStatus(Enum):
    """How far the bytes of one layer are."""

    PENDING = "pending"  # not enqueued yet: there is nothing that a stream could wait for
    SUBMITTED = "submitted"  # enqueued: a fence orders a stream behind them
    COMPLETE = "complete"  # landed
    FAILED = "failed"  # they will not come; fences let through


class GroupState:
    """One layer group of a transfer.

    Attributes:
        submitted: they are enqueued.
        finished: the loop knows that they have landed, or will not. Of groups that nobody waits for it may
            learn with the next one that somebody does.
        error: why they will not.
    """

    __slots__ = ("_event", "_landed", "_poll", "error", "finished", "submitted")

    def __init__(self, poll: Callable[[], None]) -> None:
        """`poll`: has the loop learn what has landed by now."""
        self._event: Event | None = None
        self.submitted = False
        self.finished = False
        self.error: BaseException | None = None
        self._poll = poll
        self._landed: asyncio.Event | None = None  # of many groups, few are waited for one by one

    def submit(self, event: Event) -> None:
        """The copies are enqueued, and `event` is recorded behind them; on the enqueueing thread."""
        self._event = event
        self.submitted = True

    def finish(self, error: BaseException | None) -> None:
        """The copies have landed, or will not; on the loop."""
        self.error = error
        self.finished = True
        self._event = None  # the device uses it again, however long a ticket is kept

    @property
    def event(self) -> Event | None:
        """Recorded behind the copies, once and for all who ask; None before that, and once `finished`."""
        event = self._event  # read first: the loop takes it away once it has said `finished`
        return None if self.finished else event

    @property
    def status(self) -> LayerStatus:
        event = self.event
        if self.finished:
            return LayerStatus.COMPLETE if self.error is None else LayerStatus.FAILED
        if event is None:
            return LayerStatus.PENDING
        try:
            return LayerStatus.COMPLETE if event.query() else LayerStatus.SUBMITTED
        except DeviceError:
            return LayerStatus.FAILED

    def awaited(self) -> bool:
        """Whether somebody waits for this group; from any thread."""
        return self._landed is not None

    async def landed(self) -> None:
        """Wait until the group has landed, or will not; on the loop."""
        if not self.finished:
            self._landed = self._landed or asyncio.Event()
            self._poll()  # it may have landed when nobody waited
            await self._landed.wait()

    def wake(self) -> None:
        """Let those who wait look again; on the loop."""
        if self._landed is not None:
            self._landed.set()


class TransferRecord:
    """Operations of one direction that are carried out as one.

    Attributes:
        number: ascending in the order of enqueueing.
        direction: theirs.
        submissions: the operations, until all is enqueued; positions in it are those of the plan.
        after: events of the caller's that the copies wait for.
        needs: transfers that write what this one reads.
        follows: transfers that use what this one writes.
        plan: what the operations come to; None if they come to nothing, see `error`.
        groups: one state for each group of the plan.
        last_event: stands for all that was enqueued so far; None before anything was, and once all landed.
        error: why it could not be enqueued; set by the enqueueing thread.
        failure: why some of it will not land; set on the loop.
        finished: nothing more will land.
        settled: set once every group is enqueued, or never will be.
    """

    def __init__(self, number: int, direction: Direction, submissions: Sequence[Submission]) -> None:
        self.number = number
        self.direction = direction
        self.submissions = submissions
        self.after = [event for submission in submissions for event in submission.after]
        self.needs: set[TransferRecord] = set()
        self.follows: set[TransferRecord] = set()
        self.plan: TransferPlan | None = None
        self.groups: Sequence[GroupState] = ()
        self.last_event: Event | None = None
        self.error: BaseException | None = None
        self.failure: BaseException | None = None
        self.finished = False
        self.settled = asyncio.Event()
        self._asked: dict[GroupState, asyncio.Event] = {}  # somebody waits for these to be enqueued
        self._landed_groups = 0
        self._untold: list[list[Submission]] = [list(submissions)]  # by the group they end with

    def start(self, plan: TransferPlan, groups: Sequence[GroupState]) -> None:
        """This is what will be enqueued."""
        self.plan, self.groups = plan, groups
        self._untold = [[] for _ in groups]
        for submission, last in zip(self.submissions, plan.last_groups, strict=True):
            self._untold[last].append(submission)

    def urgency(self, index: int) -> Callable[[], bool] | None:
        """What decides whether the loop is woken when group `index` has landed: always (None) where an
        operation ends, and with the last group; else if somebody waits for the group."""
        group = self.groups[index]
        return None if self._untold[index] or group is self.groups[-1] else group.awaited

    async def submitted(self, group: GroupState) -> None:
        """Wait until a group is enqueued, or never will be; on the loop. At once if that is known."""
        if not (group.submitted or self.settled.is_set()):
            asked = self._asked.setdefault(group, asyncio.Event())
            # The thread that enqueues looks the other way round, so one of the two sees the other.
            if not group.submitted:
                await asked.wait()

    def asked(self, group: GroupState) -> bool:
        """Whether somebody is to be told, by `tell`, that a group is enqueued; on the enqueueing thread."""
        return group in self._asked

    def tell(self, group: GroupState) -> None:
        """A group is enqueued; on the loop."""
        self._asked[group].set()

    def settle(self) -> None:
        """Every group is enqueued, or never will be; on the loop."""
        self.settled.set()
        for asked in self._asked.values():
            asked.set()

    def forget(self) -> None:
        """What only enqueueing needed. Records that held on to each other would never be freed, and
        tickets, which hold on to theirs, not before a garbage collection."""
        self.after, self.needs, self.follows, self.submissions = [], set(), set(), ()

    def land(self, index: int) -> list[Submission]:
        """Group `index` has landed, and with it those before it, as they are on one stream.

        Returns:
            The submissions that have ended by that, and were told.
        """
        ended = self._finish(index + 1, None)
        if self.finished:
            self.last_event = None
        return ended

    def fail(self, error: BaseException) -> list[Submission]:
        """What has not landed by now will not be waited for; as `land`."""
        self.failure = error
        ended = self._finish(len(self._untold), error)
        self.settle()
        return ended

    def _finish(self, stop: int, error: BaseException | None) -> list[Submission]:
        start, self._landed_groups = self._landed_groups, max(self._landed_groups, stop)
        groups = self.groups[start:stop]
        for group in groups:
            group.finish(error)
        self.finished = self._landed_groups >= len(self._untold)
        ending = [submission for some in self._untold[start:stop] for submission in some]
        self._untold[start:stop] = [[]] * (stop - start)
        ended = [submission for submission in ending if submission.end(error)]
        for group in groups:
            group.wake()
        return ended


class TransferView(NamedTuple):
    """What one ticket sees of one transfer.

    Attributes:
        record: the transfer.
        position: the ticket's own operation in it, or None where the ticket waits for what others move.
    """

    record: TransferRecord
    position: int | None

    @property
    def groups(self) -> Sequence[GroupState]:
        """The groups up to the last one that matters here; none if there is no plan."""
        plan = self.record.plan
        if plan is None or self.position is None:
            return self.record.groups
        return self.record.groups[: plan.last_groups[self.position] + 1]

    @property
    def finished(self) -> bool:
        groups = self.groups
        return groups[-1].finished if groups else self.record.failure is not None

    @property
    def error(self) -> BaseException | None:
        """Why it will not land, as far as is known; what the device knows, the loop may not know yet."""
        groups = self.groups
        if not groups:
            return self.record.failure or self.record.error
        event = groups[-1].event
        if event is None:
            return groups[-1].error or self.record.error
        return device_error(event)

    def group(self, layer: int) -> GroupState | None:
        """The group behind which the bytes of `layer` are; None if there is no plan."""
        plan, groups = self.record.plan, self.groups
        return groups[min(plan.group_of(layer), len(groups) - 1)] if plan and groups else None

    def status(self, layer: int) -> LayerStatus:
        group = self.group(layer)
        if group is None:
            return LayerStatus.PENDING if self.record.failure is None else LayerStatus.FAILED
        return group.status

    async def submitted(self, layer: int) -> bool:
        """Wait until `layer` is enqueued, or never will be; whether it is."""
        group = self.group(layer)
        if group is None:
            await self.record.settled.wait()
            return False
        await self.record.submitted(group)
        return group.submitted

    async def landed(self, layer: int) -> BaseException | None:
        """Wait until the bytes of `layer` have landed, or will not; why they will not."""
        group = self.group(layer)
        if group is None:
            await self.record.settled.wait()
            return self.record.failure or self.record.error
        await group.landed()
        return group.error


def device_error(event: Event) -> DeviceError | None:
    """The error of an event's device, if it has failed."""
    try:
        event.query()
    except DeviceError as error:
        return error
    return None
