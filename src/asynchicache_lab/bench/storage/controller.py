"""Move pages from host to storage and back through a whole cache, with write-behind and prefetch."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.controller.request import Request
from asynchicache.errors import StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import EngineWrapper, PoolBinding, PoolEngine, StorageBackend
from asynchicache.types import Outcome, Tier
from asynchicache_lab.bench.storage.report import RoundSample

_PAGE_TOKENS = 16
POOL = "kv"
"""Whose pages are moved."""


class WatchedBackend:
    """A backend that times its puts, because the controller starts writes in the background.

    Attributes:
        began, ended: start of a round's first put, and end of its last put, in seconds.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self.name = backend.name
        self.began: float | None = None
        self.ended = 0.0
        self._backend = backend
        self._engine: PoolEngine | None = None
        self._keys: list[ObjectKey] = []

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        self._engine = await self._backend.open_pool(binding)
        return _WatchedEngine(self._engine, self)

    def putting(self, keys: Sequence[ObjectKey]) -> None:
        """A put begins."""
        if self.began is None:
            self.began = time.perf_counter()
        self._keys += keys

    async def forget(self) -> None:
        """Delete the stored pages, so that the next round writes to the same place on the medium."""
        keys, self._keys, self.began = self._keys, [], None
        if self._engine is not None:
            await self._engine.delete(keys)

    async def aclose(self) -> None:
        await self._backend.aclose()


class _WatchedEngine(EngineWrapper):
    def __init__(self, engine: PoolEngine, watch: WatchedBackend) -> None:
        super().__init__(engine)
        self._watch = watch

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._watch.putting(keys)
        outcomes = await self._engine.put(keys, slots)
        self._watch.ended = time.perf_counter()
        return outcomes


class ControllerBench:
    """One cache with an attention pool, whose pages are written to storage and read back.

    Args:
        cache: a cache with slots for all pages on the device and on the host.
        watch: the cache's backend.
        page_bytes, pages: size and number of the pages.
        seed: seed of the bytes.

    Attributes:
        content: contents of the pages, `[pages, tokens, bytes]`.
    """

    def __init__(
        self, cache: HybridCache, watch: WatchedBackend, page_bytes: int, pages: int, seed: int
    ) -> None:
        self._cache = cache
        self._watch = watch
        self._nbytes = page_bytes * pages
        self._pages = pages
        self._device = cache.device_tensor(POOL, "bytes")[0]
        generator = torch.Generator().manual_seed(seed)
        shape = (pages, _PAGE_TOKENS, page_bytes // _PAGE_TOKENS)
        self.content = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    async def put(self, number: int) -> RoundSample:
        """Publish a new prompt; return the time from the start of the first put to the end of the last.

        Raises:
            StorageError: not all pages were stored.
        """
        async with self._cache.request(self._tokens(number)) as request:
            await request.load()
            request.extend(self._pages * _PAGE_TOKENS)
            self._device[self._slots(request)] = self.content
            await request.checkpoint(self._pages * _PAGE_TOKENS)
            cpu = time.process_time()
            if not await request.durable() or self._watch.began is None:
                raise StorageError("not all pages reached storage through the controller")
        seconds = self._watch.ended - self._watch.began
        return RoundSample(seconds, time.process_time() - cpu, self._nbytes)

    async def get(self, number: int) -> tuple[RoundSample, int]:
        """Prefetch a prompt that device and host have evicted.

        Returns:
            The duration of `Request.prefetch`, and the number of wrong pages.

        Raises:
            StorageError: some of the prompt was not a hit.
        """
        await self._cache.flush()
        self._device.zero_()
        async with self._cache.request(self._tokens(number)) as request:
            started, cpu = time.perf_counter(), time.process_time()
            hit = await request.prefetch()
            sample = RoundSample(time.perf_counter() - started, time.process_time() - cpu, self._nbytes)
            if hit.by_tier.get(Tier.STORAGE, 0) != self._pages * _PAGE_TOKENS:
                raise StorageError(f"prefetch brought {hit.by_tier} back: {hit.reason.value}")
            await request.load()
            same = self._device[self._slots(request)] == self.content
            wrong = self._pages - int(same.flatten(1).all(1).sum())
        await self._cache.flush()
        await self._watch.forget()
        return sample, wrong

    def _slots(self, request: Request) -> list[int]:
        return request.pages(POOL)[: self._pages]

    def _tokens(self, number: int) -> list[int]:
        first = number << 32
        return list(range(first, first + self._pages * _PAGE_TOKENS + 1))


@asynccontextmanager
async def open_controller_bench(
    backend: StorageBackend, page_bytes: int, pages: int, seed: int, port: Port
) -> AsyncIterator[ControllerBench]:
    """Open a cache on `backend`, which the caller must close."""
    tensor = TensorSpec("bytes", (0,), (page_bytes // _PAGE_TOKENS,), "uint8")
    spec = ModelSpec("bench", _PAGE_TOKENS, 1, (PoolSpec(POOL, (tensor,)),))
    config = CacheConfig(
        device_slots={POOL: pages + 1},
        host_slots={POOL: pages + 1},
        weight_version="bench",
        store_bytes=2 * page_bytes * pages,
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE, max_seconds=600.0),
        storage_limits=PoolLimits(deadline=120.0),
        seed=seed,
    )
    watch = WatchedBackend(backend)
    async with HybridCache.open(spec, config, storage=watch, port=port) as cache:
        yield ControllerBench(cache, watch, page_bytes, pages, seed)
