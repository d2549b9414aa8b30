"""What `durable` vouches for while storage is cleared, and after the device has failed; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynchicache import HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import StorageError
from asynchicache.events import PagesStored, TiersCleared
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.devices import break_device
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from cache.engine import SPEC, Engine, config

PROMPT = list(range(100, 120))
PAGES = 6
"""Five of attention, and a state."""

LATE = 5.0
SEEDS = pytest.mark.parametrize("seed", range(5))


class Scene:
    def __init__(self, cache: HybridCache, store: MemoryStore, faults: Faulty) -> None:
        self.cache = cache
        self.store = store
        self.faults = faults
        self.engine = Engine(cache)

    async def clear_that_hangs(self) -> asyncio.Task[int]:
        """A clear that has begun, and ends after `Faulty.release`."""
        self.faults.rates = FaultRates(hang=1.0, calls=("clear",))
        clearing = asyncio.create_task(self.cache.clear_storage())
        while not self.faults.hanging:  # noqa: ASYNC110  the wrapper needs no event elsewhere
            await asyncio.sleep(0.001)
        return clearing

    def mend(self) -> None:
        self.faults.rates = FaultRates()
        self.faults.release()


@asynccontextmanager
async def scene(world: SeededWorld, **options: object) -> AsyncIterator[Scene]:
    store = MemoryStore()
    faults = Faulty(MemoryBackend(store), FaultRates(), world.random, late_seconds=LATE)
    async with world.open_cache(SPEC, config(**options), storage=faults) as cache:
        yield Scene(cache, store, faults)


@SEEDS
def test_what_a_clear_is_removing_is_durable_once_it_is_written_anew(seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        async with scene(world) as s, s.cache.request(PROMPT) as request:
            await request.load()
            await s.engine.compute(request, len(PROMPT))
            assert await request.durable()
            clearing = await s.clear_that_hangs()
            waiting = asyncio.create_task(request.durable())
            await asyncio.sleep(1)
            assert not waiting.done(), "what is there now is gone in a moment"
            s.mend()
            assert await clearing == PAGES
            assert await waiting
            assert len(s.store) == PAGES

    run_seeded(seed, main)


@SEEDS
def test_what_is_written_while_storage_is_cleared_may_be_gone_too(seed: int) -> None:
    """Its write ended before the clear did, which may have taken it along."""

    async def main(world: SeededWorld) -> None:
        async with scene(world) as s, s.cache.request(PROMPT) as request:
            clearing = await s.clear_that_hangs()
            await request.load()
            await s.engine.compute(request, len(PROMPT))
            waiting = asyncio.create_task(request.durable())
            await asyncio.sleep(1)
            assert (len(s.store), waiting.done()) == (PAGES, False)
            s.mend()
            assert await clearing == PAGES
            assert await waiting
            assert len(s.store) == PAGES

    run_seeded(seed, main)


def test_a_clear_that_fails_keeps_nobody_waiting() -> None:
    async def main(world: SeededWorld) -> None:
        limits = PoolLimits(clearing=0.5)
        async with scene(world, storage_limits=limits) as s, s.cache.request(PROMPT) as request:
            clearing = await s.clear_that_hangs()
            await request.load()
            await s.engine.compute(request, len(PROMPT))
            assert await request.durable()
            with pytest.raises(StorageError, match=r"could not be cleared.*longer than 0\.5 s"):
                await clearing
            assert len(s.store) == PAGES

    run_seeded(0, main)


def test_a_write_whose_answer_comes_after_a_clear_is_not_told_of() -> None:
    """Listeners would look for its pages in storage, which has them no more."""

    async def main(world: SeededWorld) -> None:
        async with scene(world) as s:
            s.faults.rates = FaultRates(late=1.0, calls=("put",))
            with s.cache.events() as events:
                serving = asyncio.create_task(s.engine.serve(PROMPT))
                await asyncio.sleep(1)
                assert await s.cache.clear_storage() == PAGES
                await serving
                s.faults.rates = FaultRates()
                told = events.take()
                assert [one for one in told if isinstance(one, TiersCleared)]
                assert not [one for one in told if isinstance(one, PagesStored) and one.tier is Tier.STORAGE]

    run_seeded(0, main)


@SEEDS
@pytest.mark.parametrize("begun", ["before", "after"])
def test_a_checkpoint_that_a_failed_device_kept_back_is_not_durable(seed: int, begun: str) -> None:
    """Nothing of it was published, so nothing of what was published was missing."""

    async def main(world: SeededWorld) -> None:
        device = world.device()
        store = MemoryStore()
        async with world.open_cache(SPEC, config(), storage=MemoryBackend(store), device=device) as cache:
            engine = Engine(cache)
            request = cache.request(PROMPT)
            if begun == "before":
                await request.__aenter__()
                await request.load()
            break_device(device)
            while device.error is None:  # noqa: ASYNC110  it fails when its stream gets a turn
                await asyncio.sleep(0.001)
            if begun == "after":
                await request.__aenter__()
                request.load()
            request.extend(len(PROMPT))
            request.checkpoint(len(PROMPT))
            assert not await request.durable()
            request.close()
            assert engine.cache.verify() == []
            assert len(store) == 0

    run_seeded(seed, main)


def test_what_was_stored_before_the_device_failed_is_durable() -> None:
    async def main(world: SeededWorld) -> None:
        device = world.device()
        store = MemoryStore()
        async with world.open_cache(SPEC, config(), storage=MemoryBackend(store), device=device) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                await Engine(cache).compute(request, len(PROMPT))
                assert await request.durable()
                break_device(device)
                while device.error is None:  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.001)
                assert await request.durable()
                request.checkpoint(len(PROMPT))
                assert not await request.durable()

    run_seeded(0, main)


def test_pools_that_hang_are_closed_side_by_side() -> None:
    """One after another, each with its limit, they kept a cache of four pools open for two minutes."""

    async def main(world: SeededWorld) -> float:
        limits = PoolLimits(deadline=1.0, closing=1.0)
        async with scene(world, storage_limits=limits) as s:
            s.faults.rates = FaultRates(hang=1.0, calls=("put",))
            await s.engine.serve(PROMPT)
            started = world.loop.time()
            await s.cache.detach_storage()
            return world.loop.time() - started

    assert run_seeded(0, main) < 2.0
