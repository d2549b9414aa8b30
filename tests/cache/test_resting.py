"""Requests that keep nothing while they wait for something else, and match again."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache import CapacityError, HybridCache, RequestStateError
from cache.engine import PAGE, SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(17))
OTHER = list(range(100, 117))


async def test_a_resting_request_meets_what_others_publish_meanwhile() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            request.rest()
            await engine.serve(PROMPT)
            assert request.rematch().tokens == 4 * PAGE
            await request.load()
            engine.check(request)
            assert request.hit.tokens == 4 * PAGE
        assert cache.verify() == []


async def test_what_a_resting_request_had_matched_may_go() -> None:
    """Six pages, no host: of four that are known the other prompt, of five, leaves one."""
    async with HybridCache.open(SPEC, config(device_slots={"kv": 6, "mamba": 4}, host_ratio=0)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        async with cache.request(PROMPT) as request:
            assert request.hit.tokens == 4 * PAGE
            with pytest.raises(CapacityError):
                await engine.serve(OTHER)
            request.rest()
            await engine.serve(OTHER)
            assert request.rematch().tokens < 4 * PAGE
            await request.load()
            engine.check(request)
        assert cache.verify() == []


async def test_nobody_waits_for_a_resting_request() -> None:
    async with HybridCache.open(SPEC, config(device_slots={"kv": 6, "mamba": 4}, host_ratio=0)) as cache:
        await Engine(cache).serve(PROMPT)
        async with cache.request(PROMPT) as first, cache.request(OTHER) as second:
            await second.load()
            waiting = asyncio.create_task(second.reserve(len(OTHER)))
            await asyncio.sleep(0)
            assert not waiting.done()  # the first one keeps four of six pages
            first.rest()
            await waiting
            with pytest.raises(CapacityError, match="2 more kv device slots wanted"):
                await second.reserve(2 * PAGE + 1)


async def test_publications_are_not_counted_as_served() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        async with cache.request(PROMPT) as request:
            await request.load(counted=False)
        assert cache.statistics().served.requests == 0


async def test_the_order() -> None:
    async with HybridCache.open(SPEC, config()) as cache, cache.request(PROMPT) as request:
        request.rest()
        with pytest.raises(RequestStateError, match="rests; call rematch"):
            request.load()
        request.rematch()
        await request.load()
        for verb in (request.rest, request.rematch):
            with pytest.raises(RequestStateError, match="comes before load"):
                verb()
