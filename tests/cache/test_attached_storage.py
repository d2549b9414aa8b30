"""Storage that comes, goes and is cleared while requests are served; and what each rank writes."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine import PAGE, SPEC, Engine, config

from asynchicache import HybridCache, ModelSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError, UsageError
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.types import ShedReason, trailing_pages

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


async def test_storage_comes_and_goes():
    store = MemoryStore()
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        assert await cache.detach_storage() is False
        await cache.attach_storage(MemoryBackend(store))
        async with cache.request([*PROMPT, 1]) as request:
            await request.load()
            assert await request.durable()  # what was in memory before goes there now
        assert len(store) == 6
        assert await cache.detach_storage() is True
        await cache.flush()
        assert (await engine.serve([*PROMPT, 2])).tokens == 0
        assert len(store) == 6
        await cache.attach_storage(MemoryBackend(store))
        await cache.flush()
        assert (await engine.serve([*PROMPT, 3])).by_tier == {Tier.STORAGE: 20}


async def test_another_storage_gets_its_own_copy():
    first, second = MemoryStore(), MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(first)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.detach_storage()
        await cache.attach_storage(MemoryBackend(second))
        await engine.serve([*PROMPT, *range(4)])
        assert len(first) == 6
        assert len(second) == 8


async def test_a_named_backend_is_closed_with_its_attachment(tmp_path: Path):
    async with HybridCache.open(SPEC, config()) as cache:
        await cache.attach_storage("file", {"path": str(tmp_path / "pages")})
        with pytest.raises(UsageError, match="has storage already"):
            await cache.attach_storage(MemoryBackend(MemoryStore()))
        await Engine(cache).serve(PROMPT)
        await cache.detach_storage()
        await cache.attach_storage("file", {"path": str(tmp_path / "pages")})  # the lock is free again
        await cache.flush()
        assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


async def test_a_hanging_storage_is_detached_and_its_slots_are_not_lent_again():
    faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))
    limits = PoolLimits(closing=0.05)
    async with HybridCache.open(SPEC, config(storage_limits=limits), storage=faults) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.flush()
        faults.rates = FaultRates(hang=1)
        async with cache.request([*PROMPT, 1]) as request:
            waiting = asyncio.create_task(request.prefetch())
            for _ in range(1000):
                await asyncio.sleep(0)
                if faults.hanging:
                    break
            assert await cache.detach_storage()
            hit = await waiting
            assert hit.tokens == 0
            await request.load()
            await engine.compute(request, len(PROMPT))
            assert not await request.durable()
        faults.release()
        assert cache.verify() == []
        assert (await engine.serve([*PROMPT, 2])).by_tier == {Tier.DEVICE: 20}


async def test_clear_leaves_other_models_alone():
    store = MemoryStore()
    for version in ("one", "two"):
        async with HybridCache.open(
            SPEC, config(weight_version=version), storage=MemoryBackend(store)
        ) as cache:
            await Engine(cache).serve(PROMPT)
    assert len(store) == 12
    options = config(weight_version="two")
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(store)) as cache:
        assert await cache.clear_storage() == 6
        assert len(store) == 6
        engine = Engine(cache)
        assert (await engine.serve([*PROMPT, 1])).tokens == 0
        assert len(store) == 12  # and is written anew


async def test_attaching_needs_a_weight_version():
    async with HybridCache.open(SPEC, config(weight_version=None)) as cache:
        with pytest.raises(ConfigError, match="needs weight_version"):
            await cache.attach_storage(MemoryBackend(MemoryStore()))
    async with HybridCache.open(SPEC, config()) as cache:
        with pytest.raises(ConfigError, match="none of the backends"):
            await cache.attach_storage("tape")


async def test_shed_writes_say_why():
    store = MemoryStore()
    store.capacity_bytes = 0
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
        assert cache.statistics().traffic.shed == {ShedReason.REJECTED: 6}


LATENT = PoolSpec("kv", (TensorSpec("latent", (0,), (3,), "uint8"),), replicated=True)
STATE = PoolSpec(
    "mamba", (TensorSpec("recurrent", (1,), (8,), "uint8"),), coverage=trailing_pages(1), per_token=False
)
MLA = ModelSpec("mla-and-states", PAGE, 2, (LATENT, STATE))


async def test_replicated_pages_are_written_by_one_rank_and_states_by_each():
    """Each of two ranks holds the whole latent and a part of the states."""
    store = MemoryStore()
    for rank in (1, 0):
        async with HybridCache.open(MLA, config(rank=rank, ranks=2), storage=MemoryBackend(store)) as cache:
            await Engine(cache).serve(PROMPT)
        assert len(store) == (1 if rank else 1 + 6)
    for rank in (0, 1):
        async with HybridCache.open(MLA, config(rank=rank, ranks=2), storage=MemoryBackend(store)) as cache:
            assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}
