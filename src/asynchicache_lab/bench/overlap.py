"""`bench overlap`: compare a forward that starts each layer as soon as it is loaded with one that waits."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch
from rich.console import RenderableType
from rich.table import Table

from asynchicache.reports import add_figures
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.base import Stream
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import PoolTransfer
from asynchicache_lab.bench.copy_rig import CopyRig, open_rig
from asynchicache_lab.bench.cores import on_core, one_torch_thread, single_threaded, two_cores
from asynchicache_lab.bench.options import OverlapOptions
from asynchicache_lab.bench.rounds import rotated

SHARES = (0.5, 1.0, 2.0)
"""How long the forward computes, as a multiple of how long its pages are on the way."""

_PAGES = 32
_CPU_WIDTH, _GPU_WIDTH = 192, 2048  # of a layer's matrices; these fit into the caches


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """Medians, in milliseconds.

    Attributes:
        layerwise_ms: load and forward, with each layer launched after its own fence.
        serial_ms: load all layers, then forward.
        compute_ms, transfer_ms: forward alone, load alone.
        ideal_ms: the longer of the two, plus one layer's transfer.
        together_ms: the forward, and concurrently a plain copy of the same size on another stream, unordered.
            Exceeds the longer of the two if they slow each other down on this machine.
        ideal_together_ms: `together_ms` plus one layer's transfer.
    """

    layerwise_ms: float
    serial_ms: float
    compute_ms: float
    transfer_ms: float
    ideal_ms: float
    together_ms: float
    ideal_together_ms: float


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """One run.

    Attributes:
        device: torch name of the device.
        rows: one per share of compute.
        submit_us_per_layer: from submitting a load until all its layers are enqueued, per layer.
        first_layer_us: from submitting a load until its first layer is enqueued and the forward launched.
        ok: each layer's bytes had arrived when the forward read them.
        pinned: whether host memory was pinned; never on a CPU.
    """

    device: str
    rows: list[OverlapRow]
    submit_us_per_layer: float
    first_layer_us: float
    ok: bool
    pinned: bool = False

    def as_json(self) -> dict[str, object]:
        rows = [asdict(row) for row in self.rows]
        return {
            "device": self.device,
            "ok": self.ok,
            "pinned": self.pinned,
            "submit_us_per_layer": self.submit_us_per_layer,
            "first_layer_us": self.first_layer_us,
            "rows": rows,
        }

    def present(self) -> RenderableType:
        table = Table(title=f"overlap, {self.device}, ms")
        add_figures(table, "compute", "transfer", "serial", "layer-\nwise", "ideal", "of it", "together")
        add_figures(table, "of\nthat")
        for row in self.rows:
            times = (row.compute_ms, row.transfer_ms, row.serial_ms, row.layerwise_ms, row.ideal_ms)
            ratio = f"{row.layerwise_ms / row.ideal_ms:.2f}"
            together = f"{row.together_ms:.1f}", f"{row.layerwise_ms / row.ideal_together_ms:.2f}"
            table.add_row(*(f"{value:.1f}" for value in times), ratio, *together)
        return table


async def run_overlap(
    options: OverlapOptions,
    advance: Callable[[int, int], None],
    tell: Callable[[OverlapReport], None] = lambda report: None,
) -> OverlapReport:
    """Measure load and compute, overlapped and sequential.

    Args:
        options: what to measure.
        advance: called with the number of finished rows and the total.
        tell: called with the partial report after each row, which survives an interrupt. Default: ignored.

    Raises:
        ConfigError: the device's name is invalid.
        DeviceError: the device is not available.
    """
    item = (options.layer_mib << 20) // _PAGES
    tensor = TensorSpec("pages", tuple(range(options.layers)), (item,), "uint8")
    pool = PoolSpec("kv", (tensor,))
    rows = []
    # As with a GPU, copies and compute get separate cores, and other threads do not use the copies' core.
    cores = two_cores(["load", "aside"], ["compute"]) if options.device == "cpu" else {}
    with one_torch_thread(), on_core(cores.get("compute")):
        async with open_rig(pool, 1, _PAGES, device=options.device, group_bytes=1, cores=cores) as rig:
            runner = _OverlapRunner(rig, options.layers)
            for done, share in enumerate(SHARES):
                rows.append(await runner.row(share, options.rounds))
                tell(runner.report([*rows]))
                advance(done + 1, len(SHARES))
            return runner.report(rows)


class _OverlapRunner:
    """Runs one model's load and forward in several orders.

    Attributes:
        submit_seconds: time to enqueue each separate load.
        first_seconds: time to enqueue the first layer of each layer-wise load.
        wrong_layers: layers whose first byte differed from the host's when the forward read them.
    """

    def __init__(self, rig: CopyRig, layers: int) -> None:
        self.submit_seconds: list[float] = []
        self.first_seconds: list[float] = []
        self.wrong_layers = 0
        self._rig = rig
        self._layers = layers
        self._compute = single_threaded(rig.device, "compute")
        width = _CPU_WIDTH if rig.device.name == "cpu" else _GPU_WIDTH
        self._matrix = torch.ones(width, width, device=rig.memory.device.device)
        self._out = torch.empty_like(self._matrix)
        self._pages = rig.memory.device.items("pages")
        self._plain = torch.ones(self._pages.shape, dtype=torch.uint8, pin_memory=rig.memory.host.pinned)
        rig.memory.host.items("pages").fill_(1)

    def report(self, rows: list[OverlapRow]) -> OverlapReport:
        """The report of the rows so far."""
        submit = median(self.submit_seconds) / self._layers * 1e6
        first = median(self.first_seconds) * 1e6
        device, pinned = self._rig.device.name, self._rig.memory.host.pinned
        return OverlapReport(device, rows, submit, first, self.wrong_layers == 0, pinned)

    async def row(self, share: float, rounds: int) -> OverlapRow:
        transfer = median([await self._timed(self._load) for _ in range(5)][1:])
        repeats = await self._repeats(transfer * share / self._layers)
        orders = (self._layerwise, self._serial, self._forward, self._load, self._together)
        seconds: list[list[float]] = [[] for _ in orders]
        for turn in range(rounds + 1):
            for which in rotated(range(len(orders)), turn):
                await self._rig.seconds_on_stream(self._pages[:, :, 0].zero_)  # `_see` then finds stale bytes
                seconds[which].append(await self._timed(partial(orders[which], repeats)))
        layerwise, serial, compute, transfer, together = (median(times[1:]) * 1e3 for times in seconds)
        first = transfer / self._layers
        ideal = max(compute, transfer) + first
        return OverlapRow(layerwise, serial, compute, transfer, ideal, together, together + first)

    async def _timed(self, run: Callable[[], Awaitable[object]]) -> float:
        started = time.perf_counter()
        await run()
        return time.perf_counter() - started

    async def _repeats(self, seconds: float) -> int:
        """Number of multiplications that take `seconds`."""
        many = 50
        times = [await self._rig.seconds_on_stream(partial(self._multiply, many)) for _ in range(5)]
        return max(1, round(seconds / (median(times[1:]) / many)))

    def _multiply(self, repeats: int) -> None:
        for _ in range(repeats):
            torch.mm(self._matrix, self._matrix, out=self._out)

    async def _load(self, repeats: int = 0) -> None:
        started = time.perf_counter()
        ticket = self._submit()
        await ticket.submitted()
        self.submit_seconds.append(time.perf_counter() - started)
        await ticket

    async def _forward(self, repeats: int) -> None:
        seen: list[torch.Tensor] = []
        for layer in range(self._layers):
            self._launch(layer, seen, repeats)
        await self._end()

    async def _serial(self, repeats: int) -> None:
        await self._submit()
        await self._forward(repeats)

    async def _together(self, repeats: int) -> None:
        copied = self._rig.device.event()
        self._rig.aside.launch(partial(self._pages.copy_, self._plain, non_blocking=True))
        self._rig.aside.record(copied)
        await self._forward(repeats)
        await self._rig.port.run_blocking(copied.synchronize)

    async def _layerwise(self, repeats: int) -> None:
        started = time.perf_counter()
        ticket = self._submit()
        seen: list[torch.Tensor] = []
        for layer in range(self._layers):
            await ticket.submitted(layer)
            if layer == 0:
                self.first_seconds.append(time.perf_counter() - started)
            ticket.fence(layer).wait_on(self._compute)
            self._launch(layer, seen, repeats)
        await self._end()
        self.wrong_layers += sum(not bool((first == 1).all()) for first in seen)

    def _launch(self, layer: int, seen: list[torch.Tensor], repeats: int) -> None:
        """Launch one layer's compute, identical in every order: read from every page, then multiply."""
        self._compute.launch(partial(self._see, seen, layer))
        self._compute.launch(partial(self._multiply, repeats))

    def _see(self, seen: list[torch.Tensor], layer: int) -> None:
        seen.append(self._pages[layer, :, 0].clone())

    def _submit(self) -> Ticket:
        slots = range(_PAGES)
        operation = CacheOperation(Direction.LOAD, (PoolTransfer("kv", slots, slots[::-1]),))
        return self._rig.transfers.submit(operation, done=lambda error: None)

    async def _end(self) -> None:
        await self._rig.port.run_blocking(partial(_reach_end, self._rig, self._compute))


def _reach_end(rig: CopyRig, stream: Stream) -> None:
    event = rig.device.event()
    stream.record(event)
    event.synchronize()
