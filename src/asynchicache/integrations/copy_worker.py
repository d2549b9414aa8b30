"""Carries out copies that a cache hands out (`RemoteCopies`), in a process that has the device memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Self

import msgspec

from asynchicache.config import CacheConfig
from asynchicache.controller.tasks import shielded
from asynchicache.errors import CacheError, ConfigError
from asynchicache.openings import Opening, caller
from asynchicache.parts import OpenedDevice
from asynchicache.pools.engine import EngineMemory
from asynchicache.pools.host import HostPool, SteppedMemory
from asynchicache.pools.shared import HostHandle, attach_pools
from asynchicache.pools.slabs import Pinner
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec
from asynchicache.streams.base import Device, Event, Stream, check_stream
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.plan import CacheOperation
from asynchicache.transfer.remote import CopyOrder, CopyResult
from asynchicache.transfer.statistics import TransferStatistics


class CopyWorker:
    """Copies between the device memory of an engine and the host memory of a cache. Confined to its loop.

    Attributes:
        device: its streams carry the copies out; `CudaDevice.wrap` makes one of torch's.
    """

    def __init__(self, device: Device, transfers: LocalTransfers, stack: AsyncExitStack) -> None:
        self.device = device
        self._transfers = transfers
        self._stack = stack
        self._unreported: list[CopyResult] = []

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        memory: EngineMemory,
        host: HostHandle,
        config: CacheConfig | None = None,
        *,
        port: Port | None = None,
        device: Device | None = None,
    ) -> Opening[Self]:
        """Map the cache's host memory, and pin it for a GPU: enter it, or await it and call `aclose`.

        Args:
            spec: the model, as the cache has it.
            host: from `RemoteCopies.host`.
            config: `inline`, `copy_path`, `close_seconds` and `io_threads` apply; the defaults if None.
            port: clock and threads; the real ones if None.
            device: an open device to use; the caller closes it. Default: the one that has the memory.

        Raises:
            ConfigError: `host` is of another model, or its owner cannot be reached.
            CapacityError: no room.
            DeviceError: the device does not exist.
        """
        config = CacheConfig() if config is None else config
        begin = partial(cls._open, spec, memory, host, config, port, device)
        return Opening(f"{cls.__name__}.open(...)", begin, caller())

    @classmethod
    async def _open(
        cls,
        spec: ModelSpec,
        memory: EngineMemory,
        host: HostHandle,
        config: CacheConfig,
        port: Port | None,
        device: Device | None,
    ) -> Self:
        stack = AsyncExitStack()
        try:
            memory.pages(spec)  # checks that they fit each other
            config = msgspec.structs.replace(config, device=memory.device, audit=0.0)
            opened = OpenedDevice(stack, config, port, device)
            hosts = await opened.allocate(partial(_attach, spec, host, memory.device))
            memories = {name: PoolMemory(memory.pools[name], pool) for name, pool in hosts.items()}
            transfers = await opened.transfers(memories, spec.layers)
        except BaseException:
            await shielded(stack.aclose())
            raise
        return cls(opened.device, transfers, stack)

    def mark(self, stream: Stream) -> Event:
        """An event behind the work enqueued on a stream now, for `run`; from any thread.

        Raises:
            UsageError: the stream is not one of `device`.
        """
        check_stream(self.device, stream)
        event = self.device.event()
        stream.record(event)
        return event

    async def run(self, orders: Sequence[CopyOrder], *, after: Event | None = None) -> list[CopyResult]:
        """Carry out orders, and wait until all have ended. A failed copy is a result, never an exception.

        The copies are enqueued before this waits, so of two calls the first one's copies come first. If the
        waiter is cancelled, they go on; the next call returns their results too.

        Args:
            orders: the copies, in the order that `take` gave.
            after: an event that they wait for, see `mark`. Default: none.
        """
        waiting = [self._begin(order, () if after is None else (after,)) for order in orders]
        try:
            await asyncio.sleep(0)  # a cancellation point even if all have ended
            results = list(await asyncio.gather(*waiting))
        except asyncio.CancelledError:
            self._unreported += [
                ended.result() for ended in waiting if ended.done() and not ended.cancelled()
            ]
            for ended in waiting:
                ended.cancel()
            raise
        unreported, self._unreported = self._unreported, []
        return unreported + results

    def _begin(self, order: CopyOrder, after: Sequence[Event]) -> asyncio.Future[CopyResult]:
        ended: asyncio.Future[CopyResult] = asyncio.get_running_loop().create_future()
        try:
            operation = CacheOperation(order.direction, tuple(order.transfers))
            self._transfers.submit(operation, after=after, done=partial(self._ended, order.id, ended))
        except CacheError as error:
            ended.set_result(CopyResult(order.id, str(error)))
        return ended

    def _ended(self, number: int, ended: asyncio.Future[CopyResult], error: BaseException | None) -> None:
        result = CopyResult(number, "" if error is None else str(error) or type(error).__name__)
        if ended.done():  # cancelled
            self._unreported.append(result)
        else:
            ended.set_result(result)

    def statistics(self) -> TransferStatistics:
        return self._transfers.statistics()

    async def aclose(self) -> None:
        """Wait for copies in flight, and unmap the host memory. Idempotent."""
        await shielded(self._stack.aclose())


def _attach(spec: ModelSpec, host: HostHandle, device: str, kept: ExitStack) -> Mapping[str, HostPool]:
    """Map and pin all of the host memory. Blocking.

    Raises:
        ConfigError, CapacityError: see `attach_pools`; or the GPU cannot pin all of it.
    """
    hosts, shared = attach_pools(spec, host, Pinner.of(device), kept)
    memories: list[HostPool | SteppedMemory] = [*hosts.values()]
    for memory in memories if shared is None else [*memories, shared]:
        while memory.growing:
            memory.grow()
    for name, pool in hosts.items():
        if pool.ready < pool.slots:
            raise ConfigError(
                f"pool {name!r}: only {pool.ready} of {pool.slots} host slots can be pinned, "
                "and the cache uses all: lower its host_slots or host_bytes"
            )
    if shared is not None and shared.ready < shared.slab.nbytes:
        raise ConfigError(
            f"only {shared.ready} of {shared.slab.nbytes} bytes of the host memory that pools share can be "
            "pinned, and the cache uses all: lower its host_bytes"
        )
    return hosts
