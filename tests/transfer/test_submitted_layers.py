"""Forwards that begin on the first layers of a load while the others are still being enqueued."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from asynchicache.errors import RequestStateError, TransferError, UsageError
from asynchicache.transfer.copies import PageCopier
from asynchicache.transfer.graph_fences import GraphFences
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import LayerStatus
from turns import turns

pytestmark = pytest.mark.asyncio

Build = Callable[..., CacheOperation]
LAYERS = 6
PATIENCE = 30.0


class HeldCopies:
    """Lets the submit thread enqueue one group for each `permit`; fails at the group `broken`."""

    def __init__(self) -> None:
        self.broken: int | None = None
        self.stopped = threading.Event()  # the thread that enqueues has come to where it needs a permit
        self._permits = threading.Semaphore(0)
        self._enqueued = 0

    def permit(self, groups: int = 1) -> None:
        self._permits.release(groups)

    def take(self) -> None:
        self.stopped.set()
        self._permits.acquire()
        self._enqueued += 1
        if self.broken == self._enqueued - 1:
            raise ZeroDivisionError("a bug in the copies")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    held, enqueue = HeldCopies(), PageCopier.enqueue

    def enqueue_held(*args) -> None:
        held.take()
        enqueue(*args)

    monkeypatch.setattr(PageCopier, "enqueue", enqueue_held)
    return held


@contextmanager
def released(held: HeldCopies) -> Iterator[None]:
    """However the block ends, let the transfers go, which else could not be closed."""
    try:
        yield
    finally:
        held.permit(1000)


def at_once(waiting) -> bool:
    """Whether a coroutine returns without giving way to the loop."""
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


def load_all(rig, operation: Build):
    """A load whose layers 0 to 4 are a group each; layer 5 comes with layer 4."""
    return rig.transfers.submit(operation(Direction.LOAD, kv=([2], [7]), mamba=([0], [0])), done=rig.done)


async def test_the_first_layers_can_be_waited_for_while_others_are_being_enqueued(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig() as rig:
        with released(held):
            compute, ticket = rig.device.stream("compute"), load_all(rig, operation)
            for layer in range(4):
                held.permit()
                await ticket.submitted(layer)
                ticket.fence(layer).wait_on(compute)
                with pytest.raises(RequestStateError, match=rf"await Ticket.submitted\({layer + 1}\)"):
                    ticket.fence(layer + 1).wait_on(compute)
                assert ticket.status(layer + 1) is LayerStatus.PENDING
            await ticket.layer(3)  # it has landed, and is told
            assert not ticket.done
            held.permit()
            await ticket.submitted(5)
        await ticket
        assert rig.outcomes == [None]


async def test_what_is_enqueued_is_answered_without_a_turn_of_the_loop(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            assert not at_once(ticket.submitted(0))
            held.permit(2)
            await ticket.submitted(1)
            assert at_once(ticket.submitted(0))
            assert at_once(ticket.submitted(1))
            assert not at_once(ticket.submitted(2))
        await ticket
        assert all(at_once(ticket.submitted(layer)) for layer in range(LAYERS))
        assert not at_once(ticket.submitted())  # always lets others run, and be cancelled


async def test_each_waiter_is_woken_by_its_own_layer(open_rig, operation: Build, held: HeldCopies) -> None:
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            layers = (0, 1, 1, 4, 5, None)
            waiting = [asyncio.ensure_future(ticket.submitted(layer)) for layer in layers]
            await turns()
            assert not any(task.done() for task in waiting)
            held.permit(2)
            await asyncio.gather(*waiting[:3])
            await turns()
            assert not any(task.done() for task in waiting[3:])
            held.permit(3)
            await asyncio.gather(*waiting)
        await ticket


async def test_a_cancelled_waiter_leaves_the_others_waiting(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            held.permit()
            await ticket.submitted(0)
            waiting = [asyncio.ensure_future(ticket.submitted(3)) for _ in range(2)]
            await turns()
            waiting[0].cancel()
            await asyncio.wait(waiting[:1])
            assert waiting[0].cancelled()
            held.permit(3)
            await waiting[1]
        await ticket
        assert rig.outcomes == [None]


async def test_layers_that_cannot_be_enqueued_fail_those_who_wait_for_them_alone(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    held.broken = 2
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            held.permit(2)
            await ticket.submitted(1)
            waiting = [asyncio.ensure_future(ticket.submitted(layer)) for layer in (2, 5, None)]
            await turns()
            assert not any(task.done() for task in waiting)
            held.permit()
            for task in waiting:
                with pytest.raises(TransferError, match="not submitted: a bug in the copies"):
                    await task
            await ticket.submitted(1)
        with pytest.raises(TransferError, match="a bug in the copies"):
            await ticket
        with pytest.raises(TransferError, match="a bug in the copies"):
            await ticket.submitted(2)
        for layer in range(LAYERS):
            ticket.fence(layer).wait_on(rig.device.stream("compute"))  # lets through
        assert [type(error.__cause__) for error in rig.outcomes] == [ZeroDivisionError]


async def test_a_waiter_is_told_when_transfers_give_up(open_rig, operation: Build, held: HeldCopies) -> None:
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            held.permit()
            await ticket.submitted(0)
            waiting = asyncio.ensure_future(ticket.submitted(2))
            fence = ticket.host_fence(2)
            await turns()
            assert not fence.wait_on(rig.device.stream("compute"), 0)
            assert await rig.transfers.aclose(0) == 1
            with pytest.raises(TransferError, match="given up"):
                await waiting
            await ticket.submitted(0)
            assert fence.wait_on(rig.device.stream("compute"), 0)  # lets through


async def test_a_reader_waits_for_the_layers_that_others_bring(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig() as rig:
        with released(held):
            load_all(rig, operation)
            reader = rig.transfers.submit(operation(Direction.LOAD), reads=[("kv", [7])], done=lambda _: None)
            held.permit(2)
            await reader.submitted(1)
            waiting = asyncio.ensure_future(reader.submitted(2))
            await turns()
            assert not waiting.done()
            held.permit()
            await waiting
        await reader


async def test_layers_that_are_not_there_or_need_nothing(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        nothing = rig.transfers.submit(operation(Direction.LOAD), done=rig.done)
        assert at_once(nothing.submitted(5))
        assert nothing.host_fence(5).wait_on(rig.device.stream("compute"))
        for layer in (-1, 6, "0", 1.5, True):
            for verb in (nothing.submitted, nothing.layer):
                with pytest.raises(UsageError, match=f"layer {layer!r} is not within 0 to 5"):
                    await verb(layer)  # type: ignore[arg-type]
            for fence in (nothing.fence, nothing.host_fence):
                with pytest.raises(UsageError, match=f"layer {layer!r} is not within 0 to 5"):
                    fence(layer)  # type: ignore[operator]
        assert nothing.fence(np.int64(5)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("driver", ["inline", "seeded"])
async def test_transfers_that_enqueue_on_the_loop_have_all_layers_at_once(
    open_rig, operation: Build, driver: str
) -> None:
    async with open_rig(driver) as rig:
        ticket = load_all(rig, operation)
        assert ticket.ok
        assert not ticket.done
        await asyncio.sleep(0)  # the end of the tick, in which all of it is told
        assert at_once(ticket._submission.transfers[0].settled.wait())
        await ticket.submitted(0)
        assert all(at_once(ticket.submitted(layer)) for layer in range(LAYERS))
        await ticket


async def test_a_graph_is_armed_once_all_its_layers_are_enqueued(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig() as rig:
        with released(held):
            fences, ticket = GraphFences(rig.device, LAYERS), load_all(rig, operation)
            held.permit(2)
            await ticket.submitted(1)
            with pytest.raises(RequestStateError, match="layer 2 is not submitted"):
                fences.arm(ticket)
            held.permit(3)
            await ticket.submitted()
            fences.arm(ticket)
        await ticket


# Threads of serving engines, which are not the loop's.


class Forward:
    """A forward in a thread of its own, that knows nothing of the loop."""

    def __init__(self, rig, ticket, timeout: float | None = PATIENCE) -> None:
        self.answers: list[bool] = []
        self.seen: dict[int, torch.Tensor] = {}
        self.launched = threading.Event()
        self._keys = rig.memories["kv"].device.items("keys")
        self._compute, self._end = rig.device.stream("compute"), rig.device.event()
        self._thread = threading.Thread(target=self._run, args=(ticket, timeout))
        self._thread.start()

    def _run(self, ticket, timeout: float | None) -> None:
        for local, layer in enumerate((1, 2, 4)):
            self.answers.append(ticket.host_fence(layer).wait_on(self._compute, timeout))
            self._compute.launch(lambda local=local: self.seen.update({local: self._keys[local, 7].clone()}))
        self._compute.record(self._end)
        self.launched.set()
        self._end.synchronize()

    def join(self) -> None:
        """Wait for the thread, with the loop standing still."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


