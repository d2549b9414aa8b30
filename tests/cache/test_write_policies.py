"""What each write policy keeps of what the device or host alone has: over evictions, and over a restart."""

from __future__ import annotations

import pytest

from asynchicache import HybridCache
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import WritePolicy
from cache import paged_engine
from cache.engine import PAGE, Engine, config

SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE
MODELS = pytest.mark.parametrize("pools", [("kv",), ("kv", "mamba"), ("kv", "swa"), ("kv", "mamba", "swa")])
DOCUMENT = list(range(40 * PAGE + 1))


def other(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 40 * PAGE + 1))


@MODELS
@pytest.mark.parametrize("eviction", ["size", "lru", "fifo"])
@pytest.mark.asyncio
async def test_what_returns_after_its_eviction_is_kept_from_then_on(
    pools: tuple[str, ...], eviction: str
) -> None:
    """It was asked for twice, though the first pages were gone when the second request came."""
    spec = synthetic_spec(PAGE, pools, window_pages=2)
    options = config(
        device_slots=dict.fromkeys(pools, 60),
        host_slots=dict.fromkeys(pools, 200),
        write_policy=SELECTIVE,
        eviction=eviction,
    )
    async with HybridCache.open(spec, options) as cache:
        engine, hits = Engine(cache), []
        for number in range(3):
            hits.append((await engine.serve(DOCUMENT)).tokens)
            for more in (1, 2):
                await engine.serve(other(2 * number + more))
        assert hits == [0, 0, 40 * PAGE]
        assert cache.statistics().planner.backed_up <= 40 * len(pools), "the others came once"


@pytest.mark.asyncio
async def test_a_shared_beginning_is_kept_when_others_return_to_it_after_its_eviction() -> None:
    spec = synthetic_spec(PAGE, ("kv",))
    options = config(device_slots={"kv": 60}, host_slots={"kv": 200}, write_policy=SELECTIVE)
    async with HybridCache.open(spec, options) as cache:
        engine = Engine(cache)
        for number in (1, 2):
            await engine.serve([*DOCUMENT[: 20 * PAGE], *other(number)[: 20 * PAGE]])
            await engine.serve(other(number + 5))
            await engine.serve(other(number + 7))
        assert (await engine.serve([*DOCUMENT[: 20 * PAGE], 7])).tokens == 20 * PAGE


@pytest.mark.asyncio
async def test_a_state_that_was_evicted_without_its_pages_is_kept_when_it_returns() -> None:
    """The pages are there, and nothing of them can be used: they were asked for again all the same."""
    spec = synthetic_spec(PAGE, ("kv", "mamba"))
    options = config(
        device_slots={"kv": 200, "mamba": 2}, host_slots={"kv": 200, "mamba": 9}, write_policy=SELECTIVE
    )
    async with HybridCache.open(spec, options) as cache:
        engine, hits = Engine(cache), []
        for number in range(3):
            hits.append((await engine.serve(DOCUMENT)).tokens)
            await engine.serve(other(number + 1)[: 2 * PAGE + 1])
            await engine.serve(other(number + 5)[: 2 * PAGE + 1])
        assert hits == [0, 0, 40 * PAGE]


@pytest.mark.parametrize("pools", [("kv",), ("kv", "mamba")])
@pytest.mark.asyncio
async def test_pages_of_an_engine_that_return_to_a_small_host_go_to_storage(pools: tuple[str, ...]) -> None:
    spec, store = paged_engine.spec_of(*pools), MemoryStore()
    memory = paged_engine.paged(spec)
    options = paged_engine.config(spec, host_slots=dict.fromkeys(pools, 6), write_policy=SELECTIVE)
    async with HybridCache.open(spec, options, engine=memory.memory, storage=MemoryBackend(store)) as cache:
        engine, hits = paged_engine.PagedEngine(cache, memory), []
        prompt = list(range(100, 100 + 5 * PAGE + 1))
        for number in range(3):
            hits.append((await engine.serve(prompt)).tokens)
            await engine.serve([1000 * (number + 1) + one for one in prompt])
        assert (hits[0], hits[2]) == (0, 5 * PAGE)
