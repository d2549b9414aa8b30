"""What a follower is doing, and whether the leader's view allows it. Pure.

The leader frees slots and ends operations when all ranks have ended (rule R3). So an operation that runs here
is open there, and no slot that it uses is free. `HybridCache.verify_ranks` asks every rank whether it is so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from asynchicache.ranks.messages import (
    CopyEntry,
    PoolPages,
    ReadEntry,
    VerifyEntry,
    WriteEntry,
    unpack_slots,
)
from asynchicache.types import Tier

MovingEntry: TypeAlias = CopyEntry | ReadEntry | WriteEntry
"""Entries that use slots until they have ended."""

_MAX_NAMED = 8
"""Slots that a description names."""


class RunningOperations:
    """The copies, reads and writes of a follower that have not ended, late ones included."""

    def __init__(self) -> None:
        self._entries: dict[int, MovingEntry] = {}

    def begin(self, entry: MovingEntry) -> None:
        self._entries[entry.operation] = entry

    def late(self, operation: int, pages: list[PoolPages]) -> None:
        """A read or write has been answered, and only the slots of `pages` may still be used by it."""
        entry = self._entries[operation]
        assert not isinstance(entry, CopyEntry), "copies are never late"
        self._entries[operation] = msgspec.structs.replace(entry, pages=pages)

    def end(self, operation: int) -> None:
        """Nothing uses the slots of an operation any more."""
        del self._entries[operation]

    def problems(self, view: VerifyEntry) -> Iterator[str]:
        """Describe what contradicts the leader's view, taken when it sent the entry. Linear in the slots."""
        free = {(one.pool, one.tier): frozenset(unpack_slots(one.slots)) for one in view.free}
        still_open = frozenset(view.open_operations)
        for operation, entry in self._entries.items():
            if operation not in still_open:
                yield f"operation {operation} runs, and the leader takes it for ended"
            elif view.idle:
                yield f"operation {operation} runs in an idle cache"
            for pool, tier, slots in _uses(entry):
                both = sorted(free.get((pool, tier), frozenset()).intersection(slots))
                if both:
                    yield (
                        f"{pool} {tier.name.lower()} slots: operation {operation} uses {both[:_MAX_NAMED]}, "
                        "which the leader takes for free"
                    )


def _uses(entry: MovingEntry) -> Iterator[tuple[str, Tier, list[int]]]:
    """The slots that must not be free. Those on the device that are only read may be (rule R2)."""
    if not isinstance(entry, CopyEntry):
        for page in entry.pages:
            yield page.pool, Tier.HOST, unpack_slots(page.slots)
        return
    way = entry.direction
    for one in entry.transfers:
        if way.source is Tier.HOST:
            yield one.pool, Tier.HOST, unpack_slots(one.sources)
        yield one.pool, way.destination, unpack_slots(one.destinations)
