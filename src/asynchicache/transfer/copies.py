"""Carries out plans: enqueues copies between the tiers of pools on a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from asynchicache.errors import CallRefusedError, ConfigError
from asynchicache.kernels.batch import LayerRuns, PieceCount, RunBatch, RunGeometry, expand_runs
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.reference import copy_run
from asynchicache.kernels.select import CopyMethods, PageKernels, copy_methods
from asynchicache.kernels.units import copy_runs
from asynchicache.pools.device import DevicePages
from asynchicache.pools.host import HostPool
from asynchicache.streams.base import Stream
from asynchicache.transfer.paths import CopyPath, PathTable, RunShape, table_for
from asynchicache.transfer.plan import Direction, PoolShape, Slots, TensorPart, TransferPlan, tensor_parts

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""Bytes of one launch. A long copy must let others run in between, on a copy engine that alternates between
streams and on emulated streams that share the cores."""

_BETWEEN_TIERS = (Direction.LOAD, Direction.BACKUP)

KERNEL_PIECES = 16
"""From this many runs on a kernel's launch pays (https://github.com/vllm-project/vllm/pull/42212)."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory of one pool in both tiers.

    Raises:
        ConfigError: the two are not of the same pool and page size.
    """

    device: DevicePages
    host: HostPool

    def __post_init__(self) -> None:
        device, host = self.device, self.host
        if device.spec != host.spec or device.page_size != host.page_size:
            raise ConfigError(
                f"device pool {device.spec.name!r} with pages of {device.page_size} and host pool "
                f"{host.spec.name!r} with pages of {host.page_size} are not one pool"
            )

    @property
    def extent(self) -> PoolShape:
        return PoolShape(self.device.spec, self.device.page_size, self.device.slots, self.host.slots)

    def items(self) -> PoolItems:
        """Views of both tiers, with each item cut into the units that it has on the host."""
        tensors = self.device.copy_spec.tensors
        parts = [self.device.host_parts[tensor.name] for tensor in tensors]
        host = [self.host.items(name)[layers] for name, layers in parts]
        device = [
            self.device.items(tensor.name).view(len(tensor.layers), self.device.slots, *ours.shape[2:])
            for tensor, ours in zip(tensors, host, strict=True)
        ]
        return PoolItems.of(host, device, [tensor.layers for tensor in tensors])


class SizedCopy(NamedTuple):
    """A part of a pool's copies: bytes, and the call that enqueues it on the current stream."""

    of: PoolCopies
    nbytes: int
    call: Callable[[], object]

    def run(self) -> None:
        try:
            self.call()
        except Exception as error:
            self.of.failed = error  # a launch has parts of several pools
            raise


PathBytes: TypeAlias = dict[str, dict[CopyPath, int]]
"""Bytes enqueued, by pool and path."""


