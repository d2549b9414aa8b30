"""The runs of a transfer's layers, written once: a layer's copy is then one call with a pointer into a table.

Layers that consist of the same make a block; a row of a block has the runs of one layer, or of several that
follow one another on both sides. How they lie depends on pools and groups only (`TableLayout`), not on pages.
A table is filled row by row as groups are enqueued, a small one at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from asynchicache.kernels.batch import MAX_RUNS, ItemRuns, ItemShape, RunBatch, RunPattern, RunTable
from asynchicache.transfer.plan import Slots, runs_of

FILLED_AHEAD = 8 * MAX_RUNS
"""Runs that are written together, also for later groups: each write costs microseconds to begin."""


class TableTensor(NamedTuple):
    """A tensor of a pool, on the two sides of a copy.

    Attributes:
        source, destination: `[layers, slots, units, words]`.
    """

    pool: str
    layers: Sequence[int]
    source: torch.Tensor
    destination: torch.Tensor


class _LayerSpan(NamedTuple):
    """One row of a block for one tensor: which layers, and where the first one begins."""

    group: int
    layer: int
    layers: int
    source: int
    destination: int


class BlockPart(NamedTuple):
    """One tensor's share of each row of a block.

    Attributes:
        shape: of the items, which may be several layers.
        sources, destinations: int64 `[rows, 1]`, where each row's layer begins.
        layers: int64 `[rows, 1]`, by which sizes are to be multiplied; None if `shape` has them.
    """

    pool: str
    shape: ItemShape
    sources: Slots
    destinations: Slots
    layers: Slots | None


class TableBlock(NamedTuple):
    """Rows with the runs of the same tensors.

    Attributes:
        rows: how many.
        parts: of each row.
        alike: whether rows differ only in where they begin.
    """

    rows: int
    parts: tuple[BlockPart, ...]
    alike: bool

    @classmethod
    def of(cls, rows: int, parts: Sequence[BlockPart]) -> TableBlock:
        distances = {tuple((side - side[0]).ravel()) for side in (part.sources for part in parts)}
        others = {tuple((side - side[0]).ravel()) for side in (part.destinations for part in parts)}
        even = all(part.layers is None for part in parts)
        return cls(rows, tuple(parts), even and len(distances) == len(others) == 1)


class TableLayout(NamedTuple):
    """The rows of a plan's layers.

    Attributes:
        blocks: all of them.
        groups: by the first layer of a group, its rows: (block, first row, one past the last).
    """

    blocks: tuple[TableBlock, ...]
    groups: Mapping[int, Sequence[tuple[int, int, int]]]

    @classmethod
    def of(cls, tensors: Sequence[TableTensor], groups: Sequence[range], chunk_bytes: int) -> TableLayout:
        """
        Args:
            tensors: all of the pools.
            groups: layers of the model that are copied together.
            chunk_bytes: layers are not joined to longer runs.
        """
        rows: dict[tuple[int, int, int], dict[_Track, _LayerSpan]] = {}
        for track, of_track in _tracks(tensors, groups, chunk_bytes).items():
            for row in of_track:
                rows.setdefault(row[:3], {})[track] = row
        alike: dict[tuple[_Track, ...], list[tuple[int, int, int]]] = {}
        for key in sorted(rows):
            alike.setdefault(tuple(rows[key]), []).append(key)
        blocks: list[TableBlock] = []
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for tracks, keys in alike.items():
            parts = [_part(track, [rows[key][track] for key in keys]) for track in tracks]
            for group, of_group in groupby(range(len(keys)), key=lambda row: keys[row][0]):
                first, *others = of_group
                piece = len(blocks), first, first + len(others) + 1
                pieces.setdefault(groups[group].start, []).append(piece)
            blocks.append(TableBlock.of(len(keys), parts))
        return cls(tuple(blocks), pieces)


_Track = tuple[str, ItemShape, int]
"""Tensors that lie alike, one of each layer: pool, shape, and how many such ones of a layer come before."""


def _tracks(
    tensors: Sequence[TableTensor], groups: Sequence[range], chunk_bytes: int
) -> dict[_Track, list[_LayerSpan]]:
    by_layer: dict[int, list[tuple[str, ItemShape, int, int]]] = {}
    for pool, layers, source, destination in tensors:
        shape = ItemShape.of(source, destination)
        for local, layer in enumerate(layers if shape.unit_bytes else ()):
            starts = (_start(source, local), _start(destination, local))
            by_layer.setdefault(layer, []).append((pool, shape, *starts))
    tracks: dict[_Track, list[_LayerSpan]] = {}
    for group, layers in enumerate(groups):
        for layer in layers:
            seen: Counter[tuple[str, ItemShape]] = Counter()
            for pool, shape, of, to in by_layer.get(layer, ()):
                rows = tracks.setdefault((pool, shape, seen[pool, shape]), [])
                seen[pool, shape] += 1
                row = _LayerSpan(group, layer, 1, of, to)
                if rows and _follows(rows[-1], row, shape, chunk_bytes):
                    rows[-1] = rows[-1]._replace(layers=rows[-1].layers + 1)
                else:
                    rows.append(row)
    return tracks


def _start(view: torch.Tensor, layer: int) -> int:
    return int(view.data_ptr() + layer * view.stride(0) * view.element_size())


def _follows(before: _LayerSpan, row: _LayerSpan, shape: ItemShape, chunk_bytes: int) -> bool:
    """Whether a layer's items are the continuation of those before, on both sides."""
    length = before.layers * shape.unit_bytes
    return (
        before.group == row.group
        and shape.units == 1
        and not shape.slots_follow
        and before.source + length == row.source
        and before.destination + length == row.destination
        and length + shape.unit_bytes <= chunk_bytes
    )


