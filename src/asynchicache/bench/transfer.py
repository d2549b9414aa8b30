"""`bench transfer`: pages through the engine, beside one plain copy of as many bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from rich.console import RenderableType
from rich.table import Table

from asynchicache.bench.copy_rig import CopyRig, open_rig
from asynchicache.bench.cores import one_torch_thread
from asynchicache.bench.options import check_minimums, option
from asynchicache.bench.rounds import rotated
from asynchicache.bench.tables import add_figures
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.pools.slabs import Slab
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import PoolTransfer, trailing_pages

AUTO, ALL = "auto", "all"
_LAYERS = tuple(range(4))
_DIRECTIONS = (Direction.LOAD, Direction.BACKUP)


def _kv(name: str, width: int, *, layers: tuple[int, ...] = _LAYERS) -> PoolSpec:
    tensors = tuple(TensorSpec(part, layers, (width, 128), "bfloat16") for part in ("keys", "values"))
    return PoolSpec(name, tensors)


POOLS: dict[str, tuple[PoolSpec, tuple[int, ...]]] = {
    "mha": (_kv("kv", 8), (1, 4, 16, 64, 256)),
    "mla": (PoolSpec("kv", (TensorSpec("latent", _LAYERS, (576,), "bfloat16"),)), (64,)),
    "dsa": (PoolSpec("dsa", (TensorSpec("index_keys", _LAYERS, (132,), "uint8"),)), (64,)),
    "swa": (_kv("swa", 4, layers=(0, 2)), (64,)),
    "mamba": (
        PoolSpec(
            "mamba",
            (
                TensorSpec("conv", _LAYERS[:2], (8192, 3), "bfloat16"),
                TensorSpec("recurrent", _LAYERS[:2], (32, 128, 128), "float32"),
            ),
            coverage=trailing_pages(1),
            per_token=False,
        ),
        (1,),
    ),
}
"""By name, a pool of a usual shape and few layers, and the page sizes, in tokens, that are tried."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """The flags of `bench transfer`."""

    device: str = option("cpu", "cpu, cuda or cuda:N")
    path: str = option(AUTO, "how to copy; auto measures", choices=[AUTO, *(path.value for path in CopyPath)])
    pool: str = option(ALL, "whose pages to copy", choices=[ALL, *POOLS])
    row_mib: int = option(256, "MiB that a row moves at a time", minimum=1)
    rounds: int = option(40, "rounds, of which the median counts", minimum=1)
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self)


@dataclass(frozen=True, slots=True)
class TransferRow:
    """One pool in one layout, in one direction.

    Attributes:
        page_bytes: of one slot, all tensors and layers.
        run_bytes: contiguous on both sides, on average.
        path: how the pages were copied.
        gb_s, limit_gb_s: 10^9 bytes a second, of the engine, and of one plain copy of as many bytes; medians.
        ratio: of both in a round; the median.
    """

    direction: str
    layout: str
    pool: str
    page_bytes: int
    run_bytes: int
    path: str
    gb_s: float
    limit_gb_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One run; `ok` if every page that arrived is the page that left."""

    device: str
    rows: list[TransferRow]
    ok: bool

    def as_json(self) -> dict[str, object]:
        return {"device": self.device, "ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def present(self) -> RenderableType:
        """A table with a section for each pool and page, in which a row has both directions of a layout."""
        caption = "share: of the speed of one plain copy of as many bytes"
        table = Table(title=f"transfer, {self.device}, GB/s", caption=caption)
        table.add_column("pool, page\nlayout", no_wrap=True)
        add_figures(table, "run")
        table.add_column("path")
        add_figures(table, "load", "share", "backup", "share")
        section = ""
        for load, backup in zip(self._of("load"), self._of("backup"), strict=True):
            if section != (section := f"{load.pool}, {_size(load.page_bytes)}"):
                table.add_section()
                table.add_row(section)
            paths = dict.fromkeys((load.path, backup.path))  # one word where both are the same
            rates = [f"{value:.2f}" for row in (load, backup) for value in (row.gb_s, row.ratio)]
            table.add_row(load.layout, _size(load.run_bytes), ", ".join(paths), *rates)
        return table

    def _of(self, direction: str) -> list[TransferRow]:
        return [row for row in self.rows if row.direction == direction]


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / 1024:.1f} KiB" if nbytes >= 1024 else f"{nbytes} B"


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    pool: PoolSpec
    page_size: int
    layout: HostLayout

    @property
    def run_bytes(self) -> int:
        """Pages are taken in no order, so a run is a unit of an item."""
        layout = SlotLayout.of(self.pool, self.page_size, self.layout)
        units = sum(len(tensor.spec.layers) * tensor.units for tensor in layout.tensors.values())
        return layout.page_bytes // units


def _cases(chosen: str) -> Iterator[_Case]:
    for name in POOLS if chosen == ALL else [chosen]:
        pool, page_sizes = POOLS[name]
        for page_size in page_sizes:
            for layout in HostLayout:
                yield _Case(name, pool, page_size, layout)


