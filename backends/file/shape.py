"""The layout of slots in the files of one pool: arithmetic only.

A segment is a file: first the entries of its slots, then the slots, one page each.
"""

from __future__ import annotations

from typing import NamedTuple

from asynchicache.layouts import round_up

ENTRY_BYTES = 128
"""Bytes of an entry, which says what a slot holds; no entry crosses a sector."""

_SEGMENT_BYTES = 4 << 30
_FEWEST_SLOTS, _MAX_SLOTS = 64, 4096
_CACHE_PAGE = 1 << 16  # the largest page size of a page cache, so that no cache page holds entries and a slot


class SegmentShape(NamedTuple):
    """The layout of every segment of a pool; it depends only on the slot size.

    Attributes:
        slot_bytes: bytes of a page with its padding, a multiple of 4,096.
        slots: slots per segment: about 4 GiB of them, but 64 to 4,096.
        entries_bytes: bytes of the entries of a segment, padded.
    """

    slot_bytes: int
    slots: int
    entries_bytes: int

    @classmethod
    def of(cls, slot_bytes: int) -> SegmentShape:
        wanted = round_up(_SEGMENT_BYTES // slot_bytes, _FEWEST_SLOTS)
        slots = min(max(wanted, _FEWEST_SLOTS), _MAX_SLOTS)
        return cls(slot_bytes, slots, round_up(slots * ENTRY_BYTES, _CACHE_PAGE))

    def file_bytes(self, slots: int) -> int:
        """Bytes of a segment with its first `slots` slots."""
        return self.entries_bytes + slots * self.slot_bytes

    def file_slots(self, nbytes: int) -> int:
        """Whole slots in a segment of `nbytes` bytes."""
        return min(max(nbytes - self.entries_bytes, 0) // self.slot_bytes, self.slots)

    def pool_bytes(self, slots: int) -> int:
        """Bytes of all segments of a pool with `slots` slots."""
        full, rest = divmod(slots, self.slots)
        return full * self.file_bytes(self.slots) + (self.file_bytes(rest) if rest else 0)

    def pool_slots(self, nbytes: int) -> int:
        """Most slots of a pool whose segments have `nbytes` bytes in total."""
        full, rest = divmod(max(nbytes, 0), self.file_bytes(self.slots))
        return full * self.slots + self.file_slots(rest)
