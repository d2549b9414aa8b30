"""A tick of many operations is planned like a tick of one: by pool and direction, not by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest

from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.transfer import plan, schedule
from asynchicache.transfer.plan import CacheOperation, Direction, PoolShape, runs_of
from asynchicache.transfer.record import Submission
from asynchicache.transfer.schedule import Scheduler

OPERATIONS, PAGES, LAYERS = 512, 16, 4
SLOTS = OPERATIONS * 2 * PAGES
TENSOR = TensorSpec("bytes", tuple(range(LAYERS)), (8,), "uint8")
POOLS = {name: PoolShape(PoolSpec(name, (TENSOR,)), 4, 2 * SLOTS, 2 * SLOTS) for name in ("dense", "sparse")}

Build = Callable[..., CacheOperation]


def _wish(operation: Build, direction: Direction, number: int) -> CacheOperation:
    """Pages that follow those of the operation before in one pool, and leave a gap in the other. Backups keep
    to the upper half of the slots."""
    first = SLOTS * (direction is Direction.BACKUP)
    dense, sparse = first + number * PAGES, first + number * 2 * PAGES
    slots = {"dense": range(dense, dense + PAGES), "sparse": range(sparse, sparse + PAGES)}
    return operation(direction, **{pool: (some, some) for pool, some in slots.items()})


def _counted(monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType | type, str]) -> Counter[str]:
    calls: Counter[str] = Counter()

    def count(owner: ModuleType | type, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: object) -> object:
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in functions:
        count(owner, name)
    return calls


def test_operations_of_one_tick_are_planned_once_for_each_pool_and_direction(
    operation: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (Direction.LOAD, Direction.BACKUP)
    wishes = [_wish(operation, direction, number) for number in range(OPERATIONS) for direction in both]
    scheduler = Scheduler(POOLS, LAYERS, 1, lambda record, index: None)
    calls = _counted(
        monkeypatch,
        (schedule, "plan_of"),
        (plan, "runs_of"),
        (plan, "check_slots"),
        (schedule.IndependenceCheck, "holds"),
        (schedule.HazardTable, "mark"),
    )

    records = scheduler.schedule([Submission(operation=wish) for wish in wishes])
    scheduler.settle()

    assert [record.direction for record in records] == [Direction.LOAD, Direction.BACKUP]
    assert calls == {"holds": 1, "mark": 2, "plan_of": 2}, "slots were checked when they were submitted"
    for record in records:
        first = SLOTS * (record.direction is Direction.BACKUP)
        assert runs_of(*record.plan.columns["dense"]).tolist() == [[first, first, OPERATIONS * PAGES]]
        starts = range(first, first + SLOTS, 2 * PAGES)
        assert runs_of(*record.plan.columns["sparse"]).tolist() == [[start, start, PAGES] for start in starts]
        assert len(record.plan.groups) == (LAYERS if record.direction is Direction.LOAD else 1)
