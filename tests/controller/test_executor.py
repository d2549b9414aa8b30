"""The executor alone: a real planner, device and transfers, no cache around them."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynchicache.controller.executor import Executor
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import ClosedError
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.ports import AsyncioPort
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import LocalTransfers
from asynchicache.tree.node import FULL_HOST, RESIDENT, Node
from asynchicache.types import WritePolicy
from controller.simulation import Simulation

SLOTS = {"kv": (16, 16)}
PROMPT = [1, 2, 3, 4]


class Rig:
    """An executor, and a planner whose requests are computed by hand."""

    def __init__(self, executor: Executor, device: EmulatedDevice, sim: Simulation) -> None:
        self.executor, self.device, self.sim = executor, device, sim

    def published(self, tokens: list[int]) -> Node:
        """The end of a path that is on the device only."""
        sequence = self.sim.open(tokens)
        self.sim.load(sequence)
        assert self.sim.compute(sequence, len(tokens))
        node = sequence.lease.node
        self.sim.close(sequence)
        return node

    def backup(self, node: Node) -> None:
        assert self.executor.run(self.sim.planner.backups.backup(node)) is not None


@asynccontextmanager
async def opened() -> AsyncIterator[Rig]:
    sim = Simulation(random.Random(0), states=False, slots=SLOTS, policy=WritePolicy.WRITE_BACK)
    port, device = AsyncioPort(threads=1), EmulatedDevice(ThreadDriver())
    reactor = CompletionReactor(port, sweep_seconds=0.01)
    memories = {
        pool.name: PoolMemory(
            DevicePool(pool, sim.spec.page_size, 16), HostPool(pool, sim.spec.page_size, 16, pin=False)
        )
        for pool in sim.spec.pools
    }
    transfers = LocalTransfers(device, memories, sim.spec.layers, port, reactor)
    tasks = OwnedTasks()
    await tasks.ready()
    try:
        yield Rig(Executor(sim.planner, device, reactor, transfers, tasks), device, sim)
    finally:
        await tasks.aclose()
        await transfers.aclose(10)
        await reactor.aclose(10)
        device.close()
        for memory in memories.values():
            memory.host.close()
        await port.aclose()


@pytest.mark.asyncio
async def test_a_backup_ends_in_the_tree_and_storage_is_next() -> None:
    async with opened() as rig:
        told: list[tuple[Node, int | None]] = []
        rig.executor.on_backed_up = lambda node, period: told.append((node, period))
        node = rig.published(PROMPT)
        period = rig.sim.planner.activity.period
        rig.backup(node)
        assert (rig.executor.in_flight(), len(rig.executor.copies)) == (1, 1)
        await rig.executor.settled()
        assert node.residency[FULL_HOST] == RESIDENT
        assert told == [(node, period)]
        assert (rig.executor.in_flight(), rig.executor.copies_failed) == (0, 0)


@pytest.mark.asyncio
async def test_nothing_follows_once_it_is_stopped() -> None:
    async with opened() as rig:
        told: list[Node] = []
        rig.executor.on_backed_up = lambda node, period: told.append(node)
        rig.backup(rig.published(PROMPT))
        rig.executor.stop()
        with pytest.raises(ClosedError, match="not all that was in flight has ended"):
            await rig.executor.idle()
        while rig.executor.in_flight():
            await rig.executor.next_progress()
        assert told == []


@pytest.mark.asyncio
async def test_a_copy_waits_for_the_stream_that_wrote_its_source() -> None:
    async with opened() as rig:
        gate, stream = threading.Event(), rig.device.stream("compute")
        stream.launch(gate.wait)
        node = rig.published(PROMPT)
        rig.executor.order_after(stream)
        rig.backup(node)
        reached: list[BaseException | None] = []
        rig.executor.when_reached(stream, reached.append)
        for _ in range(20):
            await rig.executor.checkpoint()
        assert (rig.executor.in_flight(), reached) == (2, [])
        gate.set()
        await rig.executor.settled()
        assert reached == [None]
        assert node.residency[FULL_HOST] == RESIDENT


@pytest.mark.asyncio
async def test_settled_waits_for_what_follows_and_not_for_what_begins_later() -> None:
    async with opened() as rig:
        executor, ended = rig.executor, []
        first, other = asyncio.Event(), asyncio.Event()

        async def follows() -> None:
            ended.append("follows")

        async def call(period: int) -> None:
            await first.wait()
            executor.call(follows(), period)

        async def later() -> None:
            await other.wait()

        executor.call(call(rig.sim.planner.activity.period))
        waiting = asyncio.ensure_future(executor.settled())
        await executor.checkpoint()
        executor.call(later())
        assert len(executor.calls) == 2
        first.set()
        await waiting
        assert ended == ["follows"]
        assert executor.in_flight() == 1, "the later call still runs"
        other.set()
        await executor.idle()
        assert not executor.calls


@pytest.mark.asyncio
async def test_a_late_call_is_not_waited_for_and_wakes_who_waits_when_it_ends() -> None:
    async with opened() as rig:
        lets_go = asyncio.Event()

        async def late() -> None:
            await lets_go.wait()

        rig.executor.call_late(late())
        await rig.executor.settled()
        await rig.executor.idle()
        waiting = asyncio.ensure_future(rig.executor.next_progress())
        await rig.executor.checkpoint()
        assert not waiting.done()
        lets_go.set()
        await waiting


@pytest.mark.asyncio
async def test_what_lacked_room_on_the_host_is_backed_up_when_something_is_given_back() -> None:
    async with opened() as rig:
        node, free = rig.published(PROMPT), rig.sim.planner.inventory.free[FULL_HOST]
        held = free.allocate(16)
        assert rig.executor.run(rig.sim.planner.backups.backup(node)) is None
        free.release(held)
        rig.executor.notify()
        await rig.executor.settled()
        assert node.residency[FULL_HOST] == RESIDENT


@pytest.mark.asyncio
async def test_busy_is_counted_and_a_closed_executor_refuses() -> None:
    async with opened() as rig:
        with rig.executor.busy():
            assert rig.executor.in_flight() == 1
        assert rig.executor.in_flight() == 0
        rig.executor.close()
        with pytest.raises(ClosedError):
            await rig.executor.checkpoint()
