"""Many requests that begin alike and ask storage at once: nobody gives up what it has, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache import HybridCache, MissReason
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.storage.protocol import PoolBinding, PoolEngine, StorageBackend
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.node import FULL_HOST
from asynchicache.types import Tier
from cache.engine import SPEC, Engine, config

PAGES_ONLY = synthetic_spec(4, ("kv",))
HEAD = list(range(12))
TURN = [*HEAD, *range(100, 164)]
"""Seventy-six tokens of a conversation that was stored."""

ROOMY = {"device_slots": {"kv": 512}, "host_slots": {"kv": 512}}
HYBRID = {"device_slots": {"kv": 512, "mamba": 64}, "host_slots": {"kv": 512, "mamba": 64}}
EXISTS_SECONDS = 0.05


class SlowExists:
    """A store far away: each question takes the same time, and is counted."""

    def __init__(self, backend: StorageBackend, seconds: float) -> None:
        self.name = backend.name
        self.aclose = backend.aclose
        self.asked: dict[str, int] = {}
        self._backend = backend
        self._seconds = seconds

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        engine = await self._backend.open_pool(binding)
        exists = engine.exists

        async def slow(keys):
            self.asked[binding.pool] = self.asked.get(binding.pool, 0) + len(keys)
            await asyncio.sleep(self._seconds)
            return await exists(keys)

        engine.exists = slow  # type: ignore[method-assign]
        return engine


async def stored(world: SeededWorld, spec, options, *prompts: list[int]) -> MemoryStore:
    store = MemoryStore()
    async with world.open_cache(spec, config(**options), storage=MemoryBackend(store)) as cache:
        for prompt in prompts:
            await Engine(cache).serve(prompt)
    return store


async def ask(cache: HybridCache, prompt: list[int]) -> tuple[int, MissReason, float]:
    """What a request is told of its prefix, and how long that took."""
    clock = asyncio.get_running_loop().time
    started = clock()
    async with cache.request(prompt) as request:
        hit = await request.prefetch()
        seconds = clock() - started
        await request.load()
        Engine(cache).check(request)
        return request.hit.tokens, hit.reason, seconds


@pytest.mark.parametrize("others", [1, 5, 6, 8, 16])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("states", [False, True], ids=["kv", "kv+mamba"])
def test_a_returning_conversation_finds_all_of_it_beside_new_ones(
    seed: int, others: int, states: bool
) -> None:
    """With states, only the end of the stored conversation can be resumed: its head alone serves nobody."""

    async def main(world: SeededWorld) -> None:
        spec, options = (SPEC, HYBRID) if states else (PAGES_ONLY, ROOMY)
        store = await stored(world, spec, options, TURN)
        backend = Latency(MemoryBackend(store), 1e-3, sleep=world.sleep)
        async with world.open_cache(spec, config(**options), storage=backend) as cache:
            new = [[*HEAD, *range(1000 * n, 1000 * n + 80)] for n in range(1, others + 1)]
            answers = await asyncio.gather(*(ask(cache, prompt) for prompt in [*new, [*TURN, 1]]))
            assert answers[-1][:2] == (76, MissReason.NONE)
            expected = (0, MissReason.STATE) if states else (12, MissReason.COLD)
            assert {answer[:2] for answer in answers[:-1]} == {expected}
            assert cache.verify() == []

    run_seeded(seed, main)


@pytest.mark.parametrize("options", [ROOMY, HYBRID], ids=["kv", "kv+mamba"])
def test_slow_questions_do_not_add_up(options: dict) -> None:
    async def main(world: SeededWorld) -> None:
        spec = SPEC if options is HYBRID else PAGES_ONLY
        store = await stored(world, spec, options, HEAD)
        backend = SlowExists(MemoryBackend(store), EXISTS_SECONDS)
        async with world.open_cache(spec, config(**options), storage=_suspending(backend)) as cache:
            prompts = [[*HEAD, *range(1000 * n, 1000 * n + 40)] for n in range(1, 17)]
            answers = await asyncio.gather(*(ask(cache, prompt) for prompt in prompts))
            assert {tokens for tokens, _, _ in answers} == {12}
            assert max(seconds for _, _, seconds in answers) < 2 * EXISTS_SECONDS + 0.02
            assert backend.asked["kv"] == 3 + 16 * 9, "the head once, and each one's own pages"

    run_seeded(0, main)


def _suspending(backend: SlowExists) -> Latency:
    """Engines in memory say that they never suspend; the wrapper says that they may."""
    return Latency(backend, 0.0, sleep=lambda _: asyncio.sleep(0))


@pytest.mark.parametrize("seed", range(5))
def test_turns_of_one_conversation_are_read_side_by_side(seed: int) -> None:
    """Each goes one page further than the one before: none waits for the sum of the others' reads."""

    async def main(world: SeededWorld) -> None:
        prompt = list(range(64))
        store = await stored(world, PAGES_ONLY, ROOMY, prompt)
        backend = Latency(MemoryBackend(store), 0.05, sleep=asyncio.sleep)
        async with world.open_cache(PAGES_ONLY, config(**ROOMY), storage=backend) as cache:
            turns = range(4, 65, 4)
            answers = await asyncio.gather(*(ask(cache, [*prompt[:turn], 999]) for turn in turns))
            assert [tokens for tokens, _, _ in answers] == list(turns)
            counts = cache.statistics().storage["kv"]
            assert (counts.exists.pages, counts.get.pages) == (16, 16)
            # one question, and sixteen reads of which four run at once: no chain of sixteen
            assert max(seconds for _, _, seconds in answers) < 0.05 * 7

    run_seeded(seed, main)


