"""Runs of bytes: which ones a plan consists of, batches of them, and copying a batch on a CPU."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asynchicache.errors import UsageError

Integers: TypeAlias = npt.NDArray[np.int64]

MAX_RUNS = 4096
"""Runs of one batch. A driver takes about half a microsecond for each, and AMD's accepts at most 8,192."""

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


class Rows(NamedTuple):
    """Runs of a batch from `start` on: `number` of `size` bytes each, at equal distances."""

    start: int
    number: int
    size: int
    to_step: int
    by_step: int


@dataclass(slots=True, eq=False)
class RunPattern:
    """Properties of a batch's runs that do not depend on where it begins; computed once, shared by layers.

    Computing them holds the GIL, for which a forward may be waiting.
    """

    nbytes: int | None = None
    rows: Sequence[Rows] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RunBatch:
    """Runs of bytes to copy, in no order.

    Attributes:
        sources, destinations: int64 `[runs]`, addresses.
        sizes: int64 `[runs]`, bytes.
        keep: the tensors that the addresses point into.
        pattern: shared by batches that differ only in where they begin. Default: its own.
    """

    sources: Integers
    destinations: Integers
    sizes: Integers
    keep: Sequence[torch.Tensor]
    pattern: RunPattern = field(default_factory=RunPattern)

    @classmethod
    def join(cls, batches: Sequence[RunBatch]) -> RunBatch:
        """Batches, one at least, as one."""
        if len(batches) == 1:
            return batches[0]
        return cls(
            np.concatenate([batch.sources for batch in batches]),
            np.concatenate([batch.destinations for batch in batches]),
            np.concatenate([batch.sizes for batch in batches]),
            [tensor for batch in batches for tensor in batch.keep],
        )

    @property
    def nbytes(self) -> int:
        if self.pattern.nbytes is None:
            self.pattern.nbytes = int(self.sizes.sum())
        return self.pattern.nbytes

    def cut(self, chunk_bytes: int) -> Iterator[RunBatch]:
        """The same runs in batches of at most `chunk_bytes`, as far as single runs allow, and `MAX_RUNS`."""
        if self.nbytes <= chunk_bytes and len(self.sizes) <= MAX_RUNS:
            yield self
            return
        ends = np.cumsum(self.sizes)
        start, before = 0, 0
        while start < len(ends):
            fitting = int(np.searchsorted(ends, before + chunk_bytes, side="right"))
            stop = min(max(fitting, start + 1), start + MAX_RUNS)
            part = slice(start, stop)
            yield RunBatch(self.sources[part], self.destinations[part], self.sizes[part], self.keep)
            start, before = stop, int(ends[stop - 1])


BatchCopy: TypeAlias = Callable[[RunBatch], None]
"""Copies a batch, in the order of the current stream."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRuns:
    """The contiguous runs of pages in one layer; other layers have the same at a fixed distance.

    Attributes:
        sources, destinations, sizes: as of a `RunBatch`, in layer 0.
        source_stride, destination_stride: bytes from layer to layer.
        keep: the tensors that the addresses point into.
        pattern: of one layer, the same for each.
    """

    sources: Integers
    destinations: Integers
    sizes: Integers
    source_stride: int
    destination_stride: int
    keep: tuple[torch.Tensor, torch.Tensor]
    pattern: RunPattern = field(default_factory=RunPattern)

    def batch(self, start: int, stop: int) -> RunBatch:
        """The runs of layers `start` to `stop - 1`."""
        if stop == start + 1:
            sources = self.sources + start * self.source_stride
            destinations = self.destinations + start * self.destination_stride
            return RunBatch(sources, destinations, self.sizes, self.keep, self.pattern)
        layers = np.arange(start, stop, dtype=np.int64)[:, None]
        return RunBatch(
            (self.sources + layers * self.source_stride).ravel(),
            (self.destinations + layers * self.destination_stride).ravel(),
            np.tile(self.sizes, stop - start),
            self.keep,
        )


class RunGeometry:
    """Where the items of one tensor lie on both sides of a copy; computed once, as it never changes."""

    def __init__(self, source: torch.Tensor, destination: torch.Tensor) -> None:
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
        self._views = source, destination
        self._follow = _slots_follow(source, destination)
        self._units = units
        self._unit_bytes = words * source.element_size()
        self._source, self._destination = _Side.of(source), _Side.of(destination)

    def runs(self, runs: Integers) -> LayerRuns:
        """
        Args:
            runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
        """
        if self._follow:
            from_slots, to_slots, counts = runs.T
            sizes = counts * self._unit_bytes
        else:
            from_slots, to_slots = expand_runs(runs)
            sizes = np.full(len(from_slots) * self._units, self._unit_bytes, np.int64)
        return LayerRuns(
            self._source.addresses(from_slots, self._units),
            self._destination.addresses(to_slots, self._units),
            sizes,
            self._source.layer,
            self._destination.layer,
            self._views,
        )


class _Side(NamedTuple):
    """One end of a copy: the first byte, and bytes from layer to layer, slot to slot, unit to unit."""

    start: int
    layer: int
    slot: int
    unit: int

    @classmethod
    def of(cls, view: torch.Tensor) -> _Side:
        return cls(view.data_ptr(), *(stride * view.element_size() for stride in view.stride()[:3]))

    def addresses(self, slots: Integers, units: int) -> Integers:
        """Of every unit of `slots` in layer 0, `[slots * units]`."""
        starts = slots * self.slot + self.start
        if units == 1:
            return starts
        return (starts[:, None] + np.arange(units, dtype=np.int64) * self.unit).ravel()


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
            layers, _, units, _ = source.shape
            if _slots_follow(source, destination):
                of_runs += layers
            else:
                of_slots += layers * units
        return cls(of_runs, of_slots)

    def count(self, runs: Integers) -> int:
        """Of `runs` of slots, int64 `[runs, 3]` as `RunGeometry.runs` takes them."""
        return self.of_runs * len(runs) + self.of_slots * int(runs[:, 2].sum())


def _slots_follow(*views: torch.Tensor) -> bool:
    """Whether neighbouring slots of a layer are one run of bytes."""
    return all(view.shape[2] == 1 and view.stride(1) == view.shape[3] for view in views)


def expand_runs(runs: Integers) -> tuple[Integers, Integers]:
    """Source and destination slot of every page of `runs`, int64 `[pages]` each."""
    sources, destinations, counts = runs.T
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(len(first)) - first
    return np.repeat(sources, counts) + within, np.repeat(destinations, counts) + within


# On a CPU.


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


_copy_without_gil = _memmove(ctypes.CDLL(None))  # releases the GIL
_copy_with_gil = _memmove(ctypes.PyDLL(None))  # does not


def memmove_batch(batch: RunBatch) -> None:
    """Copy one run after the other on this thread."""
    mean = batch.nbytes // max(1, len(batch.sizes))
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
    for start, number, size, to_step, by_step in rows:
        destination, source = int(batch.destinations[start]), int(batch.sources[start])
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
