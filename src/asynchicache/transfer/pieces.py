"""Runs of slots, cut to what one copy may move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from asynchicache.transfer.plan import TensorPart
from asynchicache.transfer.slots import Slots


class Piece(NamedTuple):
    """Runs of slots of neighbouring layers: what one tensor has in one launch.

    Attributes:
        start: the first layer, a local number.
        stop: one behind the last.
        runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
    """

    start: int
    stop: int
    runs: Slots

    @property
    def items(self) -> int:
        return (self.stop - self.start) * int(self.runs[:, 2].sum())


def pieces(part: TensorPart, runs: Slots, item_bytes: int, chunk_bytes: int) -> Iterator[Piece]:
    """A tensor's share of a plan in pieces of at most `chunk_bytes`, as far as single items allow.

    Runs are cut between slots, and between layers where one slot is too large already.
    """
    layer_step = max(1, chunk_bytes // item_bytes)
    for start in range(part.start, part.stop, layer_step):
        stop = min(start + layer_step, part.stop)
        most = max(1, chunk_bytes // (item_bytes * (stop - start)))
        for some in _batches(cut_runs(runs, most), most):
            yield Piece(start, stop, some)


def cut_runs(runs: Slots, most: int) -> Slots:
    """The same pages in runs of at most `most` slots."""
    counts = runs[:, 2]
    if counts.max(initial=0) <= most:
        return runs
    parts = -(-counts // most)
    cut = np.repeat(runs, parts, axis=0)
    offsets = most * (np.arange(len(cut)) - np.repeat(np.cumsum(parts) - parts, parts))
    cut[:, :2] += offsets[:, None]
    cut[:, 2] = np.minimum(most, cut[:, 2] - offsets)
    return cut


def split_runs(runs: Slots, side: int, step: int) -> Slots:
    """The same pages in runs of which none has slots `n * step - 1` and `n * step` of one side.

    Args:
        runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
        side: 0 for sources, 1 for destinations.
        step: slots between two borders.
    """
    first, counts = runs[:, side], runs[:, 2]
    parts = (first + counts - 1) // step - first // step + 1
    if parts.max(initial=1) == 1:
        return runs
    split = np.repeat(runs, parts, axis=0)
    index = np.arange(len(split)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts, ends = split[:, side], split[:, side] + split[:, 2]
    borders = (starts // step + index) * step
    offsets = np.maximum(borders - starts, 0)
    stops = np.minimum(borders + step, ends)
    split[:, 2] = stops - starts - offsets
    split[:, :2] += offsets[:, None]
    return split


def _batches(runs: Slots, most: int) -> Iterator[Slots]:
    """Neighbouring runs together, as many as make up at most `most` slots; each alone is no larger."""
    ends = np.cumsum(runs[:, 2])
    start, before = 0, 0
    while start < len(runs):
        stop = int(np.searchsorted(ends, before + most, side="right"))
        yield runs[start:stop]
        start, before = stop, int(ends[stop - 1])
