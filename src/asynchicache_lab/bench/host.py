"""`bench host`: what a load costs the host a layer, with a CUDA driver that counts and copies nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import NamedTuple, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table

from asynchicache.kernels.batch import RunBatch
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.select import CopyMethods, FindMethods
from asynchicache.pools.host import HostPool
from asynchicache.reports import Advance, add_figures, facts
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import PoolTransfer
from asynchicache_lab.bench.counting_driver import CountedCalls, PagesOfNoGpu, batches_only, counted_cuda
from asynchicache_lab.bench.options import HostOptions
from asynchicache_lab.bench.rounds import no_garbage_collection
from asynchicache_lab.bench.submit_thread import SubmitPort, busy_python

LAYERS = 48
FIRST_PAGES = 1024, 16384
IDLE_SECONDS = 0.003  # between two loads, as what follows the first launch is not to be in the next one's way
_LOADS = 6  # of a round; the first one fills caches
_CLOSE_SECONDS = 30.0

_ATTENTION = tuple(range(3, LAYERS, 4))
_LINEAR = tuple(layer for layer in range(LAYERS) if layer % 4 != 3)
_PAGES = PoolSpec("kv", (TensorSpec("pages", tuple(range(LAYERS)), (1024,), "uint8"),))
_HYBRID = (
    PoolSpec("kv", tuple(TensorSpec(name, _ATTENTION, (2, 16), "bfloat16") for name in ("keys", "values"))),
    PoolSpec(
        "states",
        (TensorSpec("conv", _LINEAR, (16,), "bfloat16"), TensorSpec("recurrent", _LINEAR, (64,), "float32")),
    ),
)
_FIRST = PoolSpec("kv", tuple(TensorSpec(name, (0, 1, 2, 3), (64,), "uint8") for name in ("keys", "values")))


class CountedLoad(NamedTuple):
    """A load in groups of one layer.

    Attributes:
        name: for people.
        pools: what is loaded.
        pages: of each pool, in no order.
    """

    name: str
    pools: Sequence[PoolSpec]
    pages: int


CASES = (
    CountedLoad("attention", (_PAGES,), 32),
    CountedLoad("attention", (_PAGES,), 512),
    CountedLoad("hybrid, four tensors", _HYBRID, 64),
)


@dataclass(frozen=True, slots=True)
class HostRow:
    """One case; medians, in microseconds a layer.

    Attributes:
        cpu_us: CPU time of the submit thread.
        wall_us: the same by the clock.
        busy_us: by the clock, beside a thread that runs Python.
        driver_calls: how many.
        gil_releases: of these, those that released the interpreter's lock.
    """

    case: str
    pages: int
    cpu_us: float
    wall_us: float
    busy_us: float
    driver_calls: float
    gil_releases: float


@dataclass(frozen=True, slots=True)
class HostReport:
    """One run.

    Attributes:
        rows: by case.
        first_launch_us: by pages of a load, medians from its submission to the driver's first call.
    """

    rows: list[HostRow]
    first_launch_us: dict[int, float]

    @property
    def ok(self) -> bool:
        return True  # measures only; nothing to check

    @property
    def first_launch_ratio(self) -> float:
        few, many = (self.first_launch_us[pages] for pages in FIRST_PAGES)
        return many / few

    def as_json(self) -> dict[str, object]:
        first = {str(pages): us for pages, us in self.first_launch_us.items()}
        rows = [asdict(row) for row in self.rows]
        return {"rows": rows, "first_launch_us": first, "first_launch_ratio": self.first_launch_ratio}

    def present(self) -> RenderableType:
        table = Table("case", title=f"a load of {LAYERS} layers, a layer")
        add_figures(
            table, "pages", "CPU, us", "clock, us", "beside\nPython, us", "driver\ncalls", "lock\nreleased"
        )
        for row in self.rows:
            us = (f"{value:.1f}" for value in (row.cpu_us, row.wall_us, row.busy_us))
            table.add_row(row.case, f"{row.pages}", *us, f"{row.driver_calls:.2f}", f"{row.gil_releases:.2f}")
        first = [
            (f"first launch of {pages:,} pages", f"{us:.0f} us") for pages, us in self.first_launch_us.items()
        ]
        return Group(table, facts([*first, ("ratio", f"{self.first_launch_ratio:.2f}")], "after submitting"))


async def run_host(options: HostOptions, advance: Advance = lambda done, of: None) -> HostReport:
    """Measure every case in each round."""
    spent: list[list[tuple[float, float, float]]] = [[] for _ in CASES]
    counted: list[tuple[float, float]] = []
    first: dict[int, list[float]] = {pages: [] for pages in FIRST_PAGES}
    with counted_cuda() as calls, no_garbage_collection():
        for number in range(options.rounds):
            counted = []
            for case, times in zip(CASES, spent, strict=True):
                alone, of_calls = await _load(case, calls, busy=False)
                busy, _ = await _load(case, calls, busy=True)
                times.append((*alone[::-1], busy[0]))
                counted.append(of_calls)
            for pages, times_of in first.items():
                times_of.append(await _first_launch(pages))
            advance(number + 1, options.rounds)
    rows = [
        HostRow(case.name, case.pages, median(cpu), median(wall), median(busy), *of_calls)
        for case, of_calls, (cpu, wall, busy) in zip(
            CASES, counted, (zip(*times, strict=True) for times in spent), strict=True
        )
    ]
    return HostReport(rows, {pages: median(times) for pages, times in first.items()})


Pair: TypeAlias = tuple[float, float]


async def _load(case: CountedLoad, calls: CountedCalls, *, busy: bool) -> tuple[Pair, Pair]:
    """Medians, a layer: microseconds on the clock and of the processor; driver calls, and those that released
    the lock."""
    async with _open(case.pools, LAYERS, 2 * case.pages) as (transfers, port):
        operation = _operation(case.pools, 2 * case.pages, case.pages)
        with busy_python() if busy else nullcontext():
            for _ in range(_LOADS):
                before = calls.names.total(), calls.released
                await transfers.submit(operation, done=lambda error: None)
        made, released = calls.names.total() - before[0], calls.released - before[1]
    wall, cpu = (1e6 * median(times) / LAYERS for times in zip(*port.spent[1:], strict=True))
    return (wall, cpu), (made / LAYERS, released / LAYERS)


async def _first_launch(pages: int) -> float:
    """Microseconds; the median of some loads."""
    began: list[float] = []

    def methods(items: PoolItems, *, pinned: bool) -> CopyMethods:
        copy = batches_only(items, pinned=pinned).batch
        assert copy is not None

        def timed(batch: RunBatch, stream: int) -> None:
            began.append(time.perf_counter())
            copy(batch, stream)

        return CopyMethods(batch=timed)

    times = []
    async with _open([_FIRST], 4, pages, methods) as (transfers, _):
        operation = _operation([_FIRST], pages, pages)
        for _ in range(_LOADS):
            await asyncio.sleep(IDLE_SECONDS)
            began.clear()
            started = time.perf_counter()
            await transfers.submit(operation, done=lambda error: None)
            times.append(1e6 * (began[0] - started))
    return median(times[1:])


@asynccontextmanager
async def _open(
    pools: Sequence[PoolSpec], layers: int, slots: int, methods: FindMethods = batches_only
) -> AsyncIterator[tuple[LocalTransfers, SubmitPort]]:
    port, device = SubmitPort(), CudaDevice(0)
    reactor = CompletionReactor(port)
    hosts = {pool.name: HostPool(pool, 1, slots, pin=False) for pool in pools}
    memories = {pool.name: PoolMemory(PagesOfNoGpu(pool, 1, slots), hosts[pool.name]) for pool in pools}
    given = partial(LocalTransfers, group_bytes=1, copy_path=CopyPath.BATCH, methods=methods)
    transfers = given(device, memories, layers, port, reactor)
    try:
        yield transfers, port
    finally:
        await transfers.aclose(_CLOSE_SECONDS)
        await reactor.aclose(_CLOSE_SECONDS)
        device.close()
        for host in hosts.values():
            host.close()
        await port.aclose()


def _operation(pools: Sequence[PoolSpec], slots: int, pages: int) -> CacheOperation:
    rng = random.Random(0)
    sides = [[rng.sample(range(slots), pages) for _ in "12"] for _ in pools]
    transfers = [PoolTransfer(pool.name, *both) for pool, both in zip(pools, sides, strict=True)]
    return CacheOperation(Direction.LOAD, tuple(transfers))
