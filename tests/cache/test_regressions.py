"""Faults of the front door that were found by hand, one test each."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from asynchicache import (
    CacheConfig,
    CapacityError,
    ClosedError,
    ConfigError,
    HybridCache,
    ModelSpec,
    Request,
    RequestStateError,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.pools.host import HostPool
from asynchicache.storage.limits import PoolLimits
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.tree.node import Node
from asynchicache.types import Tier, WritePolicy
from cache.engine import PAGE, SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 140))
TINY = {"kv": 8, "mamba": 4}
IMPATIENT = PoolLimits(deadline=0.02, closing=1.0)


def _hanging(store: MemoryStore) -> Faulty:
    return Faulty(MemoryBackend(store), FaultRates(hang=1.0), random.Random(0))


async def _until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  tests of a wait need no event elsewhere
        await asyncio.sleep(0.001)


async def _opened(cache: HybridCache, tokens: list[int], room: int = 0) -> Request:
    request = await cache.request(tokens).__aenter__()
    await request.load()
    request.extend(room)
    return request


# Wrong bytes


async def test_a_prefetch_that_ends_after_load_changes_nothing():
    """It used to move the request to a longer prefix than its pages begin behind."""
    backend = _hanging(MemoryStore())
    async with HybridCache.open(SPEC, config(), storage=backend) as cache:
        engine = Engine(cache)
        async with cache.request([*PROMPT, 1]) as request:
            prefetch = asyncio.create_task(request.prefetch())
            await _until(lambda: backend.hanging)
            await request.load()
            async with cache.request(PROMPT[:20]) as other:
                await other.load()
                await engine.compute(other, 20)
            backend.rates = FaultRates()
            backend.release()
            assert (await prefetch).tokens == 0
            await engine.compute(request, 20)
        await cache.drain()
        async with cache.request([*PROMPT, 1]) as request:
            await request.load()
            assert request.hit.tokens == 20
            engine.check(request)


async def test_a_snapshot_without_a_slot_publishes_no_state():
    async with HybridCache.open(SPEC, config(device_slots={"kv": 32, "mamba": 2})) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(len(PROMPT))
            engine.oracle.write("kv", request.pages("kv"), engine.digests(request, None))
            other = await _opened(cache, [1])
            await request.snapshot(16)
            other.close()
            engine.oracle.write("mamba", [request.state("mamba")], [b"\0" * 32])  # the decode went on
            await request.checkpoint(16)
        async with cache.request(PROMPT) as request:
            await request.load()
            assert request.hit.tokens == 0


async def test_pages_are_not_backed_up_before_they_are_computed():
    """Another request's second hit asks for the backup while the forward is still enqueued."""
    gate = threading.Event()
    pages_only = ModelSpec("pages", PAGE, 4, SPEC.pools[:1])
    policy = WritePolicy.WRITE_THROUGH_SELECTIVE
    options = config(device_slots={"kv": 16}, write_policy=policy)
    async with HybridCache.open(pages_only, options, storage=MemoryBackend(MemoryStore())) as cache:
        engine = Engine(cache)
        compute = cache.device.stream("compute")
        request = await _opened(cache, PROMPT[:20], 20)
        pages, digests = request.pages("kv"), engine.digests(request, None)
        compute.launch(gate.wait)
        compute.launch(lambda: engine.oracle.write("kv", pages, digests))
        request.checkpoint(20, after=compute)
        request.close(after=compute)
        other = await _opened(cache, PROMPT[:21])
        other.close()
        assert cache.statistics().planner.backed_up == 5
        gate.set()
        await cache.drain()
        await cache.flush()
        async with cache.request(PROMPT[:21]) as again:
            assert (await again.prefetch()).by_tier == {Tier.STORAGE: 20}
            await again.load()
            assert engine.oracle.count_wrong("kv", again.pages("kv"), digests) == 0


async def test_a_state_handed_over_is_not_read_before_it_is_computed():
    """Another request restores the state while the forward that writes it is still enqueued."""
    gate = threading.Event()
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        compute = cache.device.stream("compute")
        request = await _opened(cache, PROMPT[:20], 20)
        pages, digests = request.pages("kv"), engine.digests(request, None)
        state = request.state("mamba")
        compute.launch(gate.wait)
        compute.launch(lambda: engine.oracle.write("kv", pages, digests))
        compute.launch(lambda: engine.oracle.write("mamba", [state], digests[-1:]))
        request.checkpoint(20, after=compute, final=True)
        request.close(after=compute)
        async with cache.request(PROMPT[:21]) as other:
            ticket = other.load()
            await ticket.submitted()
            for _ in range(5000):  # every chance for a copy that does not wait
                await asyncio.sleep(0)
            gate.set()
            await ticket
            assert other.hit.tokens == 20
            assert engine.oracle.count_wrong("mamba", [other.state("mamba")], digests[-1:]) == 0


