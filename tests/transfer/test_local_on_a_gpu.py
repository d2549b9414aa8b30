"""Transfers as a whole, with submit thread, audit and fences; on a GPU, and on a CPU to compare."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from asynchicache.layouts import HostLayout
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.ports import AsyncioPort
from asynchicache.streams.base import Device
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.audit import PageAudit
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.graph_fences import GraphFences
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from transfer.conftest import DSA, KV, LAYERS, MAMBA, PAGE_SIZE, SLOTS

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.parametrize("name", ["cpu", pytest.param("cuda:0", marks=needs_gpu)]),
]
Memories = dict[str, PoolMemory]


@asynccontextmanager
async def _open(
    name: str, *, share: float = 0.0, path: CopyPath | None = None
) -> AsyncIterator[tuple[Device, LocalTransfers, Memories]]:
    port = AsyncioPort(threads=1)
    device: Device = EmulatedDevice(ThreadDriver()) if name == "cpu" else CudaDevice(0)
    pin = Pinner.of(name) or False
    memories = {
        spec.name: PoolMemory(
            DevicePool(spec, PAGE_SIZE, SLOTS[spec.name][0], name, poison=True),
            HostPool(spec, PAGE_SIZE, SLOTS[spec.name][1], pin=pin, layout=HostLayout.PAGE_FIRST_DIRECT),
        )
        for spec in (KV, DSA, MAMBA)
    }
    reactor = CompletionReactor(port)
    audit = PageAudit({pool: memory.device for pool, memory in memories.items()}, share, random.Random(1))
    transfers = LocalTransfers(
        device, memories, LAYERS, port, reactor, group_bytes=1, copy_path=path, audit=audit
    )
    try:
        yield device, transfers, memories
    finally:
        await transfers.aclose(10)
        await reactor.aclose(10)
        device.close()
        for memory in memories.values():
            memory.host.close()
        await port.aclose()


def _randomize(memories: Memories) -> dict[tuple[str, str], torch.Tensor]:
    """Fill the device; a copy, by pool and tensor."""
    generator, found = torch.Generator().manual_seed(5), {}
    for pool, memory in memories.items():
        for tensor in memory.device.spec.tensors:
            items = memory.device.items(tensor.name)
            noise = torch.randint(0, 256, items.shape, dtype=torch.uint8, generator=generator)
            found[pool, tensor.name] = noise
            items.copy_(noise)
    return found


@pytest.mark.parametrize("path", list(CopyPath), ids=lambda path: path.value)
async def test_pages_of_every_pool_come_back_as_they_left(
    name: str, path: CopyPath, operation: Callable[..., CacheOperation]
) -> None:
    async with _open(name, share=1.0, path=path) as (_, transfers, memories):
        before, outcomes = _randomize(memories), []
        kept, places, back = [2, 3, 7], [9, 0, 1], [11, 4, 5]
        backup = operation(Direction.BACKUP, kv=(kept, places), dsa=(kept, places), mamba=([1], [2]))
        load = operation(Direction.LOAD, kv=(places, back), dsa=(places, back), mamba=([2], [4]))

        # Both at once: the load waits on the device for the backup whose pages it reads.
        tickets = [transfers.submit(one, done=outcomes.append) for one in (backup, load)]
        for ticket in tickets:
            await ticket
        await transfers.submit(load, done=outcomes.append)  # by now there are fingerprints to compare with

        assert outcomes == [None] * 3
        found = transfers.statistics().audit
        assert (found.recorded, found.mismatched) == (7, 0)
        assert found.compared in (7, 14)  # all of the first load's as well if the backup had landed by then
        for (pool, tensor), noise in before.items():
            found = memories[pool].device.items(tensor).cpu()
            here, there = (back, kept) if pool != "mamba" else ([4], [1])
            assert torch.equal(found[:, here], noise[:, there])


async def test_a_stream_and_a_captured_graph_wait_for_their_layers(
    name: str, operation: Callable[..., CacheOperation]
) -> None:
    async with _open(name) as (device, transfers, memories):
        _randomize(memories)
        keys = memories["kv"].device.items("keys")
        compute, fences = device.stream("compute"), GraphFences(device, LAYERS)
        by_stream, by_graph = torch.zeros_like(keys[:, 7]), torch.zeros_like(keys[:, 7])
        memories["kv"].host.items("keys").copy_(torch.arange(10, dtype=torch.uint8)[:, None, None])
        with device.capture(compute) as graph:
            for local, layer in enumerate(KV.tensors[0].layers):
                fences.wait_on(layer, compute)
                compute.launch(lambda local=local: by_graph[local].copy_(keys[local, 7]))
        for slot in range(3):
            ticket = transfers.submit(operation(Direction.LOAD, kv=([slot], [7])), done=lambda error: None)
            await ticket.submitted()
            fences.arm(ticket)
            for local, layer in enumerate(KV.tensors[0].layers):
                ticket.fence(layer).wait_on(compute)
                compute.launch(lambda local=local: by_stream[local].copy_(keys[local, 7]))
            graph.replay()
            end = device.event()
            compute.record(end)
            await asyncio.to_thread(end.synchronize)

            assert (by_stream == slot).all()
            assert (by_graph == slot).all()
