"""A transfer that cannot be carried out is told to everyone, and nobody hangs."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asynchicache.errors import ClosedError, CopyEndedError, DeviceError, TransferError
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer import schedule
from asynchicache.transfer.copies import PlanCopies
from asynchicache.transfer.plan import CacheOperation, Direction, plan_of
from asynchicache.transfer.record import LayerStatus, Submission, Tick
from asynchicache.transfer.schedule import HazardTable
from asynchicache.transfer.ticket import Ticket

Build = Callable[..., CacheOperation]


async def _break(device: EmulatedDevice) -> None:
    def work() -> None:
        raise ZeroDivisionError("a bad kernel")

    stream, end = device.stream("bad"), device.event()
    stream.launch(work)
    stream.record(end)
    with pytest.raises(DeviceError):
        await asyncio.to_thread(end.synchronize)


@pytest.mark.asyncio
async def test_a_device_error_fails_everything_in_flight_and_after(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        gate = rig.gate()
        tickets = [
            rig.transfers.submit(
                operation(Direction.LOAD, kv=([slot], [slot])), after=[gate.event], done=rig.done
            )
            for slot in range(2)
        ]
        await tickets[0].submitted()
        await _break(rig.device)
        gate.open()
        for ticket in tickets:
            with pytest.raises(TransferError, match="a bad kernel"):
                await ticket
            assert ticket.done
            assert not ticket.ok
            assert {ticket.status(layer) for layer in range(6)} == {LayerStatus.FAILED}
            ticket.fence(0).wait_on(rig.device.stream("compute"))  # lets through
        with pytest.raises(TransferError):
            await rig.transfers.submit(operation(Direction.BACKUP, mamba=([0], [0])), done=rig.done)
        statistics = rig.transfers.statistics()

    assert [type(error) for error in rig.outcomes] == [DeviceError] * 3
    assert (statistics.failed, statistics.in_flight) == (2, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["thread", "inline", "seeded"])
async def test_what_cannot_be_enqueued_fails_and_so_does_who_reads_it(
    open_rig, operation: Build, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(driver) as rig:
        prepare = rig.transfers._copier.prepare

        def broken(plan) -> PlanCopies:
            if plan.direction is Direction.LOAD:
                monkeypatch.undo()  # the next one works
                raise MemoryError("no room for a list of copies")
            return prepare(plan)

        monkeypatch.setattr(rig.transfers._copier, "prepare", broken)
        load = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        backup = rig.transfers.submit(operation(Direction.BACKUP, kv=([0], [1])), done=rig.done)
        apart = rig.transfers.submit(operation(Direction.FORK, kv=([2], [3])), done=lambda _: None)
        with pytest.raises(TransferError, match="was not submitted"):
            await load.submitted()
        with pytest.raises(TransferError, match="no room for a list of copies"):
            await load
        with pytest.raises(TransferError, match="another was to write"):
            await backup.layer(0)
        await apart
        await rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)

    refused, unread, none = rig.outcomes
    assert type(refused) is type(unread) is CopyEndedError, "the device never had them: it goes on"
    assert (type(refused.__cause__), none) == (MemoryError, None)


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["thread", "inline"])
async def test_a_closed_device_or_reactor_fails_transfers(open_rig, operation: Build, driver: str) -> None:
    for close in (lambda rig: rig.reactor.aclose(1), lambda rig: asyncio.to_thread(rig.device.close)):
        async with open_rig(driver) as rig:
            await close(rig)
            with pytest.raises(TransferError, match="closed"):
                await rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)

        assert [type(error) for error in rig.outcomes] == [ClosedError]


@pytest.mark.asyncio
@pytest.mark.parametrize(("refused", "lasting"), [("asynchicache-submit", False), ("stream-", True)])
async def test_where_no_thread_is_to_be_had_everybody_is_told(
    open_rig, operation: Build, refused: str, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def fails(what: Awaitable[None]) -> None:
        with pytest.raises(TransferError, match="can't start new thread"):
            await asyncio.wait_for(what, 30)

    async with open_rig() as rig:
        load = operation(Direction.LOAD, kv=([1], [1]))
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", refuse)
            ticket = rig.transfers.submit(load, done=rig.done)
            await fails(ticket)
        assert len(rig.outcomes) == 1
        later = rig.transfers.submit(load, done=rig.done)
        await (fails(later) if lasting else later)  # a stream that lost its work is a device that failed


@pytest.mark.asyncio
async def test_closing_waits_for_what_is_in_flight(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)

        assert await rig.transfers.aclose(10) == 0

        assert ticket.done
        assert rig.outcomes == [None]
        with pytest.raises(ClosedError):
            rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        assert await rig.transfers.aclose(10) == 0


@pytest.mark.asyncio
async def test_closing_gives_up_at_its_deadline(open_rig, operation: Build, caplog) -> None:
    async with open_rig() as rig:
        gate = rig.gate()
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), after=[gate.event], done=rig.done
        )

        assert await rig.transfers.aclose(0) == 1

        assert [type(error) for error in rig.outcomes] == [TransferError]
        with pytest.raises(TransferError, match="given up"):
            await ticket
        gate.open()

    # The late completion is nobody's any more.
    assert len(rig.outcomes) == 1
    assert ticket.status(0) is LayerStatus.FAILED
    assert caplog.text == ""


@pytest.mark.asyncio
async def test_what_is_planned_only_after_it_was_given_up_is_told_once(
    open_rig, operation: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, carried_out = (threading.Event() for _ in range(3))
    async with open_rig() as rig:
        transfers = rig.transfers
        schedule_tick, run_tick = transfers.scheduler.schedule, transfers._run_tick

        def late(submissions):
            begun.set()
            go_on.wait()
            return schedule_tick(submissions)

        def watched(tick) -> None:
            run_tick(tick)
            carried_out.set()

        monkeypatch.setattr(transfers.scheduler, "schedule", late)
        monkeypatch.setattr(transfers, "_run_tick", watched)
        ticket = transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        await asyncio.to_thread(begun.wait)
        try:
            assert await transfers.aclose(0) == 1
        finally:
            go_on.set()
        await asyncio.to_thread(carried_out.wait)
        with pytest.raises(TransferError, match="given up"):
            await ticket

    assert [type(error) for error in rig.outcomes] == [TransferError]


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", ["thread", "inline"])
@pytest.mark.parametrize("broken", ["merge", "mark"])
async def test_a_tick_that_cannot_be_planned_fails_whole_and_keeps_nobody_waiting(
    open_rig, operation: Build, driver: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its two transfers the second runs out of memory; later ones use the slots of both."""

    async def fails(what: Awaitable[None], why: str) -> None:
        with pytest.raises(TransferError, match=why):
            await asyncio.wait_for(what, 30)

    async with open_rig(driver) as rig:
        room = [True] if broken == "merge" else []  # of a mark, the second comes when both are enqueued

        def refuse(*_: object) -> None:
            if not room:
                raise MemoryError("no room for a plan")
            room.pop()

        def merged(*args: Any) -> Any:
            refuse()
            return plan_of(*args)

        with monkeypatch.context() as exhausted:
            if broken == "merge":
                exhausted.setattr(schedule, "plan_of", merged)
            else:
                mark = HazardTable.mark
                exhausted.setattr(HazardTable, "mark", lambda *args: (refuse(), mark(*args)))
            load = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
            backup = rig.transfers.submit(operation(Direction.BACKUP, kv=([1], [1])), done=rig.done)
            await fails(load, "no room for a plan")
            await fails(backup, "no room for a plan")
        assert [type(error) for error in rig.outcomes] == [MemoryError] * 2
        nothing = CacheOperation(Direction.LOAD, ())
        await asyncio.wait_for(rig.transfers.submit(nothing, reads=[("kv", [0])], done=rig.done).layer(0), 30)
        later = operation(Direction.BACKUP, kv=([0], [2]))
        await asyncio.wait_for(rig.transfers.submit(later, reads=[("kv", [0])], done=rig.done).layer(0), 30)
        assert await rig.transfers.aclose(10) == 0

    assert rig.outcomes[2:] == [None, None]


