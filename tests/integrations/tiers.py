"""Real models behind a whole cache: what they compute goes down three tiers, and comes back."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from transformers import DynamicCache

from asynchicache import CacheConfig, HybridCache, PrefetchOptions, PrefetchPolicy, Request
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.snapshot import new_cache, trim_windows
from integrations.zoo import PAGE, tiny_config, tiny_model, tiny_spec


@asynccontextmanager
async def open_tiers(
    name: str, dtype: str = "float32", *, device_slots: Mapping[str, int] | None = None
) -> AsyncIterator[tuple[HybridCache, CacheBridge]]:
    """A cache of three tiers for one of the zoo's models; storage is memory, its bytes are checked."""
    spec = tiny_spec(name, dtype)
    options = CacheConfig(
        device_slots={pool.name: (device_slots or {}).get(pool.name, 16) for pool in spec.owners},
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        weight_version="test",
        inline=True,
    )
    async with HybridCache.open(spec, options, storage=MemoryBackend(MemoryStore())) as cache:
        yield cache, CacheBridge(tiny_config(name), cache)
        await cache.drain()
        assert cache.verify() == []


async def compute(
    name: str, dtype: str, cache: HybridCache, bridge: CacheBridge, tokens: list[int], stop: int
) -> dict[int, DynamicCache]:
    """Publish `tokens[:stop]`, its forward cut at every page; model memory at each of them."""
    originals, held = {}, new_cache(tiny_config(name))
    async with cache.request(tokens) as request:
        await request.load()
        for end in range(PAGE, stop + 1, PAGE):
            prefill(tiny_model(name, dtype), held, tokens, end - PAGE, end)
            await publish(request, bridge, held, end - PAGE, end)
            trim_windows(held, PAGE)
            originals[end] = copy.deepcopy(held)
    await cache.drain()
    return originals


async def publish(request: Request, bridge: CacheBridge, held: DynamicCache, start: int, stop: int) -> None:
    request.extend(stop - request.reserved)
    bridge.save(request, held, start, stop)
    await request.checkpoint(stop)


@asynccontextmanager
async def loaded(cache: HybridCache, tokens: list[int]) -> AsyncIterator[Request]:
    """A request with whatever the cache has of its prompt, from storage too."""
    async with cache.request(tokens) as request:
        await request.prefetch()
        await request.load()
        yield request
