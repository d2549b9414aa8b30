"""Runs of bytes: which ones a plan consists of, batches of them, and copying a batch on a CPU."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asynchicache.errors import UsageError

Integers: TypeAlias = npt.NDArray[np.int64]

MAX_RUNS = 1024
"""Runs of one batch. A driver takes about half a microsecond for each, and copies none before it has all."""

GIL_HELD_BYTES = 64 << 10
"""Shorter runs are copied with the GIL held: releasing and retaking it can take longer than the copy."""

GIL_RELEASE_BYTES = 1 << 20
"""After this many bytes of such runs the GIL is released once."""

PIECE_BYTES = 512 << 10
"""Longer runs are copied in about equal pieces of at most about this many bytes.

Up to the size of an AMD core's L2 cache (512 KiB or 1 MiB) glibc's `memmove` uses `rep movsb`, which need not
read what it overwrites. Longer copies use plain stores, which do, and are 10 to 25 % slower
(`rep_movsb_stop_threshold` in sysdeps/x86/dl-cacheinfo.h of glibc 2.36). On other processors the limit is
near the size of the last-level cache, and pieces do no harm.
"""


class RunTable:
    """Runs of bytes to copy, in no order, as columns of one array.

    Attributes:
        destinations, sources: int64 `[runs]`, addresses.
        sizes: int64 `[runs]`, bytes.
        address: of the first destination.
        step: bytes from there to the first source, and on to the first size.
        keep: what the addresses point into.
    """

    __slots__ = ("address", "destinations", "keep", "sizes", "sources", "step")

    def __init__(self, runs: int, keep: object) -> None:
        columns = np.empty((3, runs), np.int64)
        self.destinations, self.sources, self.sizes = columns
        self.address: int = columns.ctypes.data
        self.step = columns.itemsize * runs
        self.keep = keep


class Rows(NamedTuple):
    """Runs of a batch from `start` on: `number` of `size` bytes each, at equal distances."""

    start: int
    number: int
    size: int
    to_step: int
    by_step: int


class RunPattern:
    """The rows of a batch; they do not depend on where it begins, so that layers share them.

    Finding them holds the GIL, for which a forward may be waiting.
    """

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: Sequence[Rows] | None = None


class RunBatch(NamedTuple):
    """Neighbouring runs of a table, to be copied together.

    Attributes:
        table: theirs.
        start, stop: the first, and one past the last.
        nbytes: in all, about.
        pattern: shared by batches that differ only in where they begin.
    """

    table: RunTable
    start: int
    stop: int
    nbytes: int
    pattern: RunPattern

    @classmethod
    def of(cls, destinations: Integers, sources: Integers, sizes: Integers, keep: object = ()) -> RunBatch:
        """A table of its own."""
        table = RunTable(len(sizes), keep)
        table.destinations[:], table.sources[:], table.sizes[:] = destinations, sources, sizes
        return cls(table, 0, len(sizes), int(sizes.sum()), RunPattern())

    @property
    def destinations(self) -> Integers:
        return self.table.destinations[self.start : self.stop]

    @property
    def sources(self) -> Integers:
        return self.table.sources[self.start : self.stop]

    @property
    def sizes(self) -> Integers:
        return self.table.sizes[self.start : self.stop]

    def cut(self, chunk_bytes: int) -> Iterator[RunBatch]:
        """The same runs in batches of at most `chunk_bytes`, as far as single runs allow, and `MAX_RUNS`."""
        if self.nbytes <= chunk_bytes and self.stop - self.start <= MAX_RUNS:
            yield self
            return
        ends = np.cumsum(self.sizes)
        start, before = 0, 0
        while start < len(ends):
            fitting = int(np.searchsorted(ends, before + chunk_bytes, side="right"))
            stop = min(max(fitting, start + 1), start + MAX_RUNS, len(ends))
            nbytes = int(ends[stop - 1]) - before
            yield RunBatch(self.table, self.start + start, self.start + stop, nbytes, RunPattern())
            start, before = stop, before + nbytes


BatchCopy: TypeAlias = Callable[[RunBatch, int], None]
"""Copies a batch on a stream, by its handle."""


class ItemRuns(NamedTuple):
    """The runs of some pages' items of one tensor and layer, from where that layer begins.

    Attributes:
        destinations, sources: as of a `RunTable`.
        sizes: as there, or that of each.
        nbytes: in all.
    """

    destinations: Integers
    sources: Integers
    sizes: Integers | int
    nbytes: int


class ItemShape(NamedTuple):
    """How the items of a tensor lie on both sides of a copy; an item is `units` runs of `unit_bytes`.

    Attributes:
        source_slot, destination_slot: bytes from one slot to the next.
        source_unit, destination_unit: bytes from one unit to the next.
    """

    source_slot: int
    destination_slot: int
    source_unit: int
    destination_unit: int
    units: int
    unit_bytes: int

    @classmethod
    def of(cls, source: torch.Tensor, destination: torch.Tensor) -> ItemShape:
        """
        Args:
            source: `[layers, slots, units, words]`.
            destination: the same shape but for the slots.

        Raises:
            UsageError: the views differ in shape or dtype.
        """
        layers, _, units, words = source.shape
        theirs = (destination.shape[0], *destination.shape[2:])
        if (source.dtype, layers, units, words) != (destination.dtype, *theirs):
            raise UsageError(f"{tuple(source.shape)} and {tuple(destination.shape)} are no views of one pool")
        size = source.element_size()
        steps = [view.stride(axis) * size for axis in (1, 2) for view in (source, destination)]
        return cls(steps[0], steps[1], steps[2], steps[3], units, words * size)

    @property
    def slots_follow(self) -> bool:
        """Whether the items of neighbouring slots are one run of bytes."""
        return self.units == 1 and self.source_slot == self.destination_slot == self.unit_bytes

    def joined(self, layers: int) -> ItemShape:
        """The same where neighbouring layers, whose items follow one another, are one item."""
        return self._replace(unit_bytes=self.unit_bytes * layers)

    def of_slots(self, sources: Integers, destinations: Integers) -> ItemRuns:
        """A run for each unit of each slot.

        Args:
            sources, destinations: int64 `[slots]`.
        """
        pages, units = len(sources), self.units
        of, to = sources * self.source_slot, destinations * self.destination_slot
        if units > 1:
            unit = np.arange(units, dtype=np.int64)
            of = (of[:, None] + unit * self.source_unit).ravel()
            to = (to[:, None] + unit * self.destination_unit).ravel()
        return ItemRuns(to, of, self.unit_bytes, pages * units * self.unit_bytes)

    def of_runs(self, runs: Integers) -> ItemRuns:
        """A run for each run of slots, where `slots_follow`.

        Args:
            runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
        """
        sources, destinations, counts = runs.T
        sizes = counts * self.unit_bytes
        return ItemRuns(
            destinations * self.destination_slot, sources * self.source_slot, sizes, int(sizes.sum())
        )


class PieceCount(NamedTuple):
    """How many contiguous runs of bytes the pages of a pool come to, in all tensors and layers.

    Attributes:
        of_runs: for each run of slots, where neighbouring slots of a layer follow one another.
        of_slots: for each slot, where they do not.
    """

    of_runs: int
    of_slots: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PieceCount:
        """
        Args:
            pairs: by tensor, views `[layers, slots, units, words]` of both tiers.
        """
        of_runs = of_slots = 0
        for source, destination in pairs:
            shape = ItemShape.of(source, destination)
            if shape.slots_follow:
                of_runs += source.shape[0]
            else:
                of_slots += source.shape[0] * shape.units
        return cls(of_runs, of_slots)


# On a CPU.


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


_copy_without_gil = _memmove(ctypes.CDLL(None))  # releases the GIL
_copy_with_gil = _memmove(ctypes.PyDLL(None))  # does not


def memmove_batch(batch: RunBatch, stream: int = 0) -> None:
    """Copy one run after the other on this thread."""
    mean = batch.nbytes // max(1, batch.stop - batch.start)
    if mean >= GIL_HELD_BYTES:
        _copy_long(batch)
        return
    # Now and then one run releases the GIL. Not `sleep(0)`, which gives up the processor as well.
    runs, turn = _as_list(batch), max(1, GIL_RELEASE_BYTES // max(1, mean))
    for start in range(0, len(runs), turn):
        *most, last = runs[start : start + turn]
        deque(starmap(_copy_with_gil, most), maxlen=0)
        _copy_without_gil(*last)


Run: TypeAlias = tuple[int, int, int]
"""Destination, source, bytes."""


def _as_list(batch: RunBatch) -> list[Run]:
    return list(zip(*(c.tolist() for c in (batch.destinations, batch.sources, batch.sizes)), strict=True))


def _copy_long(batch: RunBatch) -> None:
    """Copy runs that are each worth releasing the GIL. Runs at equal distances, and the pieces of one run,
    release it once together, since retaking it may mean waiting and being woken."""
    rows = batch.pattern.rows
    if rows is None:
        batch.pattern.rows = rows = _rows(_as_list(batch))
    destinations, sources = batch.destinations, batch.sources
    for start, number, size, to_step, by_step in rows:
        destination, source = int(destinations[start]), int(sources[start])
        if number == 1 and size <= PIECE_BYTES:
            _copy_without_gil(destination, source, size)
        else:
            pieces = _pieces(size)
            to, by = _Memory(destination, number, to_step, pieces), _Memory(source, number, by_step, pieces)
            np.copyto(np.asarray(to), np.asarray(by))


def _rows(runs: Sequence[Run]) -> list[Rows]:
    """`runs`, grouped where neighbours have one length and equal distances."""
    rows, start = [], 0
    while start < len(runs):
        to, source, size = runs[start]
        stop = _end_of_rows(runs, start)
        next_to, next_source, _ = runs[min(start + 1, stop - 1)]
        rows.append(Rows(start, stop - start, size, next_to - to, next_source - source))
        start = stop
    return rows


def _end_of_rows(runs: Sequence[Run], start: int) -> int:
    """The end of the group from `start`: runs of its length, each at the same distance from the one
    before."""
    if start + 1 == len(runs) or runs[start][2] != runs[start + 1][2]:
        return start + 1
    (to, source, size), (next_to, next_source, _) = runs[start : start + 2]
    to_step, source_step = next_to - to, next_source - source
    stop = start + 2
    while stop < len(runs) and runs[stop] == (next_to + to_step, next_source + source_step, size):
        next_to, next_source, _ = runs[stop]
        stop += 1
    return stop


class _Pieces(NamedTuple):
    """A run as pieces of one length at equal distances."""

    number: int
    step: int
    size: int


def _pieces(size: int) -> _Pieces:
    """Cut a run of `size` bytes, at least one, into pieces.

    Pieces overlap by some bytes, which are copied twice: numpy would merge adjacent pieces into one run.
    """
    number = 1 if size <= PIECE_BYTES else size // PIECE_BYTES + 1
    step = (size - 1) // number
    return _Pieces(number, step, size - (number - 1) * step)


class _Memory:
    """Memory as numpy sees it: rows of bytes at equal distances, which may be negative, in pieces."""

    def __init__(self, start: int, count: int, step: int, pieces: _Pieces) -> None:
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (count, pieces.number, pieces.size),
            "strides": (step, pieces.step, 1),
            "typestr": "|u1",
            "version": 3,
        }
