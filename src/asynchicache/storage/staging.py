"""Slots that pages wait in on their way from one stage of a chain of stores to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap

from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding

_STAGED_PAGES = 128
_STAGED_BYTES = 64 << 20
_SMALL_BYTES = 1 << 20
"""Staging slots of a pool, at most, and the bytes that are copied to them without a thread."""


class StagingSlots:
    """Slots of memory behind those of a binding."""

    def __init__(self, binding: SlotBinding) -> None:
        slots = max(8, min(_STAGED_PAGES, _STAGED_BYTES // binding.slot_bytes))
        self.first = binding.regions()[0].nbytes // binding.header_bytes
        self._binding = binding
        self._pages = memoryview(mmap(-1, slots * binding.slot_bytes))
        self._headers = memoryview(mmap(-1, slots * binding.header_bytes))
        self._free = list(range(self.first, self.first + slots))
        self.reserve = slots // 4
        """Slots that are left to pages which leave a full stage."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """At most `count` free slots."""
        taken, self._free = self._free[: max(count, 0)], self._free[max(count, 0) :]
        return taken

    def give_back(self, slots: Iterable[int]) -> None:
        self._free += slots

    def copy(self, sources: Sequence[int], slots: Sequence[int]) -> None:
        """Copy slots of the pool, with their headers."""
        for source, slot in zip(sources, slots, strict=True):
            self.page(slot)[:] = self._binding.page(source)
            self.header(slot)[:] = self._binding.header(source)

    def page(self, slot: int) -> memoryview:
        return self._view(slot, self._pages, self._binding.slot_bytes, self._binding.page)

    def header(self, slot: int) -> memoryview:
        return self._view(slot, self._headers, self._binding.header_bytes, self._binding.header)

    def regions(self) -> tuple[memoryview, memoryview]:
        return self._binding.regions()

    def _view(self, slot: int, memory: memoryview, size: int, own: Callable[[int], memoryview]) -> memoryview:
        if slot < self.first:
            return own(slot)
        return memory[(slot - self.first) * size : (slot - self.first + 1) * size]


class StagedCopy:
    """A copy of pages to staging slots, of which somebody else waits for the end.

    Attributes:
        ended: done when it has; False if what was copied is of no use.
    """

    def __init__(self) -> None:
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def run(self, copy: Callable[[], None], port: Port, nbytes: int) -> None:
        """Copy; off the loop, if that takes long."""
        if nbytes <= _SMALL_BYTES:
            copy()
            self.ended.set_result(True)
            return
        copying = asyncio.ensure_future(port.run_blocking(copy))
        copying.add_done_callback(self._copied)
        self._wanted = True
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:  # the slots are the caller's again, while they are still read
            self._wanted = False
            raise

    def _copied(self, copying: asyncio.Future[None]) -> None:
        if not self.ended.done():
            self.ended.set_result(self._wanted and not copying.cancelled() and copying.exception() is None)
