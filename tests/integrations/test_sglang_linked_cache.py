"""The cache below SGLang's tree: what it promises is in host memory, verified and locked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from asynchicache import CacheConfig, HybridCache, PrefetchOptions, PrefetchPolicy
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import TransferError
from asynchicache.integrations.sglang.linked_cache import STEPS_KEPT, LinkedCache
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.specs import synthetic_spec

PAGE = 4
SPEC = synthetic_spec(PAGE)
KEYS = [bytes([number]) * 32 for number in range(12)]
HOST = {"kv": 16, "mamba": 8}
COMPLETE = PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE)


def paged() -> PagedMemory:
    return PagedMemory(SPEC, {"kv": 64, "mamba": 16})


@asynccontextmanager
async def linked(
    memory: PagedMemory,
    storage: StorageBackend | None = None,
    *,
    every_length: bool = False,
    prefetch: PrefetchOptions = COMPLETE,
) -> AsyncIterator[LinkedCache]:
    config = CacheConfig(
        host_slots=HOST,
        inline=True,
        page_keys=True,
        weight_version="1",
        storage="memory" if storage is not None else None,
        prefetch=prefetch,
    )
    cache = await HybridCache.open(SPEC, config, engine=memory.memory, storage=storage)
    tier = LinkedCache(cache, every_length=every_length)
    try:
        yield tier
        await cache.drain()
        assert cache.verify() == []
    finally:
        await tier.aclose()


async def back_up(tier: LinkedCache, memory: PagedMemory, keys: Sequence[bytes]) -> bool:
    """Compute a prefix with its state on the device, and hand both down."""
    pages, state = memory.take("kv", len(keys)), memory.take("mamba", 1)
    memory.compute("kv", pages, keys)
    memory.compute("mamba", state, keys[-1:])
    done = await tier.back_up(keys, lambda: {"kv": pages, "mamba": state}, [])
    memory.give("kv", pages)
    memory.give("mamba", state)
    return done


async def restored(
    tier: LinkedCache, memory: PagedMemory, rid: str, keys: Sequence[bytes], known: int
) -> bool:
    """Load what was promised; whether the device then has the right bytes."""
    pages, state = memory.take("kv", len(keys) - known), memory.take("mamba", 1)
    assert tier.claim(rid) == known
    await (await tier.load(rid, len(keys), {"kv": pages, "mamba": state}))
    wrong = memory.count_wrong("kv", pages, keys[known:]) + memory.count_wrong("mamba", state, keys[-1:])
    memory.give("kv", pages)
    memory.give("mamba", state)
    return not wrong


@pytest.mark.asyncio
async def test_what_was_handed_down_is_promised_and_comes_back() -> None:
    memory = paged()
    async with linked(memory) as tier:
        assert await tier.look("cold", KEYS[:4], 0) == []
        assert await back_up(tier, memory, KEYS[:4])
        assert await tier.look("whole", KEYS[:6], 0) == [4]
        assert await tier.look("end", KEYS[:6], 3) == [1]
        assert await tier.look("known", KEYS[:6], 4) == []
        assert await restored(tier, memory, "whole", KEYS[:4], 0)
        assert await restored(tier, memory, "end", KEYS[:4], 3)
        assert tier.claim("another") is None


@pytest.mark.asyncio
async def test_what_was_read_from_storage_is_found_by_a_later_lookup() -> None:
    memory, store = paged(), MemoryStore()
    async with linked(memory, MemoryBackend(store)) as tier:
        assert await back_up(tier, memory, KEYS[:4])
    async with linked(memory, MemoryBackend(store)) as tier:
        assert await tier.look("first", KEYS[:5], 0) == []
        await tier.read("first", KEYS[:5])
        assert await tier.look("first", KEYS[:5], 0) == [4]
        assert await restored(tier, memory, "first", KEYS[:4], 0)


@pytest.mark.asyncio
async def test_what_was_read_stays_until_the_request_has_its_turn() -> None:
    memory, store = paged(), MemoryStore()
    others = [[bytes([first + number]) * 32 for number in range(8)] for first in (100, 120, 140)]
    async with linked(memory, MemoryBackend(store)) as tier:
        assert await back_up(tier, memory, KEYS[:4])
    async with linked(memory, MemoryBackend(store)) as tier:
        await tier.read("waits", KEYS[:4])
        tier.step(100 * STEPS_KEPT)
        for other in others:
            await back_up(tier, memory, other)
        assert await tier.look("waits", KEYS[:4], 0) == [4]
        assert await restored(tier, memory, "waits", KEYS[:4], 0)
        assert tier.promises == 1

        tier.forget("waits")
        tier.forget("waits")
        assert tier.promises == 0
        for other in others:
            await back_up(tier, memory, other)
        assert await tier.look("late", KEYS[:4], 0) == []


@pytest.mark.asyncio
async def test_who_is_read_for_twice_keeps_one_read_and_a_cancelled_read_keeps_nothing() -> None:
    memory, store = paged(), MemoryStore()
    async with linked(memory, MemoryBackend(store)) as tier:
        assert await back_up(tier, memory, KEYS[:4])
    hanging = Faulty(MemoryBackend(store), FaultRates(), random.Random(1))
    async with linked(memory, hanging) as tier:
        await tier.read("twice", KEYS[:2])
        await tier.read("twice", KEYS[:4])
        assert tier.promises == 1
        tier.forget("twice")
        await tier.empty()
        hanging.rates = FaultRates(hang=1.0, calls=["get"])
        read = asyncio.create_task(tier.read("cancelled", KEYS[:4]))
        while not hanging.hanging:  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0)
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
        assert tier.promises == 0
        hanging.release()


@pytest.mark.asyncio
async def test_pages_that_storage_damages_are_never_promised() -> None:
    memory, store = paged(), MemoryStore()
    async with linked(memory, MemoryBackend(store)) as tier:
        assert await back_up(tier, memory, KEYS[:4])
    damaging = Faulty(MemoryBackend(store), FaultRates(swap=1.0), random.Random(1))
    async with linked(memory, damaging) as tier:
        assert await tier.look("first", KEYS[:4], 0) == []
        await tier.read("first", KEYS[:4])
        assert await tier.look("first", KEYS[:4], 0) == []


@pytest.mark.asyncio
async def test_a_read_from_storage_that_hangs_ends_at_its_deadline() -> None:
    memory, store = paged(), MemoryStore()
    async with linked(memory, MemoryBackend(store)) as tier:
        assert await back_up(tier, memory, KEYS[:4])
    hanging = Faulty(MemoryBackend(store), FaultRates(hang=1.0, calls=["get"]), random.Random(1))
    async with linked(memory, hanging, prefetch=PrefetchOptions(base_seconds=0.0)) as tier:
        await tier.read("first", KEYS[:4])
        assert await tier.look("held until then", KEYS[:4], 0) == []
        hanging.release()


@pytest.mark.asyncio
async def test_ranks_are_told_every_length_that_has_a_state() -> None:
    memory = paged()
    async with linked(memory, every_length=True) as tier:
        for end in (2, 5, 6):
            assert await back_up(tier, memory, KEYS[:end])
        assert await tier.look("all", KEYS, 0) == [2, 5, 6]
        assert await tier.look("rest", KEYS, 3) == [2, 3]
        assert await restored(tier, memory, "all", KEYS[:5], 0)  # what both ranks had


@pytest.mark.asyncio
async def test_a_promise_holds_while_others_want_the_memory_and_ends_with_its_steps() -> None:
    memory = paged()
    others = [bytes([100 + number]) * 32 for number in range(16)]
    async with linked(memory) as tier:
        assert await back_up(tier, memory, KEYS[:4])
        assert await tier.look("waits", KEYS[:4], 0) == [4]
        tier.step(STEPS_KEPT)
        assert not await back_up(tier, memory, others)  # no room for all
        assert await tier.look("waits", KEYS[:4], 0) == [4]
        assert await restored(tier, memory, "waits", KEYS[:4], 0)

        assert await tier.look("leaves", KEYS[:4], 0) == [4]
        tier.step(2 * STEPS_KEPT + 1)
        assert tier.promises == 0
        assert tier.claim("leaves") is None


@pytest.mark.asyncio
async def test_a_claim_is_dropped_or_used_once() -> None:
    memory = paged()
    async with linked(memory) as tier:
        assert await back_up(tier, memory, KEYS[:2])
        await tier.look("cancelled", KEYS[:2], 0)
        assert tier.claim("cancelled") == 0
        tier.drop("cancelled")
        tier.drop("cancelled")
        assert tier.promises == 0

        await tier.look("too much", KEYS[:3], 0)
        assert tier.claim("too much") == 0
        with pytest.raises(TransferError, match="3 pages were promised, and 2 are there"):
            await tier.load("too much", 3, {})
        assert tier.promises == 0


@pytest.mark.asyncio
async def test_a_prefix_without_its_beginning_is_not_kept() -> None:
    memory = paged()
    async with linked(memory) as tier:
        pages = memory.take("kv", 2)
        assert not await tier.back_up(KEYS[:4], lambda: {"kv": pages}, [])
        assert await tier.look("any", KEYS[:4], 0) == []