@pytest.mark.asyncio
@pytest.mark.parametrize("beside", [False, True])
async def test_a_ticket_that_only_reads_is_given_up_too(
    open_rig, operation: Build, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in its tick or beside an operation, behind a thread that is stuck in the driver."""
    begun, go_on = threading.Event(), threading.Event()
    async with open_rig() as rig:
        transfers, run_tick = rig.transfers, rig.transfers._run_tick

        def stuck(tick: Tick) -> None:
            begun.set()
            go_on.wait()
            run_tick(tick)

        monkeypatch.setattr(transfers, "_run_tick", stuck)
        transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        await asyncio.to_thread(begun.wait)
        nothing = CacheOperation(Direction.LOAD, ())
        reader = transfers.submit(nothing, reads=[("kv", [0])], done=lambda _: None)
        if beside:
            transfers.submit(operation(Direction.LOAD, kv=([1], [1])), done=rig.done)
        try:
            assert await transfers.aclose(0) == 1 + beside
            with pytest.raises(TransferError, match="given up"):
                await asyncio.wait_for(reader, 30)
            assert reader.status(0) is LayerStatus.FAILED
            assert reader.host_fence(0).open
        finally:
            go_on.set()


@pytest.mark.asyncio
async def test_a_ticket_of_which_nothing_is_known_is_no_success() -> None:
    tick = Tick(0.0)
    tick.planned.set()

    with pytest.raises(TransferError, match="not known"):
        await Ticket(Submission(tick), 6)


@pytest.mark.asyncio
async def test_failures_that_nobody_waits_for_make_no_noise(open_rig, operation: Build) -> None:
    noise: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    async with open_rig() as rig:
        gate = rig.gate()
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), after=[gate.event], done=rig.done
        )
        waiter = asyncio.ensure_future(ticket.layer(0))
        await ticket.submitted()
        waiter.cancel()
        await _break(rig.device)
        gate.open()
        await rig.transfers.aclose(10)
        del ticket, waiter
    gc.collect()

    assert [type(error) for error in rig.outcomes] == [DeviceError]
    assert noise == []
