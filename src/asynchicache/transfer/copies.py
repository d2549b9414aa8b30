"""Carries out plans: enqueues copies between the tiers of pools on a stream."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from asynchicache.errors import CallRefusedError, ConfigError, DeviceError, InternalError
from asynchicache.kernels.batch import PieceCount, RunBatch
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.reference import copy_run
from asynchicache.kernels.select import CopyMethods, FindMethods, copy_methods
from asynchicache.kernels.units import copy_runs
from asynchicache.pools.device import DevicePages
from asynchicache.pools.host import HostPool
from asynchicache.streams.base import Event, Stream
from asynchicache.transfer.launch_table import LaunchTable, PlanPages, TableLayout, TableTensor, cut_runs
from asynchicache.transfer.paths import CopyPath, PathTable, RunShape, table_for
from asynchicache.transfer.plan import Direction, PoolShape, Slots, TensorPart, TransferPlan, tensor_parts
from asynchicache.transfer.slots import SlotRegion, SlotRing, SlotsInPlace

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""Bytes of one launch. A long copy must let others run in between, on a copy engine that alternates between
streams and on emulated streams that share the cores."""

_BETWEEN_TIERS = (Direction.LOAD, Direction.BACKUP)

FIRST_RUNS = 64
"""Runs of a transfer's first launch: a driver takes them in some tens of microseconds, and copies begin."""

LEAST_RING, MOST_RING = 1 << 17, 1 << 23
"""Slot numbers that a GPU has room for: 1 MiB, and 64."""

MOST_LAYOUTS = 256

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
    """A part of a transfer's copies.

    Attributes:
        pools: whose.
        path: how.
        nbytes: about how many.
        call: enqueues it on the current stream, or on the one that it was made for.
        at_once: whether it is not to wait for others to be launched together with.
    """

    pools: Sequence[_Pool]
    path: CopyPath
    nbytes: int
    call: Callable[[], object]
    at_once: bool = False


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
        methods: FindMethods | None = None,
    ) -> None:
        """
        Args:
            memories: by pool.
            table: measured rates, to choose paths by. Default: recorded rates of a CPU; plain copies on
                a GPU.
            force: always take this path.
            chunk_bytes: most bytes of one launch, as far as single items allow.
            methods: finds what can copy a pool. Default: `copy_methods`.

        Raises:
            ConfigError: the forced path is not available.
        """
        on_gpu = any(memory.device.device.type == "cuda" for memory in memories.values())
        self.table = table_for(table, on_gpu=on_gpu)
        self.nbytes: PathBytes = {pool: dict.fromkeys(CopyPath, 0) for pool in memories}
        self._force = force
        self._chunk_bytes = chunk_bytes
        self._pools = {
            pool: _Pool(pool, memory, force, methods or copy_methods) for pool, memory in memories.items()
        }
        self._keep = list(self._pools.values())
        self._layouts: dict[tuple[Direction, tuple[str, ...], tuple[range, ...]], TableLayout] = {}
        self._slots = self._slot_store(memories)

    def _slot_store(self, memories: Mapping[str, PoolMemory]) -> SlotsInPlace | SlotRing:
        """Room for the slots of some of the largest transfers: no slot occurs twice in one."""
        pools = [(pool, memories[name]) for name, pool in self._pools.items()]
        ours = [(pool, memory) for pool, memory in pools if CopyPath.KERNEL in pool.available]
        if not any(memory.device.device.type == "cuda" for _, memory in ours):
            return SlotsInPlace()
        most = sum(min(memory.device.slots, memory.host.slots) for _, memory in ours)
        numbers = min(max(LEAST_RING, 4 * most), MOST_RING)
        try:
            return SlotRing(ours[0][1].device.device, numbers)
        except DeviceError as error:
            for pool, _ in ours:
                pool.drop(CopyPath.KERNEL, error)
            return SlotsInPlace()

    @property
    def choice(self) -> dict[Direction, str]:
        """Which path runs of which length take, in words."""
        if self._force is not None:
            return dict.fromkeys(_BETWEEN_TIERS, self._force.value)
        return {direction: self.table.summary(direction) for direction in _BETWEEN_TIERS}

    def prepare(self, plan: TransferPlan) -> PlanCopies:
        """The copies of one plan, for `enqueue`. It takes as long for many pages as for few."""
        copies = PlanCopies(plan, self._pools, self.table, self._slots, self._chunk_bytes)
        if plan.direction is not Direction.FORK:
            for pool, path in copies.paths.items():
                pages = len(plan.columns[pool][0])
                self.nbytes[pool][path] += pages * self._pools[pool].page_bytes
        batched = tuple(pool for pool, path in copies.paths.items() if path is CopyPath.BATCH)
        if batched:
            layout = self._layout(plan, batched)
            copies.table = LaunchTable(layout, copies.pages, self._chunk_bytes, self._keep)
        return copies

    def _layout(self, plan: TransferPlan, pools: tuple[str, ...]) -> TableLayout:
        key = plan.direction, pools, plan.groups
        layout = self._layouts.get(key)
        if layout is None:
            tensors = [one for pool in pools for one in self._pools[pool].tensors(plan.direction)]
            if len(self._layouts) >= MOST_LAYOUTS:  # sizes of loads make few different groups
                self._layouts.clear()
            layout = self._layouts[key] = TableLayout.of(tensors, plan.groups, self._chunk_bytes)
        return layout

    def enqueue(self, stream: Stream, copies: PlanCopies, layers: range) -> None:
        """Enqueue the copies of a group of layers, in launches of at most a chunk; groups come in order.

        Raises:
            CallRefusedError: the device refused one of them. No later plan takes its path.
        """
        batch = copies.ready(layers)
        if batch is not None:
            copies.launch(batch, stream)
            return
        held: list[SizedCopy] = []
        nbytes = 0
        for copy in copies.of_group(layers, stream.handle):
            if held and nbytes + copy.nbytes > self._chunk_bytes:
                _launch(stream, held)
                held, nbytes = [], 0
            held.append(copy)
            nbytes += copy.nbytes
            if copy.at_once:
                _launch(stream, held)
                held, nbytes = [], 0
        if held:
            _launch(stream, held)


