"""Which copies must wait for which: whoever reads what another writes, or writes what another uses.

Every slot remembers the number of the last transfer that wrote it, and of the last that read it in
each direction. The last is enough: transfers of one direction run in the order of their numbers on one
stream, and each waits for the writer before it. Numbers of transfers that are complete mean nothing any
more and are skipped, so there is nothing to take back when a transfer ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from asynchicache.transfer.plan import CacheOperation, Columns, Direction, PoolExtent, columns_of
from asynchicache.transfer.slots import Slots, slot_numbers
from asynchicache.types import Tier

_TIERS = (Tier.DEVICE, Tier.HOST)
_READERS = {
    Tier.DEVICE: (Direction.BACKUP, Direction.FORK),
    Tier.HOST: (Direction.LOAD,),
    Tier.STORAGE: (),
}


class HazardTable:
    """The last users of every slot, by transfer number; numbers are positive and ascend."""

    def __init__(self, extents: Mapping[str, PoolExtent]) -> None:
        self._writers = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
        }
        self._readers = {
            (pool, tier, direction): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
            for direction in _READERS[tier]
        }

    def writers(self, pool: str, tier: Tier, slots: Slots | Sequence[int], since: int) -> set[int]:
        """Transfers numbered `since` or later that write one of `slots`."""
        return _recent([self._writers[pool, tier]], slot_numbers(slots), since)

    def writers_of_sources(self, direction: Direction, columns: Columns, since: int) -> set[int]:
        """Transfers numbered `since` or later that write what is read here."""
        found: set[int] = set()
        for pool, (sources, _) in columns.items():
            found |= self.writers(pool, direction.source, sources, since)
        return found

    def users_of_destinations(self, direction: Direction, columns: Columns, since: int) -> set[int]:
        """Transfers numbered `since` or later that read or write what is written here."""
        tier = direction.destination
        found: set[int] = set()
        for pool, (_, destinations) in columns.items():
            found |= _recent(self._users(pool, tier), destinations, since)
        return found

    def mark(self, direction: Direction, columns: Columns, number: int) -> None:
        """Transfer `number` moves `columns`."""
        for pool, (sources, destinations) in columns.items():
            self._readers[pool, direction.source, direction][sources] = number
            self._writers[pool, direction.destination][destinations] = number

    def _users(self, pool: str, tier: Tier) -> list[Slots]:
        """Who wrote each slot last, then who read it last, by direction."""
        return [self._writers[pool, tier], *(self._readers[pool, tier, one] for one in _READERS[tier])]


class Independence:
    """Tells whether operations may run in any order: no slot is written twice, or read and written.

    Every slot that is written is stamped; stamps only ascend, so none has to be taken back.
    """

    def __init__(self, extents: Mapping[str, PoolExtent]) -> None:
        self._stamps = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
        }
        self._next = 1

    def holds(self, operations: Sequence[CacheOperation]) -> bool:
        first = self._next
        moved = [
            (direction, columns_of([one for one in operations if one.direction is direction]))
            for direction in Direction
        ]
        for direction, columns in moved:
            for pool, (_, written) in columns.items():
                if not self._stamp(self._stamps[pool, direction.destination], written, first):
                    return False
        return not any(
            (self._stamps[pool, direction.source][read] >= first).any()
            for direction, columns in moved
            for pool, (read, _) in columns.items()
        )

    def _stamp(self, table: Slots, slots: Slots, first: int) -> bool:
        """Whether none of `slots` had a stamp of this call, or comes twice."""
        if (table[slots] >= first).any():
            return False
        stamps = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)
        table[slots] = stamps
        return not (table[slots] != stamps).any()


def _recent(tables: Iterable[Slots], slots: Slots, since: int) -> set[int]:
    found: set[int] = set()
    for table in tables:
        numbers = table[slots]
        found.update(numbers[numbers >= since].tolist())
    return found
