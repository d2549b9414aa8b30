"""Carries out plans: copies between the tiers of pools, enqueued on a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from asynchicache.errors import ConfigError
from asynchicache.kernels.reference import copy_run, word_dtype
from asynchicache.kernels.select import PageKernels, page_kernels
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.streams.base import Stream
from asynchicache.transfer.plan import Direction, LayerGroup, PoolExtent, Slots, TensorPart, TransferPlan

CHUNK_BYTES = 32 << 20
"""Bytes of one launch: a long copy must let others in between, on a copy engine that takes turns
and on emulated streams that share the cores."""

KERNEL_ITEM_BYTES = 256 << 10
KERNEL_PAGES = 16
"""From this many pages, items smaller than this are copied by a kernel where there is one: torch
takes some 5 microseconds to enqueue one copy, in which a PCIe 5 bus moves as many bytes."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The slots of one pool in both tiers.

    Raises:
        ConfigError: they are not of the same pool and page size.
    """

    device: DevicePool
    host: HostPool

    def __post_init__(self) -> None:
        device, host = self.device, self.host
        if device.spec != host.spec or device.page_size != host.page_size:
            raise ConfigError(
                f"device pool {device.spec.name!r} with pages of {device.page_size} and host pool "
                f"{host.spec.name!r} with pages of {host.page_size} are not one pool"
            )

    @property
    def extent(self) -> PoolExtent:
        return PoolExtent(self.device.spec, self.device.page_size, self.device.slots, self.host.slots)


class _TensorMemory(NamedTuple):
    """One tensor of a pool in both tiers, as `[layers, slots, words]` of one integer dtype."""

    device: torch.Tensor
    host: torch.Tensor
    item_bytes: int

    def ends(self, direction: Direction) -> tuple[torch.Tensor, torch.Tensor]:
        """Where bytes come from, and where they go."""
        match direction:
            case Direction.LOAD:
                return self.host, self.device
            case Direction.BACKUP:
                return self.device, self.host
            case Direction.FORK:
                return self.device, self.device


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


class _Copy(NamedTuple):
    """`runs` between two `[layers, slots, words]` views."""

    source: torch.Tensor
    destination: torch.Tensor
    runs: Slots


class PageCopier:
    """Knows where the bytes of every pool lie, and enqueues the copies of a plan."""

    def __init__(
        self,
        memories: Mapping[str, PoolMemory],
        *,
        kernels: Mapping[str, PageKernels] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """
        Args:
            memories: by pool.
            kernels: by pool, for small pages. Default: what each pool's device has.
            chunk_bytes: most bytes of one launch, as far as single items allow.
        """
        self._chunk_bytes = chunk_bytes
        self._kernels = _default_kernels(memories) if kernels is None else kernels
        self._tensors = {
            (pool, tensor.name): _tensor_memory(memory, tensor.name)
            for pool, memory in memories.items()
            for tensor in memory.device.spec.tensors
        }

    def enqueue(self, stream: Stream, plan: TransferPlan, group: LayerGroup) -> None:
        """Enqueue every copy of one group on `stream`."""
        by_runs = []
        for part in group.parts:
            kernels = self._kernels_for(plan, part)
            if kernels is None:
                by_runs.append(part)
            else:
                stream.launch(partial(self._copy_by_kernel, kernels, plan, part))
        for copies in self._launches(plan, by_runs):
            stream.launch(partial(_copy_all, copies))

    def _kernels_for(self, plan: TransferPlan, part: TensorPart) -> PageKernels | None:
        small = self._tensors[part.pool, part.tensor].item_bytes < KERNEL_ITEM_BYTES
        many = plan.runs[part.pool][:, 2].sum() >= KERNEL_PAGES
        return (
            self._kernels.get(part.pool) if small and many and plan.direction is not Direction.FORK else None
        )

    def _copy_by_kernel(self, kernels: PageKernels, plan: TransferPlan, part: TensorPart) -> None:
        memory = self._tensors[part.pool, part.tensor]
        device = memory.device[part.start : part.stop]
        host = memory.host[part.start : part.stop].transpose(0, 1)
        sources, destinations = map(torch.from_numpy, expand_runs(plan.runs[part.pool]))
        if plan.direction is Direction.LOAD:
            kernels.scatter(host, device, sources, destinations)
        else:
            kernels.gather(device, host, sources, destinations)

    def _launches(self, plan: TransferPlan, parts: Sequence[TensorPart]) -> Iterator[list[_Copy]]:
        """The copies of `parts`, as many to a launch as make up a chunk."""
        copies: list[_Copy] = []
        held = 0
        for part in parts:
            memory = self._tensors[part.pool, part.tensor]
            source, destination = memory.ends(plan.direction)
            for piece in pieces(part, plan.runs[part.pool], memory.item_bytes, self._chunk_bytes):
                size = piece.items * memory.item_bytes
                if copies and held + size > self._chunk_bytes:
                    yield copies
                    copies, held = [], 0
                layers = slice(piece.start, piece.stop)
                copies.append(_Copy(source[layers], destination[layers], piece.runs))
                held += size
        if copies:
            yield copies


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


def _batches(runs: Slots, most: int) -> Iterator[Slots]:
    """Neighbouring runs together, as many as make up at most `most` slots; each alone is no larger."""
    ends = np.cumsum(runs[:, 2])
    start, before = 0, 0
    while start < len(runs):
        stop = int(np.searchsorted(ends, before + most, side="right"))
        yield runs[start:stop]
        start, before = stop, int(ends[stop - 1])


def expand_runs(runs: Slots) -> tuple[Slots, Slots]:
    """Source and destination slot of every page of `runs`, int64 `[pages]` each."""
    sources, destinations, counts = runs.T
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(len(first)) - first
    return np.repeat(sources, counts) + within, np.repeat(destinations, counts) + within


def _copy_all(copies: Sequence[_Copy]) -> None:
    for source, destination, runs in copies:
        for source_slot, destination_slot, slots in runs.tolist():
            copy_run(
                source[:, source_slot : source_slot + slots],
                destination[:, destination_slot : destination_slot + slots],
            )


def _tensor_memory(memory: PoolMemory, name: str) -> _TensorMemory:
    layout = memory.host.layout.tensors[name]
    word = word_dtype(layout.item_bytes, layout.offset)
    device, host = memory.device.items(name).view(word), memory.host.items(name).view(word)
    return _TensorMemory(device, host.transpose(0, 1), layout.item_bytes)


def _default_kernels(memories: Mapping[str, PoolMemory]) -> dict[str, PageKernels]:
    found = {
        pool: page_kernels(memory.device.device, pinned=memory.host.pinned)
        for pool, memory in memories.items()
    }
    return {pool: kernels for pool, kernels in found.items() if kernels is not None}