def _no_batches(batch: RunBatch, stream: int) -> None:
    raise InternalError("a path that is not there was chosen")


def _launch(stream: Stream, copies: Sequence[SizedCopy]) -> None:
    begun: list[SizedCopy] = []
    try:
        stream.launch(partial(_run_all, copies, begun))
    except CallRefusedError as error:
        _drop(begun[-1].pools, begun[-1].path, error)
        raise


def _drop(pools: Sequence[_Pool], path: CopyPath, error: CallRefusedError) -> None:
    for pool in pools:
        pool.drop(path, error.__cause__ or error)


def _run_all(copies: Sequence[SizedCopy], begun: list[SizedCopy]) -> None:
    for copy in copies:
        begun.append(copy)
        copy.call()


class _Pool:
    """One pool's items, and the methods that can copy them."""

    def __init__(self, name: str, memory: PoolMemory, force: CopyPath | None, methods: FindMethods) -> None:
        self._name = name
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
        self.tokens = any(items.shape[2] > 1 for items in host)
        self.pieces = PieceCount.of(self.ends[Direction.LOAD])
        runs = Counter[int]()
        for row in self.items.rows:
            runs[row.layer] += host[row.tensor].shape[2]
        self.first_pages = max(1, FIRST_RUNS // max(runs.values()))
        self._host = memory.host
        self._spans: dict[range, tuple[range, int]] = {}
        self._chosen: dict[tuple[RunShape, bool], CopyPath] = {}
        self.methods = CopyMethods()
        if memory.host.slots:  # without any, nothing is ever copied between the tiers
            self.methods = methods(self.items, pinned=memory.host.pinned)
        self.force = force
        self._refused: set[CopyPath] = set()
        if force is not None and memory.host.slots and force not in self.available:
            raise ConfigError(
                f"copy_path {force.value!r} is not there for pool {name!r} on {memory.device.device}: "
                f"{self.methods.lacking[force.value]}. Leave copy_path out to have what is there measured"
            )

    def tensors(self, direction: Direction) -> Iterator[TableTensor]:
        for tensor, ends in zip(self.spec.tensors, self.ends[direction], strict=True):
            yield TableTensor(self._name, tensor.layers, *ends)

    def span(self, layers: range) -> tuple[range, int]:
        """Rows of the pool's items, and bytes of a page in them."""
        if layers not in self._spans:
            parts = tensor_parts(self.spec, layers)
            nbytes = sum((part.stop - part.start) * self.item_bytes[part.tensor] for part in parts)
            self._spans[layers] = self.items.span(layers.start, layers.stop), nbytes
        return self._spans[layers]

    def within_registrations(self, direction: Direction, runs: Slots) -> Slots:
        """The same pages in runs that CUDA can copy: none spans two registrations of host memory."""
        host = self._host
        if direction is Direction.FORK or host.step_bytes >= host.memory.nbytes:
            return runs
        side = 0 if direction is Direction.LOAD else 1
        return split_runs(runs, side, host.step_bytes, host.layout.slot_bytes)

    @property
    def available(self) -> list[CopyPath]:
        found = [CopyPath.PLAIN]
        if self.methods.kernels is not None:
            found.append(CopyPath.KERNEL)
        if self.methods.batch is not None:
            found.append(CopyPath.BATCH)
        return [path for path in found if path not in self._refused]

    def choose(self, table: PathTable, shape: RunShape, *, kernels: bool) -> CopyPath:
        """
        Args:
            kernels: whether a kernel may be chosen.
        """
        key = shape, kernels
        if key not in self._chosen:
            among = [path for path in self.available if kernels or path is not CopyPath.KERNEL]
            self._chosen[key] = self.force if self.force in among else table.choose(shape, among)
        return self._chosen[key]

    def drop(self, path: CopyPath, error: BaseException) -> None:
        """The device refused a copy by a path: later ones take another. Plain copies are the last resort."""
        if path is not CopyPath.PLAIN and path not in self._refused:
            self._refused.add(path)
            self._chosen.clear()
            logger.warning("pool %s: no more copies by %s: %s", self._name, path.value, error)


class PlanCopies:
    """The copies of one plan.

    Attributes:
        paths: by pool, how they are copied.
        pages: by pool.
        table: the runs of what is copied in batches; None if nothing is.
    """

    def __init__(
        self,
        plan: TransferPlan,
        pools: Mapping[str, _Pool],
        rates: PathTable,
        slots: SlotsInPlace | SlotRing,
        chunk_bytes: int,
    ) -> None:
        self._direction = plan.direction
        self._pools = {pool: pools[pool] for pool in plan.columns}
        self._columns = plan.columns
        self._rates = rates
        self._chunk_bytes = chunk_bytes
        self.table: LaunchTable | None = None
        self.pages = {name: self._pages(pool, *plan.columns[name]) for name, pool in self._pools.items()}
        self.paths = {name: self._choose(name, kernels=True) for name in self._pools}
        self._region: SlotRegion | None = None
        self._addresses: dict[str, list[int]] = {}
        by_kernel = self._by(CopyPath.KERNEL)
        if by_kernel:
            self._region = slots.reserve(2 * sum(len(plan.columns[name][0]) for name in by_kernel))
        if self._region is None:
            self.paths.update({name: self._choose(name, kernels=False) for name in by_kernel})
        self._batched = [self._pools[name] for name in self._by(CopyPath.BATCH)]
        self._only_batches = len(self._batched) == len(self._pools)
        self._copy = (self._batched[0].methods.batch if self._batched else None) or _no_batches

    def _by(self, path: CopyPath) -> list[str]:
        return [name for name, chosen in self.paths.items() if chosen is path]

    def _pages(self, pool: _Pool, sources: Slots, destinations: Slots) -> PlanPages:
        bounded = partial(pool.within_registrations, self._direction)
        first = max(1, pool.first_pages // len(self._pools))
        return PlanPages(sources, destinations, first, self._chunk_bytes, bounded)

    def _choose(self, name: str, *, kernels: bool) -> CopyPath:
        """By the length of runs: a guess by the first pages where it depends on which slots follow others."""
        if self._direction is Direction.FORK:
            return CopyPath.PLAIN
        pool, pages, count = self._pools[name], self.pages[name], len(self._columns[name][0])
        pieces = pool.pieces.of_slots * count
        if pool.pieces.of_runs:
            runs, of = len(pages.slot_runs(0)), len(pages.pieces[0][0])
            pieces += pool.pieces.of_runs * max(1, runs * count // of)
        shape = RunShape(self._direction, pool.tokens, pool.page_bytes * count // max(1, pieces))
        forced = pool.force is CopyPath.KERNEL
        return pool.choose(self._rates, shape, kernels=kernels and (forced or pieces >= KERNEL_PIECES))

    def ready(self, layers: range) -> RunBatch | None:
        """All copies of a group, where they are one batch that is written down."""
        return self.table.ready(layers.start) if self._only_batches and self.table is not None else None

    def launch(self, batch: RunBatch, stream: Stream) -> None:
        """Enqueue a batch of its table.

        Raises:
            CallRefusedError: as `PageCopier.enqueue`.
        """
        try:
            stream.launch(partial(self._copy, batch, stream.handle))
        except CallRefusedError as error:
            _drop(self._batched, CopyPath.BATCH, error)
            raise

    def _of_batch(self, batch: RunBatch, stream: int, *, at_once: bool = False) -> SizedCopy:
        call = partial(self._copy, batch, stream)
        return SizedCopy(self._batched, CopyPath.BATCH, batch.nbytes, call, at_once)

    def of_group(self, layers: range, stream: int) -> Iterator[SizedCopy]:
        """The copies of a group of layers of the model.

        Args:
            layers: one of the plan's groups, in order.
            stream: its handle.
        """
        if self.table is not None:
            for batch in self.table.batches(layers.start):
                yield self._of_batch(batch, stream, at_once=batch is self.table.head)
        for name, pool in self._pools.items():
            if self.paths[name] is CopyPath.KERNEL:
                yield from self._launches(name, pool, layers, stream)
            elif self.paths[name] is CopyPath.PLAIN:
                yield from self._plain(name, pool, layers)

    def _launches(self, name: str, pool: _Pool, layers: range, stream: int) -> Iterator[SizedCopy]:
        rows, nbytes = pool.span(layers)
        if rows:
            pages = len(self._columns[name][0])
            step = max(1, self._chunk_bytes // nbytes)
            for start in range(0, pages, step):
                count = min(step, pages - start)
                call = partial(self._by_kernel, name, rows, start, count, stream)
                yield SizedCopy([pool], CopyPath.KERNEL, nbytes * count, call)

    def _by_kernel(self, name: str, rows: range, start: int, count: int, stream: int) -> None:
        addresses = self._addresses or self._upload(stream)
        kernels = self._pools[name].methods.kernels
        assert kernels is not None, "a path that is not there is not chosen"
        load = self._direction is Direction.LOAD
        host, device = addresses[name] if load else reversed(addresses[name])
        kernels.copy(rows, host + 8 * start, device + 8 * start, count, to_device=load, stream=stream)

    def _upload(self, stream: int) -> dict[str, list[int]]:
        """The slots on the device, those of all pools together; once per plan, in the order of its stream."""
        assert self._region is not None, "else no kernel is chosen"
        names = self._by(CopyPath.KERNEL)
        found = self._region.upload([side for name in names for side in self._columns[name]], stream)
        self._addresses = {name: found[2 * i : 2 * i + 2] for i, name in enumerate(names)}
        return self._addresses

    def _plain(self, name: str, pool: _Pool, layers: range) -> Iterator[SizedCopy]:
        pages = self.pages[name]
        for part in tensor_parts(pool.spec, layers):
            source, destination = pool.ends[self._direction][pool.index[part.tensor]]
            item_bytes = pool.item_bytes[part.tensor]
            for number in range(len(pages.pieces)):
                for piece in pieces(part, pages.slot_runs(number), item_bytes, self._chunk_bytes):
                    some = slice(piece.start, piece.stop)
                    call = partial(_copy_runs, source[some], destination[some], piece.runs)
                    yield SizedCopy([pool], CopyPath.PLAIN, piece.items * item_bytes, call)

    def end(self, event: Event | None) -> None:
        """Nothing more is enqueued, and all has run once `event` is reached, or by now."""
        if self._region is not None:
            self._region.end(event)


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
