"""A load waits for nothing that a forward of another request computes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asynchicache import HybridCache, Tier
from asynchicache.testing.specs import synthetic_spec
from cache.engine import PAGE, Engine, config

PATIENCE = 20.0
PROMPT = list(range(100, 120))


@pytest.mark.asyncio
async def test_a_load_lands_while_a_forward_of_another_request_runs() -> None:
    gate = threading.Event()
    options = config(device_slots={"kv": 12}, host_slots={"kv": 32})
    async with HybridCache.open(synthetic_spec(PAGE, ("kv",)), options) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await engine.serve(range(200, 240))  # the device has no room for both
        compute = cache.device.stream("compute")
        async with cache.request(range(300, 308)) as other:
            await other.load()
            other.extend(8)
            compute.launch(gate.wait)
            other.checkpoint(8, after=compute)
            try:
                async with cache.request([*PROMPT, 1]) as request, asyncio.timeout(PATIENCE):
                    await request.load()
                    assert request.hit.by_tier[Tier.HOST] > 0
                    engine.check(request)
            finally:
                gate.set()
        await cache.drain()
