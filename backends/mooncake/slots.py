"""Addresses of a pool's slots, in memory registered with Mooncake."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from asynchicache.backends.mooncake.store import MooncakeStore, address_of
from asynchicache.errors import StorageError, UsageError
from asynchicache.storage.protocol import PoolBinding

_PIECE_BYTES = 256 << 10
"""A page is passed to Mooncake in buffers of this size, because Mooncake moves the buffers of a page in
parallel over TCP. Over loopback, this halves the time for pages of 2 and 4 MiB."""


class RegisteredMemory:
    """The memory that is registered with a store. Pools may share one memory: Mooncake takes it once.

    Its methods block; call them from any thread.
    """

    def __init__(self, store: MooncakeStore) -> None:
        self._store = store
        self._users: Counter[int] = Counter()  # by address
        self._lock = threading.Lock()

    def register(self, address: int, nbytes: int) -> int:
        """Register a memory unless it is; returns Mooncake's code."""
        with self._lock:
            code = 0 if self._users[address] else self._store.register_buffer(address, nbytes)
            self._users[address] += code == 0
            return code

    def unregister(self, address: int) -> None:
        """Unregister a memory once nobody uses it."""
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                self._store.unregister_buffer(address)


class RegisteredSlots:
    """Headers and pages of a pool, registered with a store until `close`.

    Every returned address is checked to lie in a registered region: RDMA rejects other memory, while TCP
    accepts it and would hide the mistake.

    Raises:
        StorageError: Mooncake refuses to register the memory.
    """

    def __init__(self, memory: RegisteredMemory, binding: PoolBinding) -> None:
        headers, pages = binding.regions()
        self._regions = (headers, pages)  # keeps the memory alive while Mooncake may write to it
        self._memory = memory
        self._pool = binding.pool
        self._slots = pages.nbytes // binding.slot_bytes
        self._strides = (binding.header_bytes, binding.slot_bytes)
        starts = range(0, binding.page_bytes, _PIECE_BYTES)
        self._pieces = [(start, min(_PIECE_BYTES, binding.page_bytes - start)) for start in starts]
        self._sizes = [binding.header_bytes, *(size for _, size in self._pieces)]  # without padding
        self.object_bytes = sum(self._sizes)
        self._bases: list[int] = []
        for region in self._regions:
            self._register(region)

    def buffers(self, slots: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """For each slot, the addresses and sizes of its header and page pieces.

        Raises:
            UsageError: a slot does not exist.
        """
        pointers = [self._addresses(slot) for slot in slots]
        return pointers, [self._sizes] * len(pointers)

    def close(self) -> None:
        """Unregister the memory. Idempotent. No call may be running."""
        while self._bases:
            self._memory.unregister(self._bases.pop())

    def _addresses(self, slot: int) -> list[int]:
        if not 0 <= slot < self._slots:
            raise UsageError(f"pool {self._pool!r} has slots 0 to {self._slots - 1}, and no slot {slot}")
        headers, pages = self._bases
        header_stride, page_stride = self._strides
        page = pages + slot * page_stride
        return [headers + slot * header_stride, *(page + start for start, _ in self._pieces)]

    def _register(self, region: memoryview) -> None:
        address = address_of(region)
        code = self._memory.register(address, region.nbytes)
        if code != 0:
            self.close()
            raise StorageError(
                f"Mooncake does not register {region.nbytes} bytes at {address:#x} of pool {self._pool!r}: "
                f"code {code}; is the pool open elsewhere, or is the limit of locked memory too low (RDMA)?"
            )
        self._bases.append(address)
