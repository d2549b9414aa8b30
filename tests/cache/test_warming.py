"""A new replica reads what storage has before its first request: bounded, in order, and told of."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache import ConfigError, HybridCache, PrefetchOptions, PrefetchPolicy, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.controller.warming import Warmed
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from cache.engine import SPEC, Engine, config

PROMPTS = [[number, *range(100, 120)] for number in range(6)]
TOKENS = 20
"""Of each that can be restored: five pages and a state."""


async def filled(world: SeededWorld) -> MemoryStore:
    store = MemoryStore()
    async with world.open_cache(SPEC, config(), storage=MemoryBackend(store)) as cache:
        for prompt in PROMPTS:
            await Engine(cache).serve(prompt)
    return store


def host_bytes(cache: HybridCache) -> int:
    """Bytes of the host slots in use."""
    free = cache.inspect().planner.inventory.free
    return sum(slots.held * slots.slot_bytes for slots in free[1::2])


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_what_was_warmed_is_restored_from_the_host(policy: PrefetchPolicy) -> None:
    async def main(world: SeededWorld) -> None:
        told: list[Warmed] = []
        options = config(prefetch=PrefetchOptions(policy=policy), host_slots={"kv": 40, "mamba": 8})
        async with world.open_cache(SPEC, options, storage=MemoryBackend(await filled(world))) as cache:
            done = await cache.warm(PROMPTS, progress=told.append)
            assert done == (6, 6 * TOKENS, told[0].bytes * 6, 0, True)
            assert done.bytes == host_bytes(cache) > 0
            assert [one.tokens for one in told] == [TOKENS * (number + 1) for number in range(6)]
            again = await cache.warm(PROMPTS)
            assert (again.tokens, again.bytes) == (done.tokens, 0)
            for prompt in PROMPTS:
                assert (await Engine(cache).serve([*prompt, 1])).by_tier == {Tier.HOST: TOKENS}
            assert_clean(cache)

    run_seeded(0, main)


@pytest.mark.parametrize("slots", [{"kv": 16, "mamba": 8}, {"kv": 40, "mamba": 3}])
def test_the_first_prompts_stay_and_what_has_no_room_is_left_out(slots: dict[str, int]) -> None:
    async def main(world: SeededWorld) -> None:
        options = config(host_slots=slots, share_host=False)
        async with world.open_cache(SPEC, options, storage=MemoryBackend(await filled(world))) as cache:
            done = await cache.warm(PROMPTS)
            assert (done.prefixes, done.tokens, done.left, done.in_time) == (6, 3 * TOKENS, 3, True)
            for prompt in PROMPTS[:3]:
                async with cache.request([*prompt, 1]) as request:
                    assert request.hit.tokens == TOKENS

    run_seeded(0, main)


def test_no_more_bytes_are_read_than_allowed() -> None:
    async def main(world: SeededWorld) -> None:
        store = await filled(world)
        async with world.open_cache(SPEC, config(), storage=MemoryBackend(store)) as cache:
            one = (await cache.warm(PROMPTS[:1])).bytes
        async with world.open_cache(SPEC, config(), storage=MemoryBackend(store)) as cache:
            done = await cache.warm(PROMPTS, nbytes=3 * one - 1)
            assert done.tokens == 2 * TOKENS
            assert done.bytes == host_bytes(cache) == 2 * one

    run_seeded(0, main)


@pytest.mark.parametrize("seed", range(3))
def test_storage_that_hangs_does_not_hold_up_a_start(seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        hanging = FaultRates(hang=1.0, calls=("get",))
        faults = Faulty(MemoryBackend(await filled(world)), hanging, world.random)
        async with world.open_cache(SPEC, config(), storage=faults) as cache:
            began = world.loop.time()
            done = await cache.warm(PROMPTS, seconds=3)
            assert world.loop.time() - began < 4
            assert (done.tokens, done.in_time) == (0, False)
            faults.release()
            await cache.drain()
            assert_clean(cache)

    run_seeded(seed, main)


def test_warming_is_cancelled_and_refuses_what_is_no_bound() -> None:
    async def main(world: SeededWorld) -> None:
        hanging = FaultRates(hang=1.0, calls=("get",))
        faults = Faulty(MemoryBackend(await filled(world)), hanging, world.random)
        async with world.open_cache(SPEC, config(), storage=faults) as cache:
            warming = asyncio.create_task(cache.warm(PROMPTS))
            await asyncio.sleep(0.1)
            warming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await warming
            with pytest.raises(ConfigError, match="seconds=-1"):
                await cache.warm(PROMPTS, seconds=-1)
            with pytest.raises(ConfigError, match=r"nbytes=0\.5"):
                await cache.warm(PROMPTS, nbytes=0.5)  # type: ignore[arg-type]
            faults.rates = FaultRates()
            faults.release()
            await cache.drain()
            assert_clean(cache)
            assert (await cache.warm(PROMPTS)).tokens == 6 * TOKENS

    run_seeded(0, main)
