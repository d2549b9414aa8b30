"""Copies that touch the same slots run in the order of submission, whatever their direction."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import torch

from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import LayerStatus
from asynchicache.types import PoolTransfer, Tier
from soaking import first

Build = Callable[..., CacheOperation]
DRIVERS = ["thread", "inline", "seeded"]


@pytest.mark.asyncio
async def test_a_load_waits_for_a_backup_that_still_reads_its_slot(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        before = rig.contents()
        gate = rig.gate()
        backup = rig.transfers.submit(
            operation(Direction.BACKUP, kv=([0], [9])), after=[gate.event], done=rig.done
        )
        load = rig.transfers.submit(operation(Direction.LOAD, kv=([3], [0])), done=rig.done)
        other = rig.transfers.submit(operation(Direction.FORK, kv=([5], [6])), done=rig.done)
        await load.submitted()
        await other  # the device runs, and still the load does not

        assert load.status(1) is LayerStatus.SUBMITTED
        gate.open()
        await backup
        await load
        after = rig.contents()

    for name in ("keys", "values", "scales"):
        assert torch.equal(after["kv", name, Tier.HOST][:, 9], before["kv", name, Tier.DEVICE][:, 0])
        assert torch.equal(after["kv", name, Tier.DEVICE][:, 0], before["kv", name, Tier.HOST][:, 3])


@pytest.mark.asyncio
async def test_a_backup_of_a_fork_in_the_same_tick_saves_what_was_forked(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        before = rig.contents()
        gate = rig.gate()
        rig.transfers.submit(operation(Direction.FORK, mamba=([0], [3])), after=[gate.event], done=rig.done)
        backup = rig.transfers.submit(operation(Direction.BACKUP, mamba=([3], [1])), done=rig.done)
        await backup.submitted()
        assert not backup.done
        gate.open()
        await backup
        after = rig.contents()

    assert rig.outcomes == [None, None]
    for name in ("conv", "recurrent"):
        assert torch.equal(after["mamba", name, Tier.HOST][:, 1], before["mamba", name, Tier.DEVICE][:, 0])


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", DRIVERS)
async def test_dependent_operations_of_one_direction_do_not_merge(
    open_rig, operation: Build, carry_out, driver: str
) -> None:
    wishes = [
        operation(Direction.FORK, mamba=([0], [1])),
        operation(Direction.FORK, mamba=([1], [2])),  # reads what the first writes
        operation(Direction.FORK, mamba=([3], [1])),  # writes what the second reads
        operation(Direction.FORK, mamba=([4], [1])),  # writes what the third writes
    ]
    async with open_rig(driver) as rig:
        expected = rig.contents()
        for wish in wishes:
            carry_out(expected, wish)
            rig.transfers.submit(wish, done=rig.done)
        await rig.transfers.submit(wishes[-1], done=rig.done)
        found = rig.contents()

    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert rig.transfers.statistics().launches == 5


@pytest.mark.asyncio
async def test_a_ticket_joins_the_transfer_that_brings_what_it_reads(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        gate = rig.gate()
        load = rig.transfers.submit(
            operation(Direction.LOAD, kv=([2, 3], [7, 8])), after=[gate.event], done=rig.done
        )
        nothing = operation(Direction.LOAD)
        joined = rig.transfers.submit(nothing, reads=[("kv", [8]), ("mamba", [0])], done=rig.done)
        apart = rig.transfers.submit(nothing, reads=[("kv", [9]), ("dsa", [8])], done=rig.done)

        assert rig.outcomes == [None, None]  # nothing of their own to move
        assert joined.status(0) is LayerStatus.PENDING
        await joined.submitted()
        assert apart.done
        assert not joined.done
        compute, end = rig.device.stream("compute"), rig.device.event()
        joined.fence(4).wait_on(compute)
        compute.record(end)
        assert not end.query()
        gate.open()
        await joined
        assert load.done
        await asyncio.to_thread(end.synchronize)


@pytest.mark.asyncio
async def test_what_a_submission_names_is_that_of_the_call(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        gate, events, slots = rig.gate(), [], [7]
        events.append(gate.event)
        rig.transfers.submit(operation(Direction.LOAD, kv=([2], [7])), after=events, done=rig.done)
        reads = [("kv", slots)]
        joined = rig.transfers.submit(operation(Direction.LOAD), reads=reads, done=rig.done)
        for changed in (events, slots, reads):
            changed.clear()
        await joined.submitted()
        assert not joined.done
        gate.open()
        await joined


@pytest.mark.asyncio
async def test_nothing_is_remembered_of_transfers_that_are_over(open_rig, operation: Build) -> None:
    async with open_rig() as rig:
        await rig.transfers.submit(operation(Direction.LOAD, kv=([2], [7])), done=rig.done)
        ticket = rig.transfers.submit(operation(Direction.LOAD), reads=[("kv", [7])], done=rig.done)

        assert ticket.done


def _random_operation(rng: random.Random, slots: dict[str, tuple[int, int]]) -> CacheOperation:
    direction = rng.choice(list(Direction))
    transfers = []
    for pool, capacity in slots.items():
        sources = rng.sample(range(capacity[direction.source]), capacity[direction.source])
        destinations = rng.sample(range(capacity[direction.destination]), capacity[direction.destination])
        count = rng.randint(0, 3)
        if direction is Direction.FORK:
            sources, destinations = sources[: len(sources) // 2], sources[len(sources) // 2 :]
        count = min(count, len(sources), len(destinations))
        transfers.append(PoolTransfer(pool, sources[:count], destinations[:count]))
    return CacheOperation(direction, tuple(transfers))


@pytest.mark.asyncio
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("seed", first(10, range(25)))
async def test_random_programs_end_like_their_operations_one_after_another(
    open_rig, carry_out, driver: str, seed: int
) -> None:
    rng = random.Random(seed)
    async with open_rig(driver, seed=seed, group_bytes=rng.choice([1, 300, 1 << 20])) as rig:
        slots = {pool: (m.device.slots, m.host.slots) for pool, m in rig.memories.items()}
        expected = rig.contents()
        wishes = [_random_operation(rng, slots) for _ in range(30)]
        tickets = []
        for wish in wishes:
            carry_out(expected, wish)
            tickets.append(rig.transfers.submit(wish, done=rig.done))
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        for ticket in tickets:
            await ticket
        found = rig.contents()

    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert rig.outcomes == [None] * len(wishes)