class PageCopier:
    """Knows where the bytes of every pool lie, and chooses the path by which they are copied.

    Attributes:
        table: rates of the paths.
        nbytes: bytes enqueued between the tiers, by pool and path.
    """

    def __init__(
        self,
        memories: Mapping[str, PoolMemory],
        *,
        table: PathTable | None = None,
        force: CopyPath | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """
        Args:
            memories: by pool.
            table: measured rates, to choose paths by. Default: recorded rates of a CPU; plain copies on
                a GPU.
            force: always take this path.
            chunk_bytes: most bytes of one launch, as far as single items allow.

        Raises:
            ConfigError: the forced path is not available.
        """
        on_gpu = any(memory.device.device.type == "cuda" for memory in memories.values())
        self.table = table_for(table, on_gpu=on_gpu)
        self.nbytes: PathBytes = {pool: dict.fromkeys(CopyPath, 0) for pool in memories}
        self._force = force
        self._chunk_bytes = chunk_bytes
        self._pools = {pool: _Pool(pool, memory, force) for pool, memory in memories.items()}

    @property
    def choice(self) -> dict[Direction, str]:
        """Which path runs of which length take, in words."""
        if self._force is not None:
            return dict.fromkeys(_BETWEEN_TIERS, self._force.value)
        return {direction: self.table.summary(direction) for direction in _BETWEEN_TIERS}

    def prepare(self, plan: TransferPlan) -> dict[str, PoolCopies]:
        """The copies of one plan by pool, for `enqueue`."""
        copies = {pool: self._copies(plan, pool) for pool in plan.runs}
        if plan.direction is not Direction.FORK:
            for pool, of_pool in copies.items():
                self.nbytes[pool][of_pool.path] += of_pool.nbytes
        return copies

    def enqueue(self, stream: Stream, copies: Mapping[str, PoolCopies], layers: range) -> None:
        """Enqueue the copies of some layers of the model, in launches of at most a chunk.

        Raises:
            CallRefusedError: the device refused one of them. No later plan takes its path.
        """
        held: list[SizedCopy] = []
        for copy in self._of_layers(copies, layers):
            if held and sum(one.nbytes for one in held) + copy.nbytes > self._chunk_bytes:
                _launch(stream, held)
                held = []
            held.append(copy)
        if held:
            _launch(stream, held)

    def _of_layers(self, copies: Mapping[str, PoolCopies], layers: range) -> Iterator[SizedCopy]:
        for pool, of_pool in copies.items():
            parts = list(tensor_parts(self._pools[pool].spec, layers))
            if parts:
                yield from of_pool.of_layers(layers, parts, self._chunk_bytes)

    def path(self, plan: TransferPlan, pool: str) -> CopyPath:
        """The path that the pages of a pool take in a plan."""
        return self._copies(plan, pool).path

    def _copies(self, plan: TransferPlan, pool: str) -> PoolCopies:
        return PoolCopies(self._pools[pool], plan.direction, plan.runs[pool], self.table)


def _launch(stream: Stream, copies: Sequence[SizedCopy]) -> None:
    try:
        stream.launch(partial(_run_all, copies))
    except CallRefusedError:
        for copy in copies:
            copy.of.drop_failed_path()
        raise


def _run_all(copies: Sequence[SizedCopy]) -> None:
    for copy in copies:
        copy.run()


class _Pool:
    """One pool's items, and the methods that can copy them."""

    def __init__(self, name: str, memory: PoolMemory, force: CopyPath | None) -> None:
        self._name = name
        self._warned = False
        self.items = memory.items()
        self.spec = spec = memory.device.copy_spec
        page_size = memory.device.page_size
        self.index = {tensor.name: index for index, tensor in enumerate(spec.tensors)}
        self.item_bytes = {tensor.name: spec.item_bytes(tensor, page_size) for tensor in spec.tensors}
        self.page_bytes = spec.slot_bytes(page_size)
        host, device = self.items.host, self.items.device
        self.ends = {
            Direction.LOAD: list(zip(host, device, strict=True)),
            Direction.BACKUP: list(zip(device, host, strict=True)),
            Direction.FORK: list(zip(device, device, strict=True)),
        }
        self._geometry: dict[tuple[Direction, int], RunGeometry] = {}
        self.tokens = any(items.shape[2] > 1 for items in host)
        self.pieces = PieceCount.of(self.ends[Direction.LOAD])
        self._host = memory.host
        self.methods = CopyMethods()
        if memory.host.slots:  # without any, nothing is ever copied between the tiers
            self.methods = copy_methods(self.items, pinned=memory.host.pinned)
        self.force = force
        self._refused: set[CopyPath] = set()
        if force is not None and memory.host.slots and force not in self.available:
            raise ConfigError(
                f"copy_path {force.value!r} is not there for pool {name!r} on {memory.device.device}: "
                f"{self.methods.lacking[force.value]}"
            )

    def geometry(self, direction: Direction, tensor: int) -> RunGeometry:
        if (direction, tensor) not in self._geometry:
            self._geometry[direction, tensor] = RunGeometry(*self.ends[direction][tensor])
        return self._geometry[direction, tensor]

    def within_registrations(self, direction: Direction, runs: Slots) -> Slots:
        """The same pages in runs that CUDA can copy: none spans two registrations of host memory."""
        host = self._host
        if direction is Direction.FORK or host.step_bytes >= host.memory.nbytes or not self.pieces.of_runs:
            return runs
        side = 0 if direction is Direction.LOAD else 1
        return split_runs(runs, side, host.step_bytes, host.layout.slot_bytes)

    def warn_once(self, error: Exception) -> None:
        """Log the first time that the GPU has no room."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "pool %s: copies by kernel go plainly while there is no room: %s", self._name, error
            )

    @property
    def available(self) -> list[CopyPath]:
        found = [CopyPath.PLAIN]
        if self.methods.kernels is not None:
            found.append(CopyPath.KERNEL)
        if self.methods.batch is not None:
            found.append(CopyPath.BATCH)
        return [path for path in found if path not in self._refused]

    def drop(self, path: CopyPath, error: Exception) -> None:
        """The device refused a copy by a path: later ones take another. Plain copies are the last resort."""
        if path is not CopyPath.PLAIN and path not in self._refused:
            self._refused.add(path)
            logger.warning("pool %s: no more copies by %s: %s", self._name, path.value, error)


class PoolCopies:
    """The copies of one pool in one plan.

    Attributes:
        path: how they are copied.
        nbytes: bytes in all.
        failed: what the last part of them that was not enqueued raised.
    """

    def __init__(self, pool: _Pool, direction: Direction, runs: Slots, table: PathTable) -> None:
        self._pool = pool
        self._direction = direction
        self._runs = runs = pool.within_registrations(direction, runs)
        self._ends = pool.ends[direction]
        self._sides: tuple[torch.Tensor, torch.Tensor] | None = None
        self._layers: dict[int, LayerRuns] = {}
        self.nbytes = pool.page_bytes * int(runs[:, 2].sum())
        self.path = self._choose(table)
        self.failed: Exception | None = None

    def drop_failed_path(self) -> None:
        """If a part was refused, no later plan takes this path."""
        if self.failed is not None:
            self._pool.drop(self.path, self.failed)

    def of_layers(self, layers: range, parts: Sequence[TensorPart], chunk_bytes: int) -> Iterator[SizedCopy]:
        """The copies of some layers of the model; `parts`: the same by tensor."""
        match self.path:
            case CopyPath.BATCH:
                return self._batches(parts, chunk_bytes)
            case CopyPath.KERNEL:
                return self._launches(layers, parts, chunk_bytes)
            case CopyPath.PLAIN:
                return self._plain(parts, chunk_bytes)

    def _choose(self, table: PathTable) -> CopyPath:
        pool = self._pool
        if self._direction is Direction.FORK:
            return CopyPath.PLAIN
        if pool.force in pool.available:
            return pool.force
        count = pool.pieces.count(self._runs)
        among = [path for path in pool.available if path is not CopyPath.KERNEL or count >= KERNEL_PIECES]
        return table.choose(RunShape(self._direction, pool.tokens, self.nbytes // max(1, count)), among)

    def _batches(self, parts: Sequence[TensorPart], chunk_bytes: int) -> Iterator[SizedCopy]:
        copy = self._pool.methods.batch
        assert copy is not None, "a path that is not there is not chosen"
        batches = [self._layer_runs(part, chunk_bytes).batch(part.start, part.stop) for part in parts]
        for batch in RunBatch.join(batches).cut(chunk_bytes):
            yield SizedCopy(self, batch.nbytes, partial(copy, batch))

    def _layer_runs(self, part: TensorPart, chunk_bytes: int) -> LayerRuns:
        """The runs of a tensor, which are the same in every layer and so are computed once per plan."""
        tensor = self._pool.index[part.tensor]
        if tensor not in self._layers:
            runs = cut_runs(self._runs, max(1, chunk_bytes // self._item_bytes(part)))
            self._layers[tensor] = self._pool.geometry(self._direction, tensor).runs(runs)
        return self._layers[tensor]

    def _launches(self, layers: range, parts: Sequence[TensorPart], chunk_bytes: int) -> Iterator[SizedCopy]:
        kernels = self._pool.methods.kernels
        assert kernels is not None, "a path that is not there is not chosen"
        rows = self._pool.items.span(layers.start, layers.stop)
        item_bytes = sum((part.stop - part.start) * self._item_bytes(part) for part in parts)
        step = max(1, chunk_bytes // item_bytes)
        for start in range(0, int(self._runs[:, 2].sum()), step):
            call = partial(self._by_kernel, kernels, rows, parts, slice(start, start + step))
            yield SizedCopy(self, item_bytes * step, call)

    def _by_kernel(
        self, kernels: PageKernels, rows: range, parts: Sequence[TensorPart], pages: slice
    ) -> None:
        """Copy by kernel; by plain copies if a full GPU has no room for the slot numbers."""
        try:
            sides = self._sides = self._sides or self._upload(kernels)
        except torch.OutOfMemoryError as error:
            self._pool.warn_once(error)
            self._without_room(parts, pages)
            return
        sources, destinations = (side[pages] for side in sides)
        if self._direction is Direction.LOAD:
            kernels.scatter(rows, sources, destinations, checked=True)
        else:
            kernels.gather(rows, sources, destinations, checked=True)

    def _upload(self, kernels: PageKernels) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots on the device; once per plan, in the order of its stream."""
        sources, destinations = map(torch.from_numpy, expand_runs(self._runs))
        return kernels.upload(sources), kernels.upload(destinations)

    def _without_room(self, parts: Sequence[TensorPart], pages: slice) -> None:
        sources, destinations = (side[pages] for side in expand_runs(self._runs))
        runs = np.stack((sources, destinations, np.ones_like(sources)), axis=1)
        for part in parts:
            layers = slice(part.start, part.stop)
            source, destination = self._ends[self._pool.index[part.tensor]]
            _copy_runs(source[layers], destination[layers], runs)

    def _plain(self, parts: Sequence[TensorPart], chunk_bytes: int) -> Iterator[SizedCopy]:
        for part in parts:
            source, destination = self._ends[self._pool.index[part.tensor]]
            item_bytes = self._item_bytes(part)
            for piece in pieces(part, self._runs, item_bytes, chunk_bytes):
                layers = slice(piece.start, piece.stop)
                call = partial(_copy_runs, source[layers], destination[layers], piece.runs)
                yield SizedCopy(self, piece.items * item_bytes, call)

    def _item_bytes(self, part: TensorPart) -> int:
        return self._pool.item_bytes[part.tensor]


def _copy_runs(source: torch.Tensor, destination: torch.Tensor, runs: Slots) -> None:
    # Only for items of several runs. Items that are one run are as fast by `memmove` (path batch), and a tie
    # in the measurement must not make this path win.
    if source.shape[2] > 1 and source.device.type == destination.device.type == "cpu":
        copy_runs(source, destination, runs)
        return
    for source_slot, destination_slot, slots in runs.tolist():
        copy_run(
            source[:, source_slot : source_slot + slots],
            destination[:, destination_slot : destination_slot + slots],
        )


# Runs of slots, cut to what one copy may move.


class CopyPiece(NamedTuple):
    """Runs of slots in neighbouring layers: the share of one tensor in one launch.

    Attributes:
        start: the first layer, as an index into the tensor's.
        stop: one past the last.
        runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
    """

    start: int
    stop: int
    runs: Slots

    @property
    def items(self) -> int:
        return (self.stop - self.start) * int(self.runs[:, 2].sum())


def pieces(part: TensorPart, runs: Slots, item_bytes: int, chunk_bytes: int) -> Iterator[CopyPiece]:
    """A tensor's share of a plan in pieces of at most `chunk_bytes`, unless a single item is larger.

    Runs are cut between slots, and between layers if a slot of all layers is too large.
    """
    layer_step = max(1, chunk_bytes // item_bytes)
    for start in range(part.start, part.stop, layer_step):
        stop = min(start + layer_step, part.stop)
        most = max(1, chunk_bytes // (item_bytes * (stop - start)))
        for some in _batches(cut_runs(runs, most), most):
            yield CopyPiece(start, stop, some)


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


def split_runs(runs: Slots, side: int, step_bytes: int, slot_bytes: int) -> Slots:
    """The same pages in runs that do not cross a multiple of `step_bytes` on one side.

    Args:
        runs: int64 `[runs, 3]` of (first source slot, first destination slot, slots).
        side: 0 for sources, 1 for destinations.
        step_bytes: bytes between two borders; none lies within a slot of `runs`.
        slot_bytes: bytes of a slot on that side.
    """
    first, counts = runs[:, side], runs[:, 2]
    parts = ((first + counts) * slot_bytes - 1) // step_bytes - first * slot_bytes // step_bytes + 1
    if parts.max(initial=1) == 1:
        return runs
    split = np.repeat(runs, parts, axis=0)
    index = np.arange(len(split)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts, ends = split[:, side], split[:, side] + split[:, 2]
    numbers = starts * slot_bytes // step_bytes + index
    offsets = np.maximum(-(-numbers * step_bytes // slot_bytes) - starts, 0)
    stops = np.minimum(-(-(numbers + 1) * step_bytes // slot_bytes), ends)
    split[:, 2] = stops - starts - offsets
    split[:, :2] += offsets[:, None]
    return split


def _batches(runs: Slots, most: int) -> Iterator[Slots]:
    """Group neighbouring runs, up to `most` slots each time; no single run is larger."""
    ends = np.cumsum(runs[:, 2])
    start, before = 0, 0
    while start < len(runs):
        stop = int(np.searchsorted(ends, before + most, side="right"))
        yield runs[start:stop]
        start, before = stop, int(ends[stop - 1])
