"""Where slots lie in the files of one pool: integers only.

A segment is a file: first the entries of its slots, then the slots, a page each.
"""

from __future__ import annotations

from typing import NamedTuple

from asynchicache.layouts import round_up

ENTRY_BYTES = 64
"""Of an entry, which says what a slot holds; none crosses a sector."""

_SEGMENT_BYTES = 4 << 30
_FEWEST_SLOTS, _MOST_SLOTS = 64, 4096
_CACHE_PAGE = 1 << 16  # the largest page of a kernel's cache, so that none holds entries and a slot


class SegmentShape(NamedTuple):
    """What every segment of a pool looks like; follows from the size of a slot alone.

    Attributes:
        slot_bytes: of a page with its padding, a multiple of 4,096.
        slots: of a segment: about 4 GiB, from 64 to 4,096.
        entries_bytes: of its entries, padded.
    """

    slot_bytes: int
    slots: int
    entries_bytes: int

    @classmethod
    def of(cls, slot_bytes: int) -> SegmentShape:
        wanted = round_up(_SEGMENT_BYTES // slot_bytes, _FEWEST_SLOTS)
        slots = min(max(wanted, _FEWEST_SLOTS), _MOST_SLOTS)
        return cls(slot_bytes, slots, round_up(slots * ENTRY_BYTES, _CACHE_PAGE))

    def file_bytes(self, slots: int) -> int:
        """Bytes of a segment that has its first so many slots."""
        return self.entries_bytes + slots * self.slot_bytes

    def file_slots(self, nbytes: int) -> int:
        """Slots that lie whole in a segment of so many bytes."""
        return min(max(nbytes - self.entries_bytes, 0) // self.slot_bytes, self.slots)

    def pool_bytes(self, slots: int) -> int:
        """Bytes of all segments of a pool with so many slots."""
        full, rest = divmod(slots, self.slots)
        return full * self.file_bytes(self.slots) + (self.file_bytes(rest) if rest else 0)

    def pool_slots(self, nbytes: int) -> int:
        """Most slots of a pool whose segments have so many bytes in all."""
        full, rest = divmod(max(nbytes, 0), self.file_bytes(self.slots))
        return full * self.slots + self.file_slots(rest)
