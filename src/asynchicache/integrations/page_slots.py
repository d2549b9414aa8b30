"""Slots that storage reads and writes: the engine's own pages in place, or staging slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from asynchicache.errors import UsageError
from asynchicache.layouts import HEADER_BYTES, SlotLayout
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Slab
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.types import trailing_pages


def opaque_pool(name: str, nbytes: int) -> PoolSpec:
    """Return the spec of a pool whose slots hold `nbytes` opaque bytes."""
    tensor = TensorSpec("bytes", (0,), (nbytes,), "uint8")
    return PoolSpec(name, (tensor,), trailing_pages(1), per_token=False)


class PlacedSlots:
    """An engine's pages as slots (a `storage.binding.SlotMemory`), with headers in a separate slab.

    Args:
        memory: consecutive slots, aligned; each fills its blocks.
        slot_bytes: bytes of a slot.
    """

    def __init__(self, name: str, memory: memoryview, slot_bytes: int) -> None:
        self.layout = SlotLayout.of(opaque_pool(name, slot_bytes), 1)
        self.slots = memory.nbytes // slot_bytes
        self._memory = memory
        self._headers = Slab(self.slots * HEADER_BYTES)

    def page(self, slot: int) -> memoryview:
        self._check(slot)
        size = self.layout.slot_bytes
        return self._memory[slot * size : (slot + 1) * size]

    def header(self, slot: int) -> memoryview:
        self._check(slot)
        return self._headers.memory[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]

    def regions(self) -> tuple[memoryview, memoryview]:
        return self._headers.memory, self._memory

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._headers.close()
        self._memory = memoryview(b"")

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise UsageError(f"pool {self.layout.pool.name!r}: there is no slot {slot}; it has {self.slots}")


class StagedSlots(HostPool):
    """Staging slots that pages are copied through. Callers take and return them, in FIFO order.

    Args:
        nbytes: bytes of a page.
        timeout_s: seconds that `take` waits: calls to a server that hangs keep their slots.

    Raises:
        CapacityError: the system has no memory for the slots.
    """

    def __init__(self, name: str, nbytes: int, slots: int, timeout_s: float) -> None:
        super().__init__(opaque_pool(name, nbytes), 1, slots, pin=False)
        self._timeout_s = timeout_s
        self._free = list(range(slots))
        self._queue_lock = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, most: int) -> list[int]:
        """Take up to `most` free slots; wait until one is free. Empty after the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s), self._queue_lock:
                while not self._free:
                    self._freed.clear()
                    await self._freed.wait()
                taken, self._free = self._free[:most], self._free[most:]
                return taken
        except TimeoutError:
            return []

    def give(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)
        self._freed.set()
