"""Load or compute: a request reads from storage only where that is faster, and says so."""

from __future__ import annotations

import pytest

from asynchicache import CacheConfig, HybridCache, MissReason, PrefetchOptions
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.specs import synthetic_spec

SPEC = synthetic_spec(4)
PROMPT = list(range(100, 140))


def config(**prefetch: object) -> CacheConfig:
    return CacheConfig(
        device_slots={"kv": 64, "mamba": 8},
        weight_version="1",
        inline=True,
        prefetch=PrefetchOptions(**prefetch),
    )


async def store_prompt() -> MemoryStore:
    store = MemoryStore()
    async with (
        HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache,
        cache.request(PROMPT) as request,
    ):
        await request.load().submitted()
        request.extend(40)
        request.checkpoint(36)
        assert await request.durable()
    return store


async def ask(cache: HybridCache) -> tuple[int, MissReason]:
    async with cache.request([*PROMPT, 1]) as request:
        await request.prefetch()
        hit = request.hit
        await request.load()
        return hit.tokens, hit.reason


@pytest.mark.asyncio
async def test_few_tokens_are_computed_while_nothing_is_measured():
    store = await store_prompt()
    async with HybridCache.open(SPEC, config(min_fetch_tokens=37), storage=MemoryBackend(store)) as cache:
        assert await ask(cache) == (0, MissReason.CHEAPER_TO_COMPUTE)
        assert sum(cache.statistics().served.missed_tokens.values()) == 0, "it is no miss"
        assert cache.statistics().pages_read == 0
        assert cache.verify(idle=True) == []
    async with HybridCache.open(SPEC, config(min_fetch_tokens=36), storage=MemoryBackend(store)) as cache:
        assert (await ask(cache))[0] == 36


@pytest.mark.asyncio
@pytest.mark.parametrize(("seconds", "hit"), [(1e-9, 0), (10.0, 36)])
async def test_measured_costs_decide(seconds: float, hit: int):
    store = await store_prompt()
    async with HybridCache.open(SPEC, config(load_or_compute=True), storage=MemoryBackend(store)) as cache:
        async with cache.request([7, 7, 7]) as request:
            assert request.reports_costs
            request.load()
            for tokens in range(1, 20):
                request.computed(tokens, tokens * seconds)
        for _ in range(10):  # reads as slow as they are; the first ones are not decided by costs
            cache._parts.costs.read(1000, 0, 0.01)
        found, reason = await ask(cache)
        assert found == hit
        assert (reason is MissReason.CHEAPER_TO_COMPUTE) == (hit == 0)
        assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_reads_are_measured():
    store = await store_prompt()
    async with HybridCache.open(SPEC, config(load_or_compute=True), storage=MemoryBackend(store)) as cache:
        assert (await ask(cache))[0] == 36
        costs = cache._parts.costs
        assert costs.load_seconds(1) > 0
        assert costs.reading_bytes == 0
        assert not cache._parts.costs.measured
