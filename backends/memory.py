"""The memory engine: pages in a dictionary. It is the fastest engine, and the model in tests of the others.

No call suspends or leaves the event loop's thread; a call costs only its copies.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.options import BackendOptions
from asynchicache.errors import ClosedError
from asynchicache.hashing import ObjectKey
from asynchicache.options import Positive
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

_BATCH_BYTES = 4 << 20  # copying them blocks the loop for a few milliseconds at most
_BATCH_PAGES = 128


class _MemoryPage(NamedTuple):
    header: bytes
    page: bytes


class _PoolIdentity(NamedTuple):
    """One pool of one model on one shard."""

    fingerprint: bytes
    pool: str
    shard: str

    def key(self, digest: bytes) -> ObjectKey:
        return ObjectKey(self.fingerprint, digest, self.pool, self.shard)


class MemoryStore:
    """Pages of any pools. It evicts pages first whose dependency is missing, then the least recently used.

    Args:
        capacity_bytes: most bytes of pages, without headers; None for no limit.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.evicted = 0
        self._pages: OrderedDict[ObjectKey, _MemoryPage] = OrderedDict()
        self._bytes = 0
        self._standing: dict[_PoolIdentity, str | None] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[ObjectKey]:
        """Keys of all pages, the least recently used first."""
        return iter(self._pages)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._pages

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages, without headers."""
        return self._bytes

    def know(self, binding: PoolBinding) -> None:
        """Register a pool and the pool that it depends on (`binding.depends_on`)."""
        self._standing[_PoolIdentity(binding.fingerprint, binding.pool, binding.shard)] = binding.depends_on

    def present(self, keys: Sequence[ObjectKey]) -> bytearray:
        """One byte per key, 1 if the store has the page."""
        return bytearray(map(self._pages.__contains__, keys))

    def read(self, key: ObjectKey) -> _MemoryPage | None:
        """The page, or None; does not count as a use."""
        return self._pages.get(key)

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        """Count pages as used now, the last one most recently; missing pages are skipped."""
        for key in keys:
            if key in self._pages:
                self._pages.move_to_end(key)

    def useful(self, key: ObjectKey) -> bool:
        """Whether the store has the page that `key` depends on, or `key` depends on no registered pool."""
        ground = self._standing.get(_PoolIdentity(key.fingerprint, key.pool, key.shard))
        known = [family for family in self._standing if family.pool == ground]
        return not known or any(family.key(key.digest) in self._pages for family in known)

    def size(self, keys: Iterable[ObjectKey]) -> int:
        """Bytes of the given pages, missing ones excluded."""
        return sum(len(self._pages[key].page) for key in keys if key in self._pages)

    def make_room(self, nbytes: int, keep: Collection[ObjectKey] = frozenset(), kept_bytes: int = 0) -> bool:
        """Evict pages until there is room for `nbytes` bytes.

        Args:
            keep: pages not to evict.
            kept_bytes: bytes of the pages in `keep` that are in the store.

        Returns:
            False if that would require evicting pages in `keep`; nothing changes then.
        """
        if self.capacity_bytes is None:
            return True
        if kept_bytes + nbytes > self.capacity_bytes:
            return False
        while self._bytes + nbytes > self.capacity_bytes:
            self.drop(next(key for key in self._pages if key not in keep))
            self.evicted += 1
        return True

    def leaving(self, nbytes: int) -> list[ObjectKey]:
        """The pages that `make_room` would evict."""
        over, found = self._bytes + nbytes - (self.capacity_bytes or sys.maxsize), list[ObjectKey]()
        for key, stored in self._pages.items():
            if over <= 0:
                break
            found.append(key)
            over -= len(stored.page)
        return found

    def write(self, key: ObjectKey, header: bytes, page: bytes) -> bool:
        """Store a page that is not in the store yet; False if it is larger than the capacity."""
        if not self.make_room(len(page)):
            return False
        self._pages[key] = _MemoryPage(header, page)
        self._bytes += len(page)
        return True

    def drop(self, key: ObjectKey) -> bool:
        """Remove a page; False if the store does not have it."""
        stored = self._pages.pop(key, None)
        if stored is None:
            return False
        self._bytes -= len(stored.page)
        self._demote(key)
        return True

    def clear(self, fingerprint: bytes, pool: str, shard: str) -> int:
        """Remove every page of one pool; returns how many there were."""
        mine = (fingerprint, pool, shard)
        doomed = [key for key in self._pages if (key.fingerprint, key.pool, key.shard) == mine]
        return sum(map(self.drop, doomed))

    def _demote(self, gone: ObjectKey) -> None:
        """Make the pages that depended on `gone` the next to be evicted: they are useless without it."""
        above = [family.key(gone.digest) for family, pool in self._standing.items() if pool == gone.pool]
        for page in above:
            if page in self._pages and not self.useful(page):
                self._pages.move_to_end(page, last=False)


_NAMED: dict[str, MemoryStore] = {}


class MemoryEngine:
    """One pool's pages in a `MemoryStore`.

    Args:
        checksum: seal pages on `put` and check them on `get`; if False, memory is trusted.
    """

    def __init__(self, binding: PoolBinding, store: MemoryStore, *, checksum: bool) -> None:
        self._binding = binding
        self._store = store
        self._checksum = checksum
        self._page_bytes = binding.page_bytes
        self.closed = False
        pages = max(1, min(_BATCH_PAGES, _BATCH_BYTES // max(1, self._page_bytes)))
        self.capabilities = Capabilities(durable=False, checks=True, batch_pages=pages, immediate=True)

    @property
    def evicts(self) -> bool:
        """Whether the store has a capacity, and so evicts pages."""
        return self._store.capacity_bytes is not None

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        self._check_open()
        return self._store.present(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        outcomes = [self._get(key, slot) for key, slot in zip(keys, slots, strict=True)]
        self._store.touch(reversed(keys))
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        own = frozenset(keys)
        self._store.touch(keys)
        own_bytes = self._store.size(own)
        outcomes = []
        for key, slot in zip(keys, slots, strict=True):
            outcomes.append(self._put(key, slot, own, own_bytes))
            own_bytes += self._page_bytes if outcomes[-1] is Outcome.STORED else 0
        self._store.touch(reversed(keys))
        return outcomes

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Count pages as used now, the last one most recently; skip pages whose dependency is missing."""
        self._check_open()
        self._store.touch(filter(self._store.useful, keys))

    async def leaving(self, pages: int) -> list[ObjectKey]:
        self._check_open()
        return self._store.leaving(pages * self._page_bytes)

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
        if not self._checksum or not stored.header:  # no header: stored by an engine without checksums
            return Outcome.HIT
        self._binding.header(slot)[:] = stored.header
        outcome = self._binding.check(slot, key)
        if outcome is Outcome.CORRUPT:
            self._store.drop(key)
        return outcome

    def _put(self, key: ObjectKey, slot: int, own: Collection[ObjectKey], own_bytes: int) -> Outcome:
        if self._store.read(key) is not None:
            return Outcome.EXISTS
        if not self._store.make_room(self._page_bytes, own, own_bytes):
            return Outcome.REJECTED
        header = b""
        if self._checksum:
            self._binding.seal(slot, key)
            header = bytes(self._binding.header(slot))
        # A copy: the caller may reuse the slot as soon as this returns.
        page = bytes(self._binding.page(slot)[: self._page_bytes])
        return Outcome.STORED if self._store.write(key, header, page) else Outcome.REJECTED


