"""What is urgent is enqueued first, as far as the order of copies allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynchicache.transfer.plan import CacheOperation, Direction

Build = Callable[..., CacheOperation]
LOAD, BACKUP, FORK = Direction.LOAD, Direction.BACKUP, Direction.FORK


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[tuple[Direction, int, int]]]:
    """Lets an engine write down (direction, priority, operations) of each transfer that it enqueues."""

    def watch(engine) -> list[tuple[Direction, int, int]]:
        written: list[tuple[Direction, int, int]] = []
        original = engine._enqueue

        def enqueue(record, begun) -> None:
            priority = record.plan.priority
            written.append((record.direction, priority, len(record.submissions)))
            original(record, begun)

        monkeypatch.setattr(engine, "_enqueue", enqueue)
        return written

    return watch


@pytest.mark.asyncio
async def test_loads_go_before_backups_that_were_submitted_earlier(
    open_rig, operation: Build, enqueued
) -> None:
    async with open_rig() as rig:
        order = enqueued(rig.engine)
        rig.engine.submit(operation(BACKUP, kv=([0], [0])), done=rig.done)
        rig.engine.submit(operation(LOAD, kv=([1], [1])), done=rig.done)
        rig.engine.submit(operation(BACKUP, kv=([2], [2])), done=rig.done)
        await rig.engine.submit(operation(FORK, mamba=([0], [1])), done=rig.done)

    assert order == [(FORK, 0, 1), (LOAD, 0, 1), (BACKUP, 0, 2)]


@pytest.mark.asyncio
async def test_operations_of_one_priority_merge_and_lower_numbers_go_first(
    open_rig, operation: Build, enqueued, carry_out
) -> None:
    wishes = [operation(LOAD, priority=slot % 3, kv=([slot], [slot + 1])) for slot in range(9)]
    wishes.append(operation(BACKUP, priority=-1, mamba=([0], [0])))
    async with open_rig() as rig:
        expected = rig.contents()
        order = enqueued(rig.engine)
        tickets = [rig.engine.submit(wish, done=rig.done) for wish in wishes]
        for ticket, wish in zip(tickets, wishes, strict=True):
            carry_out(expected, wish)
            await ticket
        found = rig.contents()

    assert order == [(BACKUP, -1, 1), (LOAD, 0, 3), (LOAD, 1, 3), (LOAD, 2, 3)]
    assert all(found[key].equal(expected[key]) for key in expected)


@pytest.mark.asyncio
async def test_no_priority_overtakes_what_it_depends_on(open_rig, operation: Build, enqueued) -> None:
    async with open_rig() as rig:
        order = enqueued(rig.engine)
        rig.engine.submit(operation(BACKUP, priority=5, kv=([0], [3])), done=rig.done)
        rig.engine.submit(operation(LOAD, priority=-5, kv=([4], [0])), done=rig.done)  # over what is saved
        await rig.engine.submit(operation(LOAD, priority=9, kv=([5], [6])), done=rig.done)

    assert order == [(BACKUP, 5, 1), (LOAD, -5, 1), (LOAD, 9, 1)]


@pytest.mark.asyncio
async def test_one_dependent_pair_among_many_splits_a_tick_in_two(
    open_rig, operation: Build, enqueued
) -> None:
    async with open_rig() as rig:
        order = enqueued(rig.engine)
        for slot in range(8):
            rig.engine.submit(operation(LOAD, kv=([slot], [slot])), done=rig.done)
        rig.engine.submit(operation(FORK, kv=([7], [8])), done=rig.done)
        await rig.engine.submit(operation(LOAD, kv=([9], [9])), done=rig.done)

    assert order == [(LOAD, 0, 8), (FORK, 0, 1), (LOAD, 0, 1)]
