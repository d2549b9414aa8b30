"""Reads belong to pages: who waits for which, what comes in time, what is dropped, what stays for a turn."""

from __future__ import annotations

import asyncio
import random

import pytest

from asynchicache import Hit, HybridCache, MissReason, PrefetchOptions, PrefetchPolicy, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import PoolBinding, PoolEngine
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.node import place_of
from cache.engine import PAGE, SPEC, Engine, config

ATTENTION = synthetic_spec(PAGE, ("kv",))
WINDOW = synthetic_spec(PAGE, ("kv", "swa"))
MODELS = pytest.mark.parametrize("spec", [ATTENTION, SPEC, WINDOW], ids=["attention", "state", "window"])
PAGE_SECONDS = 0.02
LONG = list(range(1000, 1000 + 320 * PAGE))


def roomy(spec: ModelSpec, pages: int = 400, **options: object) -> dict[str, object]:
    counts = {pool.name: pages if pool.per_token else pages // 4 for pool in spec.owners}
    return {"device_slots": counts, "host_slots": counts, **options}


async def stored(
    world: SeededWorld, spec: ModelSpec, *prompts: list[int], ends: tuple[int, ...] = ()
) -> MemoryStore:
    """A store with prompts, which can be resumed at `ends` pages too."""
    store = MemoryStore()
    async with world.open_cache(spec, config(**roomy(spec)), storage=MemoryBackend(store)) as cache:
        engine = Engine(cache)
        for prompt in prompts:
            async with cache.request(prompt) as request:
                await request.load()
                for end in (*(pages * PAGE for pages in ends), len(prompt)):
                    await engine.compute(request, end)
                assert await request.durable()
    return store


class SlowReads(Latency):
    """Reads take time in proportion to their pages; questions are answered at once."""

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        engine = await super().open_pool(binding)
        engine.exists = engine._engine.exists
        return engine


def slow(store: MemoryStore) -> Latency:
    return SlowReads(MemoryBackend(store), 0.0, PAGE_SECONDS, sleep=asyncio.sleep)


def patience(policy: str = "timeout", seconds: float = 60.0) -> PrefetchOptions:
    return PrefetchOptions(
        policy=PrefetchPolicy(policy), base_seconds=seconds, seconds_per_ki_token=0.0, max_seconds=seconds
    )


async def ask(cache: HybridCache, tokens: list[int]) -> tuple[Hit, float]:
    clock = asyncio.get_running_loop().time
    began = clock()
    async with cache.request(tokens) as request:
        await request.prefetch()
        waited = clock() - began
        await request.load()
        Engine(cache).check(request)
        return request.hit, waited


def reads(cache: HybridCache) -> int:
    return cache.statistics().storage["kv"].get.pages


def test_who_needs_the_first_pages_of_a_long_prefix_waits_for_these() -> None:
    async def main(world: SeededWorld) -> None:
        store = await stored(world, ATTENTION, LONG)
        options = config(**roomy(ATTENTION), prefetch=patience())
        async with world.open_cache(ATTENTION, options, storage=slow(store)) as cache:
            long = asyncio.create_task(ask(cache, [*LONG, 1]))
            await world.sleep(0.1)
            short = [asyncio.create_task(ask(cache, [*LONG[: 10 * PAGE], n])) for n in range(3)]
            hits = [await one for one in short]
            assert not long.done()
            assert {hit.tokens for hit, _ in hits} == {10 * PAGE}
            hit, waited = await long
            assert hit.tokens == 320 * PAGE
            assert max(seconds for _, seconds in hits) < waited / 2
            assert reads(cache) == 320
            assert cache.verify() == []

    run_seeded(0, main)


@MODELS
def test_what_arrived_in_order_by_the_deadline_is_the_hit(spec: ModelSpec) -> None:
    """A hybrid, and a window, end where storage has what ends a prefix."""

    async def main(world: SeededWorld) -> None:
        ends = tuple(range(20, 320, 20))
        store = await stored(world, spec, LONG, ends=ends)
        options = config(**roomy(spec), prefetch=patience(seconds=1.0))
        async with world.open_cache(spec, options, storage=slow(store)) as cache:
            hit, waited = await ask(cache, [*LONG, 1])
            assert waited < 1.1
            assert 20 * PAGE <= hit.tokens < 320 * PAGE
            assert hit.reason is MissReason.DEADLINE
            await cache.drain()
            assert cache.verify() == []
            again, _ = await ask(cache, [*LONG, 2])
            assert again.tokens > hit.tokens

    run_seeded(0, main)


def test_a_tail_that_no_shorter_prefix_replaces_has_all_of_the_time() -> None:
    async def life(world: SeededWorld) -> None:
        prompt = LONG[: PAGE - 1]
        options = roomy(SPEC, tails=True, prefetch=patience(seconds=1.2 * PAGE_SECONDS))
        store = MemoryStore()
        async with world.open_cache(SPEC, config(**options), storage=MemoryBackend(store)) as cache:
            async with cache.request(prompt) as request:
                await request.load()
                request.extend(len(prompt))
                await request.checkpoint(len(prompt), final=True)
                assert await request.durable()
        async with world.open_cache(SPEC, config(**options), storage=slow(store)) as cache:
            hit, _ = await ask(cache, [*prompt, 7])
            assert hit.tokens == len(prompt), hit

    run_seeded(1, life)


def test_best_effort_says_that_it_did_not_wait() -> None:
    async def main(world: SeededWorld) -> None:
        store = await stored(world, ATTENTION, LONG)
        options = config(**roomy(ATTENTION), prefetch=patience("best_effort"))
        async with world.open_cache(ATTENTION, options, storage=slow(store)) as cache:
            hit, waited = await ask(cache, [*LONG, 1])
            assert (hit.tokens, hit.reason) == (0, MissReason.DEADLINE)
            assert waited < PAGE_SECONDS
            await cache.drain()
            assert (await ask(cache, [*LONG, 2]))[0].tokens == 320 * PAGE
            async with cache.request([*range(40)]) as cold:
                await cold.prefetch()
                cold.rest()
                await cache.drain()
                assert (cold.rematch().tokens, cold.hit.reason) == (0, MissReason.COLD)

    run_seeded(0, main)


def test_reads_for_later_requests_that_find_no_room_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's end would drop them, so they would keep what they build on for ever."""

    async def main(world: SeededWorld) -> None:
        prompts = [[n * 10_000 + token for token in range(12 * PAGE)] for n in range(6)]
        store = await stored(world, SPEC, *prompts)
        sizes = roomy(SPEC) | {"host_slots": {"kv": 400, "mamba": 1}}
        options = config(**sizes, prefetch=patience("best_effort"))
        async with world.open_cache(SPEC, options, storage=slow(store)) as cache:
            inventory = cache._parts.planner.inventory
            make_room = inventory.make_room
            with monkeypatch.context() as patch:
                states = place_of(1, Tier.HOST)
                patch.setattr(
                    inventory, "make_room", lambda place, n: place != states and make_room(place, n)
                )
                await asyncio.gather(*(ask(cache, [*prompt, 1]) for prompt in prompts))
                await cache.drain()
                await world.sleep(1e-3)
                assert reads(cache) == 6 * 12
                assert cache._parts.planner.prefetches.in_flight == []
            assert cache.verify(idle=True) == []

    run_seeded(0, main)


def test_what_nobody_waits_for_is_not_read() -> None:
    async def main(world: SeededWorld) -> None:
        prompts = [[n * 100_000 + token for token in range(40 * PAGE)] for n in range(41)]
        spec = ATTENTION
        store = await stored(world, spec, *prompts[:5], *prompts[40:])
        options = config(**roomy(spec, 2000), prefetch=patience())
        async with world.open_cache(
            spec, options, storage=Latency(MemoryBackend(store), 0.05, 0.02)
        ) as cache:
            gone = [asyncio.create_task(ask(cache, [*prompt, 1])) for prompt in prompts[:5]]
            await world.sleep(7.0)
            begun = reads(cache)
            for one in gone:
                one.cancel()
            await asyncio.wait(gone)
            hit, _ = await ask(cache, [*prompts[40], 1])
            assert hit.tokens == 40 * PAGE
            await cache.drain()
            assert reads(cache) <= begun + 4 * 16 + 40, "four calls had begun"
            assert cache.verify(idle=True) == []

    run_seeded(0, main)


def test_questions_that_nobody_waits_for_are_not_asked() -> None:
    async def main(world: SeededWorld) -> None:
        options = config(**roomy(ATTENTION), prefetch=patience())
        backend = Latency(MemoryBackend(MemoryStore()), 0.5, sleep=world.sleep)
        async with world.open_cache(ATTENTION, options, storage=backend) as cache:
            for prefix in range(6):
                prompt = range(10_000 * prefix, 10_000 * prefix + 9 * PAGE + 1)
                task = asyncio.create_task(ask(cache, list(prompt)))
                await world.sleep(0.01)
                if prefix > 2:  # three calls run: this one waits for its turn
                    task.cancel()
            await cache.drain()
            assert cache.statistics().storage["kv"].exists.pages == 3 * 9
            assert cache.verify(idle=True) == []

    run_seeded(0, main)


@MODELS
def test_a_prefix_that_is_longer_than_the_host_is_resumed_as_far_as_that_reaches(spec: ModelSpec) -> None:
    async def main(world: SeededWorld) -> None:
        prompt = LONG[: 40 * PAGE]
        store = await stored(world, spec, prompt)
        small = roomy(spec, 64) | {"host_slots": {pool.name: 16 for pool in spec.owners}}
        async with world.open_cache(spec, config(**small), storage=MemoryBackend(store)) as cache:
            engine = Engine(cache)
            hit = await engine.serve([*prompt, 1])
            assert hit.reason is MissReason.HOST_CAPACITY
            assert hit.tokens == (16 * PAGE if spec is ATTENTION else 0)
        async with world.open_cache(spec, config(**small), storage=MemoryBackend(store)) as cache:
            hit = await Engine(cache).serve([*prompt, 2])
            assert (hit.tokens, hit.reason) == (16 * PAGE, MissReason.HOST_CAPACITY)

    run_seeded(0, main)


@MODELS
def test_without_room_for_all_of_a_prefix_a_shorter_one_is_read(spec: ModelSpec) -> None:
    """Another request keeps host slots, and nothing that is in flight will free any."""

    async def main(world: SeededWorld) -> None:
        one, other = LONG[: 40 * PAGE], [*range(30 * PAGE)]
        store = await stored(world, spec, one, other, ends=(8, 16))
        sizes = roomy(spec, 64) | {"host_slots": {pool.name: 48 for pool in spec.owners}}
        async with world.open_cache(spec, config(**sizes), storage=MemoryBackend(store)) as cache:
            async with cache.request([*other, 1]) as holder:
                assert (await holder.prefetch()).tokens == 30 * PAGE
                hit, waited = await ask(cache, [*one, 1])
                assert hit.reason is MissReason.HOST_CAPACITY
                assert hit.tokens == (12 if spec is ATTENTION else 8) * PAGE
                assert hit.advice.startswith("the host holds 48 pages of 'kv': raise them")
                assert waited < 1.0
            assert (await ask(cache, [*one, 2]))[0].tokens == 40 * PAGE
            await cache.drain()
            assert cache.verify(idle=True) == []

    run_seeded(0, main)


@MODELS
@pytest.mark.parametrize("seed", range(3))
def test_prompts_that_wait_for_their_turn_lose_nothing(spec: ModelSpec, seed: int) -> None:
    """Sixteen at once after a restart, a host of half their size, one served after the other."""

    async def main(world: SeededWorld) -> None:
        prompts = [[n * 10_000 + token for token in range(20 * PAGE)] for n in range(16)]
        store = await stored(world, spec, *prompts)
        sizes = roomy(spec, 64) | {
            "host_slots": {pool.name: 160 if pool.per_token else 8 for pool in spec.owners}
        }
        options = config(**sizes, prefetch=PrefetchOptions())
        backend = Latency(MemoryBackend(store), 1e-3, 1e-5, sleep=world.sleep)
        async with world.open_cache(spec, options, storage=backend) as cache:
            engine, turn, hits = Engine(cache), asyncio.Lock(), []

            async def serve(prompt: list[int]) -> None:
                async with cache.request([*prompt, 1]) as request:
                    await request.prefetch()
                    request.rest()
                    async with turn:
                        request.rematch()
                        await request.load()
                        engine.check(request)
                        hits.append(request.hit.tokens)
                        await world.sleep(0.05)
                        await engine.compute(request, len(prompt))

            await asyncio.gather(*map(serve, prompts))
            await cache.drain()
            assert hits == [20 * PAGE] * 16
            assert cache.verify(idle=True) == []
            assert reads(cache) == 16 * 20, "nothing was read, lost, and read again"

    run_seeded(seed, main)


def test_a_read_that_hangs_keeps_no_other_key_from_being_served() -> None:
    async def main(world: SeededWorld) -> None:
        prompts = [[n * 10_000 + token for token in range(20 * PAGE)] for n in range(4)]
        store = await stored(world, ATTENTION, *prompts)
        faults = Faulty(MemoryBackend(store), FaultRates(hang=1, calls=("get",)), random.Random(0))
        options = config(**roomy(ATTENTION, 64), prefetch=patience(seconds=1.0))
        async with world.open_cache(ATTENTION, options, storage=faults) as cache:
            hanging = asyncio.create_task(ask(cache, [*prompts[0], 1]))
            while not faults.hanging:
                await world.sleep(1e-3)
            faults.rates = FaultRates()
            for number, prompt in enumerate(prompts[1:]):
                hit, _ = await ask(cache, [*prompts[0], number])
                assert hit.tokens == 0
                hit, _ = await ask(cache, [*prompt, 1])
                assert hit.tokens == 20 * PAGE
            await hanging
            assert reads(cache) <= 4 * 20
            faults.release()

    run_seeded(0, main)


@pytest.mark.parametrize("names", [("kv",), ("kv", "mamba"), ("kv", "swa")], ids=" ".join)
@pytest.mark.parametrize("pages", [12, 20, 30])
def test_a_prefix_longer_than_a_memory_that_pools_share_leaves_room_for_what_ends_it(
    names: tuple[str, ...], pages: int
) -> None:
    async def main(world: SeededWorld) -> None:
        spec = synthetic_spec(PAGE, names, token_bytes=1024, state_bytes=1 << 14)
        prompt = LONG[: 40 * PAGE]
        store = await stored(world, spec, prompt, ends=(8, 16, 24))
        sizes = roomy(spec, 64, host_bytes=pages * spec.pool("kv").slot_bytes(PAGE) + (1 << 17))
        del sizes["host_slots"]
        async with world.open_cache(spec, config(**sizes), storage=MemoryBackend(store)) as cache:
            hit = await Engine(cache).serve([*prompt, 1])
            assert hit.reason is MissReason.HOST_CAPACITY
            assert hit.tokens >= 8 * PAGE
            await cache.drain()
            assert cache.verify(idle=True) == []
        async with world.open_cache(spec, config(**sizes), storage=MemoryBackend(store)) as cache:
            again = await Engine(cache).serve([*prompt, 2])
            assert again.tokens >= hit.tokens

    run_seeded(0, main)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@MODELS
def test_of_a_prompt_longer_than_the_host_storage_gets_what_the_host_holds(
    spec: ModelSpec, policy: str
) -> None:
    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        prompt = LONG[: 40 * PAGE + 1]
        sizes = roomy(spec, write_policy=policy)
        small = config(**{**sizes, "host_slots": {pool.name: 12 for pool in spec.owners}})
        async with world.open_cache(spec, small, storage=MemoryBackend(store)) as cache:
            async with cache.request(prompt) as request:
                await request.load()
                for end in (*request.cuts, len(prompt)) if spec is not ATTENTION else (len(prompt),):
                    await Engine(cache).compute(request, end)
                assert not await request.durable()
            await cache.drain()
            assert cache.verify(idle=True) == []
        async with world.open_cache(spec, config(**sizes), storage=MemoryBackend(store)) as cache:
            assert (await ask(cache, prompt))[0].tokens == 12 * PAGE

    run_seeded(0, main)


@pytest.mark.parametrize("spec", [ATTENTION, WINDOW, SPEC], ids=["attention", "window", "state"])
def test_closing_stores_of_each_prompt_longer_than_the_host_what_the_host_holds(spec: ModelSpec) -> None:
    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        prompts = [list(range(n, n + 40 * PAGE + 1)) for n in (10_000, 20_000, 30_000, 40_000)]
        sizes = roomy(spec, write_policy="write_back")
        small = config(**{**sizes, "host_slots": {pool.name: 12 for pool in spec.owners}})
        async with world.open_cache(spec, small, storage=MemoryBackend(store)) as cache:
            for prompt in prompts:
                await Engine(cache).serve(prompt)
        async with world.open_cache(spec, config(**sizes), storage=MemoryBackend(store)) as cache:
            for prompt in prompts:
                assert (await ask(cache, prompt))[0].tokens == 12 * PAGE

    run_seeded(0, main)
