"""What pins memory of the CUDA runtime, as `torch.cuda.cudart()` has it; it refuses what CUDA refuses."""

from __future__ import annotations

import mmap
from pathlib import Path

INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 1, 2, 712, 713
PORTABLE, MAPPED = 1, 2
_PAGE = mmap.PAGESIZE


class Code:
    """`cudaError`: no number, and has a name for success only."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


class PlayedRuntime:
    """Pins nothing.

    Attributes:
        pinned: bytes by address.
        most: that were pinned at once, runs.
        lost: addresses that were unmapped before they were unpinned.
    """

    def __init__(self, refuse: int | None = None) -> None:
        """`refuse`: there is no memory for another registration once there are so many."""
        self.pinned: dict[int, int] = {}
        self.most = 0
        self.lost: list[int] = []
        self._refuse = refuse

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> Code:  # noqa: N802
        if not isinstance(pointer, int) or pointer <= 0 or size <= 0 or flags & ~0xF:
            return Code(INVALID_VALUE)
        if len(self.pinned) == self._refuse:
            return Code(OUT_OF_MEMORY)
        if any(_share_a_page((pointer, size), other) for other in self.pinned.items()):
            return Code(ALREADY_REGISTERED)
        assert flags == PORTABLE | MAPPED, "streams of any context copy, and kernels read"
        self.pinned[pointer] = size
        self.most = max(self.most, len(self.pinned))
        return Code(0)

    def cudaHostUnregister(self, pointer: int) -> Code:  # noqa: N802
        if pointer in self.pinned and not _is_mapped(pointer):
            self.lost.append(pointer)
        return Code(NOT_REGISTERED if self.pinned.pop(pointer, None) is None else 0)

    def within_one(self, address: int, nbytes: int) -> bool:
        """Whether a copy may read or write so many bytes at `address`."""
        return any(
            first <= address and address + nbytes <= first + size for first, size in self.pinned.items()
        )


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


def _share_a_page(one: tuple[int, int], other: tuple[int, int]) -> bool:
    pages = [range(start // _PAGE, -(-(start + size) // _PAGE)) for start, size in (one, other)]
    return pages[0].start < pages[1].stop and pages[1].start < pages[0].stop
