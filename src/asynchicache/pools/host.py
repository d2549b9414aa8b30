"""Host memory of one pool, `page_first_direct`: storage reads and writes a slot with no further copy."""

from __future__ import annotations

import torch

from asynchicache.errors import UsageError
from asynchicache.layouts import ALIGNMENT, SlotLayout
from asynchicache.pools.device import check_size
from asynchicache.pools.memory import Slab, allocate_slab
from asynchicache.specs import PoolSpec

HEADER_BYTES = ALIGNMENT
"""Bytes of a slot's header in its slab; what O_DIRECT can write at the least."""


class HostPool:
    """The slots of one pool in host memory, and a header for each in a slab of their own.

    Headers are apart so that pages of neighbouring slots follow one another, and so that storage
    can write a header and a page as two runs of one vectored call.

    Attributes:
        spec: the pool.
        page_size: tokens of a slot; without meaning where a slot holds a state.
        slots: how many there are.
        layout: where what lies in a slot.
    """

    def __init__(self, spec: PoolSpec, page_size: int, slots: int, *, pin: bool) -> None:
        """
        Args:
            spec: the pool.
            page_size: tokens of a slot.
            slots: how many; 0 for a pool that stays on the device.
            pin: whether a GPU will copy from and to them.

        Raises:
            ConfigError: fewer than 0 slots, or pages of no tokens.
            CapacityError: the system has no room for them.
        """
        check_size(spec, page_size, slots, least=0)
        self.spec = spec
        self.page_size = page_size
        self.slots = slots
        self.layout = SlotLayout.of(spec, page_size)
        slot_bytes = self.layout.slot_bytes
        self._pages: Slab = allocate_slab(max(slots, 1) * slot_bytes, pin, unit=slot_bytes)
        self._headers: Slab = allocate_slab(max(slots, 1) * HEADER_BYTES, pin=False)

    @property
    def nbytes(self) -> int:
        """Bytes of both slabs, padding included."""
        return self._pages.nbytes + self._headers.nbytes

    @property
    def pinned(self) -> bool:
        return self._pages.pinned

    def page(self, slot: int) -> memoryview:
        """The `slot_bytes` of a slot, writable; its neighbour's follow at once.

        Raises:
            UsageError: there is no such slot.
            ClosedError: the pool is closed.
        """
        return self.pages(slot, 1)

    def pages(self, first: int, count: int) -> memoryview:
        """The `count * slot_bytes` of neighbouring slots, writable.

        Raises:
            UsageError: there are no such slots.
            ClosedError: the pool is closed.
        """
        return self._run(self._pages, self.layout.slot_bytes, first, count)

    def header(self, slot: int) -> memoryview:
        """The `HEADER_BYTES` of a slot's header, writable; its neighbour's follow at once.

        Raises:
            UsageError: there is no such slot.
            ClosedError: the pool is closed.
        """
        return self.headers(slot, 1)

    def headers(self, first: int, count: int) -> memoryview:
        """The `count * HEADER_BYTES` of the headers of neighbouring slots, writable.

        Raises:
            UsageError: there are no such slots.
            ClosedError: the pool is closed.
        """
        return self._run(self._headers, HEADER_BYTES, first, count)

    def regions(self) -> tuple[memoryview, memoryview]:
        """All headers and all pages, each one run of memory, with slot 0 at its beginning.

        Raises:
            ClosedError: the pool is closed.
        """
        return self._headers.memory, self._pages.memory

    def items(self, name: str) -> torch.Tensor:
        """One tensor of every slot as bytes, uint8 `[slots, layers, item_bytes]`, strided.

        Raises:
            ClosedError: the pool is closed.
        """
        tensor = self.layout.tensors[name]
        shape = (self.slots, len(tensor.spec.layers), tensor.item_bytes)
        strides = (self.layout.slot_bytes, tensor.item_bytes, 1)
        return self._pages.tensor.as_strided(shape, strides, tensor.offset)

    def close(self) -> None:
        """Unpin and let go of the memory; twice is harmless. No copy may be in flight."""
        self._pages.close()
        self._headers.close()

    def _run(self, slab: Slab, stride: int, first: int, count: int) -> memoryview:
        if first < 0 or count < 1 or first + count > self.slots:
            raise UsageError(
                f"pool {self.spec.name!r}: there are no host slots {first} to {first + count - 1}; "
                f"it has {self.slots}"
            )
        return slab.memory[first * stride : (first + count) * stride]

    def __repr__(self) -> str:
        return f"<HostPool {self.spec.name}: {self.slots} slots, {self.nbytes} bytes, pinned={self.pinned}>"
