"""Batches of runs: what runs of pages come to in each layout, how they are cut, and what copies them."""

from __future__ import annotations

from ctypes import c_int64

import numpy as np
import pytest
import torch

from asynchicache.errors import UsageError
from asynchicache.kernels.batch import (
    MAX_RUNS,
    PIECE_BYTES,
    ItemShape,
    PieceCount,
    RunBatch,
    memmove_batch,
)
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.select import copy_methods


def _items(slots: int, *, follow: bool, units: int = 1) -> torch.Tensor:
    """uint8 `[2, slots, units, 4]`, slots one behind the other or with gaps."""
    gap = 0 if follow else 3
    memory = torch.arange(2 * slots * (units * 4 + gap), dtype=torch.uint8)
    strides = (slots * (units * 4 + gap), units * 4 + gap, 4, 1)
    return memory.as_strided((2, slots, units, 4), strides)


@pytest.mark.parametrize(("follow", "units", "count"), [(True, 1, 2), (False, 1, 3), (False, 2, 6)])
def test_pages_come_to_runs_that_are_contiguous_on_both_sides(follow: bool, units: int, count: int) -> None:
    source, destination = _items(6, follow=True, units=units), _items(5, follow=follow, units=units)
    expected = destination.clone()
    for from_slot, to_slot in ((0, 3), (1, 4), (5, 0)):
        expected[0, to_slot] = source[0, from_slot]
    shape = ItemShape.of(source, destination)
    assert shape.slots_follow is follow
    if follow:
        found = shape.of_runs(np.array([[0, 3, 2], [5, 0, 1]], np.int64))
    else:
        found = shape.of_slots(np.array([0, 1, 5]), np.array([3, 4, 0]))
    starts = found.destinations + destination.data_ptr(), found.sources + source.data_ptr()
    memmove_batch(RunBatch.of(*starts, np.broadcast_to(found.sizes, starts[0].shape)))

    pieces = PieceCount.of([(source, destination)])
    assert len(found.sources) == count == (pieces.of_runs * 2 + pieces.of_slots * 3) / 2
    assert found.nbytes == 3 * units * 4
    assert torch.equal(destination, expected)


PATTERNS = {
    "backwards": list(range(9))[::-1],
    "every second one, then the others": [0, 2, 4, 6, 8, 1, 3, 5, 7],
    "in no order": [4, 0, 7, 1, 8, 2],
    "alone": [3],
}


def _rows(slots: list[int], sizes: list[int]) -> tuple[RunBatch, torch.Tensor, torch.Tensor]:
    """Runs from rows 0, 1, ... to rows `slots`, and what the destination has to be."""
    source = torch.arange(9 * 16, dtype=torch.uint8).reshape(9, 16) + 1
    destination, expected = torch.zeros_like(source), torch.zeros_like(source)
    for row, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
        expected[slot, :size] = source[row, :size]
    starts = np.arange(len(slots)) * 16 + source.data_ptr()
    ends = np.array(slots) * 16 + destination.data_ptr()
    batch = RunBatch.of(ends, starts, np.array(sizes, np.int64), (source, destination))
    return batch, destination, expected


