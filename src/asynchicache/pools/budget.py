"""One memory that several pools of a tier share: bytes, not slots, are what runs out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class PaidSlots(Protocol):
    """The slots of one pool; `pools.allocator.SlotAllocator` has them."""

    @property
    def slot_bytes(self) -> int: ...


class ByteBudget:
    """Bytes that the slots of several pools are paid from.

    Attributes:
        nbytes: of the memory.
        used: by slots that are held or quarantined.
    """

    __slots__ = ("nbytes", "used")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used = 0

    @property
    def left(self) -> int:
        return self.nbytes - self.used

    def fits(self, wanted: Iterable[tuple[PaidSlots, int]]) -> bool:
        """Whether each pool can have that many slots, beside the others."""
        return sum(count * pool.slot_bytes for pool, count in wanted) <= self.left

    def short(self, wanted: Sequence[tuple[PaidSlots, int]], pool: PaidSlots) -> int:
        """Slots of `pool` whose bytes `wanted` lacks."""
        lacking = sum(count * of_pool.slot_bytes for of_pool, count in wanted) - self.left
        return -(-lacking // pool.slot_bytes)

    def __repr__(self) -> str:
        return f"<ByteBudget {self.used} of {self.nbytes} bytes used>"
