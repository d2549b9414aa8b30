"""`bench transfer`: copy pages with the engine, and compare with one plain copy of the same size."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from rich.console import RenderableType
from rich.table import Table

from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.reports import add_figures
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import PoolTransfer, trailing_pages
from asynchicache_lab.bench.copy_rig import CopyRig, open_rig
from asynchicache_lab.bench.cores import one_torch_thread
from asynchicache_lab.bench.options import TransferOptions
from asynchicache_lab.bench.plain_copies import PlainMemory, single_copier
from asynchicache_lab.bench.rounds import rotated

AUTO, ALL = "auto", "all"
SINGLES = range(4 << 10, (16 << 10) + 1)
"""Bytes of pages, or of runs, for which the engine is held against a loop of single copies too."""

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
class TransferRow:
    """One pool in one layout, in one direction.

    Attributes:
        page_bytes: size of one slot, all tensors and layers.
        run_bytes: average length of runs that are contiguous on both sides.
        path: the copy path.
        gb_s, limit_gb_s: median speed of the engine and of one plain copy of the same size, in 10^9 bytes/s.
        ratio: median of the two speeds' ratio within a round.
        pinned: whether host memory was pinned, including the plain copy's; never on a CPU.
        singles_gb_s: speed of a loop of single copies of equally long runs, for pages or runs of 4 to 16 KiB;
            else None.
        gain: median ratio of the engine's speed to `singles_gb_s` within a round, or None.
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
    pinned: bool = False
    singles_gb_s: float | None = None
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The result of one run; `ok` if every page arrived intact."""

    device: str
    rows: list[TransferRow]
    ok: bool

    def as_json(self) -> dict[str, object]:
        return {"device": self.device, "ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def present(self) -> RenderableType:
        """A table with a section per pool and page size, and a row per layout with both directions."""
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
            paths = dict.fromkeys((load.path, backup.path))  # without duplicates
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
        """Run length. Pages are copied in random order, so runs never span pages."""
        layout = SlotLayout.of(self.pool, self.page_size, self.layout)
        units = sum(len(tensor.spec.layers) * tensor.units for tensor in layout.tensors.values())
        return layout.page_bytes // units

    @property
    def page_bytes(self) -> int:
        return self.pool.slot_bytes(self.page_size)

    @property
    def singly(self) -> bool:
        """Whether to compare with single copies, too."""
        return self.page_bytes in SINGLES or self.run_bytes in SINGLES


def _cases(chosen: str) -> Iterator[_Case]:
    for name in POOLS if chosen == ALL else [chosen]:
        pool, page_sizes = POOLS[name]
        for page_size in page_sizes:
            for layout in HostLayout:
                yield _Case(name, pool, page_size, layout)


async def run_transfer(
    options: TransferOptions,
    advance: Callable[[int, int], None],
    tell: Callable[[TransferReport], None] = lambda report: None,
) -> TransferReport:
    """Copy the pages of every pool in every layout, in both directions.

    Args:
        options: what to measure.
        advance: called with the number of finished cases and the total.
        tell: called with the partial report after each case, which survives an interrupt. Default: ignored.

    Raises:
        ConfigError: the device's name is invalid, or the device does not support the copy path.
        DeviceError: the device is not available.
    """
    cases, rows, ok, device = list(_cases(options.pool)), [], True, options.device
    with one_torch_thread():  # the plain copy gets one thread, as the engine's streams have
        for done, case in enumerate(cases):
            found, right, device = await _run_case(case, options)
            rows += found
            ok = ok and right
            tell(TransferReport(device, [*rows], ok))
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
            rows.append(await _row(rig, case, operation, options))
            right = right and _arrived(rig, operation)
        return rows, right, rig.device.name


def _shuffled(direction: Direction, pool: str, slots: int, seed: int) -> CacheOperation:
    """An operation on all pages, in random order."""
    rng = random.Random(seed)
    sources, destinations = (rng.sample(range(slots), slots) for _ in range(2))
    return CacheOperation(direction, (PoolTransfer(pool, sources, destinations),))


async def _row(rig: CopyRig, case: _Case, operation: CacheOperation, options: TransferOptions) -> TransferRow:
    before = rig.transfers.statistics().paths[case.pool.name]
    with PlainMemory.beside(rig, operation.direction) as plain:
        measures = [
            (plain.nbytes, partial(rig.seconds, operation)),
            (plain.nbytes, partial(rig.seconds_on_stream, plain.copy)),
        ]
        if case.singly:
            runs, copy = plain.singles(case.run_bytes, options.seed), single_copier(rig.memory.device.device)
            measures.append((runs.nbytes, partial(rig.seconds_on_stream, partial(copy, runs))))
        mine, limit, *singles = await _measured(measures, options.rounds)
    after = rig.transfers.statistics().paths[case.pool.name]
    return TransferRow(
        operation.direction.value,
        case.layout.value,
        case.name,
        case.page_bytes,
        case.run_bytes,
        next(path.value for path in CopyPath if after[path] > before[path]),
        median(mine),
        median(limit),
        _median_ratio(mine, limit),
        rig.memory.host.pinned,
        *(figure for rates in singles for figure in (median(rates), _median_ratio(mine, rates))),
    )


async def _measured(
    measures: Sequence[tuple[int, Callable[[], Awaitable[float]]]], rounds: int
) -> list[list[float]]:
    """Speeds of each measure by round, in 10^9 bytes/s.

    Args:
        measures: for each, the bytes moved and a call that moves them and returns the seconds.
        rounds: number of counted rounds, which follow one warm-up round.
    """
    seconds: list[list[float]] = [[] for _ in measures]
    for number in range(rounds + 1):
        for which in rotated(range(len(measures)), number):
            seconds[which].append(await measures[which][1]())
    return [_rates(nbytes, times[1:]) for (nbytes, _), times in zip(measures, seconds, strict=True)]


def _median_ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """Median over rounds of the ratio of two rates."""
    return median(one / other for one, other in zip(mine, others, strict=True))


def _rates(nbytes: int, seconds: Sequence[float]) -> list[float]:
    """Rates in 10^9 bytes/s."""
    return [nbytes / one / 1e9 for one in seconds]


def _sides(rig: CopyRig, direction: Direction) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Source and destination of each tensor."""
    items = rig.memory.items()
    sides = (items.host, items.device) if direction is Direction.LOAD else (items.device, items.host)
    return zip(*sides, strict=True)