def _part(track: _Track, rows: Sequence[_LayerSpan]) -> BlockPart:
    pool, shape, _ = track
    sources, destinations, layers = (
        np.array([column], np.int64).T
        for column in zip(*[(row.source, row.destination, row.layers) for row in rows], strict=True)
    )
    if len({row.layers for row in rows}) == 1:
        return BlockPart(pool, shape.joined(rows[0].layers), sources, destinations, None)
    return BlockPart(pool, shape, sources, destinations, layers)


class PlanPages:
    """The pages of one pool in a plan, in pieces: the first few, to be soon under way, and the rest."""

    def __init__(
        self,
        sources: Slots,
        destinations: Slots,
        first: int,
        chunk_bytes: int,
        bounded: Callable[[Slots], Slots],
    ) -> None:
        """
        Args:
            sources, destinations: int64 `[pages]`.
            first: pages of the first piece.
            chunk_bytes: no run is longer, as far as single items allow.
            bounded: cuts runs where the device cannot copy across.
        """
        self.pieces = [(sources[:first], destinations[:first])]
        if len(sources) > first:
            self.pieces.append((sources[first:], destinations[first:]))
        self._chunk_bytes = chunk_bytes
        self._bounded = bounded
        self._slot_runs: dict[int, Slots] = {}
        self._items: dict[tuple[ItemShape, int], ItemRuns] = {}

    def slot_runs(self, piece: int) -> Slots:
        """Pages in runs, int64 `[runs, 3]` of (first source slot, first destination slot, slots)."""
        if piece not in self._slot_runs:
            self._slot_runs[piece] = self._bounded(runs_of(*self.pieces[piece]))
        return self._slot_runs[piece]

    def items(self, shape: ItemShape, piece: int) -> ItemRuns:
        """The items of a tensor."""
        found = self._items.get((shape, piece))
        if found is None:
            if shape.slots_follow:
                most = max(1, self._chunk_bytes // shape.unit_bytes)
                found = shape.of_runs(cut_runs(self.slot_runs(piece), most))
            else:
                found = shape.of_slots(*self.pieces[piece])
            self._items[shape, piece] = found
        return found


class LaunchTable:
    """The runs of one transfer, group by group.

    Attributes:
        head: the first batch, if it has but the first pages of its rows.
    """

    def __init__(
        self, layout: TableLayout, pages: Mapping[str, PlanPages], chunk_bytes: int, keep: object
    ) -> None:
        """
        Args:
            pages: by pool.
            chunk_bytes: most bytes of a batch, as far as single runs allow.
            keep: what the addresses point into.
        """
        self._layout = layout
        self._pages = pages
        self._chunk_bytes = chunk_bytes
        self._keep = keep
        self._blocks: dict[int, _FilledBlock] = {}
        self.head: RunBatch | None = None
        self._begun = False

    def ready(self, first_layer: int) -> RunBatch | None:
        """The one batch of the group that begins at a layer, if it is written; groups come in order."""
        pieces = self._layout.groups.get(first_layer, ())
        if len(pieces) != 1:
            return None
        number, first, stop = pieces[0]
        block = self._blocks.get(number)
        return None if block is None else block.ready(first, stop)

    def batches(self, first_layer: int) -> Iterator[RunBatch]:
        """The batches of the group that begins at a layer of the model; groups come in order.

        Only what is worked out after `head` was taken takes longer for many pages than for few.
        """
        for number, first, stop in self._layout.groups.get(first_layer, ()):
            skip = 0
            if not self._begun:
                self._begun = True
                for batch in self._head(self._layout.blocks[number], first):
                    self.head = self.head or batch
                    yield batch
                    skip = batch.stop
            block = self._blocks.get(number)
            if block is None:
                columns = self._columns(self._layout.blocks[number], 2)
                block = _FilledBlock(self._layout.blocks[number], columns, self._chunk_bytes, self._keep)
                self._blocks[number] = block
            yield from block.batches(first, stop, skip)

    def _columns(self, block: TableBlock, pieces: int) -> list[tuple[BlockPart, ItemRuns]]:
        return [
            (part, self._pages[part.pool].items(part.shape, piece))
            for piece in range(pieces)
            for part in block.parts
            if piece < len(self._pages[part.pool].pieces)
        ]

    def _head(self, block: TableBlock, row: int) -> Iterator[RunBatch]:
        """The first pages of a row; none if there are no others."""
        if all(len(self._pages[part.pool].pieces) == 1 for part in block.parts):
            return
        columns = self._columns(block, 1)
        table = RunTable(sum(len(items.destinations) for _, items in columns), self._keep)
        _fill(table, columns, row, row + 1)
        nbytes = sum(items.nbytes for _, items in columns)
        yield from RunBatch(table, 0, len(table.sizes), nbytes, RunPattern()).cut(self._chunk_bytes)


class _FilledBlock:
    """Some rows of a block, written down."""

    def __init__(
        self,
        block: TableBlock,
        columns: Sequence[tuple[BlockPart, ItemRuns]],
        chunk_bytes: int,
        keep: object,
    ) -> None:
        self._columns = columns
        self._rows = block.rows
        self._width = sum(len(items.destinations) for _, items in columns)
        self._nbytes = sum(
            items.nbytes * (1 if part.layers is None else int(part.layers.max())) for part, items in columns
        )
        self._chunk_bytes = chunk_bytes
        self._keep = keep
        self._step = max(1, min(MAX_RUNS // self._width, chunk_bytes // self._nbytes))
        self._fits = self._width <= MAX_RUNS and self._nbytes <= chunk_bytes
        self._ahead = max(1, FILLED_AHEAD // self._width)
        self._pattern = RunPattern() if block.alike else None  # of each row
        self._first = self._stop = 0  # rows that the table has
        self._table = RunTable(0, keep)

    def ready(self, first: int, stop: int) -> RunBatch | None:
        """Rows as one batch, if they are written and fit into one."""
        if self._fits and self._first <= first and stop <= self._stop and stop - first <= self._step:
            return self._batch(first, stop, 0)
        return None

    def batches(self, first: int, stop: int, skip: int) -> Iterator[RunBatch]:
        """
        Args:
            first, stop: rows.
            skip: runs of the first row that have been copied.
        """
        for row in range(first, stop, self._step):
            end = min(row + self._step, stop)
            if not self._first <= row <= end <= self._stop:
                self._write(row, min(max(end, row + self._ahead), self._rows))
            batch, skip = self._batch(row, end, skip), 0
            if batch.start < batch.stop:
                yield from batch.cut(self._chunk_bytes)

    def _batch(self, first: int, stop: int, skip: int) -> RunBatch:
        start, end = (first - self._first) * self._width + skip, (stop - self._first) * self._width
        whole = end - start == self._width
        pattern = (self._pattern if whole else None) or RunPattern()
        return RunBatch(self._table, start, end, self._nbytes * (stop - first), pattern)

    def _write(self, first: int, stop: int) -> None:
        self._first, self._stop = first, stop
        self._table = RunTable((stop - first) * self._width, self._keep)
        _fill(self._table, self._columns, first, stop)


def _fill(table: RunTable, columns: Sequence[tuple[BlockPart, ItemRuns]], first: int, stop: int) -> None:
    """Write rows `first` to `stop - 1` of a block into a table."""
    to, of, sizes = (
        column.reshape(stop - first, -1) for column in (table.destinations, table.sources, table.sizes)
    )
    at = 0
    for part, items in columns:
        here = slice(at, at + len(items.destinations))
        np.add(items.destinations, part.destinations[first:stop], out=to[:, here])
        np.add(items.sources, part.sources[first:stop], out=of[:, here])
        if part.layers is None:
            sizes[:, here] = items.sizes
        else:
            np.multiply(items.sizes, part.layers[first:stop], out=sizes[:, here])
        at = here.stop


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
