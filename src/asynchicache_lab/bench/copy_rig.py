"""Transfers on a real device, and a stream of the same device for plain copies to compare with."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from asynchicache.config import CacheConfig
from asynchicache.layouts import HostLayout
from asynchicache.parts import open_device
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.ports import AsyncioPort
from asynchicache.specs import PoolSpec
from asynchicache.streams.base import Device, Stream
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.calibration import measured_paths
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import GROUP_BYTES, LocalTransfers
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation
from asynchicache_lab.bench.cores import OwnCores, single_threaded

_CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class CopyRig:
    """Open transfers with their device and memory.

    Attributes:
        aside: a stream for work outside the transfers, from `single_threaded`.
    """

    device: Device
    transfers: LocalTransfers
    memory: PoolMemory
    port: AsyncioPort
    aside: Stream

    async def seconds(self, operation: CacheOperation) -> float:
        """Seconds from an operation's submission to its last byte.

        Raises:
            TransferError: the operation failed.
        """
        started = time.perf_counter()
        await self.transfers.submit(operation, done=lambda error: None)
        return time.perf_counter() - started

    def settle(self) -> None:
        """Wait for torch work outside our streams, because our streams are not ordered with it."""
        if self.memory.device.device.type == "cuda":
            torch.cuda.synchronize(self.memory.device.device)

    async def seconds_on_stream(self, work: Callable[[], object]) -> float:
        """Seconds that work takes by itself on the stream `aside`."""
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
    port: AsyncioPort | None = None,
) -> AsyncIterator[CopyRig]:
    """Open transfers over one pool, with pinned host memory.

    Args:
        spec: the pool.
        page_size: tokens of a page.
        slots: number of slots in each of the two tiers, device and host.
        device: torch name of the device.
        layout: layout of host memory.
        path: the copy path; None chooses it by measurement.
        group_bytes: minimum bytes of layers copied together. Default: that of `LocalTransfers`.
        cores: for a CPU, the core of each stream; see `OwnCores`.
        port: clock and threads, which the rig closes. Default: the ordinary ones.

    Raises:
        ConfigError: the device's name is invalid.
        DeviceError: the device is not available.
        CapacityError: there is not enough memory.
    """
    async with AsyncExitStack() as stack:
        port = port or AsyncioPort(threads=2)
        stack.push_async_callback(port.aclose)
        opened = (
            EmulatedDevice(OwnCores(cores)) if device == "cpu" else open_device(CacheConfig(device=device))
        )
        host = HostPool(spec, page_size, slots, pin=Pinner.of(opened.name) or False, layout=layout)
        stack.callback(host.close)
        stack.callback(opened.close)
        while host.growing:
            host.grow()
        memory = PoolMemory(DevicePool(spec, page_size, slots, opened.name), host)
        layers = max(tensor.layers[-1] for tensor in spec.tensors) + 1
        reactor = CompletionReactor(port)
        table = measured_paths(opened.name) if path is None else None
        transfers = LocalTransfers(
            opened,
            {spec.name: memory},
            layers,
            port,
            reactor,
            group_bytes=group_bytes,
            paths=table,
            copy_path=path,
        )
        stack.push_async_callback(reactor.aclose, _CLOSE_SECONDS)
        stack.push_async_callback(transfers.aclose, _CLOSE_SECONDS)
        yield CopyRig(opened, transfers, memory, port, single_threaded(opened, "aside"))