def _place(rig: CopyRig) -> torch.device:
    """The device that generates and compares pages: the rig's, since a CPU would take seconds for a GPU's."""
    return rig.memory.device.device


def _fill(rig: CopyRig, direction: Direction, seed: int) -> None:
    """Fill the source with distinct words and the destination with zeros."""
    start = seed << 32
    for source, destination in _sides(rig, direction):
        nbytes = source.numel() * source.element_size()
        numbers = torch.arange(start, start + -(-nbytes // 8), dtype=torch.int64, device=_place(rig))
        # On the side of the source: CUDA refuses one copy across two registrations of pinned memory.
        numbers = numbers.view(torch.uint8).to(source.device)
        source.copy_(numbers[:nbytes].view(source.dtype).view(source.shape))
        destination.zero_()
        start += len(numbers)
    rig.settle()


def _arrived(rig: CopyRig, operation: CacheOperation) -> bool:
    """Whether every page has arrived at its destination."""
    transfer = operation.transfers[0]
    place = _place(rig)
    order = [torch.tensor(list(slots), device=place) for slots in (transfer.sources, transfer.destinations)]
    return all(
        torch.equal(_moved(source, place)[:, order[0]], _moved(destination, place)[:, order[1]])
        for source, destination in _sides(rig, operation.direction)
    )


def _moved(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """`tensor` on `place`, through memory that is not pinned, as in `_fill`."""
    return tensor if tensor.device.type == place.type else tensor.clone().to(place)
