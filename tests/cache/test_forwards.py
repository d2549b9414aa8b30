"""Copies from the device wait for the forwards that write what they read, the last one of each stream too."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asynchicache import HybridCache, ModelSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.streams.base import Event, Stream
from asynchicache.types import WritePolicy
from cache.engine import PAGE, SPEC, Engine, config
from turns import turns

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 140))
PAGES_ONLY = ModelSpec("pages", PAGE, 4, SPEC.pools[:1])


def marked(cache: HybridCache, stream: Stream) -> Event:
    """What is enqueued on a stream now."""
    event = cache.device.event()
    stream.record(event)
    return event


async def reached(event: Event) -> None:
    """It has run, and the cache knows."""
    while not event.query():  # noqa: ASYNC110  tests of a wait need no event elsewhere
        await asyncio.sleep(0.001)
    await turns()


@pytest.mark.parametrize("apart", [False, True], ids=["one stream", "two streams"])
async def test_a_backup_waits_for_the_last_forwards_when_the_first_have_ended(apart: bool) -> None:
    """The backup is asked for by the second hit of another request, long after the checkpoints."""
    gates = [threading.Event() for _ in range(2)]
    options = config(device_slots={"kv": 32}, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    async with HybridCache.open(PAGES_ONLY, options, storage=MemoryBackend(MemoryStore())) as cache:
        engine = Engine(cache)
        first = cache.device.stream("first")
        last = cache.device.stream("last") if apart else first
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(len(PROMPT))
            pages, digests = request.pages("kv"), engine.digests(request, None)
            first.launch(gates[0].wait)
            first.launch(lambda: engine.oracle.write("kv", pages[:5], digests[:5]))
            request.checkpoint(20, after=first)
            begun = marked(cache, first)
            last.launch(gates[1].wait)
            last.launch(lambda: engine.oracle.write("kv", pages[5:], digests[5:]))
            request.checkpoint(40, after=last)
            gates[0].set()
            await reached(begun)
            async with cache.request([*PROMPT, 1]) as other:
                assert other.hit.tokens == 40
            assert cache.statistics().planner.backed_up == 10
            await turns(5000)  # every chance for a copy that does not wait
            gates[1].set()
            await reached(marked(cache, last))
        await cache.drain()
        await cache.flush()
        async with cache.request([*PROMPT, 1]) as again:
            assert (await again.prefetch()).by_tier == {Tier.STORAGE: 40}
            await again.load()
            assert engine.oracle.count_wrong("kv", again.pages("kv"), digests) == 0


async def test_statistics_say_what_is_held_of_each_pool_in_each_tier() -> None:
    sizes = {"device_slots": {"kv": 32, "mamba": 7}, "host_slots": {"kv": 48, "mamba": 9}}
    async with HybridCache.open(SPEC, config(**sizes)) as cache:
        await Engine(cache).serve(PROMPT)
        statistics = cache.statistics()
        held = {
            name: [(tier.capacity, tier.held, tier.quarantined, tier.closed) for tier in tiers]
            for name, tiers in statistics.occupancy.items()
        }
        states = held["mamba"][0][1]
        assert states >= 1
        assert held == {
            "kv": [(32, 10, 0, 0), (48, 10, 0, 0)],
            "mamba": [(7, states, 0, 0), (9, states, 0, 0)],
        }
        assert statistics.evicted == {"kv": (0, 0), "mamba": (0, 0)}
        await cache.flush()
        assert cache.statistics().evicted == {"kv": (10, 10), "mamba": (states, states)}
        assert statistics.evicted == {"kv": (0, 0), "mamba": (0, 0)}, "it stays as it was"
        assert statistics.room_waits.count == 0
        async with cache.request(PROMPT) as request:
            await request.admit()
            assert cache.statistics().room_waits.count == 1
