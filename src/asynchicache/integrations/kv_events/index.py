"""What a publisher has, as far as its events say: what a router keeps of each of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asynchicache.integrations.kv_events.wire import (
    AllBlocksCleared,
    AnyEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
)


class BlockLocation(NamedTuple):
    """Where blocks are: a medium, and the group of a hybrid model; None where a publisher names none."""

    medium: str | None
    group: int | None


class BlockIndex:
    """The blocks of one publisher.

    Attributes:
        places: by medium and group, the hashes of the blocks that are there.
    """

    def __init__(self) -> None:
        self.locations: dict[BlockLocation, set[BlockHash]] = {}

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Follow events; kinds that are not known change nothing."""
        for event in events:
            if isinstance(event, BlockStored):
                self.locations.setdefault(BlockLocation(event.medium, event.group_idx), set()).update(
                    event.block_hashes
                )
            elif isinstance(event, BlockRemoved):
                self._remove(BlockLocation(event.medium, event.group_idx), event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._clear(event.media)

    def _remove(self, location: BlockLocation, hashes: Iterable[BlockHash]) -> None:
        blocks = self.locations.get(location)
        if blocks is not None:
            blocks.difference_update(hashes)
            if not blocks:
                del self.locations[location]

    def _clear(self, media: Sequence[str] | None) -> None:
        for location in list(self.locations):
            if media is None or location.medium in media:
                del self.locations[location]

    def reach(self, hashes: Sequence[BlockHash], group: int | None = 0) -> int:
        """How many of a sequence's blocks, from the first on without a gap, some medium has.

        Args:
            hashes: of the sequence, in order.
            group: the pool that every block is needed of; None for publishers without groups.
        """
        there = [blocks for location, blocks in self.locations.items() if location.group == group]
        for count, block in enumerate(hashes):
            if not any(block in blocks for blocks in there):
                return count
        return len(hashes)
