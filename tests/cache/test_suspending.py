"""Requests that give everything back while others run, and go on as a match."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from asynchicache import CapacityError, HybridCache, RequestStateError, Tier
from cache.engine import PAGE, SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(17))
OTHER = list(range(100, 117))
SIX_PAGES = config(device_slots={"kv": 6, "mamba": 4}, host_ratio=4)


async def test_it_goes_on_where_it_was() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            await engine.compute(request, 3 * PAGE)
            request.suspend(3 * PAGE)
            assert repr(request) == "<Request resting, 17 tokens>"
            assert cache.statistics().occupancy["kv"][0].held == 3  # the tree's

            assert request.rematch().tokens == 3 * PAGE
            await request.load()
            engine.check(request)
            await engine.compute(request, len(PROMPT))
            assert request.pages("kv") != []
        assert await engine.serve(PROMPT) is not None
        assert cache.statistics().served.requests == 2  # going on is no new request
        assert cache.verify(idle=True) == []


async def test_others_run_in_its_room_and_it_comes_back_from_the_host() -> None:
    async with HybridCache.open(SPEC, SIX_PAGES) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            await engine.compute(request, 4 * PAGE)
            with pytest.raises(CapacityError):
                await engine.serve(OTHER)
            request.suspend(4 * PAGE)
            await cache.drain()  # until its pages are on the host
            await engine.serve(OTHER)
            request.rematch()
            await request.load()
            engine.check(request)
            assert request.hit.by_tier == {Tier.HOST: 4 * PAGE}
        assert cache.verify(idle=True) == []


async def test_within_a_page_the_last_snapshot_is_kept() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(17)
            engine.write(request, 0, 12)
            await request.snapshot(12)
            engine.write(request, 12, 17)
            request.append([7, 8])
            request.suspend(17)

            assert request.rematch().tokens == 12
            assert list(request.tokens) == [*PROMPT, 7, 8]
            await request.load()
            engine.check(request)


async def test_without_a_state_nothing_is_restorable_but_pages_are_there() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(17)
            engine.write(request, 0, 17)
            request.suspend(17)
            hit = request.rematch()
            assert (hit.tokens, hit.full_tokens) == (0, 16)
            assert hit.held_back_by == "mamba"


async def test_it_may_be_suspended_again_and_again_and_its_pages_become_durable(tmp_path: Path) -> None:
    options = config(storage="file", storage_options={"path": str(tmp_path)})
    async with HybridCache.open(SPEC, options) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            for end in (1, 2, 3, 4):
                await request.load()
                engine.check(request)
                await engine.compute(request, end * PAGE)
                request.suspend(end * PAGE)
                request.rematch()
            await request.load()
            assert request.hit.tokens == 4 * PAGE
            assert await request.durable()
            await cache.drain()
            assert cache.statistics().storage["kv"].put.pages >= 4


async def test_its_slots_are_free_only_when_its_forward_has_ended() -> None:
    gate = threading.Event()
    async with HybridCache.open(SPEC, config(host_ratio=0)) as cache:
        stream = cache.device.stream("compute")
        async with cache.request(PROMPT, stream=stream) as request:
            await request.load()
            request.extend(17)
            stream.launch(gate.wait)
            request.suspend(16)
            assert cache.statistics().occupancy["kv"][0].held == 5  # the fifth page is still its own
            gate.set()
            await cache.drain()
            assert cache.statistics().occupancy["kv"][0].held == 4


async def test_only_what_runs_is_suspended() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        async with cache.request(PROMPT) as request:
            with pytest.raises(RequestStateError, match=r"call load\(\) first"):
                request.suspend(0)
            await request.load()
            with pytest.raises(RequestStateError, match="length 17 is outside 0"):
                request.suspend(17)
            request.suspend(0)
            with pytest.raises(RequestStateError, match=r"call rematch\(\) first"):
                request.load()
            with pytest.raises(RequestStateError, match=r"call load\(\) first"):
                request.suspend(0)
        assert cache.verify(idle=True) == []


async def test_what_the_device_cannot_hold_stays_as_it_is() -> None:
    async with HybridCache.open(SPEC, SIX_PAGES) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(17)
            request.append(range(20))
            with pytest.raises(CapacityError, match="37 tokens need 10 pages of 4; the device holds 6"):
                request.suspend(0)
            assert request.reserved == 17
        assert cache.verify(idle=True) == []
