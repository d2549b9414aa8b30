"""Which transfers in flight a new copy must come after: whoever writes what it reads, and whoever
reads or writes what it writes.

Every slot remembers the number of the last transfer that wrote it, and of the last that read it in
each direction. The last is enough: transfers of one direction run in order on one stream, and each
waits for the writer before it. Numbers of transfers that are complete mean nothing any more and are
skipped, so there is nothing to take back when a transfer ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from asynchicache.transfer.plan import CacheOperation, Direction, PoolExtent, Slots, slot_numbers
from asynchicache.types import Tier

_READERS = {
    Tier.DEVICE: (Direction.BACKUP, Direction.FORK),
    Tier.HOST: (Direction.LOAD,),
    Tier.STORAGE: (),
}


class HazardTable:
    """The last users of every slot, by transfer number; numbers are positive and ascend."""

    def __init__(self, extents: Mapping[str, PoolExtent]) -> None:
        tiers = (Tier.DEVICE, Tier.HOST)
        self._writers = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in tiers
        }
        self._readers = {
            (pool, tier, direction): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in tiers
            for direction in _READERS[tier]
        }

    def writers(self, pool: str, tier: Tier, slots: Slots | Sequence[int], since: int) -> set[int]:
        """Transfers numbered `since` or later that write one of `slots`."""
        return _recent([self._writers[pool, tier]], slot_numbers(slots), since)

    def writers_of_sources(self, operation: CacheOperation, since: int) -> set[int]:
        """Transfers numbered `since` or later that write what `operation` reads."""
        found: set[int] = set()
        for pool, (sources, _) in operation.columns().items():
            found |= self.writers(pool, operation.direction.source, sources, since)
        return found

    def users_of_destinations(self, operation: CacheOperation, since: int) -> set[int]:
        """Transfers numbered `since` or later that read or write what `operation` writes."""
        tier = operation.direction.destination
        found: set[int] = set()
        for pool, (_, destinations) in operation.columns().items():
            readers = [self._readers[pool, tier, direction] for direction in _READERS[tier]]
            found |= _recent([self._writers[pool, tier], *readers], destinations, since)
        return found

    def mark(self, operation: CacheOperation, number: int) -> None:
        """Transfer `number` carries out `operation`."""
        direction = operation.direction
        for pool, (sources, destinations) in operation.columns().items():
            self._readers[pool, direction.source, direction][sources] = number
            self._writers[pool, direction.destination][destinations] = number


def _recent(tables: Iterable[Slots], slots: Slots, since: int) -> set[int]:
    found: set[int] = set()
    for table in tables:
        numbers = table[slots]
        found.update(numbers[numbers >= since].tolist())
    return found
