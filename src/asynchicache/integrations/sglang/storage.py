"""SGLang HiCache on any storage backend of this package: a `HiCacheStorage`.

SGLang loads it with `--hicache-storage-backend dynamic`. Calls block, as SGLang's threads expect; the
pages of one call move concurrently on an event loop in another thread. Once the backend is attached, a
storage failure is a miss and never raises into SGLang.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, TypeVar

import torch

from asynchicache.errors import CacheError
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.page_pool import PagePool, PagePoolStatistics
from asynchicache.integrations.page_store import PageIdentity, PageStore
from asynchicache.integrations.sglang.contents import key_adapters_by_content, settings_digest
from asynchicache.integrations.sglang.flat_pages import FlatPages, scratch_memory
from asynchicache.integrations.sglang.host_pools import host_pages, page_numbers, pool_layout
from asynchicache.integrations.sglang.options import RankIdentity, SGLangOptions, text_of
from asynchicache.integrations.sglang.prefixes import prefix_hits
from asynchicache.integrations.sglang.seam import HiCacheStorage, PoolTransferResult, StorageMetrics
from asynchicache.integrations.sglang.weights import follow_weights
from asynchicache.types import ALL_PAGES, Coverage, Outcome, trailing_pages

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ANCHOR = "kv"
_FLAT = "kv_flat"
_ALWAYS_SHARDED = frozenset({"mamba"})  # states are split by heads even if KV is replicated (MLA)
_GOOD = frozenset({Outcome.HIT, Outcome.STORED, Outcome.EXISTS})
_CLOSE_SECONDS = 5.0


class AsynchicacheStorage(HiCacheStorage):  # type: ignore[misc]
    """Storage of one rank. SGLang calls it from several threads.

    With `interface_v1`, and for every pool but the first of a hybrid model, SGLang passes pages in place:
    aligned pages are read and written without a copy. Keys and options: `docs/howto/sglang.md`.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """
        Args:
            storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` holds the options.
            kwargs: unused.

        Raises:
            ConfigError: invalid options, an unsupported sharding, or an adapter without files here; names the
                fix.
            StorageError: the storage cannot be used.
        """
        self._rank = RankIdentity(storage_config)
        self._options = SGLangOptions.of(storage_config.extra_config or {}).for_rank(self._rank)
        key_adapters_by_content()
        self._settings, self._weights = settings_digest(), follow_weights()
        self._metered = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._metrics, self._metrics_lock = StorageMetrics(), threading.Lock()
        self._pools: dict[str, tuple[Any, PagePool]] = {}
        self._flat: FlatPages | None = None
        self._flat_lock = threading.Lock()
        self._bridge = LoopBridge(name="asynchicache-sglang", max_bytes=self._options.max_bytes)
        try:
            self._store = self._bridge.call(PageStore.open(self._options))
        except CacheError:
            self._bridge.close()
            raise

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool of attention pages.

        Raises:
            ConfigError: pages of this layout cannot be moved in place; names the flag that helps.
        """
        super().register_mem_pool_host(mem_pool_host)
        if self._options.interface_v1:
            self._register(_ANCHOR, mem_pool_host)
        else:
            self._flat_pages()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register another pool of a hybrid model, or the first pool again.

        Raises:
            ConfigError: as `register_mem_pool_host`.
        """
        name = text_of(host_pool_name)
        if name != _ANCHOR or self._options.interface_v1:
            self._register(name, host_pool)

    def _register(self, name: str, host_pool: Any) -> None:
        known = self._pools.get(name)
        if known is not None and known[0] is host_pool:
            return
        if known is not None:  # SGLang rebuilt the pool
            self._bridge.call(self._store.close_pool(name))
        identity = self._identity(name, str(host_pool.dtype), pool_layout(host_pool))
        opening = self._store.open_pool(
            name, host_pages(name, host_pool), identity, writes=self._writes(name)
        )
        self._pools[name] = host_pool, self._bridge.call(opening)

    def _replicated(self, name: str) -> bool:
        return self._rank.replicated and name not in _ALWAYS_SHARDED

    def _writes(self, name: str) -> bool:
        return self._rank.writer or not self._replicated(name)

    def _identity(self, name: str, dtype: str, layout: str) -> PageIdentity:
        return PageIdentity(
            engine="sglang",
            model=self._rank.model,
            weight_version=self._options.weight_version,
            dtype=dtype,
            layout=layout,
            shard=self._rank.shard(replicated=self._replicated(name)),
            salt=self._options.salt,
            settings=self._settings,
        )

    def _flat_pages(self, sample: Any = None) -> FlatPages | None:
        """Return the pool of the generic path; opened when a page first shows the page size."""
        with self._flat_lock:
            host = getattr(self, "mem_pool_host", None)
            known = host is not None or sample is not None
            if self._flat is None and known and not self._bridge.closed:
                page = host.get_dummy_flat_data_page() if host is not None else sample
                layout = pool_layout(host) if host is not None else "flat"
                identity = self._identity(_FLAT, str(page.dtype), f"flat:{layout}")
                memory = scratch_memory(page.numel() * page.element_size())
                opening = self._store.open_pool(_FLAT, memory, identity, writes=self._writes(_FLAT))
                self._flat = FlatPages(self._bridge, self._bridge.call(opening))
            return self._flat

    def _flat_or_none(self, sample: Any = None) -> FlatPages | None:
        try:
            return self._flat_pages(sample)
        except (CacheError, CancelledError, TimeoutError) as error:
            logger.warning("the pool of flat pages cannot be opened: %s", error)
            return None

    # In place: `interface_v1`.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of consecutive pages from the start that are in storage."""
        there = self._call(self._exists(_ANCHOR, keys), [False] * len(keys))
        return there.index(False) if False in there else len(there)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the pool of attention pages; return for each whether it was read."""
        return self._moved(_ANCHOR, keys, host_indices, write=False)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the pool of attention pages; return for each whether storage has it."""
        return self._moved(_ANCHOR, keys, host_indices, write=True)

    # Hybrid models: every pool in one call.

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Find the prefixes of `keys` that all pools can restore.

        Returns:
            `PoolTransferResult`; `restorable_prefix_pages` holds every such length.
        """
        wanted = {text_of(each.name): each for each in pool_transfers or ()}
        coverages = {name: _coverage(each) for name, each in wanted.items()}
        names = [name for name, coverage in coverages.items() if coverage is not None]
        there = self._call(self._exist_all(keys, names), [[False] * len(keys)] * (len(names) + 1))
        others = {
            name: (coverage, pages)
            for name, pages in zip(names, there[1:], strict=True)
            if (coverage := coverages[name]) is not None
        }
        found = prefix_hits(_ANCHOR, there[0], others)
        return PoolTransferResult(found.longest, found.by_pool, found.lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools; return for each pool which pages were read."""
        return self._moved_all(transfers, write=False)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; return for each pool which pages storage has."""
        return self._moved_all(transfers, write=True)

    async def _exist_all(self, keys: list[str], names: Sequence[str]) -> list[list[bool]]:
        return await asyncio.gather(*(self._exists(name, keys) for name in (_ANCHOR, *names)))

    async def _exists(self, name: str, keys: list[str]) -> list[bool]:
        pool = self._pool(name)
        return [False] * len(keys) if pool is None else await pool.exists(self._named(keys))

    def _named(self, keys: Sequence[str]) -> list[str]:
        """Return the names of SGLang's pages with the weights that it has now."""
        weights = self._weights.name()
        return [f"{weights}/{key}" for key in keys] if weights else list(keys)

    def _pool(self, name: str) -> PagePool | None:
        if name == _ANCHOR and not self._options.interface_v1:
            return self._flat.pool if self._flat is not None else None
        known = self._pools.get(name)
        if known is None:
            logger.error("pool %r was never registered; its pages are not cached", name)
        return known[1] if known is not None else None

    def _moved_all(self, transfers: Sequence[Any], *, write: bool) -> dict[str, list[bool]]:
        """Move the pages of all pools concurrently, in one call."""
        moves = [self._move(text_of(each.name), each.keys, each.host_indices, write) for each in transfers]
        failed = [[False] * len(move.keys) for move in moves]
        moved = self._call(_move_all(moves), failed, sum(move.nbytes for move in moves))
        return {each.name: pages for each, pages in zip(transfers, moved, strict=True)}

    def _moved(self, name: str, keys: list[str], host_indices: torch.Tensor, *, write: bool) -> list[bool]:
        started = time.perf_counter()
        move = self._move(name, keys, host_indices, write)
        (moved,) = self._call(_move_all([move]), [[False] * len(keys)], move.nbytes)
        self._meter(sum(moved), move.nbytes, time.perf_counter() - started, write=write)
        return moved

    def _move(
        self, name: str, keys: list[str] | None, host_indices: torch.Tensor | None, write: bool
    ) -> _Move:
        """Build a move; its pool is None if the pool is unknown or indices and keys do not match."""
        keys = keys or []
        known = self._pools.get(name)
        pages = page_numbers(known[0], host_indices, len(keys)) if known is not None else None
        if known is None or pages is None:
            logger.error("pool %r: %d keys, but no such pool or not as many pages", name, len(keys))
            return _Move(None, keys, [], write)
        return _Move(known[1], self._named(keys), pages, write)

    # Pages as flat tensors.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fill `target_location` with a page and return it; None on a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill tensors with pages; return each filled tensor, and None for each miss."""
        targets = list(target_locations or [])
        flat = self._flat_or_none(targets[0] if targets else None)
        if flat is None or len(targets) != len(keys):
            return [None] * len(keys)
        try:
            there = flat.get(self._named(keys), targets)
        except (CacheError, CancelledError, TimeoutError) as error:
            logger.warning("reading %d pages failed: %s", len(keys), error)
            return [None] * len(keys)
        return [target if hit else None for target, hit in zip(targets, there, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a page; return whether storage has it."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages; return whether storage has all of them."""
        pages = list(values if values is not None else target_locations or [])
        flat = self._flat_or_none(pages[0] if pages else None)
        if flat is None or len(pages) != len(keys):
            return False
        try:
            return all(flat.put(self._named(keys), pages))
        except (CacheError, CancelledError, TimeoutError) as error:
            logger.warning("writing %d pages failed: %s", len(keys), error)
            return False

    def exists(self, key: str) -> bool:
        """Return whether storage has a page that was stored as a tensor."""
        flat = self._flat_or_none()
        return flat is not None and self._call(flat.pool.exists(self._named([key])), [False])[0]

    # The rest.

    def clear(self) -> bool:
        """Remove all pages of this model, these weights and this rank; False if that failed."""
        return self._call(self._store.clear(), -1) >= 0

    def get_stats(self) -> Any:
        """Return pages and GB/s of each call since the last report, as `StorageMetrics`."""
        with self._metrics_lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def statistics(self) -> dict[str, PagePoolStatistics]:
        """Return counts of page outcomes so far, by pool."""
        return self._store.statistics()

    def close(self) -> None:
        """Wait for running calls, up to a time limit, and close the storage. Idempotent."""
        if not self._bridge.closed:
            try:
                self._call(self._store.aclose(), None)
            finally:
                self._bridge.close(_CLOSE_SECONDS)

    def _call(self, work: Coroutine[Any, Any, T], otherwise: T, nbytes: int = 0) -> T:
        """Return the result of `work`, or `otherwise` if it fails: SGLang does not handle errors here."""
        try:
            return self._bridge.call(work, nbytes=nbytes)
        except (CacheError, CancelledError, TimeoutError) as error:
            logger.warning("a call to storage failed: %s", error)
            return otherwise

    def _meter(self, pages: int, nbytes: int, seconds: float, *, write: bool) -> None:
        if not self._metered or not nbytes:
            return
        with self._metrics_lock:
            names = ("backup_pgs", "backup_bandwidth") if write else ("prefetch_pgs", "prefetch_bandwidth")
            getattr(self._metrics, names[0]).append(pages)
            getattr(self._metrics, names[1]).append(nbytes / 1e9 / max(seconds, 1e-9))


def _coverage(transfer: Any) -> Coverage | None:
    """Return which pages of this pool a prefix needs; None if the pool does not limit the hit."""
    policy = text_of(transfer.hit_policy)
    if policy == "all_pages":
        return ALL_PAGES
    if policy == "trailing_pages":
        return trailing_pages(max(1, len(transfer.keys or ())))
    logger.warning(
        "pool %s has hit policy %s, which is not supported; it is not asked for",
        text_of(transfer.name),
        policy,
    )
    return None


class _Move(NamedTuple):
    """A read or write of pages of one pool."""

    pool: PagePool | None
    keys: list[str]
    pages: list[int]
    write: bool

    @property
    def nbytes(self) -> int:
        return len(self.pages) * self.pool.memory.page_bytes if self.pool is not None else 0

    async def run(self) -> list[bool]:
        """Return for each page whether it was moved."""
        if self.pool is None:
            return [False] * len(self.keys)
        call = self.pool.put if self.write else self.pool.get
        return [outcome in _GOOD for outcome in await call(self.keys, self.pages)]


async def _move_all(moves: Sequence[_Move]) -> list[list[bool]]:
    return await asyncio.gather(*(move.run() for move in moves))
