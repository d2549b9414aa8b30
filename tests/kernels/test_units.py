"""Plain copies on a CPU: the same bytes as torch's, whatever the runs, the strides and the sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asynchicache.kernels.reference import copy_run
from asynchicache.kernels.units import TORCH_BYTES, as_units, copy_runs

RUNS = np.array([(0, 5, 1), (3, 0, 2), (6, 6, 2), (1, 2, 1)], np.int64)
SLOTS = 8


def _items(layers: int, units: int, words: int, dtype: torch.dtype, *, page_first: bool) -> torch.Tensor:
    """`[layers, slots, units, words]` of random bits, padded between slots if `page_first`."""
    generator = torch.Generator().manual_seed(layers * units * words)
    shape = (SLOTS, units, layers, words + 1) if page_first else (layers, SLOTS, units, words)
    numbers = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    return numbers[..., :words].permute(2, 0, 1, 3) if page_first else numbers


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("way", ["load", "backup", "fork"])
@pytest.mark.parametrize(("layers", "units", "words"), [(1, 1, 1), (3, 1, 5), (2, 7, 1), (3, 4, 257)])
def test_runs_arrive_as_torch_copies_them(
    layers: int, units: int, words: int, way: str, dtype: torch.dtype
) -> None:
    source = _items(layers, units, words, dtype, page_first=way == "load")
    destination = torch.zeros_like(_items(layers, units, words, dtype, page_first=way == "backup"))
    wanted = destination.clone()
    for first, second, slots in RUNS.tolist():
        copy_run(source[:, first : first + slots], wanted[:, second : second + slots])

    copy_runs(source, destination, RUNS)
    assert torch.equal(destination, wanted)
    assert destination[:, 0].equal(source[:, 3])


def test_runs_that_numpy_and_torch_share_all_arrive() -> None:
    """Short ones enough for other threads to get turns, and one that is torch's for its length."""
    words = TORCH_BYTES // 8 // 3
    source = torch.arange(64 * words).view(1, 64, 1, words)
    destination = torch.zeros_like(source)
    order = np.random.default_rng(0).permutation(np.arange(3, 64))
    runs = np.array([(0, 0, 3), *((slot, slot, 1) for slot in order)], np.int64)

    copy_runs(source, destination, runs)
    assert torch.equal(destination, source)


def test_a_unit_is_one_value_in_the_same_memory() -> None:
    items = _items(2, 3, 5, torch.int16, page_first=True)
    units = as_units(items)
    assert units.shape == items.shape[:3]
    assert units.dtype.itemsize == 10
    assert units.ctypes.data == items.data_ptr()