# Slots


async def test_a_request_closed_while_it_waits_for_room_gets_none():
    async with HybridCache.open(SPEC, config(device_slots=TINY)) as cache:
        first = await _opened(cache, PROMPT[:24], 24)
        second = await _opened(cache, PROMPT[20:])
        waiting = asyncio.create_task(second.reserve(20))
        await asyncio.sleep(0)
        second.close()
        first.close()
        with pytest.raises(RequestStateError, match="closed while it waited"):
            await waiting
        assert cache.verify() == []
        assert cache.statistics().occupancy["kv"][0].held == 0


async def test_a_negative_reservation_is_refused():
    async with HybridCache.open(SPEC, config()) as cache:
        request = await _opened(cache, PROMPT, 8)
        with pytest.raises(RequestStateError, match=r"reserve\(-4\)"):
            await request.reserve(-4)
        assert request.reserved == 8
        request.close()


# Waits that never end


async def test_requests_that_wait_for_each_other_are_told():
    async with HybridCache.open(SPEC, config(device_slots=TINY)) as cache:
        first = await _opened(cache, PROMPT[:30], 16)
        second = await _opened(cache, PROMPT[5:35], 16)
        waiting = asyncio.create_task(first.reserve(8))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match=r"kv device slots .* suspend this one") as told:
            await second.reserve(8)
        assert "reserve" not in str(told.value), "it is what was done"
        with pytest.raises(CapacityError, match=r"kv device slots .* wait for them \(reserve\)"):
            second.extend(8)
        assert not waiting.done()
        second.close()
        assert len((await waiting)["kv"]) == 2
        first.close()


async def test_storage_that_hangs_for_ever_holds_up_nobody():
    backend = _hanging(MemoryStore())
    options = config(device_slots=TINY, storage_limits=IMPATIENT)
    async with HybridCache.open(SPEC, options, storage=backend) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT[:20]) as request:
            await request.load()
            await engine.compute(request, 20)
            assert not await request.durable()
            with pytest.raises(CapacityError):
                await request.reserve(100)
        await cache.drain()
        assert cache.verify() == []
        assert any(any(node.locks) for node in _nodes(cache))  # the engine may still read them
        backend.rates = FaultRates()
        backend.release()
        await _until(lambda: not any(any(node.locks) for node in _nodes(cache)))
        assert cache.verify() == []


def _nodes(cache: HybridCache) -> list[Node]:
    return list(cache._parts.planner.inventory.tree.nodes())


async def test_closing_wakes_who_waits_for_room():
    async with HybridCache.open(SPEC, config(device_slots=TINY)) as cache:
        first = await _opened(cache, PROMPT[:24], 24)
        second = await _opened(cache, PROMPT[20:])
        waiting = asyncio.create_task(second.reserve(20))
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await waiting
    late = [lambda: first.extend(1), lambda: first.checkpoint(4), second.load]
    for call in late:
        with pytest.raises((ClosedError, RequestStateError)):
            call()
    with pytest.raises(ClosedError):
        await first.prefetch()
    first.close()
    second.close()
    assert cache.verify() == []


async def test_closing_does_not_wait_for_a_stream_that_hangs(caplog: pytest.LogCaptureFixture):
    """What ends after the cache has closed is settled, and nothing follows on it."""
    gate = threading.Event()
    backend = MemoryBackend(MemoryStore())
    try:
        async with HybridCache.open(SPEC, config(close_seconds=0.05), storage=backend) as cache:
            compute = cache.device.stream("compute")
            async with cache.request(PROMPT) as request:
                await request.load()
                request.extend(len(PROMPT))
                compute.launch(gate.wait)
                request.checkpoint(len(PROMPT), after=compute)
        assert not gate.is_set()
        assert "device and the host memory are leaked" in caplog.text
        assert "could not be handled" not in caplog.text
    finally:
        gate.set()
        cache.device.close()


