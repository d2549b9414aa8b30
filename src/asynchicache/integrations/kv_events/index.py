"""An index of a publisher's blocks, built from its events: a router keeps one per worker."""

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
    """The medium of blocks, and their group of a hybrid model; None if the publisher gives none."""

    medium: str | None
    group: int | None


class BlockIndex:
    """The blocks of one publisher.

    Attributes:
        locations: hashes of the blocks, by medium and group.
    """

    def __init__(self) -> None:
        self.locations: dict[BlockLocation, set[BlockHash]] = {}

    def apply(self, events: Iterable[AnyEvent]) -> None:
        """Apply events; unknown kinds change nothing."""
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
        """Return how many leading blocks of a sequence are on some medium.

        Args:
            hashes: of the sequence, in order.
            group: the pool whose blocks are needed; None for publishers without groups.
        """
        there = [blocks for location, blocks in self.locations.items() if location.group == group]
        for count, block in enumerate(hashes):
            if not any(block in blocks for blocks in there):
                return count
        return len(hashes)