async def run_transfer(options: TransferOptions, advance: Callable[[int, int], None]) -> TransferReport:
    """Move the pages of every pool in every layout, in both directions.

    Raises:
        ConfigError: no such device, or no such path on it.
        DeviceError: the device is not there.
    """
    cases, rows, ok, device = list(_cases(options.pool)), [], True, options.device
    with one_torch_thread():  # as many for the plain copy as a stream of the engine's has
        for done, case in enumerate(cases):
            found, right, device = await _run_case(case, options)
            rows += found
            ok = ok and right
            advance(done + 1, len(cases))
    return TransferReport(device, rows, ok)


async def _run_case(case: _Case, options: TransferOptions) -> tuple[list[TransferRow], bool, str]:
    pool = case.pool
    slots = max(2, (options.row_mib << 20) // pool.slot_bytes(case.page_size))
    path = None if options.path == AUTO else CopyPath(options.path)
    rows, right = [], True
    async with open_rig(
        pool, case.page_size, slots, device=options.device, layout=case.layout, path=path
    ) as rig:
        for direction in _DIRECTIONS:
            operation = _shuffled(direction, pool.name, slots, options.seed)
            _fill(rig, direction, options.seed)
            rows.append(await _row(rig, case, operation, options.rounds))
            right = right and _arrived(rig, operation)
        return rows, right, rig.device.name


def _shuffled(direction: Direction, pool: str, slots: int, seed: int) -> CacheOperation:
    """Every page, in no order."""
    rng = random.Random(seed)
    sources, destinations = (rng.sample(range(slots), slots) for _ in range(2))
    return CacheOperation(direction, (PoolTransfer(pool, sources, destinations),))


async def _row(rig: CopyRig, case: _Case, operation: CacheOperation, rounds: int) -> TransferRow:
    direction = operation.direction
    plain, nbytes = _plain_copy(rig, direction)
    before = rig.engine.statistics().paths[case.pool.name]
    ours: list[float] = []
    limits: list[float] = []
    sides = [
        (ours, partial(rig.seconds, operation)),
        (limits, partial(rig.seconds_on_stream, plain)),
    ]
    for number in range(rounds + 1):  # the first round warms up
        for seconds, move in rotated(sides, number):
            seconds.append(await move())
    after = rig.engine.statistics().paths[case.pool.name]
    mine, limit = _rates(nbytes, ours[1:]), _rates(nbytes, limits[1:])
    return TransferRow(
        direction.value,
        case.layout.value,
        case.name,
        case.pool.slot_bytes(case.page_size),
        case.run_bytes,
        next(path.value for path in CopyPath if after[path] > before[path]),
        median(mine),
        median(limit),
        median(one / other for one, other in zip(mine, limit, strict=True)),
    )


def _rates(nbytes: int, seconds: Sequence[float]) -> list[float]:
    """10^9 bytes a second."""
    return [nbytes / one / 1e9 for one in seconds]


def _plain_copy(rig: CopyRig, direction: Direction) -> tuple[Callable[[], object], int]:
    """One `copy_` of as many bytes as the device pool has, between memory of the same kinds."""
    nbytes = rig.memory.device.nbytes
    if rig.memory.device.device.type == "cpu":
        host, device = (Slab(nbytes).tensor.fill_(1) for _ in range(2))
    else:
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=rig.memory.host.pinned)
        device = torch.ones(nbytes, dtype=torch.uint8, device=rig.memory.device.device)
    source, destination = (host, device) if direction is Direction.LOAD else (device, host)
    return lambda: destination.copy_(source, non_blocking=True), nbytes


def _sides(rig: CopyRig, direction: Direction) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """By tensor, source and destination."""
    items = rig.memory.items()
    sides = (items.host, items.device) if direction is Direction.LOAD else (items.device, items.host)
    return zip(*sides, strict=True)


def _place(rig: CopyRig) -> torch.device:
    """Where pages are made and compared: a CPU takes seconds for what a GPU does at once."""
    return rig.memory.device.device


def _fill(rig: CopyRig, direction: Direction, seed: int) -> None:
    """Numbers to be read, no two words alike, and zeros where they are to arrive."""
    start = seed << 32
    for source, destination in _sides(rig, direction):
        nbytes = source.numel() * source.element_size()
        numbers = torch.arange(start, start + -(-nbytes // 8), dtype=torch.int64, device=_place(rig))
        numbers = numbers.view(torch.uint8)
        source.copy_(numbers[:nbytes].view(source.dtype).view(source.shape))
        destination.zero_()
        start += len(numbers)
    rig.settle()


def _arrived(rig: CopyRig, operation: CacheOperation) -> bool:
    """Whether every page is where it was to go."""
    transfer = operation.transfers[0]
    place = _place(rig)
    order = [torch.tensor(list(slots), device=place) for slots in (transfer.sources, transfer.destinations)]
    return all(
        torch.equal(source.to(place)[:, order[0]], destination.to(place)[:, order[1]])
        for source, destination in _sides(rig, operation.direction)
    )
