"""Pages in a dictionary: the model that other engines are tested against, and the cheapest one.

Nothing here suspends or leaves the loop's thread; a call's price is its copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from asynchicache.backends.opened import OpenEngines
from asynchicache.backends.options import Options
from asynchicache.errors import ClosedError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

_BATCH_BYTES = 4 << 20  # copying them holds the loop for a few milliseconds at most
_BATCH_PAGES = 128


class _Stored(NamedTuple):
    header: bytes
    page: bytes


class MemoryStore:
    """Pages of any pools, the least recently used first out.

    Args:
        capacity_bytes: most bytes of pages, headers not counted; None for no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.evicted = 0
        self._pages: OrderedDict[ObjectKey, _Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[ObjectKey]:
        """Keys of all pages, the least recently used first."""
        return iter(self._pages)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._pages

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, headers not counted."""
        return self._bytes

    def present(self, keys: Sequence[ObjectKey]) -> bytearray:
        """One byte a key, 1 where it is held."""
        return bytearray(map(self._pages.__contains__, keys))

    def read(self, key: ObjectKey) -> _Stored | None:
        """The page, which is the most recently used then."""
        stored = self._pages.get(key)
        if stored is not None:
            self._pages.move_to_end(key)
        return stored

    def write(self, key: ObjectKey, header: bytes, page: bytes) -> bool:
        """Hold a page that is not held yet; False if it is larger than all there may be."""
        if self.capacity_bytes is not None and not self._make_room(len(page), self.capacity_bytes):
            return False
        self._pages[key] = _Stored(header, page)
        self._bytes += len(page)
        return True

    def drop(self, key: ObjectKey) -> bool:
        """Forget a page; False if it is not held."""
        stored = self._pages.pop(key, None)
        if stored is None:
            return False
        self._bytes -= len(stored.page)
        return True

    def clear(self, fingerprint: bytes, pool: str, shard: str) -> int:
        """Forget every page of one pool; how many there were."""
        mine = (fingerprint, pool, shard)
        doomed = [key for key in self._pages if (key.fingerprint, key.pool, key.shard) == mine]
        return sum(map(self.drop, doomed))

    def _make_room(self, size: int, capacity: int) -> bool:
        if size > capacity:
            return False
        while self._bytes + size > capacity:
            _, stored = self._pages.popitem(last=False)
            self._bytes -= len(stored.page)
            self.evicted += 1
        return True


_NAMED: dict[str, MemoryStore] = {}


def forget_store(name: str) -> None:
    """Let go of a named store's pages; a cache that has it open keeps them until it closes."""
    _NAMED.pop(name, None)


class MemoryEngine:
    """One pool's pages in a `MemoryStore`.

    Args:
        binding: the pool's slots.
        store: where pages go.
        checksum: seal pages on `put` and check them on `get`; else memory is trusted.
    """

    def __init__(self, binding: PoolBinding, store: MemoryStore, *, checksum: bool) -> None:
        self._binding = binding
        self._store = store
        self._checksum = checksum
        self._page_bytes = binding.page_bytes
        self.closed = False
        pages = max(1, min(_BATCH_PAGES, _BATCH_BYTES // max(1, self._page_bytes)))
        self.capabilities = Capabilities(durable=False, checks=True, batch_pages=pages, immediate=True)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        self._check_open()
        return self._store.present(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        return [self._get(key, slot) for key, slot in zip(keys, slots, strict=True)]

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        return [self._put(key, slot) for key, slot in zip(keys, slots, strict=True)]

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        self._check_open()
        return [Outcome.HIT if self._store.drop(key) else Outcome.MISS for key in keys]

    async def clear(self) -> int:
        self._check_open()
        binding = self._binding
        return self._store.clear(binding.fingerprint, binding.pool, binding.shard)

    async def aclose(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"memory engine of pool {self._binding.pool!r} is closed")

    def _get(self, key: ObjectKey, slot: int) -> Outcome:
        stored = self._store.read(key)
        if stored is None:
            return Outcome.MISS
        self._binding.page(slot)[: self._page_bytes] = stored.page
        if not self._checksum or not stored.header:  # no header: put by an engine that seals nothing
            return Outcome.HIT
        self._binding.header(slot)[:] = stored.header
        outcome = self._binding.check(slot, key)
        if outcome is Outcome.CORRUPT:
            self._store.drop(key)
        return outcome

    def _put(self, key: ObjectKey, slot: int) -> Outcome:
        if self._store.read(key) is not None:
            return Outcome.EXISTS
        header = b""
        if self._checksum:
            self._binding.seal(slot, key)
            header = bytes(self._binding.header(slot))
        # A copy, because the slot is the caller's again as soon as this returns.
        page = bytes(self._binding.page(slot)[: self._page_bytes])
        return Outcome.STORED if self._store.write(key, header, page) else Outcome.REJECTED


class MemoryBackend:
    """Pages of every pool in one `MemoryStore`.

    Args:
        store: kept by the caller, who may open another backend over it later.
        checksum: as of `MemoryEngine`.
    """

    name = "memory"

    def __init__(self, store: MemoryStore, *, checksum: bool = True) -> None:
        self.store = store
        self._checksum = checksum
        self._engines: OpenEngines[MemoryEngine] = OpenEngines()
        self._closed = False

    async def open_pool(self, binding: PoolBinding) -> MemoryEngine:
        """
        Raises:
            StorageError: the pool is open already, with another binding.
            ClosedError: the backend is closed.
        """
        if self._closed:
            raise ClosedError("memory backend is closed")
        return await self._engines.open(binding, partial(self._open, binding))

    async def _open(self, binding: PoolBinding) -> MemoryEngine:
        return MemoryEngine(binding, self.store, checksum=self._checksum)

    async def aclose(self) -> None:
        self._closed = True
        await self._engines.aclose()

    def __repr__(self) -> str:
        return f"<MemoryBackend: {len(self.store)} pages, {self.store.page_bytes} bytes>"


def open_backend(options: Mapping[str, object], port: Port) -> MemoryBackend:
    """The memory engine.

    Args:
        options: `name`, a store of this process that outlives the backend, so that a cache opened
            later finds the pages (default: pages end with the backend); `capacity_bytes`, most bytes
            of pages (default: no limit); `checksum`, seal and check pages (default: true).
        port: not needed; every backend is given one.

    Raises:
        ConfigError: an option is unknown, or breaks its rule.
    """
    taken = Options("memory", options)
    name = taken.take("name", str, "")
    capacity = taken.positive("capacity_bytes")
    checksum = taken.take("checksum", bool, True)
    taken.finish()
    store = _NAMED.setdefault(name, MemoryStore()) if name else MemoryStore()
    store.capacity_bytes = capacity
    return MemoryBackend(store, checksum=checksum)
