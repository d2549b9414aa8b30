"""One read for all who want a page, one write for all who computed it; what is being written is there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynchicache import Hit, HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import Outcome
from cache.engine import SPEC, Engine, config

PROMPT = list(range(100, 140))
SEEDS = range(10)


def slow(world: SeededWorld, store: MemoryStore) -> Latency:
    return Latency(MemoryBackend(store), 0.01, sleep=world.sleep)


async def stored(world: SeededWorld, *prompts: list[int]) -> MemoryStore:
    """A store that has these prompts."""
    store = MemoryStore()
    async with world.open_cache(SPEC, config(), storage=MemoryBackend(store)) as cache:
        for prompt in prompts:
            await Engine(cache).serve(prompt)
    return store


async def read(engine: Engine, tokens: list[int]) -> Hit:
    """Serve one prompt up to where it would be computed."""
    async with engine.cache.request(tokens) as request:
        await request.prefetch()
        await request.admit()
        await request.load()
        engine.check(request)
        return request.hit


def calls(cache: HybridCache) -> tuple[int, int]:
    """Pages that were asked for, and read, of `kv`."""
    counts = cache.statistics().storage["kv"]
    return counts.exists.pages, counts.get.pages


async def crowd(world: SeededWorld) -> None:
    store = await stored(world, PROMPT)
    async with world.open_cache(SPEC, config(), storage=slow(world, store)) as cache:
        engine = Engine(cache)
        hits = await asyncio.gather(*(read(engine, [*PROMPT, client]) for client in range(5)))
        assert [hit.tokens for hit in hits] == [40] * 5
        assert calls(cache) == (10, 10)
        assert cache.verify() == []


def test_a_crowd_that_wants_one_prompt_reads_it_once() -> None:
    for seed in SEEDS:
        run_seeded(seed, crowd)


async def one_goes_further(world: SeededWorld) -> None:
    store = await stored(world, PROMPT[:20], PROMPT)
    async with world.open_cache(SPEC, config(), storage=slow(world, store)) as cache:
        engine = Engine(cache)
        short, long = await asyncio.gather(read(engine, PROMPT[:21]), read(engine, [*PROMPT, 1]))
        assert (short.tokens, long.tokens) == (20, 40)
        assert calls(cache)[1] == 10  # whoever was first, no page came twice
        assert cache.verify() == []


def test_of_two_that_overlap_the_second_reads_the_rest() -> None:
    for seed in SEEDS:
        run_seeded(seed, one_goes_further)


@pytest.mark.asyncio
async def test_turns_of_one_conversation_that_come_in_order_all_find_what_is_stored() -> None:
    """Each waited for the one before it, and from the fifth on they gave up."""
    store, turns = MemoryStore(), range(4, 49, 4)
    spec = synthetic_spec(4, ("kv",))
    options = config(device_slots={"kv": 64}, host_slots={"kv": 64})
    async with HybridCache.open(spec, options, storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(list(range(48)))
    async with HybridCache.open(spec, options, storage=Latency(MemoryBackend(store), 0.001)) as cache:
        engine = Engine(cache)
        hits = await asyncio.gather(*(read(engine, [*range(turn), 999]) for turn in turns))
        assert [hit.tokens for hit in hits] == list(turns)
        assert calls(cache) == (12, 12), "the longest that waits goes first, and reads for the others"


async def reader_fails(world: SeededWorld) -> None:
    faults = Faulty(
        MemoryBackend(await stored(world, PROMPT)), FaultRates(hang=1, calls=("get",)), random.Random(0)
    )
    async with world.open_cache(SPEC, config(), storage=faults) as cache:
        engine = Engine(cache)
        first = asyncio.create_task(read(engine, [*PROMPT, 1]))
        await world.sleep(1.0)
        second = asyncio.create_task(read(engine, [*PROMPT, 2]))
        await world.sleep(0.1)
        assert faults.hanging  # the second waits for the first one's read, which will end by its deadline
        faults.rates = FaultRates()
        assert ((await first).tokens, (await second).tokens) == (0, 0)
        faults.release()
        await world.sleep(0.1)  # no wait counts a late call
        assert (await read(engine, [*PROMPT, 3])).tokens == 40
        assert cache.verify() == []


def test_what_a_read_failed_to_bring_is_read_when_it_has_ended() -> None:
    for seed in SEEDS:
        run_seeded(seed, reader_fails)


async def two_publishers(world: SeededWorld) -> None:
    store = MemoryStore()
    async with world.open_cache(SPEC, config(), storage=slow(world, store)) as cache:
        engine = Engine(cache)
        await asyncio.gather(engine.serve(PROMPT), engine.serve(PROMPT))
        await cache.drain()
        counts = cache.statistics().storage
        assert counts["kv"].put.outcomes == {Outcome.STORED: 10}
        assert set(counts["mamba"].put.outcomes) == {Outcome.STORED}


def test_what_two_requests_computed_is_written_once() -> None:
    for seed in SEEDS:
        run_seeded(seed, two_publishers)


@asynccontextmanager
async def writing(world: SeededWorld) -> AsyncIterator[tuple[HybridCache, Faulty]]:
    """A cache with few host slots, and a prompt on its way to storage."""
    faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(hang=1, calls=("put",)), random.Random(0))
    slots = {"device_slots": {"kv": 12, "mamba": 4}, "host_slots": {"kv": 16, "mamba": 4}}
    async with world.open_cache(SPEC, config(**slots), storage=faults) as cache:
        async with cache.request(PROMPT[:20]) as request:
            await request.load()
            await Engine(cache).compute(request, 20)
        while faults.hanging < 2:  # of pages, and of the state
            await world.sleep(1e-3)
        faults.rates = FaultRates()
        yield cache, faults
        faults.release()
        await cache.drain()
        assert cache.verify() == []


async def crowded_out(world: SeededWorld) -> None:
    async with writing(world) as (cache, faults):
        engine = Engine(cache)
        for client in range(1, 5):
            async with cache.request([client * 1000 + n for n in range(40)]) as request:
                await request.load()
                await engine.compute(request, 40)
            await world.sleep(1e-2)
        assert faults.hanging == 2
        hit = await read(engine, [*PROMPT[:20], 1])
        assert hit.by_tier == {Tier.HOST: 20}
        assert calls(cache)[1] == 0


def test_what_is_being_written_is_found_where_it_is() -> None:
    for seed in SEEDS:
        run_seeded(seed, crowded_out)
