"""What is urgent is enqueued first, as far as the order of copies allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynchicache.transfer.plan import CacheOperation, Direction

Build = Callable[..., CacheOperation]
LOAD, BACKUP, FORK = Direction.LOAD, Direction.BACKUP, Direction.FORK


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], list[tuple[Direction, int]]]:
    """Lets transfers write down (direction, operations) of each one that they enqueue."""

    def watch(transfers) -> list[tuple[Direction, int]]:
        written: list[tuple[Direction, int]] = []
        original = transfers._wait_for_dependencies

        def enqueue(record, stream) -> None:
            written.append((record.direction, len(record.submissions)))
            original(record, stream)

        monkeypatch.setattr(transfers, "_wait_for_dependencies", enqueue)
        return written

    return watch


@pytest.mark.asyncio
async def test_loads_go_before_backups_that_were_submitted_earlier(
    open_rig, operation: Build, enqueued
) -> None:
    async with open_rig() as rig:
        order = enqueued(rig.transfers)
        rig.transfers.submit(operation(BACKUP, kv=([0], [0])), done=rig.done)
        rig.transfers.submit(operation(LOAD, kv=([1], [1])), done=rig.done)
        rig.transfers.submit(operation(BACKUP, kv=([2], [2])), done=rig.done)
        await rig.transfers.submit(operation(FORK, mamba=([0], [1])), done=rig.done)

    assert order == [(FORK, 1), (LOAD, 1), (BACKUP, 2)]


@pytest.mark.asyncio
async def test_a_load_does_not_overtake_a_backup_that_it_depends_on(
    open_rig, operation: Build, enqueued
) -> None:
    async with open_rig() as rig:
        order = enqueued(rig.transfers)
        rig.transfers.submit(operation(BACKUP, kv=([0], [3])), done=rig.done)
        await rig.transfers.submit(operation(LOAD, kv=([4], [0])), done=rig.done)  # over what is saved

    assert order == [(BACKUP, 1), (LOAD, 1)]


@pytest.mark.asyncio
async def test_one_dependent_pair_among_many_splits_a_tick_in_two(
    open_rig, operation: Build, enqueued
) -> None:
    async with open_rig() as rig:
        order = enqueued(rig.transfers)
        for slot in range(8):
            rig.transfers.submit(operation(LOAD, kv=([slot], [slot])), done=rig.done)
        rig.transfers.submit(operation(FORK, kv=([7], [8])), done=rig.done)
        await rig.transfers.submit(operation(LOAD, kv=([9], [9])), done=rig.done)

    assert order == [(LOAD, 8), (FORK, 1), (LOAD, 1)]