class MemoryBackend:
    """Pages of every pool in one `MemoryStore`.

    Args:
        store: the store; the caller may open another backend over it later.
        checksum: see `MemoryEngine`.
    """

    name = "memory"

    def __init__(self, store: MemoryStore, *, checksum: bool = True) -> None:
        self.store = store
        self._checksum = checksum
        self._engines: EngineRegistry[MemoryEngine] = EngineRegistry("memory backend")

    async def open_pool(self, binding: PoolBinding) -> MemoryEngine:
        """Open the engine of a pool.

        Raises:
            StorageError: the pool is already open with another binding.
            ClosedError: the backend is closed.
        """
        return await self._engines.open(binding, partial(self._open, binding))

    async def _open(self, binding: PoolBinding) -> MemoryEngine:
        self.store.know(binding)
        return MemoryEngine(binding, self.store, checksum=self._checksum)

    async def aclose(self) -> None:
        await self._engines.aclose()

    def __repr__(self) -> str:
        return f"<MemoryBackend: {len(self.store)} pages, {self.store.page_bytes} bytes>"


class MemoryOptions(BackendOptions, frozen=True):
    """Options of the memory backend.

    Attributes:
        name: name of a store in this process that outlives the backend, so that a cache opened later finds
            its pages. Default: none; the pages are dropped with the backend.
        capacity_bytes: most bytes of pages. Default: no limit.
        checksum: seal pages when they are written and check them when they are read. Default: true.
    """

    backend: ClassVar[str] = "memory"

    name: str = ""
    capacity_bytes: Positive | None = None
    checksum: bool = True


def open_backend(options: Mapping[str, object], port: Port) -> MemoryBackend:
    """Open the memory backend; see `MemoryOptions` for its options. `port` is not used.

    Raises:
        ConfigError: an option is unknown or invalid.
    """
    chosen = MemoryOptions.of(options)
    store = _NAMED.setdefault(chosen.name, MemoryStore()) if chosen.name else MemoryStore()
    store.capacity_bytes = chosen.capacity_bytes
    return MemoryBackend(store, checksum=chosen.checksum)
