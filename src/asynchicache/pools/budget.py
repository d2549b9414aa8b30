"""One memory that several pools of a tier share: bytes, not slots, are what runs out."""

from __future__ import annotations


class SharedMemory:
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

    def __repr__(self) -> str:
        return f"<SharedMemory {self.used} of {self.nbytes} bytes used>"
