"""Host memory that is pinned in the background, and opens the slots of the pools that share it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from asynchicache.layouts import HostLayout
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.ports import AsyncioPort
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.opening import allocate_memories, growing_pools

KV = PoolSpec("kv", (TensorSpec("keys", (0,), (1024,), "float32"),))
DSA = PoolSpec("dsa", (TensorSpec("index_keys", (0,), (2048,), "float32"),), slots_of="kv")
SPEC = ModelSpec("toy", 1, 1, (KV, DSA))
PAGE = 4096


class _Runtime:
    """A CUDA runtime that pins whatever it is asked to."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        return 0


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

    growths = list(growing_pools(SPEC, memories, port, opened))
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
    memories = allocate_memories(SPEC, {"kv": (2, 6)}, "cpu", HostLayout.PAGE_FIRST)

    assert list(growing_pools(SPEC, memories, port, lambda pool, count: None)) == []
    assert {memory.host.layout.kind for memory in memories.values()} == {HostLayout.PAGE_FIRST}
    for memory in memories.values():
        memory.host.close()
    await port.aclose()