@pytest.mark.parametrize("slots", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("sizes", [[16], [16, 16, 16, 5], [7, 9]])
def test_long_runs_get_where_they_belong(
    monkeypatch: pytest.MonkeyPatch, slots: list[int], sizes: list[int]
) -> None:
    monkeypatch.setattr("asynchicache.kernels.batch.GIL_HELD_BYTES", 1)
    cycle = (sizes * len(slots))[: len(slots)]
    batch, destination, expected = _rows(slots, cycle)

    memmove_batch(batch)

    assert torch.equal(destination, expected)


def test_long_runs_at_equal_distances_give_up_the_interpreter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynchicache.kernels.batch.GIL_HELD_BYTES", 1)
    monkeypatch.setattr("asynchicache.kernels.batch._copy_without_gil", None)
    calls = []
    copyto = np.copyto
    monkeypatch.setattr(np, "copyto", lambda to, by: (calls.append(to.shape), copyto(to, by)))
    batch, destination, expected = _rows(PATTERNS["every second one, then the others"], [16] * 9)

    memmove_batch(batch)

    assert torch.equal(destination, expected)
    assert calls == [(5, 1, 16), (4, 1, 16)]


LENGTHS = [
    PIECE_BYTES + more
    for more in (-1, 0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 548_864, 1_000_003)
]


@pytest.mark.parametrize("slots", [[1], [0, 1, 2], [2, 1, 0], [1, 0, 2]])
@pytest.mark.parametrize("size", LENGTHS)
def test_every_byte_of_a_run_in_pieces_arrives_and_none_beside_it(size: int, slots: list[int]) -> None:
    gap = 67  # so that runs begin at odd addresses
    source = (torch.arange(3 * (size + gap)) % 251 + 1).to(torch.uint8).view(3, size + gap)
    destination, expected = torch.zeros_like(source), torch.zeros_like(source)
    expected[slots, 5 : 5 + size] = source[: len(slots), 5 : 5 + size]
    starts, ends = (tensor.data_ptr() + 5 for tensor in (source, destination))
    rows = np.arange(len(slots)), np.array(slots)
    addresses = (start + row * (size + gap) for start, row in zip((starts, ends), rows, strict=True))
    sources, destinations = addresses

    memmove_batch(RunBatch.of(destinations, sources, np.full(len(slots), size), (source, destination)))

    assert torch.equal(destination, expected)


@pytest.mark.parametrize("size", [length for length in LENGTHS if length > PIECE_BYTES])
def test_numpy_gets_long_runs_in_pieces_that_it_cannot_put_together(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    calls = []
    monkeypatch.setattr(np, "copyto", lambda to, by: calls.extend((to, by)))
    memory = torch.empty(size, dtype=torch.uint8)
    start = np.array([memory.data_ptr()])

    memmove_batch(RunBatch.of(start, start, np.array([size]), (memory,)))

    assert len(calls) == 2
    for pieces in calls:
        _, number, length = pieces.shape
        _, step, _ = pieces.strides
        assert 1 < number
        assert (number - 1) * step + length == size
        assert step < length <= PIECE_BYTES + number


def test_batches_are_cut_by_bytes_and_by_runs() -> None:
    sizes = np.array([4, 4, 9, 1, 1], np.int64)
    batch = RunBatch.of(np.arange(5) + 10, np.arange(5), sizes)

    assert [part.sizes.tolist() for part in batch.cut(8)] == [[4, 4], [9], [1, 1]]
    assert [part.nbytes for part in batch.cut(8)] == [8, 9, 2]
    assert [part.sources.tolist() for part in batch.cut(100)] == [[0, 1, 2, 3, 4]]
    many = RunBatch.of(*(np.ones(MAX_RUNS + 1, np.int64) for _ in range(3)))
    assert [len(part.sizes) for part in many.cut(1 << 30)] == [MAX_RUNS, 1]


def test_a_table_is_three_columns_at_equal_distances() -> None:
    table = RunBatch.of(np.array([1, 2]), np.array([3, 4]), np.array([5, 6])).table

    assert (c_int64 * 6).from_address(table.address)[:] == [1, 2, 3, 4, 5, 6]
    assert table.step == 16


def test_views_of_different_pools_have_no_runs() -> None:
    with pytest.raises(UsageError, match="no views of one pool"):
        ItemShape.of(_items(6, follow=True), _items(6, follow=True, units=2))


# What a device has.


def test_a_cpu_has_every_way_of_copying() -> None:
    memory = _items(3, follow=True)
    methods = copy_methods(PoolItems.of([memory], [memory.clone()]), pinned=False)

    assert methods.kernels is not None
    assert methods.batch is memmove_batch
    assert methods.lacking == {}


def test_a_gpu_can_reach_no_memory_that_is_not_pinned() -> None:
    host = _items(3, follow=True)
    device = torch.empty(2, 3, 1, 4, dtype=torch.uint8, device="meta")  # no CPU: that is what counts here
    items = PoolItems((host,), (device,), ())

    methods = copy_methods(items, pinned=False)

    assert (methods.kernels, methods.batch) == (None, None)
    assert set(methods.lacking.values()) == {"host memory is not pinned"}
