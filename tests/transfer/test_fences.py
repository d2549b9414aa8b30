"""Fences for others than streams: captured graphs, and threads that know nothing of the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from asynchicache.errors import DeviceError, RequestStateError, TransferError, UsageError
from asynchicache.transfer.graph_fences import GraphFences
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import LayerStatus, Submission, TransferRecord
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import Tier
from streams.conftest import notify

Build = Callable[..., CacheOperation]
LAYERS = 6
PATIENCE = 30.0


async def reached(device, stream) -> BaseException | None:
    """What is said of `stream` when it has done what is enqueued now."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[BaseException | None] = loop.create_future()
    notify(device, stream, lambda error: loop.call_soon_threadsafe(told.set_result, error))
    return await told


# Graphs.


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["thread", "inline", "seeded"])
async def test_a_captured_forward_reads_what_each_replays_ticket_brings(
    open_rig, operation: Build, driver: str
) -> None:
    async with open_rig(driver) as rig:
        host = rig.contents()["kv", "keys", Tier.HOST]
        keys, seen = rig.memories["kv"].device.items("keys"), torch.zeros(3, 90, dtype=torch.uint8)
        compute, fences = rig.device.stream("compute"), GraphFences(rig.device, LAYERS)
        with rig.device.capture(compute) as graph:
            for local, layer in enumerate((1, 2, 4)):
                fences.wait_on(layer, compute)
                compute.launch(lambda local=local: seen[local].copy_(keys[local, 7]))
        for slot in range(4):
            ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([slot], [7])), done=rig.done)
            await ticket.submitted()
            fences.arm(ticket)
            graph.replay()
            assert await reached(rig.device, compute) is None
            assert torch.equal(seen, host[:, slot])


@pytest.mark.asyncio
async def test_a_replay_waits_for_its_layers(open_rig, operation: Build) -> None:
    async with open_rig("stepped") as rig:
        compute, fences, ran = rig.device.stream("compute"), GraphFences(rig.device, LAYERS), []
        with rig.device.capture(compute) as graph:
            for layer in (1, 4):
                fences.wait_on(layer, compute)
                compute.launch(lambda layer=layer: ran.append(layer))
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        await ticket.submitted()
        fences.arm(ticket)
        graph.replay()
        end = rig.device.event()
        compute.record(end)
        assert ran == []
        rig.device.step(1)
        await ticket.layer(1)
        assert not end.query()
        assert ran in ([], [1])
        rig.device.step(2)
        await asyncio.to_thread(end.synchronize)
        assert ran == [1, 4]


@pytest.mark.asyncio
async def test_graph_fences_are_armed_with_what_is_submitted(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        fences, compute = GraphFences(rig.device, LAYERS), rig.device.stream("compute")
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        with pytest.raises(RequestStateError, match="layer 0 is not submitted"):
            fences.arm(ticket)
        with pytest.raises(UsageError, match="layer 6 is not within 0 to 5"):
            fences.wait_on(6, compute)
        with pytest.raises(UsageError, match="layer '0' is not within 0 to 5"):
            fences.wait_on("0", compute)


# Threads of serving engines.


class Waiting:
    """A thread that waits for a fence."""

    def __init__(self, fence, timeout: float | None = PATIENCE) -> None:
        self.answer: bool | None = None
        self._thread = threading.Thread(target=self._wait, args=(fence, timeout))
        self._thread.start()

    def _wait(self, fence, timeout: float | None) -> None:
        self.answer = fence.wait(timeout)

    def join(self) -> bool | None:
        """Wait for the thread, with the loop standing still."""
        self._thread.join(PATIENCE)
        return self.answer


@pytest.mark.asyncio
async def test_a_thread_waits_for_a_layer_while_the_loop_stands_still(open_rig, operation: Build) -> None:
    async with open_rig("stepped") as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        early, late = ticket.host_fence(1), ticket.host_fence(4)
        assert not early.open
        waiting = Waiting(early, None), Waiting(late)
        await asyncio.sleep(0)  # the end of the tick: the submit thread has it now
        rig.device.step(1)
        assert waiting[0].join() is True
        assert not late.open
        rig.device.step(2)
        assert waiting[1].join() is True
        assert ticket.status(4) is LayerStatus.COMPLETE
        assert not ticket.done  # the loop does not know yet, and was not needed
        await ticket
        assert early.wait(0)


@pytest.mark.asyncio
async def test_a_thread_that_waits_in_vain_gets_its_timeout(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        gate = rig.gate()
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), after=[gate.event], done=rig.done
        )
        assert Waiting(ticket.host_fence(1), 0.01).join() is False
        await ticket.submitted()
        assert Waiting(ticket.host_fence(1), 0.01).join() is False
        assert Waiting(ticket.host_fence(1), 0).join() is False
        gate.open()
        await ticket
        assert Waiting(ticket.host_fence(1), 0).join() is True


