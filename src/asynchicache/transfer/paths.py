"""Copy paths, and which one a transfer takes: by measured rates, or as configured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from math import log2
from typing import NamedTuple

from asynchicache.types import Direction


class CopyPath(Enum):
    """A way to copy pages between host and device."""

    BATCH = "batch"
    """Contiguous runs, many to a call: the driver's batched asynchronous copy; on a CPU one `memmove`
    after the other."""
    KERNEL = "kernel"
    """Pages by their slots, many to a launch: Triton on a GPU, torch's index operations on a CPU."""
    PLAIN = "plain"
    """A strided copy for each run of pages; always available."""


GPU_KERNEL_GAIN = 1.1
"""How much faster a kernel must be on a GPU, because it takes processors from the model; copy engines do
not."""


class RunShape(NamedTuple):
    """The properties of a run that the best path depends on.

    Attributes:
        direction: which way.
        tokens: whether each token of an item is a run, so that one strided copy moves many runs.
        nbytes: of a run.
    """

    direction: Direction
    tokens: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class PathTable:
    """How fast each path moved runs of some shapes on one device.

    Attributes:
        rates: by shape, by path, GB/s (10^9).
        kernel_gain: how many times as fast as the others a kernel must be to be chosen.
    """

    rates: Mapping[RunShape, Mapping[CopyPath, float]] = field(default_factory=dict)
    kernel_gain: float = 1.0

    def choose(self, shape: RunShape, available: Iterable[CopyPath]) -> CopyPath:
        """The fastest of `available` at the nearest measured length; a kernel only if it is faster by
        `kernel_gain`; plain if nothing was measured."""
        known = self._like(shape)
        if not known:
            return CopyPath.PLAIN
        nearest = min(known, key=lambda other: abs(log2(other.nbytes) - log2(max(shape.nbytes, 1))))
        among = set(available)
        rates = {path: rate for path, rate in self.rates[nearest].items() if path in among}
        if CopyPath.KERNEL in rates:
            rates[CopyPath.KERNEL] /= self.kernel_gain
        return max(rates, key=lambda path: rates[path], default=CopyPath.PLAIN)

    def summary(self, direction: Direction) -> str:
        """The fastest path by the length of runs that are whole items: `kernel to 4 KiB, then batch`."""
        shapes = sorted(self._like(RunShape(direction, False, 0)))
        by_path = groupby(shapes, key=lambda shape: self.choose(shape, CopyPath))
        chosen = [(path, max(group).nbytes) for path, group in by_path]
        words = [f"{path.value} to {_size(nbytes)}" for path, nbytes in chosen[:-1]]
        last = chosen[-1][0] if chosen else CopyPath.PLAIN
        return ", then ".join([*words, last.value])

    def _like(self, shape: RunShape) -> list[RunShape]:
        return [known for known in self.rates if known[:2] == shape[:2]]


def _size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB" if nbytes >= 1024 else f"{nbytes} B"


def table_for(measured: PathTable | None, *, on_gpu: bool) -> PathTable:
    """The table to choose by, if none was measured, or memory was too short to measure.

    A CPU's rates say nothing about a GPU's kernels, which also take processors from the model. So a GPU
    without rates of its own uses plain copies.
    """
    if measured is not None and measured.rates:
        return measured
    return PathTable() if on_gpu else cpu_table()


def cpu_table() -> PathTable:
    """Rates measured on a server's CPU, for runs that must not depend on time."""
    batch, kernel, plain = CopyPath
    measured = {
        (True, 256): {batch: 0.6, kernel: 1.0, plain: 1.5},
        (True, 4096): {batch: 3.0, kernel: 3.0, plain: 4.0},
        (False, 1024): {batch: 1.5, kernel: 3.0, plain: 0.3},
        (False, 4096): {batch: 5.0, kernel: 4.0, plain: 1.5},
        (False, 65536): {batch: 13.0, kernel: 5.0, plain: 8.0},
    }
    both = (Direction.LOAD, Direction.BACKUP)
    return PathTable({RunShape(way, *shape): rates for way in both for shape, rates in measured.items()})
