"""Measures on the device which copy path is fastest for which length of runs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import cache, partial

from asynchicache.errors import CacheError, CallRefusedError, CapacityError, ConfigError
from asynchicache.layouts import HostLayout
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import PageCopier, PoolMemory
from asynchicache.transfer.paths import GPU_KERNEL_GAIN, CopyPath, PathTable, RunShape
from asynchicache.transfer.plan import CacheOperation, Direction, TransferPlan, merge
from asynchicache.types import PoolTransfer

TOKEN_BYTES = (128, 512, 2 << 10)
ITEM_BYTES = (512, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
"""Measured lengths of runs, of single tokens and of whole items. Other lengths use the nearest one."""

_LEAST_BYTES, _MAX_BYTES = 1 << 20, 16 << 20
_GPU_BYTES = 128 << 20  # several chunks: the next one is enqueued while one is copied, as in long transfers
_CPU_RUNS = 1024  # little enough of short runs, and of long ones more than a CPU's caches hold
_GPU_RUNS = 4096  # a plain copy of each takes microseconds of the host, whatever its length
_ROUNDS = 3  # the first one warms up
_GPU_SECONDS = 0.03  # of rounds: its processors, on which kernels run, idle at a fifth of their clock
_TOKENS = 16
_BOTH = (Direction.LOAD, Direction.BACKUP)

logger = logging.getLogger(__name__)


@cache
def measured_paths(device_name: str) -> PathTable:
    """The rates of one device, measured once per process; blocks for 0.3 s on a CPU, a few seconds on a GPU.

    Lengths for which there is no memory are left out.

    Args:
        device_name: torch's name.
    """
    rates: dict[RunShape, dict[CopyPath, float]] = {}
    left_out: set[CopyPath] = set()  # for a reason that other lengths would meet too
    for tokens, lengths in ((True, TOKEN_BYTES), (False, ITEM_BYTES)):
        for nbytes in lengths:
            try:
                memory = _scratch(device_name, nbytes, tokens=tokens)
            except CapacityError as error:  # the pools took all memory
                logger.warning("copies of %d bytes are not measured: %s", nbytes, error)
                continue
            with closing(memory.host):
                for path in _paths(device_name, tokens=tokens):
                    found = {} if path in left_out else _measure(device_name, memory, path)
                    if not found:
                        left_out.add(path)
                    for direction, rate in found.items():
                        rates.setdefault(RunShape(direction, tokens, nbytes), {})[path] = rate
    return PathTable(rates, 1.0 if device_name == "cpu" else GPU_KERNEL_GAIN)


def _paths(device_name: str, *, tokens: bool) -> list[CopyPath]:
    """The paths worth measuring. On a CPU torch copies a run no faster than `memmove` (path batch) does; if
    it wins a measurement, that is noise."""
    if device_name == "cpu" and not tokens:
        return [CopyPath.BATCH, CopyPath.KERNEL]
    return list(CopyPath)


def _scratch(device_name: str, run_bytes: int, *, tokens: bool) -> PoolMemory:
    """A pool whose copies are runs of `run_bytes`."""
    page_size = _TOKENS if tokens else 1
    layers = (0, 1) if tokens else (0,)
    spec = PoolSpec("scratch", (TensorSpec("bytes", layers, (run_bytes,), "uint8"),))
    runs, most = (_CPU_RUNS, _MAX_BYTES) if device_name == "cpu" else (_GPU_RUNS, _GPU_BYTES)
    nbytes = min(max(runs * run_bytes, _LEAST_BYTES), most)
    slots = max(2, nbytes // spec.slot_bytes(page_size))
    layout = HostLayout.PAGE_FIRST if tokens else HostLayout.PAGE_FIRST_DIRECT
    host = HostPool(spec, page_size, slots, pin=Pinner.of(device_name) or False, layout=layout)
    with ExitStack() as failed:
        failed.callback(host.close)
        while host.growing:
            host.grow()
        host.items("bytes").fill_(1)  # untouched memory would all map to one page of zeros
        memory = PoolMemory(DevicePool(spec, page_size, slots, device_name), host)
        failed.pop_all()
    return memory


def _measure(device_name: str, memory: PoolMemory, path: CopyPath) -> dict[Direction, float]:
    """GB/s by direction; empty if the path is not available, or fails."""
    device = _open(device_name)  # one for each path, as an error is sticky
    try:
        copier = PageCopier({"scratch": memory}, force=path)
        return {direction: _rate(device, copier, _plan(memory, direction)) for direction in _BOTH}
    except CacheError as error:
        # That a path is not there, or was refused, is warned of where it is found.
        told = isinstance(error, (ConfigError, CallRefusedError))
        words = "copies by %s are left out on %s: %s"
        logger.log(logging.INFO if told else logging.WARNING, words, path.value, device_name, error)
        return {}
    finally:
        device.close()


def _open(device_name: str) -> Device:
    if device_name == "cpu":
        return EmulatedDevice(InlineDriver())  # handing over to a thread would dominate the time
    return CudaDevice(int(device_name.partition(":")[2] or 0))


def _plan(memory: PoolMemory, direction: Direction) -> TransferPlan:
    """All pages, in random order."""
    shuffle = random.Random(0)
    sources, destinations = (shuffle.sample(range(memory.host.slots), memory.host.slots) for _ in "12")
    operation = CacheOperation(direction, (PoolTransfer("scratch", sources, destinations),))
    layers = len(memory.device.spec.tensors[0].layers)
    return merge([operation], {"scratch": memory.extent}, layers, None)


def _rate(device: Device, copier: PageCopier, plan: TransferPlan) -> float:
    """The best of some rounds, in GB/s.

    Raises:
        DeviceError: the device failed.
    """
    stream, event = device.stream("calibrate"), device.event()
    round_ = partial(_seconds, partial(_enqueue, copier, plan, stream, event), event)
    return plan.nbytes / max(best(round_, 0.0 if device.name == "cpu" else _GPU_SECONDS), 1e-9) / 1e9


def best(round_: Callable[[], float], least_seconds: float) -> float:
    """The fastest of some rounds after the first, which warms up.

    Args:
        round_: runs one, and returns how many seconds it took.
        least_seconds: of all rounds but the first.
    """
    round_()
    seconds: list[float] = []
    while len(seconds) < _ROUNDS - 1 or sum(seconds) < least_seconds:
        seconds.append(round_())
    return min(seconds)


def _enqueue(copier: PageCopier, plan: TransferPlan, stream: Stream, event: Event) -> None:
    copies = copier.prepare(plan)
    with stream.current():
        for layers in plan.groups:
            copier.enqueue(stream, copies, layers)
    stream.record(event)
    copies.end(event)


def _seconds(enqueue: partial[None], event: Event) -> float:
    started = time.perf_counter()
    enqueue()
    event.synchronize()
    return time.perf_counter() - started
