"""Transfers move the right bytes, merge what one tick asks for, and tell layer by layer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from asynchicache.errors import ConfigError, RequestStateError, UsageError
from asynchicache.ports import AsyncioPort
from asynchicache.streams.drivers import InlineDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import PageCopier
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import LayerStatus
from asynchicache.types import Tier

Build = Callable[..., CacheOperation]
PATIENCE = 30.0
DRIVERS = ["thread", "inline", "seeded"]


def _equal(found, expected) -> bool:
    return all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("group_bytes", [1, 200, 1 << 20])
async def test_bytes_survive_the_way_down_and_up(
    open_rig, operation: Build, driver: str, group_bytes: int
) -> None:
    # scattered, contiguous and single slots; every byte is random, so NaNs are among them
    down = {"kv": ([0, 1, 2, 7, 5], [4, 5, 6, 0, 9]), "dsa": ([0, 1, 2, 7, 5], [4, 5, 6, 0, 9])}
    up = {pool: (slots, [11, 3, 4, 9, 10]) for pool, (_, slots) in down.items()}
    async with open_rig(driver, seed=3, group_bytes=group_bytes) as rig:
        before = rig.contents()
        await rig.transfers.submit(operation(Direction.BACKUP, **down, mamba=([4, 1], [0, 3])), done=rig.done)
        await rig.transfers.submit(operation(Direction.LOAD, **up, mamba=([3, 0], [2, 3])), done=rig.done)
        after = rig.contents()

    assert rig.outcomes == [None, None]
    for (pool, name, tier), items in after.items():
        if tier is Tier.DEVICE:
            sources, destinations = (
                ([0, 1, 2, 7, 5], [11, 3, 4, 9, 10]) if pool != "mamba" else ([1, 4], [2, 3])
            )
            original = before[pool, name, tier]
            assert torch.equal(items[:, destinations], original[:, sources])
            rest = [slot for slot in range(items.shape[1]) if slot not in destinations]
            assert torch.equal(items[:, rest], original[:, rest])


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("direction", list(Direction))
async def test_every_direction_moves_what_copies_of_single_pages_move(
    open_rig, operation: Build, carry_out, driver: str, direction: Direction
) -> None:
    wish = operation(direction, kv=([3, 4, 0, 1], [5, 6, 7, 9]), mamba=([0, 1], [2, 3]))
    async with open_rig(driver) as rig:
        expected = rig.contents()
        carry_out(expected, wish)
        await rig.transfers.submit(wish, done=rig.done)
        assert _equal(rig.contents(), expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", DRIVERS)
async def test_operations_of_one_tick_and_direction_are_one_launch(
    open_rig, operation: Build, carry_out, driver: str
) -> None:
    wishes = [operation(Direction.LOAD, kv=([slot], [slot + 2])) for slot in range(8)]
    wishes.append(operation(Direction.BACKUP, mamba=([0], [1])))
    async with open_rig(driver) as rig:
        expected = rig.contents()
        tickets = [rig.transfers.submit(wish, done=rig.done) for wish in wishes]
        for wish, ticket in zip(wishes, tickets, strict=True):
            carry_out(expected, wish)
            await ticket
        statistics = rig.transfers.statistics()
        assert _equal(rig.contents(), expected)

    assert (statistics.operations, statistics.launches, statistics.in_flight) == (9, 2, 0)
    assert statistics.nbytes == {
        Direction.LOAD: 8 * sum(memory_bytes("kv", rig)),
        Direction.BACKUP: sum(memory_bytes("mamba", rig)),
        Direction.FORK: 0,
    }
    assert rig.outcomes == [None] * 9


def memory_bytes(pool: str, rig) -> list[int]:
    """Bytes of one slot, by tensor."""
    layout = rig.memories[pool].host.layout
    return [len(tensor.spec.layers) * tensor.item_bytes for tensor in layout.tensors.values()]


@pytest.mark.asyncio
async def test_what_is_submitted_counts_before_the_tick_ends(open_rig, operation: Build) -> None:
    wishes = [operation(Direction.LOAD, kv=([slot], [slot])) for slot in range(3)]
    async with open_rig() as rig:
        assert (rig.transfers.in_flight(), rig.transfers.statistics().in_flight) == ([], 0)
        tickets = [rig.transfers.submit(wish, done=rig.done) for wish in wishes[:2]]
        assert rig.transfers.in_flight() == wishes[:2]
        tickets.append(rig.transfers.submit(wishes[2], done=rig.done))
        statistics = rig.transfers.statistics()
        assert (statistics.operations, statistics.in_flight) == (3, 3)
        for ticket in tickets:
            await ticket
        statistics = rig.transfers.statistics()
        assert (statistics.operations, statistics.in_flight, rig.transfers.in_flight()) == (3, 0, [])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("driver", "group_bytes", "expected"),
    [
        ("thread", 1, ["group", "yield", "group", "group"]),
        ("thread", 1 << 30, ["group", "yield", "group"]),  # the first group closes at the first bytes
        ("inline", 1, ["group", "group", "group"]),
    ],
)
async def test_the_first_group_may_begin_before_the_others_are_enqueued(
    open_rig, operation: Build, monkeypatch, driver: str, group_bytes: int, expected: list[str]
) -> None:
    steps: list[str] = []
    enqueue, yield_to_streams = PageCopier.enqueue, ThreadDriver.yield_to_streams
    monkeypatch.setattr(PageCopier, "enqueue", lambda *args: (steps.append("group"), enqueue(*args)))
    monkeypatch.setattr(
        ThreadDriver, "yield_to_streams", lambda one: (steps.append("yield"), yield_to_streams(one))
    )
    async with open_rig(driver, group_bytes=group_bytes) as rig:
        await rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        assert steps == expected
        await rig.transfers.submit(operation(Direction.BACKUP, kv=([0], [0])), done=rig.done)

    assert steps == [*expected, "group"]  # of one group, nobody waits for a part


@pytest.mark.asyncio
async def test_operations_of_later_ticks_are_launches_of_their_own(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        for slot in range(3):
            await rig.transfers.submit(operation(Direction.LOAD, kv=([slot], [slot])), done=rig.done)
        assert rig.transfers.statistics().launches == 3


@pytest.mark.asyncio
async def test_nothing_to_move_is_done_at_once(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([], [])), done=rig.done, reads=[("kv", [0])]
        )

        assert rig.outcomes == [None]
        assert ticket.done
        assert ticket.ok
        assert ticket.status(0) is LayerStatus.COMPLETE
        ticket.fence(0).wait_on(rig.device.stream("compute"))
        await ticket.submitted()
        await ticket
        assert rig.transfers.statistics().launches == 0


@pytest.mark.asyncio
async def test_layers_land_one_by_one(open_rig, operation: Build) -> None:
    async with open_rig("stepped") as rig:
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0]), mamba=([0], [0])), done=rig.done
        )
        assert ticket.status(0) is LayerStatus.PENDING
        await ticket.submitted()
        assert {ticket.status(layer) for layer in range(6)} == {LayerStatus.SUBMITTED}

        for layer in range(5):  # layer 5 has no cache; it comes with layer 4
            assert ticket.status(layer) is LayerStatus.SUBMITTED
            rig.device.step()
            await ticket.layer(layer)
            assert ticket.status(layer) is LayerStatus.COMPLETE
            assert ticket.done is (layer == 4)
        assert ticket.status(5) is LayerStatus.COMPLETE
        await ticket


@pytest.mark.asyncio
async def test_a_transfer_is_one_completion_and_one_for_each_layer_asked_for(
    open_rig, operation: Build
) -> None:
    async with open_rig("stepped") as rig:

        async def tracked(*layers: int, early: int) -> int:
            """How many, where some layers are waited for, twice each; one before it is enqueued."""
            before = rig.reactor.statistics().tracked
            wish = operation(Direction.LOAD, kv=([0], [0]), mamba=([0], [0]))
            ticket = rig.transfers.submit(wish, done=rig.done)
            waiting = [asyncio.create_task(ticket.layer(layer)) for layer in layers[:early] * 2]
            await ticket.submitted()
            waiting += [asyncio.create_task(ticket.layer(layer)) for layer in layers[early:] * 2]
            for _ in range(3):
                await asyncio.sleep(0)
            for layer in range(5):
                rig.device.step()
                assert await asyncio.to_thread(ticket.host_fence(layer).wait, PATIENCE)
            await asyncio.gather(ticket, *waiting)
            return rig.reactor.statistics().tracked - before

        assert await tracked(early=0) == 1
        assert await tracked(1, 3, early=0) == 3
        assert await tracked(0, 2, 5, early=0) == 3, "layer 5 comes with the last group"
        assert await tracked(1, 3, early=2) in (3, 4, 5), "asked for by both threads at once: told twice"
        statistics = rig.reactor.statistics()
        assert statistics.completed == statistics.tracked
        assert rig.outcomes == [None] * 4


@pytest.mark.asyncio
async def test_a_layer_that_is_asked_for_late_is_told_before_the_last(open_rig, operation: Build) -> None:
    async with open_rig("stepped") as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
        await ticket.submitted()
        waiting = asyncio.create_task(ticket.layer(0))
        await asyncio.sleep(0)
        rig.device.step()
        await waiting
        assert ticket.status(0) is LayerStatus.COMPLETE
        assert not ticket.done
        assert rig.outcomes == []
        rig.device.step(2)
        await ticket


@pytest.mark.asyncio
async def test_who_waits_for_a_layer_that_has_landed_unseen_is_told_at_once(
    open_rig, operation: Build
) -> None:
    async with open_rig("stepped") as rig:
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0]), mamba=([0], [0])), done=rig.done
        )
        await ticket.submitted()
        rig.device.step(2)
        assert await asyncio.to_thread(ticket.host_fence(1).wait, PATIENCE)
        waiting = asyncio.create_task(ticket.layer(1))
        for _ in range(3):  # turns of the loop; the sweeper takes longer
            await asyncio.sleep(0)
        assert waiting.done()
        assert not ticket.done
        rig.device.step(3)
        await ticket


@pytest.mark.asyncio
async def test_an_operation_is_done_with_its_own_last_layer(open_rig, operation: Build) -> None:
    async with open_rig("stepped") as rig:
        told: list[str] = []
        early = rig.transfers.submit(
            operation(Direction.LOAD, mamba=([0], [0])), done=lambda _: told.append("mamba")
        )
        late = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), done=lambda _: told.append("kv")
        )
        rig.device.step(4)  # layers 0 to 3
        await early

        assert told == ["mamba"]
        assert early.done
        assert not late.done
        assert rig.transfers.statistics().in_flight == 1
        rig.device.step()
        await late
        assert told == ["mamba", "kv"]


@pytest.mark.asyncio
async def test_done_is_called_before_waiters_run_and_without_any(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        told: list[str] = []
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([0], [0])), done=lambda _: told.append("done")
        )
        await ticket
        told.append("waiter")
        rig.transfers.submit(operation(Direction.LOAD, kv=([1], [1])), done=lambda _: told.append("unheard"))

    assert told == ["done", "waiter", "unheard"]


@pytest.mark.asyncio
async def test_what_done_raises_harms_nobody_else(open_rig, operation: Build, caplog) -> None:
    def fail(error: BaseException | None) -> None:
        raise ZeroDivisionError("mine")

    async with open_rig() as rig:
        first = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=fail)
        second = rig.transfers.submit(operation(Direction.LOAD, kv=([1], [1])), done=rig.done)
        await asyncio.gather(_wait(first), _wait(second))

    assert rig.outcomes == [None]
    assert "could not be handled" in caplog.text


async def _wait(ticket) -> None:
    await ticket


@pytest.mark.asyncio
async def test_a_fence_orders_a_stream_behind_its_layer(open_rig, operation: Build) -> None:
    async with open_rig("stepped") as rig:
        keys = rig.memories["kv"].device.items("keys")
        wanted = rig.memories["kv"].host.items("keys")[:, 2, 0].clone()
        seen: dict[int, torch.Tensor] = {}
        compute = rig.device.stream("compute")
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([2], [7])), done=rig.done)
        await ticket.submitted()
        for local, layer in enumerate((1, 2, 4)):
            ticket.fence(layer).wait_on(compute)
            compute.launch(lambda local=local: seen.update({local: keys[local, 7].clone()}))
        end = rig.device.event()
        compute.record(end)

        assert not end.query()
        rig.device.step(3)
        await asyncio.to_thread(end.synchronize)

        assert all(torch.equal(seen[local], wanted[local]) for local in range(3))


@pytest.mark.asyncio
async def test_a_fence_of_what_is_not_submitted_is_refused(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([2], [7])), done=rig.done)

        with pytest.raises(RequestStateError, match="layer 3 is not submitted"):
            ticket.fence(3).wait_on(rig.device.stream("compute"))
        with pytest.raises(UsageError, match="layer 6"):
            ticket.fence(6)
        with pytest.raises(UsageError, match="layer -1"):
            ticket.status(-1)


@pytest.mark.asyncio
async def test_a_cancelled_waiter_leaves_the_transfer_and_the_others_alone(
    open_rig, operation: Build
) -> None:
    async with open_rig() as rig:
        gate = rig.gate()
        ticket = rig.transfers.submit(
            operation(Direction.LOAD, kv=([2], [7])), after=[gate.event], done=rig.done
        )
        waiters = [asyncio.ensure_future(_wait(ticket)) for _ in range(3)]
        await ticket.submitted()
        waiters[1].cancel()
        await asyncio.wait([waiters[1]])

        assert waiters[1].cancelled()
        assert rig.outcomes == []
        gate.open()
        await asyncio.gather(waiters[0], waiters[2])
        assert rig.outcomes == [None]


@pytest.mark.asyncio
async def test_misuse_is_refused_before_anything_is_enqueued(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        submit = rig.transfers.submit
        with pytest.raises(UsageError, match="host slot 10"):
            submit(operation(Direction.LOAD, kv=([10], [0])), done=rig.done)
        with pytest.raises(UsageError, match="'swa'"):
            submit(operation(Direction.LOAD, swa=([0], [0])), done=rig.done)
        with pytest.raises(UsageError, match="device slot 12"):
            submit(operation(Direction.LOAD, kv=([0], [0])), reads=[("kv", [12])], done=rig.done)
        for slots in ([1.5], ["a"], [2**70], "ab", b"abc"):
            with pytest.raises(UsageError, match="not a run of 64-bit integers"):
                submit(operation(Direction.LOAD, kv=([0], [0])), reads=[("kv", slots)], done=rig.done)
            with pytest.raises(UsageError, match="not a run of 64-bit integers"):
                operation(Direction.LOAD, kv=(slots, [0]))
        with pytest.raises(RequestStateError, match="never recorded"):
            submit(operation(Direction.LOAD, kv=([0], [0])), after=[rig.device.event()], done=rig.done)
        elsewhere = EmulatedDevice(InlineDriver()).event()
        with pytest.raises(UsageError, match="is not an event of device cpu"):
            submit(operation(Direction.LOAD, kv=([0], [0])), after=[elsewhere], done=rig.done)
        statistics = rig.transfers.statistics()

    assert (statistics.operations, statistics.launches) == (0, 0)
    assert rig.outcomes == []


@pytest.mark.asyncio
async def test_pools_of_another_device_are_refused(open_rig) -> None:
    async with open_rig() as rig:
        elsewhere = EmulatedDevice(InlineDriver(), name="cuda:7")
        with pytest.raises(ConfigError, match="pool 'kv' is on cpu, the streams are cuda:7's"):
            LocalTransfers(elsewhere, rig.memories, 6, AsyncioPort(threads=1), rig.reactor)


@pytest.mark.asyncio
async def test_what_has_ended_is_freed_without_a_garbage_collection(open_rig, operation: Build) -> None:
    async with open_rig("inline", group_bytes=1) as rig:
        gc.disable()
        try:
            ticket = rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0])), done=rig.done)
            await ticket
            gone = weakref.ref(ticket)
            del ticket
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.asyncio
async def test_a_ticket_that_is_kept_holds_on_to_nothing_that_only_its_moving_needed(
    open_rig, operation: Build
) -> None:
    async with open_rig() as rig:
        gate, told = rig.gate(), Told()
        kept = [
            rig.transfers.submit(
                operation(Direction.LOAD, kv=([slot], [slot])), done=told, reads=[("kv", [5])]
            )
            for slot in range(2)
        ]
        late = rig.transfers.submit(
            operation(Direction.BACKUP, mamba=([0], [0])), after=[gate.event], done=rig.done
        )
        for ticket in kept:
            await ticket
        gone = weakref.ref(told)
        del told
        assert [ticket._submission.operation.empty for ticket in kept] == [True, True]
        assert (kept[0]._submission.reads, kept[0]._submission.after, gone()) == ((), (), None)
        assert rig.transfers.in_flight() == [late._submission.operation]
        gate.open()
        await late
        assert late._submission.tick.operations == []
        assert rig.transfers.in_flight() == []


class Told:
    """Called when an operation has ended."""

    def __call__(self, error: BaseException | None) -> None:
        assert error is None


@pytest.mark.asyncio
async def test_what_moves_nothing_has_to_name_pools_all_the_same(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        for reads in ([], [("kv", [0])]):
            with pytest.raises(UsageError, match="'swa' is none of"):
                rig.transfers.submit(operation(Direction.LOAD, swa=([], [])), done=rig.done, reads=reads)
        with pytest.raises(UsageError, match="'swa' is none of"):
            rig.transfers.submit(operation(Direction.LOAD, kv=([0], [0]), swa=([], [])), done=rig.done)

    assert rig.outcomes == []
