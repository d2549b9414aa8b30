"""A transfer engine on a real device, and a plain copy on a stream of the same device to hold it against."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from asynchicache.cache import open_device
from asynchicache.config import CacheConfig
from asynchicache.layouts import HostLayout
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.ports import AsyncioPort
from asynchicache.specs import PoolSpec
from asynchicache.streams.base import Device, Stream
from asynchicache.streams.drivers import Run, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.calibration import measured_paths
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.engine import GROUP_BYTES, TransferEngine
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation

_CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CopyRig:
    """An open engine and what it stands on.

    Attributes:
        aside: a stream for what is not the engine's, from `single_threaded`.
    """

    device: Device
    engine: TransferEngine
    memory: PoolMemory
    port: AsyncioPort
    aside: Stream

    async def seconds(self, operation: CacheOperation) -> float:
        """How long an operation takes, from its submission to its last byte.

        Raises:
            TransferError: it failed.
        """
        started = time.perf_counter()
        await self.engine.submit(operation, done=lambda error: None)
        return time.perf_counter() - started

    def settle(self) -> None:
        """Wait for what torch was told to do outside of our streams, which are not ordered with that."""
        if self.memory.device.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device.device)

    async def seconds_on_stream(self, work: Callable[[], object]) -> float:
        """How long work takes by itself on the stream `aside`."""
        return await self.port.run_blocking(partial(self._time, work))

    def _time(self, work: Callable[[], object]) -> float:
        stream, event, warm = self.aside, self.device.event(), self.device.event()
        stream.record(warm)
        warm.synchronize()
        started = time.perf_counter()
        stream.launch(work)
        stream.record(event)
        event.synchronize()
        return time.perf_counter() - started


class OwnCores(ThreadDriver):
    """Threads of some streams stay on a core each, as a GPU's copies and its compute do not share one.

    Left to the system, two that wake each other land on one core now and then, and wait for each other there.
    """

    def __init__(self, cores: Mapping[str, int]) -> None:
        """`cores`: by the name of a stream; the others go where the system lets them."""
        super().__init__()
        self._cores = cores

    def lane(self, name: str) -> Callable[[Run], None]:
        submit = super().lane(name)
        if name in self._cores:
            submit(partial(os.sched_setaffinity, 0, {self._cores[name]}))
        return submit


def two_cores(first: Sequence[str], second: Sequence[str]) -> dict[str, int]:
    """A core for some streams and another one for others; none where this process has only one."""
    cores = sorted(os.sched_getaffinity(0))
    return dict.fromkeys(first, cores[0]) | dict.fromkeys(second, cores[1]) if len(cores) > 1 else {}


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep this thread, and those that it starts meanwhile, on one core; where they like if it is None.

    Left to the system, whom a copying thread wakes is put behind it on its core, for milliseconds, while
    the other core has nothing to do.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def open_rig(
    spec: PoolSpec,
    page_size: int,
    slots: int,
    *,
    device: str = "cpu",
    layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT,
    path: CopyPath | None = None,
    group_bytes: int = GROUP_BYTES,
    cores: Mapping[str, int] = MappingProxyType({}),
) -> AsyncIterator[CopyRig]:
    """An engine over one pool, all of its host memory pinned.

    Args:
        spec: the pool.
        page_size: tokens of a page.
        slots: on the device, and as many on the host.
        device: as torch names it.
        layout: of host memory.
        path: how to copy; measured if None.
        group_bytes: layers that are copied together. Default: the engine's.
        cores: on a CPU, by stream; see `OwnCores`.

    Raises:
        ConfigError: no such device.
        DeviceError: it is not there.
        CapacityError: there is no room.
    """
    port = AsyncioPort(threads=2)
    opened = EmulatedDevice(OwnCores(cores)) if device == "cpu" else open_device(CacheConfig(device=device))
    host = HostPool(spec, page_size, slots, pin=Pinner.of(opened.name) or False, layout=layout)
    while host.growing:
        host.grow()
    memory = PoolMemory(DevicePool(spec, page_size, slots, opened.name), host)
    layers = max(tensor.layers[-1] for tensor in spec.tensors) + 1
    reactor = CompletionReactor(port)
    table = measured_paths(opened.name) if path is None else None
    engine = TransferEngine(
        opened,
        {spec.name: memory},
        layers,
        port,
        reactor,
        group_bytes=group_bytes,
        paths=table,
        copy_path=path,
    )
    try:
        yield CopyRig(opened, engine, memory, port, single_threaded(opened, "aside"))
    finally:
        await engine.aclose(_CLOSE_SECONDS)
        await reactor.aclose(_CLOSE_SECONDS)
        opened.close()
        memory.host.close()
        await port.aclose()


def single_threaded(device: Device, name: str) -> Stream:
    """A stream whose work uses one thread of the CPU.

    OpenMP counts threads for each thread that asks. A new one, such as an emulated stream's, starts with all
    cores, whatever `torch_threads` says elsewhere, and a matrix product would take those of the copies.
    """
    stream = device.stream(name)
    stream.launch(partial(torch.set_num_threads, 1))
    return stream


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch's operations use so many threads each, those of this thread; see `single_threaded`."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