@pytest.mark.asyncio
async def test_a_failed_load_lets_threads_through(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        gate, bad = rig.gate(), rig.device.stream("bad")
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), after=[gate.event], done=rig.done
        )
        await ticket.submitted()
        waiting = Waiting(ticket.host_fence(1))
        bad.launch(lambda: 1 // 0)
        assert waiting.join() is True
        gate.open()
        with pytest.raises(TransferError):
            await ticket
        assert isinstance(rig.outcomes[0], DeviceError)
        assert not ticket.ok
        assert ticket.host_fence(1).open


@pytest.mark.asyncio
async def test_what_was_never_enqueued_lets_threads_through(open_rig, operation: Build, monkeypatch) -> None:
    async with open_rig() as rig:

        def broken(submissions) -> None:
            raise ZeroDivisionError("a bug in the batcher")

        monkeypatch.setattr(rig.transfers.scheduler, "schedule", broken)
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        watcher = rig.transfers.submit(operation(Direction.LOAD), reads=[("kv", [0])], done=lambda _: None)
        for method in (ticket.submitted, lambda: ticket.submitted(0), lambda: ticket.layer(0)):
            with pytest.raises(TransferError, match="a bug in the batcher"):
                await method()
        with pytest.raises(TransferError, match="a bug in the batcher"):
            await watcher
        assert Waiting(ticket.host_fence(1)).join() is True
        assert ticket.status(0) is LayerStatus.FAILED
        assert ticket.done
        assert not ticket.ok
        ticket.fence(0).wait_on(rig.device.stream("compute"))

    assert [type(error) for error in rig.outcomes] == [ZeroDivisionError]


@pytest.mark.asyncio
async def test_a_transfer_without_a_plan_lets_nobody_through_before_it_has_failed(open_rig) -> None:
    async with open_rig() as rig:
        compute, record = (
            rig.device.stream("compute"),
            TransferRecord(0, Direction.LOAD, (), lambda record, index: None),
        )
        ticket = Ticket(Submission(transfers=[record]), LAYERS)

        for method in (ticket.fence(1).wait_on, partial(ticket.fence(1).record, rig.device.event())):
            with pytest.raises(RequestStateError, match="layer 1 is not submitted yet"):
                method(compute)
        assert not ticket.host_fence(1).wait_on(compute, 0)
        assert not ticket.host_fence(1).wait(0)
        assert ticket.ok

        record.fail(ZeroDivisionError("a bug in the planning"))
        ticket.fence(1).wait_on(compute)
        assert ticket.host_fence(1).wait_on(compute, 0)
        assert ticket.host_fence(1).wait(0)
        assert not ticket.ok


@pytest.mark.asyncio
async def test_nothing_to_move_holds_nobody_up(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD), done=rig.done)
        started = time.monotonic()
        assert ticket.host_fence(5).wait(PATIENCE)
        assert time.monotonic() - started < PATIENCE
        with pytest.raises(UsageError, match="layer 6"):
            ticket.host_fence(6)


@pytest.mark.asyncio
async def test_a_host_fence_does_not_block_the_loop(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        compute, gate = rig.device.stream("compute"), rig.gate()
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), after=[gate.event], done=rig.done
        )
        for _ in ("in the turn of its submission", "after that"):
            with pytest.raises(RequestStateError, match="layer 1 would block the loop, whose thread this is"):
                ticket.host_fence(1).wait(PATIENCE)
            assert ticket.host_fence(1).wait(0) is False
            await asyncio.sleep(0)

        await ticket.submitted()
        assert ticket.host_fence(1).wait_on(compute)  # it is enqueued: nothing is to be waited for
        gate.open()
        await ticket
        assert ticket.host_fence(1).wait()


@pytest.mark.asyncio
async def test_a_host_fence_does_not_block_the_loop_until_a_layer_is_enqueued(
    open_rig, operation: Build
) -> None:
    async with open_rig() as rig:
        compute = rig.device.stream("compute")
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)

        assert ticket.host_fence(2).wait_on(compute, 0) is False
        with pytest.raises(RequestStateError, match=r"await Ticket.submitted\(2\) or Ticket.layer\(2\)"):
            ticket.host_fence(2).wait_on(compute)
        await ticket
