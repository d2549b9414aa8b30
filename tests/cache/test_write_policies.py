"""What each write policy keeps of what the device or host alone has: over evictions, and over a restart."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache import HybridCache
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
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


# What only memory has, when the cache closes


def conversations(count: int) -> list[list[int]]:
    """Prompts of five pages, a longer one that goes on after the first of them, and one word more each."""
    own = [list(range(1000 * number, 1000 * number + 5 * PAGE + 1)) for number in range(1, count + 1)]
    return [*own, [*own[0][: 5 * PAGE], *range(7, 8 + 3 * PAGE)]]


async def hits(cache: HybridCache, prompts: list[list[int]]) -> list[int]:
    found = []
    for prompt in prompts:
        async with cache.request(prompt) as request:
            await request.prefetch()
            await request.load()
            Engine(cache).check(request)
            found.append(request.hit.tokens)
    return found


@MODELS
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_BACK, SELECTIVE])
@pytest.mark.parametrize("host", [100, 12])
@pytest.mark.parametrize("verb", ["close", "sync"])
def test_a_close_writes_what_only_memory_has(
    pools: tuple[str, ...], policy: WritePolicy, host: int, verb: str
) -> None:
    """Also through a host that holds two of the prompts, and at ends that a longer path goes through."""

    async def main(world: SeededWorld) -> None:
        spec, store, prompts = synthetic_spec(PAGE, pools, window_pages=2), MemoryStore(), conversations(6)
        sizes = {"device_slots": dict.fromkeys(pools, 100), "host_slots": dict.fromkeys(pools, host)}
        options = config(**sizes, write_policy=policy, clean_share=0.0)
        async with world.open_cache(spec, options, storage=MemoryBackend(store)) as cache:
            for prompt in prompts:
                await Engine(cache).serve(prompt)
            assert len(store) == 0 or policy is SELECTIVE
            if verb == "sync":
                assert await cache.sync()
                written = set(store)
                await cache.drain()
                assert cache.verify(idle=True) == []
        if verb == "sync" and "swa" not in pools:
            assert set(store) == written, "the close had nothing left to write"
        roomy = config(device_slots=dict.fromkeys(pools, 100))
        async with world.open_cache(spec, roomy, storage=MemoryBackend(store)) as cache:
            assert await hits(cache, prompts) == [5 * PAGE] * 6 + [8 * PAGE]

    run_seeded(1, main)


def test_the_hottest_is_written_first_within_the_time_to_close() -> None:
    async def main(world: SeededWorld) -> None:
        spec, store = synthetic_spec(PAGE, ("kv",)), MemoryStore()
        slow = Latency(MemoryBackend(store), 1.0, sleep=world.sleep)
        size = {"device_slots": {"kv": 300}, "host_slots": {"kv": 300}}
        options = config(**size, write_policy=WritePolicy.WRITE_BACK, clean_share=0.0, close_seconds=4.5)
        prompts = conversations(40)[:40]
        async with world.open_cache(spec, options, storage=slow) as cache:
            for prompt in [*prompts, prompts[0]]:
                await Engine(cache).serve(prompt, prefetch=False)
        async with world.open_cache(spec, config(**size), storage=MemoryBackend(store)) as cache:
            kept = [number for number, hit in enumerate(await hits(cache, prompts)) if hit]
            assert 2 <= len(kept) < 40
            assert kept == [0, *range(41 - len(kept), 40)]

    run_seeded(1, main)


@pytest.mark.parametrize("kind", ["fail", "hang"])
def test_a_close_gives_up_a_store_that_takes_nothing(kind: str) -> None:
    async def main(world: SeededWorld) -> None:
        faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(), world.random)
        faults.rates = FaultRates(**{kind: 1.0}, calls=("put",))
        size = {"device_slots": {"kv": 300}, "host_slots": {"kv": 300}}
        options = config(**size, write_policy=WritePolicy.WRITE_BACK, clean_share=0.0, close_seconds=20.0)
        async with world.open_cache(synthetic_spec(PAGE, ("kv",)), options, storage=faults) as cache:
            for prompt in conversations(40):
                await Engine(cache).serve(prompt, prefetch=False)
            async with asyncio.timeout(1e4):
                assert not await cache.sync()
            assert cache.verify() == []
            faults.release()

    run_seeded(1, main)


@pytest.mark.parametrize("pools", [("kv",), ("kv", "mamba")])
def test_the_end_of_an_answer_inside_a_page_is_written_too(pools: tuple[str, ...]) -> None:
    async def main(world: SeededWorld) -> None:
        spec, store = synthetic_spec(PAGE, pools), MemoryStore()
        options = config(
            device_slots=dict.fromkeys(pools, 40),
            write_policy=WritePolicy.WRITE_BACK,
            clean_share=0.0,
            tails=True,
        )
        async with world.open_cache(spec, options, storage=MemoryBackend(store)) as cache:
            async with cache.request(range(10)) as request:
                await request.load()
                await request.reserve(10)
                await request.checkpoint(10, final=True)
        async with world.open_cache(spec, options, storage=MemoryBackend(store)) as cache:
            async with cache.request(range(12)) as request:
                assert (await request.prefetch()).tokens == 10

    run_seeded(1, main)
