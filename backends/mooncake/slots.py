"""A pool's slots as addresses, in memory that Mooncake knows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from asynchicache.backends.mooncake.store import Store
from asynchicache.errors import StorageError, UsageError
from asynchicache.storage.protocol import PoolBinding


class RegisteredSlots:
    """Headers and pages of a pool, registered with a store until `close`.

    TCP moves memory that is not registered as well, RDMA does not: so every address that leaves here
    is checked to be in a registered region.

    Args:
        store: where they are registered.
        binding: the slots.

    Raises:
        StorageError: Mooncake refuses to register the memory.
    """

    def __init__(self, store: Store, binding: PoolBinding) -> None:
        headers, pages = binding.regions()
        self._regions = (headers, pages)  # keeps the memory while Mooncake may write to it
        self._store = store
        self._pool = binding.pool
        self._slots = pages.nbytes // binding.slot_bytes
        self._strides = (binding.header_bytes, binding.slot_bytes)
        self._sizes = [binding.header_bytes, binding.page_bytes]  # without padding
        self._bases: list[int] = []
        for region in self._regions:
            self._register(region)

    @property
    def object_bytes(self) -> int:
        """Bytes of a stored page with its header."""
        return sum(self._sizes)

    def buffers(self, slots: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Addresses and sizes of header and page of each slot.

        Raises:
            UsageError: there is no such slot.
        """
        headers, pages = self._bases
        header_stride, page_stride = self._strides
        for slot in slots:
            if not 0 <= slot < self._slots:
                raise UsageError(f"pool {self._pool!r} has slots 0 to {self._slots - 1}, and no slot {slot}")
        pointers = [[headers + slot * header_stride, pages + slot * page_stride] for slot in slots]
        return pointers, [self._sizes] * len(pointers)

    def close(self) -> None:
        """Mooncake may no longer use the memory; twice is harmless. No call may be running."""
        while self._bases:
            self._store.unregister_buffer(self._bases.pop())

    def _register(self, region: memoryview) -> None:
        address = address_of(region)
        code = self._store.register_buffer(address, region.nbytes)
        if code != 0:
            self.close()
            raise StorageError(
                f"Mooncake does not register {region.nbytes} bytes at {address:#x} of pool {self._pool!r}: "
                f"code {code}; is the pool open elsewhere, or is the limit of locked memory too low (RDMA)?"
            )
        self._bases.append(address)


def address_of(view: memoryview) -> int:
    """Where the writable memory of a view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