async def test_a_thread_follows_the_enqueueing_while_the_loop_stands_still(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig("stepped") as rig:
        with released(held):
            wanted = rig.memories["kv"].host.items("keys")[:, 2, 0].clone()
            ticket = load_all(rig, operation)
            forward = Forward(rig, ticket)
            await asyncio.sleep(0)  # the end of the tick: the submit thread has it now
            assert held.stopped.wait(PATIENCE)
            assert forward.answers == []
            held.permit(LAYERS)
            assert forward.launched.wait(PATIENCE)
            assert forward.seen == {}
            rig.device.step(LAYERS)
            forward.join()
        assert forward.answers == [True] * 3
        assert all(torch.equal(forward.seen[local], wanted[local]) for local in range(3))
        await ticket


async def test_a_thread_that_waits_in_vain_for_the_enqueueing_gets_its_timeout(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            forward = Forward(rig, ticket, 0)
            forward.join()
            assert forward.answers == [False] * 3
        await ticket


async def test_what_cannot_be_enqueued_lets_threads_through(
    open_rig, operation: Build, held: HeldCopies
) -> None:
    held.broken = 2
    async with open_rig() as rig:
        with released(held):
            ticket = load_all(rig, operation)
            forward = Forward(rig, ticket)
            await asyncio.sleep(0)
            held.permit(LAYERS)
            forward.join()
            assert forward.answers == [True] * 3
        with pytest.raises(TransferError, match="a bug in the copies"):
            await ticket
