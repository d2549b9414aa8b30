"""What was submitted between two turns of the loop, and what of it is still to be told."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from asynchicache.streams.base import Event, Stream
from asynchicache.transfer.plan import CacheOperation, Direction

if TYPE_CHECKING:
    from asynchicache.transfer.record import TransferRecord, TransferView

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
