"""Each public coroutine in a place where it has to wait, so that it can be interrupted there.

A scenario is given a stage, a cache with one prompt on the device, one on the host and one in storage, and
`at`, which wraps what is interrupted. Whoever adds a public coroutine adds a scenario here.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import asynchicache
from asynchicache import (
    CacheConfig,
    HybridCache,
    ModelSpec,
    PrefetchOptions,
    PrefetchPolicy,
    RankGroup,
    RankWorker,
    Request,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.cache import BaseCache
from asynchicache.controller.event_hub import EventSubscription
from asynchicache.controller.request import BaseRequest
from asynchicache.openings import Opening
from asynchicache.storage.chain import ChainStage, StorageChain
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.ticket import Ticket
from cache.engine import PAGE, Engine

STORED, HOSTED, KEPT, NEW = ([family * 100 + n for n in range(20)] for family in range(1, 5))
"""Where prompts are at first: in storage alone, on the host, on the device, nowhere."""

SPECS = {
    "full": synthetic_spec(PAGE, ("kv",)),
    "full+mamba": synthetic_spec(PAGE, ("kv", "mamba")),
    "full+mamba+swa+dsa": synthetic_spec(PAGE, ("kv", "mamba", "swa", "dsa"), window_pages=2),
}
SLOTS = {"kv": 10, "mamba": 4, "swa": 9}

At = Callable[[Awaitable[Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    """What kind of cache is on the stage."""

    pools: str
    stored: bool

    def __str__(self) -> str:
        return f"{self.pools}, {'with' if self.stored else 'without'} storage"

    @property
    def spec(self) -> ModelSpec:
        return SPECS[self.pools]

    @property
    def config(self) -> CacheConfig:
        pools = {pool.name for pool in self.spec.owners}
        return CacheConfig(
            device_slots={name: count for name, count in SLOTS.items() if name in pools},
            host_slots={name: 4 * count for name, count in SLOTS.items() if name in pools},
            prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
            storage_limits=PoolLimits(closing=0.1),
            close_seconds=0.5,
            weight_version="test",
        )


CASES = [Case(pools, stored) for pools in SPECS for stored in (True, False)]


class Stage:
    """A cache, and what is needed to use it."""

    def __init__(self, case: Case, world: SeededWorld, store: MemoryStore, cache: HybridCache) -> None:
        self.case = case
        self.world = world
        self.store = store
        self.cache = cache
        self.engine = Engine(cache)

    @property
    def storage(self) -> Latency:
        """Another backend of the same pages."""
        return slow(self.world, MemoryBackend(self.store))

    async def compute(self, request: Request, tokens: list[int]) -> None:
        """Prefill and publish a prompt; what follows from that is under way then."""
        await request.load()
        await self.engine.compute(request, len(tokens))

    @asynccontextmanager
    async def full_device(self) -> AsyncIterator[None]:
        """Somebody has all the room there is, and gives it back a little later."""
        async with self.cache.request([9] * 8) as holder:
            await holder.load()
            free = self.cache.statistics().occupancy["kv"][0].capacity
            holder.extend((free - 1) * PAGE)
            asyncio.get_running_loop().call_later(1e-3, holder.close)
            yield

    async def check(self) -> None:
        """Nothing is broken, held or lost, and whoever comes next is served, with the right bytes."""
        await self.cache.drain()
        assert_clean(self.cache)
        for prompt in (STORED, HOSTED, NEW):
            await self.engine.serve([*prompt, 1])
            assert (await self.engine.serve([*prompt, 2])).tokens == 20
        assert_clean(self.cache)
        await self.cache.flush()
        for pool, tiers in self.cache.statistics().occupancy.items():
            assert [tier.held for tier in tiers] == [0, 0], pool


def slow(world: SeededWorld, backend: StorageBackend) -> Latency:
    return Latency(backend, 1e-3, sleep=world.sleep)


@asynccontextmanager
async def staged(case: Case, world: SeededWorld, hangs: str = "") -> AsyncIterator[Stage]:
    """A stage with its prompts where they belong; then calls of storage named `hangs` never end."""
    store = MemoryStore()
    faulty = Faulty(MemoryBackend(store), FaultRates(), random.Random(0))
    storage = slow(world, faulty) if case.stored else None
    async with world.open_cache(case.spec, case.config, storage=storage) as cache:
        stage = Stage(case, world, store, cache)
        await stage.engine.serve(STORED, prefetch=False)
        await cache.flush()
        for prompt in (HOSTED, KEPT):
            await stage.engine.serve(prompt, prefetch=False)
        if hangs:
            faulty.rates = FaultRates(hang=1.0, calls=(hangs,))
        yield stage


# Scenarios, by what they interrupt.


async def enter(stage: Stage, at: At) -> None:
    request = stage.cache.request(HOSTED)
    try:
        await at(request.__aenter__())
    finally:
        request.close()


async def leave(stage: Stage, at: At) -> None:
    request = await stage.cache.request([*HOSTED, 1]).__aenter__()
    request.load()
    await at(request.__aexit__(None, None, None))


async def prefetch(stage: Stage, at: At) -> None:
    async with stage.cache.request([*STORED, 1]) as request:
        await at(request.prefetch())


async def prefetch_what_another_reads(stage: Stage, at: At) -> None:
    async with stage.cache.request([*STORED, 1]) as first, stage.cache.request([*STORED, 2]) as second:
        reading = asyncio.create_task(first.prefetch())
        await asyncio.sleep(5e-4)
        try:
            await at(second.prefetch())
        finally:
            await reading


async def admit(stage: Stage, at: At) -> None:
    async with stage.full_device(), stage.cache.request([*HOSTED, 1]) as request:
        await at(request.admit())


async def reserve(stage: Stage, at: At) -> None:
    async with stage.cache.request([*NEW, 1]) as request:
        await request.load()
        async with stage.full_device():
            await at(request.reserve(20))


async def durable(stage: Stage, at: At) -> None:
    async with stage.cache.request([*NEW, 1]) as request:
        await stage.compute(request, NEW)
        await at(request.durable())


async def a_load_submitted(stage: Stage, at: At) -> None:
    async with stage.cache.request([*HOSTED, 1]) as request:
        await at(request.load().submitted())


async def a_layer_of_a_load(stage: Stage, at: At) -> None:
    async with stage.cache.request([*HOSTED, 1]) as request:
        await at(request.load().layer(1))


async def a_load(stage: Stage, at: At) -> None:
    async with stage.cache.request([*HOSTED, 1]) as request:
        await at(request.load())


async def a_load_that_others_wait_for(stage: Stage, at: At) -> None:
    async with stage.cache.request([*HOSTED, 1]) as first, stage.cache.request([*HOSTED, 2]) as second:
        tickets = [first.load(), second.load()]
        try:
            await at(tickets[1])
        finally:
            await tickets[0]
            stage.engine.check(first)


async def a_checkpoint(stage: Stage, at: At) -> None:
    async with stage.cache.request(NEW) as request:
        await request.load()
        request.extend(20)
        stage.engine.write(request, 0, 20)
        await at(request.checkpoint(20))


async def a_snapshot(stage: Stage, at: At) -> None:
    async with stage.cache.request([*KEPT, 1]) as request:
        await request.load()
        await at(request.snapshot(20))


async def drain(stage: Stage, at: At) -> None:
    async with stage.cache.request(NEW) as request:
        await stage.compute(request, NEW)
    await at(stage.cache.drain())


async def verify_ranks(stage: Stage, at: At) -> None:
    """Without other ranks there is nobody to wait for."""
    assert await at(stage.cache.verify_ranks()) == []


async def flush(stage: Stage, at: At) -> None:
    async with stage.cache.request(NEW) as request:
        await stage.compute(request, NEW)
    await at(stage.cache.flush())


async def sync(stage: Stage, at: At) -> None:
    async with stage.cache.request(NEW) as request:
        await stage.compute(request, NEW)
    await stage.cache.detach_storage()  # other storage has nothing of it
    await stage.cache.attach_storage(stage.storage)
    await at(stage.cache.sync())


async def attach(stage: Stage, at: At) -> None:
    await stage.cache.detach_storage()
    await at(stage.cache.attach_storage(stage.storage))


async def attach_stage(stage: Stage, at: At) -> None:
    near, far = MemoryBackend(MemoryStore()), MemoryBackend(MemoryStore())
    parts = [ChainStage("near", lambda: near), ChainStage("far", lambda: far)]
    await stage.cache.detach_storage()
    await stage.cache.attach_storage(StorageChain(parts, stage.world.port))
    await stage.cache.detach_storage("near")
    near = MemoryBackend(MemoryStore())
    await at(stage.cache.attach_stage("near"))


async def warm(stage: Stage, at: At) -> None:
    await stage.cache.flush()
    await at(stage.cache.warm([[*STORED, 1], NEW]))


async def detach_what_is_read_from(stage: Stage, at: At) -> None:
    async with stage.cache.request([*STORED, 1]) as request:
        reading = asyncio.create_task(request.prefetch())
        await asyncio.sleep(5e-4)
        try:
            await at(stage.cache.detach_storage())
        finally:
            await reading


async def clear_what_is_written_to(stage: Stage, at: At) -> None:
    async with stage.cache.request(NEW) as request:
        await stage.compute(request, NEW)
    await at(stage.cache.clear_storage())


async def update_weights(stage: Stage, at: At) -> None:
    """Interrupted before it begins, or not at all."""
    async with stage.cache.request(NEW) as request:
        await stage.compute(request, NEW)
    version = stage.cache.config.weight_version or ""
    try:
        await at(stage.cache.update_weights("others"))
    finally:
        await stage.cache.update_weights(version)


async def snapshot(stage: Stage, at: At) -> None:
    await at(stage.cache.snapshot())


async def wait_for_events(stage: Stage, at: At) -> None:
    with stage.cache.events() as events:
        asyncio.get_running_loop().call_later(1e-3, events.close)
        assert not await at(events.wait())


async def next_event(stage: Stage, at: At) -> None:
    with stage.cache.events() as events:
        serving = asyncio.create_task(stage.engine.serve(NEW))
        try:
            with suppress(StopAsyncIteration):  # the cache was closed
                await at(anext(events))
        finally:
            await asyncio.gather(serving, return_exceptions=True)


async def open_and_close(stage: Stage, at: At) -> None:
    """A second cache, closed with a copy and a write under way."""
    await at(_one_life(stage))


async def _one_life(stage: Stage) -> None:
    storage = stage.storage if stage.case.stored else None
    async with AsyncExitStack() as stack:
        opened = stage.world.open_cache(stage.case.spec, stage.case.config, storage=storage)
        cache = await stack.enter_async_context(opened)
        second = Stage(stage.case, stage.world, stage.store, cache)
        async with cache.request(NEW) as request:
            await second.compute(request, NEW)


async def close_what_was_awaited(stage: Stage, at: At) -> None:
    """As `open_and_close`, by hand: once it is open, whoever awaited it closes it."""
    await at(_closed_by_hand(stage))


async def _closed_by_hand(stage: Stage) -> None:
    storage = stage.storage if stage.case.stored else None
    cache = await stage.world.open_cache(stage.case.spec, stage.case.config, storage=storage)
    try:
        async with cache.request(NEW) as request:
            await Stage(stage.case, stage.world, stage.store, cache).compute(request, NEW)
    finally:
        await cache.aclose()


Scenario = Callable[[Stage, At], Awaitable[None]]

SCENARIOS: dict[str, list[Scenario]] = {
    "BaseCache.aclose": [close_what_was_awaited],
    "Opening.__aenter__": [open_and_close],
    "Opening.__aexit__": [open_and_close],
    "Opening.__await__": [close_what_was_awaited],
    "BaseCache.drain": [drain],
    "BaseCache.flush": [flush],
    "BaseCache.sync": [sync],
    "BaseCache.warm": [warm],
    "BaseCache.verify_ranks": [verify_ranks],
    "BaseCache.attach_storage": [attach],
    "BaseCache.attach_stage": [attach_stage],
    "BaseCache.detach_storage": [detach_what_is_read_from],
    "BaseCache.clear_storage": [clear_what_is_written_to],
    "BaseCache.update_weights": [update_weights],
    "BaseCache.snapshot": [snapshot],
    "EventSubscription.wait": [wait_for_events],
    "EventSubscription.__anext__": [next_event],
    "BaseRequest.__aenter__": [enter],
    "BaseRequest.__aexit__": [leave],
    "BaseRequest.prefetch": [prefetch, prefetch_what_another_reads],
    "Request.admit": [admit],
    "Request.reserve": [reserve],
    "BaseRequest.durable": [durable],
    "Ticket.submitted": [a_load_submitted],
    "Ticket.layer": [a_layer_of_a_load],
    "Ticket.__await__": [a_load, a_load_that_others_wait_for, a_checkpoint, a_snapshot],
}


def public_coroutines() -> set[str]:
    """What users of the package may await, or enter and leave."""
    public = [getattr(asynchicache, name) for name in asynchicache.__all__]
    classes = {kind for kind in public if inspect.isclass(kind)}
    classes |= {BaseCache, BaseRequest, Opening, Ticket, EventSubscription}
    classes -= {RankGroup, RankWorker}  # of several processes; tests/ranks ends them in other ways
    return {
        f"{kind.__name__}.{name}"
        for kind in classes
        for name in vars(kind)
        if _waits(name, inspect.unwrap(getattr(kind, name)))
    }


def _waits(name: str, member: object) -> bool:
    if name.startswith("_") and not name.startswith("__"):
        return False
    function = getattr(member, "__func__", member)
    return (
        name == "__await__" == function.__name__  # a request's refuses, under another name
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
        or inspect.isasyncgenfunction(getattr(function, "__wrapped__", None))
    )
