"""What was submitted between two turns of the loop, and what of it is still to be told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeAlias

from asynchicache.streams.base import Event
from asynchicache.transfer.plan import CacheOperation
from asynchicache.transfer.record import Claim, Done, Submission, TransferRecord
from asynchicache.transfer.ticket import Ticket

Reads: TypeAlias = Sequence[tuple[str, Sequence[int]]]
"""(pool, device slots)."""

Wish: TypeAlias = tuple[CacheOperation, Sequence[Event], Reads, Done, Ticket]
"""One operation as the loop writes it down: a tuple, since an object takes it several times as long."""

_TICKET = itemgetter(4)


@dataclass(slots=True, eq=False)
class Tick:
    """The operations that merge, because one turn of the loop submitted them.

    Attributes:
        started: when the first came, by the port's clock.
        wishes: what was submitted, in order; without `onlookers`, whose operations are empty.
        planned: set, on the loop, once it is known what becomes of them, and the first of it is enqueued.
    """

    started: float
    wishes: list[Wish] = field(default_factory=list)
    onlookers: list[Wish] = field(default_factory=list)
    planned: asyncio.Event = field(default_factory=asyncio.Event)

    def submissions(self) -> list[Submission]:
        """What to plan; on the submit thread."""
        return [Submission(*wish, self.started) for wish in (*self.wishes, *self.onlookers)]

    def settle(self, record: TransferRecord) -> None:
        """One of its transfers is enqueued."""
        self.planned.set()
        record.settle()


class Untold:
    """Operations whose end was not told yet, in the order of submission; the loop's.

    Attributes:
        written: operations since the start, without empty ones.
        idle: set while there are none.
    """

    def __init__(self) -> None:
        self.written = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._wishes: dict[Claim, Wish] = {}

    def __len__(self) -> int:
        return len(self._wishes)

    def write_down(self, tick: Tick) -> None:
        """Take in what `tick` has by now; a whole tick at a time, and twice is harmless while it is open."""
        before = len(self._wishes)
        self._wishes.update(zip(map(_TICKET, tick.wishes), tick.wishes, strict=True))
        self.written += len(self._wishes) - before
        self._tell()

    def operations(self) -> list[CacheOperation]:
        return [wish[0] for wish in self._wishes.values()]

    def wishes(self) -> list[Wish]:
        return list(self._wishes.values())

    def take(self, ticket: Claim) -> bool:
        """The end of the operation of `ticket` is told now; False if it was before, or there is none."""
        taken = self._wishes.pop(ticket, None) is not None
        self._tell()
        return taken

    def _tell(self) -> None:
        if self._wishes:
            self.idle.clear()
        else:
            self.idle.set()