def test_a_read_that_hangs_holds_its_own_slots_and_is_made_once() -> None:
    """Those who want its pages wait for it, whoever began it; who comes later has it when it has ended."""

    async def main(world: SeededWorld) -> None:
        store = await stored(world, PAGES_ONLY, ROOMY, TURN)
        faults = Faulty(MemoryBackend(store), FaultRates(hang=1, calls=("get",)), world.random)
        async with world.open_cache(PAGES_ONLY, config(**ROOMY), storage=faults) as cache:
            first = asyncio.create_task(ask(cache, [*TURN, 1]))
            while not faults.hanging:  # noqa: ASYNC110  the wrapper needs no event elsewhere
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(ask(cache, [*TURN, 2 + n])) for n in range(5)]
            await asyncio.sleep(0.001)
            faults.rates = FaultRates()
            for one in (first, *others, asyncio.create_task(ask(cache, [*TURN, 9]))):
                assert (await one)[:2] == (0, MissReason.DEADLINE)
            held = cache._parts.planner.inventory.free[FULL_HOST].held
            assert (held, cache.statistics().storage["kv"].get.pages) == (19, 19)
            faults.release()
            await world.sleep(0.1)  # no wait counts a late call
            assert (await ask(cache, [*TURN, 10]))[:2] == (76, MissReason.NONE)
            assert cache.statistics().storage["kv"].get.pages == 19 + 19
            await cache.drain()
            assert cache.verify() == []

    run_seeded(0, main)


@pytest.mark.parametrize("seed", range(10))
def test_reads_that_overlap_on_a_small_host_leave_nothing_behind(seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        prompts = [[*range(32), *range(1000 * n, 1000 * n + 32)] for n in range(6)]
        store = await stored(world, PAGES_ONLY, ROOMY, *prompts)
        faults = Faulty(MemoryBackend(store), FaultRates(fail=0.1, partial=0.2), world.random)
        backend = Latency(faults, 1e-3, sleep=world.sleep)
        small = {"device_slots": {"kv": 64}, "host_slots": {"kv": 24}}
        async with world.open_cache(PAGES_ONLY, config(**small), storage=backend) as cache:
            for _ in range(3):
                cuts = [world.random.randrange(4, 65) for _ in range(12)]
                asked = [[*world.random.choice(prompts)[:cut], 7] for cut in cuts]
                tasks = [asyncio.create_task(ask(cache, prompt)) for prompt in asked]
                await asyncio.sleep(world.random.expovariate(500))
                world.random.choice(tasks).cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert cache.verify() == []
            await cache.drain()
            assert cache.verify(idle=True) == []
            assert cache.statistics().served.hit_tokens[Tier.STORAGE] >= 0

    run_seeded(seed, main)
