"""Storage goes on where the device ends: what it stands on is saved to the host first."""

from __future__ import annotations

import pytest

from asynchicache import HybridCache, Tier, WritePolicy
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.specs import synthetic_spec
from cache.engine import PAGE, Engine, config

pytestmark = pytest.mark.asyncio

SPEC = synthetic_spec(PAGE, ("kv",))
SLOTS = {"kv": 14}
PROMPT = list(range(100, 140))


async def test_what_a_read_stands_on_is_copied_to_the_host() -> None:
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(device_slots=SLOTS), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    options = config(device_slots=SLOTS, write_policy=WritePolicy.WRITE_BACK)
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(store)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT[:16], prefetch=False)
        async with cache.request([*PROMPT, 1]) as request:
            await request.prefetch()
            await request.load()
            engine.check(request)
            assert request.hit.tokens == 40
        await cache.drain()
        assert cache.verify() == []
        await engine.serve(range(200, 240), prefetch=False)  # the device has room for one of them

        hit = await engine.serve([*PROMPT, 2], prefetch=False)

        assert hit.by_tier == {Tier.HOST: 40}
