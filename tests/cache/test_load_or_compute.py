"""Load or compute: a request reads from storage only where that is faster, and says so."""

from __future__ import annotations

import pytest

from asynchicache import CacheConfig, HybridCache, MissReason, PrefetchOptions, Request, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.node import FULL_HOST

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
            cache._controller.costs.read(1000, 0, 0.01)
        found, reason = await ask(cache)
        assert found == hit
        assert (reason is MissReason.CHEAPER_TO_COMPUTE) == (hit == 0)
        assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_reads_are_measured():
    store = await store_prompt()
    async with HybridCache.open(SPEC, config(load_or_compute=True), storage=MemoryBackend(store)) as cache:
        assert (await ask(cache))[0] == 36
        costs = cache._controller.costs
        assert costs.load_seconds(1) > 0
        assert costs.reading_bytes == 0
        assert not cache._controller.costs.measured


ATTENTION = synthetic_spec(4, ["kv"])
LONG = list(range(100, 240))
"""35 pages."""


def partly(*, host: int = 64) -> CacheConfig:
    return CacheConfig(
        device_slots={"kv": 64},
        host_slots={"kv": host},
        weight_version="1",
        inline=True,
        prefetch=PrefetchOptions(load_or_compute=True, partial_loads=True),
    )


async def store_long(cache: HybridCache) -> None:
    async with cache.request(LONG) as request:
        await request.load().submitted()
        request.extend(len(LONG))
        request.checkpoint(len(LONG))
        assert await request.durable()


def measure(cache: HybridCache) -> None:
    """A token takes a millisecond to compute, and a page as long as two of its four tokens to read."""
    costs = cache._controller.costs
    for count in range(1, 20):
        costs.computed(count, 0, count * 1e-3)
        costs.read(count * cache._controller.planner.state.free[FULL_HOST].slot_bytes, 0, count * 2e-3)
    costs.read = lambda *_: None  # real reads take as long as they like


async def compute(request: Request, length: int) -> None:
    request.extend(max(length - request.reserved, 0))
    await request.checkpoint(length)


@pytest.mark.asyncio
async def test_the_end_of_a_prefix_is_read_while_its_beginning_is_computed():
    store = MemoryStore()
    async with HybridCache.open(ATTENTION, partly(), storage=MemoryBackend(store)) as cache:
        await store_long(cache)
    async with HybridCache.open(ATTENTION, partly(), storage=MemoryBackend(store)) as cache:
        measure(cache)
        async with cache.request([*LONG, 1]) as request:
            hit = await request.prefetch()
            assert (hit.tokens, hit.reason) == (0, MissReason.CHEAPER_TO_COMPUTE)
            assert request.split == 12 * 4, "12 pages are computed while 23 are read"
            await request.load()
            await compute(request, request.split)
            request.suspend(request.split)
            assert request.rematch().tokens == 12 * 4
            hit = await request.prefetch()
            await request.load()
            assert (hit.tokens, hit.reason) == (35 * 4, MissReason.NONE)
            assert request.hit.by_tier == {Tier.STORAGE: 35 * 4}
        assert cache.statistics().pages_read == 23
        await cache.drain()
        assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_a_request_that_does_not_mind_the_split_costs_nothing_but_the_read():
    store = MemoryStore()
    async with HybridCache.open(ATTENTION, partly(), storage=MemoryBackend(store)) as cache:
        await store_long(cache)
    async with HybridCache.open(ATTENTION, partly(), storage=MemoryBackend(store)) as cache:
        measure(cache)
        for last in (1, 2):
            async with cache.request([*LONG, last]) as hasty:
                await hasty.prefetch()
                assert hasty.split == 12 * 4
            await cache.drain()
            assert cache.verify(idle=True) == []
        async with cache.request([*LONG, 3]) as heedless:
            await heedless.prefetch()
            assert heedless.split == 12 * 4
            await heedless.load()
            await compute(heedless, len(LONG))
        await cache.drain()
        assert cache.verify(idle=True) == []
        async with cache.request([*LONG, 4]) as request:
            assert request.hit.tokens == 35 * 4
            assert request.split == 0


@pytest.mark.asyncio
async def test_without_room_for_the_end_of_a_prefix_its_beginning_is_read():
    store = MemoryStore()
    async with HybridCache.open(ATTENTION, partly(), storage=MemoryBackend(store)) as cache:
        await store_long(cache)
    async with HybridCache.open(ATTENTION, partly(host=8), storage=MemoryBackend(store)) as cache:
        measure(cache)
        async with cache.request([*LONG, 1]) as request:
            hit = await request.prefetch()
            assert (hit.tokens, request.split) == (8 * 4, 0)
        await cache.drain()
        assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_states_are_read_with_all_of_their_prefix_or_not_at_all():
    store = await store_prompt()
    both = config(load_or_compute=True, partial_loads=True)
    async with HybridCache.open(SPEC, both, storage=MemoryBackend(store)) as cache:
        measure(cache)
        async with cache.request([*PROMPT, 1]) as request:
            await request.prefetch()
            assert request.split == 0


def test_partial_loads_need_measured_costs():
    with pytest.raises(ConfigError, match="partial_loads: needs load_or_compute"):
        PrefetchOptions(partial_loads=True)
