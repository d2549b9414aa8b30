"""Merging operations: what is refused, how slots become runs and layers become groups."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from asynchicache.errors import InternalError, UsageError
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.transfer.plan import (
    CacheOperation,
    Direction,
    PoolShape,
    TensorPart,
    TransferPlan,
    merge,
    runs_of,
    tensor_parts,
)
from asynchicache.types import PoolTransfer, trailing_pages

Build = Callable[..., CacheOperation]

KV = PoolSpec("kv", (TensorSpec("keys", (1, 2, 4), (8,), "uint8"), TensorSpec("scales", (2,), (1,), "uint8")))
MAMBA = PoolSpec(
    "mamba",
    (TensorSpec("conv", (0, 3), (5,), "uint8"), TensorSpec("recurrent", (0, 3), (20,), "uint8")),
    coverage=trailing_pages(1),
    per_token=False,
)
POOLS = {"kv": PoolShape(KV, 2, 40, 30), "mamba": PoolShape(MAMBA, 2, 6, 5)}
LAYERS = 6


def _merge(*operations: CacheOperation, group_bytes: int | None = 1) -> TransferPlan:
    return merge(operations, POOLS, LAYERS, group_bytes)


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1, 2], [3], "2 sources for 1 destinations"),
        ([1, 2], [3, 3], "destination slot 3 is written twice"),
        ([-1], [3], "slot -1 is negative"),
        ([1], [-3], "slot -3 is negative"),
        ([1.5], [3], "not a run of 64-bit integers"),
        ([1], [2**63], "not a run of 64-bit integers"),
        (bytes(8), [3], "not a run of 64-bit integers, but bytes"),
        ([3], bytearray(8), "not a run of 64-bit integers, but bytes"),
        (memoryview(b"a"), [3], "not a run of 64-bit integers, but bytes"),
        ({3}, [3], r"slots \{3\} are not a run of 64-bit integers, but a set"),
        ([3], frozenset({3}), "not a run of 64-bit integers, but a set"),
    ],
)
def test_operations_that_mean_nothing_are_refused(
    sources: Sequence[int], destinations: Sequence[int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        CacheOperation(Direction.LOAD, (PoolTransfer("kv", sources, destinations),))


COUNTS = [1, 2, 8, 64, 65, 200]
"""Slots of a transfer: one, few and many are looked at in ways of their own."""


def _spoilt(count: int, place: int, slot: object) -> list[object]:
    slots: list[object] = list(range(300, 300 + count))
    slots[place] = slot
    return slots


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (-2, "slot -2 is negative"),
        (np.int64(-2), "slot -2 is negative"),
        (1.0, "not a run of 64-bit integers"),
        (np.float64(1), "not a run of 64-bit integers"),
        (2**63, "not a run of 64-bit integers"),
        ("1", "not a run of 64-bit integers"),
        (None, "not a run of 64-bit integers"),
        ([1], "not a run of 64-bit integers"),
    ],
)
def test_one_slot_that_is_none_is_found_wherever_it_is(
    direction: Direction, side: int, place: int, count: int, slot: object, message: str
) -> None:
    sides = [list(range(1000, 1000 + count)), list(range(5000, 5000 + count))]
    sides[side] = _spoilt(count, place, slot)

    with pytest.raises(UsageError, match=message):
        CacheOperation(direction, (PoolTransfer("mamba", [1], [2]), PoolTransfer("kv", *sides)))


@pytest.mark.parametrize("count", COUNTS[1:])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("kind", [int, np.int64, bool])
def test_a_slot_that_is_written_twice_is_found(direction: Direction, count: int, kind: type) -> None:
    sources, destinations = list(range(1000, 1000 + count)), list(range(count))
    destinations[0], destinations[-1] = 1, kind(1)

    with pytest.raises(UsageError, match="destination slot 1 is written twice"):
        CacheOperation(direction, (PoolTransfer("kv", sources, destinations),))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("direction", list(Direction))
def test_a_slot_that_is_read_and_written_is_found_in_forks_only(direction: Direction, count: int) -> None:
    sources, destinations = list(range(count)), list(range(1000, 1000 + count))
    destinations[0] = sources[-1]
    transfers = (PoolTransfer("kv", sources, destinations),)

    if direction is Direction.FORK:
        with pytest.raises(UsageError, match=f"slot {count - 1} is read and written"):
            CacheOperation(direction, transfers)
    else:
        CacheOperation(direction, transfers)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda slots: array("q", slots)])
def test_slots_are_copied_whatever_they_come_in(kind: Callable[[list[int]], object], count: int) -> None:
    numbers = random.Random(count).sample(range(1000), count)
    sources, destinations = kind(numbers), kind(numbers[::-1])
    operation = CacheOperation(Direction.LOAD, (PoolTransfer("kv", sources, destinations),))
    if not isinstance(sources, tuple):
        sources[0] = destinations[0] = -1

    ((pool, read, written),) = operation.transfers
    assert (pool, list(read), list(written)) == ("kv", numbers, numbers[::-1])
    assert operation.highest_slots == (("kv", max(numbers), max(numbers)),)
    assert all(type(slot) is int for slot in (*read, *written, *operation.highest_slots[0][1:]))
    assert isinstance(operation.transfers[0], PoolTransfer)


@pytest.mark.parametrize("count", COUNTS)
def test_the_reach_of_each_direction(count: int) -> None:
    low, high = list(range(count)), list(range(500, 500 + count))
    reaches = {
        direction: CacheOperation(direction, (PoolTransfer("kv", low[::-1], high),)).highest_slots
        for direction in Direction
    }

    assert reaches == {
        Direction.LOAD: (("kv", high[-1], low[-1]),),
        Direction.BACKUP: (("kv", low[-1], high[-1]),),
        Direction.FORK: (("kv", high[-1], -1),),
    }


def test_an_operation_may_move_nothing_and_nobody_says_otherwise() -> None:
    nothing = CacheOperation(Direction.LOAD, (PoolTransfer("kv", [], []),), (("kv", 5, 5),))
    some = CacheOperation(Direction.LOAD, (PoolTransfer("kv", [], []), PoolTransfer("mamba", [0], [0])))

    assert (nothing.empty, nothing.highest_slots, CacheOperation(Direction.LOAD, ()).empty) == (
        True,
        (),
        True,
    )
    assert (some.empty, some.highest_slots) == (False, (("kv", -1, -1), ("mamba", 0, 0)))
    with pytest.raises(AttributeError):
        some.direction = Direction.BACKUP


@pytest.mark.parametrize("transfer", [5, "kv", ("kv", [1]), None])
def test_transfers_of_another_form_are_refused(transfer: object) -> None:
    with pytest.raises(UsageError, match="must be a PoolTransfer"):
        CacheOperation(Direction.LOAD, (transfer,))


@pytest.mark.parametrize("direction", ["load", None])
def test_directions_are_checked(direction: object) -> None:
    with pytest.raises(UsageError, match="must be a Direction"):
        CacheOperation(direction, ())


@pytest.mark.parametrize("pool", [None, 7, b"kv", ["kv"], {"kv": 1}])
def test_pools_have_names(pool: object) -> None:
    with pytest.raises(UsageError, match=r"pool .* must be the name of one"):
        CacheOperation(Direction.LOAD, (PoolTransfer(pool, [1], [1]), PoolTransfer("kv", [2], [2])))


def test_a_destination_is_written_once_over_all_transfers_of_an_operation() -> None:
    transfers = (PoolTransfer("kv", [1], [3]), PoolTransfer("kv", [2], [3]))

    with pytest.raises(UsageError, match="destination slot 3 is written twice"):
        CacheOperation(Direction.LOAD, transfers)


def test_a_fork_does_not_read_what_it_writes(operation: Build) -> None:
    operation(Direction.LOAD, mamba=([0, 1], [1, 2]))  # slots of two tiers: nothing in common

    with pytest.raises(UsageError, match="slot 1 is read and written"):
        operation(Direction.FORK, mamba=([0, 1], [1, 2]))


def test_merge_refuses_what_has_no_order(operation: Build) -> None:
    with pytest.raises(UsageError, match="destination slot 7 is written twice"):
        _merge(operation(Direction.LOAD, kv=([0], [7])), operation(Direction.LOAD, kv=([1], [7])))
    with pytest.raises(UsageError, match="slot 1 is read and written"):
        _merge(operation(Direction.FORK, mamba=([0], [1])), operation(Direction.FORK, mamba=([1], [2])))


def test_merge_refuses_several_directions_and_none(operation: Build) -> None:
    with pytest.raises(InternalError, match="'backup', 'load'"):
        _merge(operation(Direction.LOAD, kv=([0], [7])), operation(Direction.BACKUP, kv=([1], [8])))
    with pytest.raises(InternalError, match="one direction"):
        _merge()


@pytest.mark.parametrize(
    ("direction", "pool", "source", "destination", "message"),
    [
        (Direction.LOAD, "kv", 30, 0, "has no host slot 30; it has 30"),
        (Direction.LOAD, "kv", 29, 40, "has no device slot 40; it has 40"),
        (Direction.BACKUP, "kv", 39, 30, "host slot 30"),
        (Direction.FORK, "mamba", 5, 6, "has no device slot 6; it has 6"),
        (Direction.LOAD, "swa", 0, 0, r"pool 'swa' is none of \['kv', 'mamba'\]"),
    ],
)
def test_merge_refuses_slots_that_are_not_there(
    operation: Build, direction: Direction, pool: str, source: int, destination: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _merge(operation(direction, **{pool: ([source], [destination])}))


def test_a_pool_without_host_slots_takes_no_part(operation: Build) -> None:
    pools = {**POOLS, "mamba": PoolShape(MAMBA, 2, 6, 0)}
    nothing = operation(Direction.LOAD, kv=([0], [0]), mamba=([], []))

    assert list(merge([nothing], pools, LAYERS, 1).columns) == ["kv"]
    with pytest.raises(UsageError, match="has no host slot 0; it has 0"):
        merge([operation(Direction.LOAD, mamba=([0], [0]))], pools, LAYERS, 1)


def test_runs_are_contiguous_on_both_sides(operation: Build) -> None:
    first = operation(Direction.LOAD, kv=([5, 4, 3, 9], [12, 11, 10, 20]))
    second = operation(Direction.LOAD, kv=([6, 7], [13, 15]))

    plan = _merge(first, second)

    assert runs_of(*plan.columns["kv"]).tolist() == [[3, 10, 4], [7, 15, 1], [9, 20, 1]]


def test_the_first_group_closes_at_the_first_layer_with_bytes(operation: Build) -> None:
    plan = _merge(operation(Direction.LOAD, kv=([0], [0])), group_bytes=1 << 30)

    assert [(group.start, group.stop) for group in plan.groups] == [(0, 2), (2, 6)]
    assert [plan.group_of(layer) for layer in range(LAYERS)] == [0, 0, 1, 1, 1, 1]


def test_groups_hold_as_many_bytes_as_are_worth_a_launch(operation: Build) -> None:
    # kv has 16 bytes at layers 1 and 4 and 18 at layer 2, mamba has 25 at layers 0 and 3.
    plan = _merge(operation(Direction.LOAD, kv=([0], [0]), mamba=([0], [0])), group_bytes=40)

    assert [(group.start, group.stop) for group in plan.groups] == [(0, 1), (1, 4), (4, 6)]
    assert plan.nbytes == 16 + 18 + 16 + 25 + 25
    parts = [part for _, part in _parts(plan, plan.groups[1])]
    assert parts == [
        ("keys", 0, 2),
        ("scales", 0, 1),
        ("conv", 1, 2),
        ("recurrent", 1, 2),
    ]


def test_without_a_group_size_there_is_one_group(operation: Build) -> None:
    plan = _merge(operation(Direction.BACKUP, kv=([0], [0]), mamba=([0], [0])), group_bytes=None)

    assert [(group.start, group.stop) for group in plan.groups] == [(0, LAYERS)]


def test_an_operation_ends_with_the_last_group_that_holds_its_bytes(operation: Build) -> None:
    plan = _merge(
        operation(Direction.LOAD, mamba=([0], [0])),
        operation(Direction.LOAD, kv=([0], [0])),
        operation(Direction.LOAD, kv=([], [])),
    )

    assert [plan.groups[index].start for index in plan.last_groups[:2]] == [3, 4]
    assert plan.last_groups[2] == -1


def _random_operations(rng: random.Random, direction: Direction) -> list[CacheOperation]:
    operations = []
    sides = {
        pool: (
            rng.sample(range(extent.capacity(direction.source)), extent.capacity(direction.source)),
            rng.sample(range(extent.capacity(direction.destination)), extent.capacity(direction.destination)),
        )
        for pool, extent in POOLS.items()
    }
    for _ in range(rng.randint(1, 4)):
        transfers = []
        for pool, (sources, destinations) in sides.items():
            count = rng.randint(0, min(len(destinations), 4))
            taken = [destinations.pop() for _ in range(count)]
            if rng.random() < 0.5:  # runs, not only single pages
                taken.sort()
            transfers.append(PoolTransfer(pool, sorted(rng.sample(sources, count)), taken))
        operations.append(CacheOperation(direction, tuple(transfers)))
    return operations


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.BACKUP])
@pytest.mark.parametrize("seed", range(40))
def test_a_plan_moves_what_copies_of_single_pages_move(direction: Direction, seed: int) -> None:
    rng = random.Random(seed)
    operations = _random_operations(rng, direction)
    plan = merge(operations, POOLS, LAYERS, rng.choice([None, 1, 40, 200]))

    expected, found = _naive(operations), _planned(plan)

    assert found == expected
    assert [group.start for group in plan.groups] == [0, *(group.stop for group in plan.groups[:-1])]
    assert plan.groups[-1].stop == LAYERS


def _naive(operations: Sequence[CacheOperation]) -> set[tuple[str, str, int, int, int]]:
    return {
        (transfer.pool, tensor.name, layer, source, destination)
        for operation in operations
        for transfer in operation.transfers
        for tensor in POOLS[transfer.pool].spec.tensors
        for layer in tensor.layers
        for source, destination in zip(transfer.sources, transfer.destinations, strict=True)
    }


def _parts(plan: TransferPlan, layers: range) -> list[tuple[str, TensorPart]]:
    return [(pool, part) for pool in plan.columns for part in tensor_parts(POOLS[pool].spec, layers)]


def _planned(plan: TransferPlan) -> set[tuple[str, str, int, int, int]]:
    moved = []
    for group in plan.groups:
        for pool, part in _parts(plan, group):
            tensor = next(t for t in POOLS[pool].spec.tensors if t.name == part.tensor)
            for layer in tensor.layers[part.start : part.stop]:
                assert group.start <= layer < group.stop
                for source, destination, count in runs_of(*plan.columns[pool]).tolist():
                    moved += [
                        (pool, part.tensor, layer, source + page, destination + page) for page in range(count)
                    ]
    assert len(set(moved)) == len(moved)
    return set(moved)


def test_slots_may_be_arrays(operation: Build) -> None:
    plan = _merge(operation(Direction.LOAD, kv=(np.arange(3), np.arange(5, 8))))

    assert runs_of(*plan.columns["kv"]).tolist() == [[0, 5, 3]]