@pytest.mark.parametrize("in_driver", [False, True])
async def test_memory_that_a_copy_may_still_write_to_outlives_its_cache(
    monkeypatch: pytest.MonkeyPatch, in_driver: bool
):
    """Whether it is the stream that hangs, or the thread that would have enqueued the copy."""
    gate = threading.Event()
    cache = HybridCache.open(SPEC, config(close_seconds=0.05))
    async with cache as opened:
        device, compute = opened.device, opened.device.stream("compute")
        memories = opened._parts.memories.values()
        pools = [weakref.ref(pool) for memory in memories for pool in (memory.device, memory.host)]
        async with opened.request(PROMPT) as request:
            await request.load()
            request.extend(len(PROMPT))
            if in_driver:
                monkeypatch.setattr(opened._parts.transfers, "_run_tick", lambda tick: gate.wait())
            else:
                compute.launch(gate.wait)
            request.checkpoint(len(PROMPT), after=compute)
    try:
        del cache, opened, memories, request
        monkeypatch.undo()
        gc.collect()
        alive = [pool() for pool in pools]
        assert None not in alive
        for pool in alive:
            pool.items(next(iter(pool.spec.tensors)).name)  # raises if it is closed
    finally:
        gate.set()
        device.close()


@pytest.mark.asyncio
async def test_what_a_device_was_given_has_run_before_host_memory_is_unpinned(
    monkeypatch: pytest.MonkeyPatch,
):
    """A device that failed tells at once of everything, also of copies that still run."""
    closed: list[type] = []
    for kind in (EmulatedDevice, HostPool):
        close = kind.close
        monkeypatch.setattr(kind, "close", lambda self, close=close: (closed.append(type(self)), close(self)))

    async with HybridCache.open(SPEC, config()):
        pass

    assert closed[0] is EmulatedDevice
    assert closed.count(HostPool) == len(SPEC.pools)


# What durable promises


async def test_durable_waits_for_a_write_of_a_longer_prompt():
    """The shorter prompt's node is the first half of one that is being written."""
    store = MemoryStore()
    backend = _hanging(store)
    kv = SPEC.pools[0]
    options = config(device_slots={"kv": 32})
    async with HybridCache.open(ModelSpec("pages", PAGE, 4, (kv,)), options, storage=backend) as cache:
        longer = await _opened(cache, PROMPT[:32], 32)
        longer.checkpoint(32)
        await _until(lambda: backend.hanging)
        shorter = await _opened(cache, PROMPT[:16])
        shorter.extend(16 - shorter.hit.tokens)
        shorter.checkpoint(16)
        waiting = asyncio.create_task(shorter.durable())
        await asyncio.sleep(0)
        assert not waiting.done()
        backend.rates = FaultRates(fail=1.0)
        backend.release()
        assert not await waiting
        backend.rates = FaultRates()
        assert await shorter.durable()
        assert len(store) == 4
        longer.close()
        shorter.close()


async def test_durable_does_not_vouch_for_what_was_evicted():
    backend = Faulty(MemoryBackend(MemoryStore()), FaultRates(fail=1.0), random.Random(0))
    async with HybridCache.open(SPEC, config(), storage=backend) as cache:
        request = await _opened(cache, PROMPT[:8], 8)
        await request.checkpoint(8)
        waiting = asyncio.create_task(request.durable())
        await asyncio.sleep(0)
        request.close()
        await cache.flush()
        assert not await waiting


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"device": "nonsense"},
        {"host_ratio": float("inf")},
        {"host_ratio": float("nan")},
        {"device_slots": {"kv": 1.5, "mamba": 1}},
        {"device_slots": {"kv": "8", "mamba": 1}},
        {"device_slots": {"kv": True, "mamba": 1}},
        {"close_seconds": float("nan")},
    ],
)
async def test_bad_options_are_named(options: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        async with HybridCache.open(SPEC, config(**options)):
            raise AssertionError("opened")


@pytest.mark.parametrize("host", [{"kv": 0}, {"mamba": 0}, {"kv": 0, "mamba": 0}, {"kv": 1, "mamba": 1}])
async def test_pools_may_be_missing_on_the_host(host: dict[str, int]):
    options: CacheConfig = config(host_slots=host, storage="memory")
    async with HybridCache.open(SPEC, options) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        assert (await engine.serve([*PROMPT, 1])).by_tier == {Tier.DEVICE: 40}


async def test_tokens_that_somebody_looks_at_can_grow():
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            await engine.compute(request, 40)
            seen = np.frombuffer(request.tokens, np.int64)
            request.append([1, 2, 3, 4])
            await engine.compute(request, 44)
            assert list(seen) == PROMPT
            assert list(request.tokens) == [*PROMPT, 1, 2, 3, 4]
        assert (await engine.serve([*PROMPT, 1, 2, 3, 4, 5])).tokens == 44
