"""Plain page copies on a CPU by numpy, which starts faster than torch and moves a unit as one opaque
value."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from asynchicache.kernels.batch import GIL_RELEASE_BYTES, Integers
from asynchicache.kernels.reference import copy_run

Units: TypeAlias = npt.NDArray[Any]
"""`[layers, slots, units]` of opaque values."""

TORCH_BYTES = 256 << 10
"""From this size on torch copies a run as fast, and releases the GIL."""


def as_units(items: torch.Tensor) -> Units:
    """The same memory with a unit as one value.

    Args:
        items: int `[layers, slots, units, words]` on a CPU, words of a unit contiguous.
    """
    words = items.numpy()
    units: Units = words.view(f"V{words.shape[3] * words.itemsize}")
    return units[..., 0]


def copy_runs(source: torch.Tensor, destination: torch.Tensor, runs: Integers) -> None:
    """Copy runs of neighbouring pages between views on a CPU, on this thread.

    Args:
        source: `[layers, slots, units, words]`.
        destination: the same shape but for the slots.
        runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
    """
    layers, _, units, words = source.shape
    page_bytes = layers * units * words * source.element_size()
    from_units, to_units = as_units(source), as_units(destination)
    held = 0
    for first, second, slots in runs.tolist():
        of, to = slice(first, first + slots), slice(second, second + slots)
        held += slots * page_bytes
        # Numpy holds the GIL for so few values. Now and then torch copies one, which lets other threads run.
        if held >= GIL_RELEASE_BYTES or slots * page_bytes >= TORCH_BYTES:
            copy_run(source[:, of], destination[:, to])
            held = 0
        else:
            to_units[:, to] = from_units[:, of]
