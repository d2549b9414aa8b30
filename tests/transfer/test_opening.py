"""Host memory that is pinned in the background, and opens the slots of the pools that share it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from asynchicache import parts
from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import CapacityError
from asynchicache.layouts import HostLayout
from asynchicache.parts import HostMemory, allocate_hosts, allocate_memories, growing_pools
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.pools.device import DevicePool
from asynchicache.pools.extents import ExtentMemory, ExtentPlan
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.ports import AsyncioPort
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.transfer import calibration
from asynchicache.transfer.copies import PoolMemory
from asynchicache.types import trailing_pages
from asynchicache_lab.bench import copy_rig
from pools.cuda_runtime import PlayedRuntime

KV = PoolSpec("kv", (TensorSpec("keys", (0,), (1024,), "float32"),))
DSA = PoolSpec("dsa", (TensorSpec("index_keys", (0,), (2048,), "float32"),), slots_of="kv")
SPEC = ModelSpec("toy", 1, 1, (KV, DSA))
PAGE = 4096
CONFIG = CacheConfig(device_bytes=64 << 10, host_bytes=64 << 10)


class _Runtime:
    """A CUDA runtime that pins whatever it is asked to."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        return 0


def hosts(memories: Mapping[str, PoolMemory]) -> HostMemory:
    return HostMemory({name: memory.host for name, memory in memories.items()})


def no_extents(count: int) -> None:
    raise AssertionError("no pools share memory")


def _memories() -> Mapping[str, PoolMemory]:
    """Six host slots in steps of 16 KiB: four of `kv`, two of `dsa`."""
    pinner = Pinner(_Runtime(), step_bytes=4 * PAGE)
    return {
        pool.name: PoolMemory(DevicePool(pool, 1, 2), HostPool(pool, 1, 6, pin=pinner)) for pool in SPEC.pools
    }


@pytest.mark.asyncio
async def test_slots_open_once_every_pool_that_shares_them_is_pinned() -> None:
    port, memories, slots, told = AsyncioPort(threads=1), _memories(), SlotAllocator(6), []

    def opened(pool: str, count: int) -> None:
        slots.open_only(count)
        told.append((pool, count))

    growths = list(growing_pools(SPEC, hosts(memories), port, opened, no_extents))
    assert slots.allocate(2) == [0, 1]
    for growth in growths:
        await growth

    assert told == [("kv", 2), ("kv", 2), ("kv", 4), ("kv", 6)]
    assert slots.available == 4
    for memory in memories.values():
        memory.host.close()
    await port.aclose()


@pytest.mark.asyncio
async def test_a_cpu_pins_nothing() -> None:
    port = AsyncioPort(threads=1)
    kept = ExitStack()
    memories, on_host = allocate_memories(SPEC, {"kv": (2, 6)}, "cpu", HostLayout.PAGE_FIRST, kept)

    assert list(growing_pools(SPEC, on_host, port, lambda pool, count: None, no_extents)) == []
    assert {memory.host.layout.kind for memory in memories.values()} == {HostLayout.PAGE_FIRST}
    kept.close()
    await port.aclose()


@pytest.mark.asyncio
async def test_extents_open_as_the_memory_that_pools_share_is_pinned() -> None:
    """Extents of 16 KiB, pinned two at a time; what shares the slots of `kv` has 24 slots, pinned eight at a
    time: of two extents each."""
    state = PoolSpec(
        "mamba", (TensorSpec("s", (0,), (4 * PAGE,), "uint8"),), trailing_pages(1), per_token=False
    )
    spec = ModelSpec("hybrid", 1, 1, (KV, replace(DSA, tensors=KV.tensors), state))
    plan = ExtentPlan({"kv": PAGE, "mamba": 4 * PAGE}, 4 * PAGE, 6)
    port, kept, memory, told = AsyncioPort(threads=1), ExitStack(), ExtentMemory(plan), []

    def opened(extents: int) -> None:
        memory.open_only(extents)
        told.append(extents)

    slots = {name: plan.slots(name) for name in plan.slot_bytes}
    on_host = allocate_hosts(
        spec,
        slots,
        HostLayout.PAGE_FIRST_DIRECT,
        kept,
        pinner=Pinner(_Runtime(), step_bytes=8 * PAGE),
        plan=plan,
    )
    assert on_host.shared is not None
    for growth in growing_pools(spec, on_host, port, lambda pool, count: None, opened):
        await growth

    assert told == [2, 2, 2, 4, 6]
    assert on_host.pools["kv"].step_bytes == 8 * PAGE
    assert on_host.pools["kv"].memory is on_host.pools["mamba"].memory
    kept.close()
    await port.aclose()


# Errors between pinning and the end of an opening.


class _SmallDevice:
    """Has room for so many pools."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __call__(self, *args: object) -> DevicePool:
        self._room -= 1
        if self._room < 0:
            raise CapacityError("no room on the device")
        spec, page_size, slots, _ = args
        return DevicePool(spec, page_size, slots)  # type: ignore[arg-type]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PlayedRuntime:
    """What every pinner of a device pins with."""
    runtime = PlayedRuntime()
    monkeypatch.setattr(Pinner, "of", lambda *_: Pinner(runtime))
    return runtime


def _assert_all_was_unpinned(runtime: PlayedRuntime) -> None:
    assert runtime.most > 0
    assert (runtime.pinned, runtime.lost) == ({}, [])


@pytest.mark.asyncio
async def test_a_cache_without_room_on_the_device_leaves_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime
) -> None:
    monkeypatch.setattr(parts, "DevicePool", _SmallDevice(1))

    with pytest.raises(CapacityError, match="no room on the device"):
        async with HybridCache.open(SPEC, CONFIG):
            pass

    assert runtime.most == 2
    _assert_all_was_unpinned(runtime)


@pytest.mark.asyncio
async def test_a_cache_whose_opening_is_cancelled_leaves_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime
) -> None:
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow(*args: object) -> DevicePool:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(30)
        return _SmallDevice(1)(*args)

    async def live() -> None:
        async with HybridCache.open(SPEC, CONFIG):
            pass

    monkeypatch.setattr(parts, "DevicePool", slow)
    task = asyncio.create_task(live())
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    _assert_all_was_unpinned(runtime)


def test_measuring_without_room_on_the_device_leaves_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime
) -> None:
    monkeypatch.setattr(calibration, "DevicePool", _SmallDevice(0))

    calibration.measured_paths.__wrapped__("cpu")

    _assert_all_was_unpinned(runtime)


def test_measuring_that_fails_leaves_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(calibration, "_measure", broken)

    with pytest.raises(RuntimeError, match="broken"):
        calibration.measured_paths.__wrapped__("cpu")

    _assert_all_was_unpinned(runtime)


@pytest.mark.asyncio
async def test_a_bench_without_room_on_the_device_leaves_nothing_pinned(
    monkeypatch: pytest.MonkeyPatch, runtime: PlayedRuntime
) -> None:
    monkeypatch.setattr(copy_rig, "DevicePool", _SmallDevice(0))

    with pytest.raises(CapacityError, match="no room on the device"):
        async with copy_rig.open_rig(KV, 1, 4):
            pass

    _assert_all_was_unpinned(runtime)
