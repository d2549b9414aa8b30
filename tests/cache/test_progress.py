"""Every wait ends while others go on: in virtual time, under traffic that does not stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import pytest

from asynchicache import CapacityError, HybridCache, Request
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import ShedReason
from cache.engine import SPEC, Engine, config
from soaking import first

PAGES_ONLY = synthetic_spec(4, ("kv",))
OPTIONS = {"device_slots": {"kv": 200, "mamba": 40}, "host_slots": {"kv": 400, "mamba": 80}}
CALL_SECONDS = 5e-3
"""What a storage call takes on average."""

BOUND = 200 * CALL_SECONDS
"""Virtual seconds in which a wait must have ended; the traffic goes on for longer than a test waits."""

SEEDS = pytest.mark.parametrize("seed", first(1, range(5)))


@asynccontextmanager
async def traffic(
    world: SeededWorld, clients: int, **options: object
) -> AsyncIterator[tuple[HybridCache, Latency]]:
    """A cache that clients use without a pause; at no moment is nothing in flight."""
    backend = Latency(MemoryBackend(MemoryStore()), CALL_SECONDS, sleep=world.sleep)
    async with world.open_cache(SPEC, config(**{**OPTIONS, **options}), storage=backend) as cache:
        served = [0]

        async def client(number: int) -> None:
            engine, turn = Engine(cache), 0
            while True:
                turn += 1
                tokens = [number * 1000 + world.random.randrange(50) for _ in range(24)]
                async with cache.request(tokens) as request:
                    await request.prefetch()
                    await request.load()
                    await request.reserve(max(24 - request.reserved, 0))
                    engine.write(request, request.hit.tokens, 24)
                    await request.checkpoint(24)
                served[0] += 1

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        await asyncio.sleep(10 * CALL_SECONDS)
        before = served[0]
        try:
            yield cache, backend
            await asyncio.sleep(5 * CALL_SECONDS)
            assert served[0] > before, "the traffic goes on"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        assert not [task for task in tasks if not task.cancelled()]


Wait = Callable[[HybridCache], Coroutine[object, object, object]]


async def durable(cache: HybridCache) -> None:
    tokens = list(range(900, 940))
    async with cache.request(tokens) as request:
        await request.load()
        await request.reserve(40)
        Engine(cache).write(request, 0, 40)
        await request.checkpoint(40)
        assert await request.durable()


WAITS: dict[str, Wait] = {
    "drain": HybridCache.drain,
    "flush": HybridCache.flush,
    "durable": durable,
    "detach": HybridCache.detach_storage,
    "clear": HybridCache.clear_storage,
}


@SEEDS
@pytest.mark.parametrize("wait", WAITS)
def test_it_ends_while_others_go_on(seed: int, wait: str) -> None:
    async def main(world: SeededWorld) -> None:
        async with traffic(world, 3) as (cache, _), asyncio.timeout(BOUND):
            await WAITS[wait](cache)

    run_seeded(seed, main)


@SEEDS
def test_what_was_shed_is_written_for_who_waits_for_it(seed: int) -> None:
    """So few bytes may be in flight that nearly every write is shed."""

    async def main(world: SeededWorld) -> None:
        async with traffic(world, 3, store_bytes=1) as (cache, _), asyncio.timeout(BOUND):
            await durable(cache)
            assert cache.statistics().traffic.shed[ShedReason.BUDGET] > 0

    run_seeded(seed, main)


@SEEDS
def test_who_waits_for_room_waits_for_what_durable_keeps(seed: int) -> None:
    """Between two calls of storage nothing is in flight, and the path is kept all the same."""

    async def durable_while_suspended(cache: HybridCache, first: int, suspended: asyncio.Event) -> bool:
        async with cache.request(list(range(first, first + 36))) as request:
            await request.load()
            await Engine(cache).compute(request, 36)
            request.suspend(36)
            suspended.set()
            return await request.durable()

    async def main(world: SeededWorld) -> None:
        options = config(device_slots={"kv": 24}, host_slots={"kv": 64})
        storage = MemoryBackend(MemoryStore())
        async with world.open_cache(PAGES_ONLY, options, storage=storage) as cache, asyncio.timeout(100):
            for number in range(30):
                events = [asyncio.Event(), asyncio.Event()]
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(durable_while_suspended(cache, 1000 * number + 500 * one, event))
                        for one, event in enumerate(events)
                    ]
                    for event in events:
                        await event.wait()
                    for _ in range(number):
                        await asyncio.sleep(0)
                    long = 10**7 + 1000 * number
                    async with cache.request(list(range(long, long + 80))) as request:
                        await request.load()
                        await request.reserve(80)  # 20 of 24 pages; those two keep 18 for a while
                assert [task.result() for task in tasks] == [True, True]
                await cache.flush()

    run_seeded(seed, main)


@SEEDS
def test_a_drain_waits_for_what_was_published_before_it(seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        async with traffic(world, 3) as (cache, _):
            tokens = list(range(900, 940))
            async with cache.request(tokens) as request:
                await request.load()
                await request.reserve(40)
                Engine(cache).write(request, 0, 40)
                await request.checkpoint(40)
                await cache.drain()
                assert cache._parts.planner.backups.is_stored(request._state.lease.node)

    run_seeded(seed, main)


def test_a_write_that_hangs_keeps_no_other_from_its_turn() -> None:
    """Bytes that an engine reads after its deadline count for ever; a wait for room leaves them out."""

    async def main(world: SeededWorld) -> None:
        faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(hang=1.0, calls=("put",)), world.random)
        async with world.open_cache(SPEC, config(**OPTIONS, store_bytes=1), storage=faults) as cache:
            await asyncio.sleep(0)
            async with cache.request(list(range(20))) as request:
                await request.load()
                await Engine(cache).compute(request, 20)
                assert not await request.durable()
            faults.rates = FaultRates()
            await asyncio.sleep(30)
            await durable(cache)
            faults.release()

    run_seeded(0, main)


@SEEDS
def test_two_who_wait_for_storage_do_not_evict_each_others_pages(seed: int) -> None:
    """The host has room for one of them at a time, and a write past its deadline fills the byte limit."""

    async def main(world: SeededWorld) -> None:
        faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(hang=1.0, calls=("put",)), world.random)
        options = config(device_slots={"kv": 64}, host_slots={"kv": 15}, store_bytes=1)
        async with world.open_cache(PAGES_ONLY, options, storage=faults) as cache:
            async with cache.request(list(range(20))) as request:
                await request.load()
                await Engine(cache).compute(request, 20)
                assert not await request.durable()
            faults.rates = FaultRates()
            await asyncio.sleep(30)

            async def one(first: int) -> bool:
                async with cache.request(list(range(first, first + 40))) as request:
                    await request.load()
                    await Engine(cache).compute(request, 40)
                    return await request.durable()

            async with asyncio.timeout(BOUND):
                assert await asyncio.gather(*(one(first) for first in (1000, 2000, 3000))) == [True] * 3
            faults.release()

    run_seeded(seed, main)


# Room


async def small_ones(cache: HybridCache, world: SeededWorld, served: list[int], *, by_reserve: bool) -> None:
    """One small request after another; each holds two pages for a while."""
    engine, number = Engine(cache), 0
    while True:
        number += 1
        tokens = [world.random.randrange(10_000) for _ in range(8)]
        async with cache.request(tokens) as request:
            await request.admit()
            await request.load()
            try:
                if by_reserve:
                    raise CapacityError("as some engines do, this one always waits")
                request.extend(8 - request.hit.tokens)
            except CapacityError:
                await request.reserve(8 - request.hit.tokens)
            await asyncio.sleep(world.random.expovariate(1000))
            engine.write(request, request.hit.tokens, 8)
            await request.checkpoint(8)
        served[0] += 1


@SEEDS
@pytest.mark.parametrize("by_reserve", [False, True], ids=["extend", "reserve"])
def test_a_large_request_is_served_behind_a_stream_of_small_ones(seed: int, by_reserve: bool) -> None:
    async def main(world: SeededWorld) -> None:
        options = config(device_slots={"kv": 24}, host_slots={"kv": 24})
        async with world.open_cache(PAGES_ONLY, options) as cache:
            served = [0]
            tasks = [
                asyncio.create_task(small_ones(cache, world, served, by_reserve=by_reserve))
                for _ in range(12)
            ]
            await asyncio.sleep(0.05)
            for length in (80, 92):
                before = served[0]
                async with cache.request(list(range(50_000, 50_000 + length))) as large:
                    await large.admit()
                    await large.load()
                    async with asyncio.timeout(1):
                        await large.reserve(length)
                    assert served[0] - before <= 3 * 12, (
                        "those that hold pages finish, and few others pass by"
                    )
                await asyncio.sleep(0.05)
                assert served[0] > before
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert [task for task in tasks if not task.cancelled()] == []
            assert cache.verify() == []

    run_seeded(seed, main)


def test_the_last_of_those_that_all_wait_for_one_another_gives_way() -> None:
    async def main(world: SeededWorld) -> None:
        options = config(device_slots={"kv": 12}, host_slots={"kv": 12})
        async with world.open_cache(PAGES_ONLY, options) as cache:

            async def grow(number: int) -> bool:
                async with cache.request([number] * 9) as request:
                    await request.load()
                    await request.reserve(16)
                    await asyncio.sleep(0.01)
                    try:
                        await request.reserve(16)
                    except CapacityError:
                        return False
                    await asyncio.sleep(0.01)
                    return True

            results = await asyncio.gather(*(grow(number) for number in range(1, 4)))
            assert sorted(results) == [False, True, True]
            assert cache.verify(idle=True) == []

    for seed in range(10):
        run_seeded(seed, main)


@SEEDS
@pytest.mark.parametrize("gives_up", [False, True])
def test_who_waits_before_loading_keeps_nothing_from_those_who_must_go_on(seed: int, gives_up: bool) -> None:
    """Two that wait in `admit` keep what they matched, which the third needs to go on: they let go of it, and
    have it again when they are served, or wait no longer."""

    async def main(world: SeededWorld) -> None:
        options = config(device_slots={"kv": 12, "mamba": 3}, host_slots={"kv": 24, "mamba": 8})
        async with world.open_cache(SPEC, options) as cache:
            engine = Engine(cache)
            known = [list(range(100 * n, 100 * n + 13)) for n in (1, 2)]
            for prompt in known:
                await engine.serve(prompt[:12])
            async with cache.request([7] * 40) as large:
                await large.load()
                requests = [cache.request(prompt) for prompt in known]
                for request in requests:
                    await request.__aenter__()
                    assert request.hit.tokens == 12
                filler = await large.reserve(24)
                assert len(filler["kv"]) == 6
                waits = [asyncio.create_task(_admitted(request, gives_up)) for request in requests]
                await asyncio.sleep(0.01)
                async with asyncio.timeout(1):
                    await large.reserve(16)
                if gives_up:
                    assert await asyncio.gather(*waits) == [False, False]
            assert all(await asyncio.gather(*waits)) is not gives_up
            for request in requests:
                await request.load()
                engine.check(request)
                assert request.hit.tokens == 12
                request.close()
            assert cache.verify(idle=True) == []

    run_seeded(seed, main)


async def _admitted(request: Request, gives_up: bool) -> bool:
    """Wait for room, for a while only if it is to give up; whether there was some."""
    try:
        async with asyncio.timeout(0.1 if gives_up else None):
            await request.admit()
    except TimeoutError:
        return False
    return True
