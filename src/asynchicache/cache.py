"""The front door: opens devices, pools, transfers, storage and controller, and closes them in order.

A little above 400 lines: what users call, and the order in which all of it opens, are read together.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import torch

from asynchicache.config import CacheConfig, open_backend
from asynchicache.controller.controller import HybridCacheController
from asynchicache.controller.event_hub import EventSubscription
from asynchicache.controller.executor import Executor
from asynchicache.controller.request import Hit, Request
from asynchicache.controller.statistics import CacheStatistics, Occupancy, collect_statistics
from asynchicache.controller.storage_pools import AttachedStorage, StoragePools
from asynchicache.controller.tasks import OwnedTasks, shielded
from asynchicache.errors import ClosedError, ConfigError, UsageError
from asynchicache.events import PagesStored
from asynchicache.hashing import pool_fingerprint
from asynchicache.layouts import SlotLayout
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.planner.planner import Planner
from asynchicache.pools.balance import find_undersized_pools
from asynchicache.pools.memory import memory_budget
from asynchicache.pools.sizing import FreeMemory, plan_slots
from asynchicache.ports import AsyncioPort, Port
from asynchicache.specs import ModelSpec
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device, Stream
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import InlineDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.tracing import Tracer
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.engine import TransferEngine
from asynchicache.transfer.opening import (
    CopyOptions,
    allocate_memories,
    close_transfers,
    growing_pools,
    open_engine,
)
from asynchicache.types import token_array

_log = logging.getLogger(__name__)


class RequestTracer(Tracer, Protocol):
    """A tracer that also makes the requests, so that it can put their calls beneath a span."""

    def request(
        self, controller: HybridCacheController, tokens: array[int], seed: bytes, traceparent: str | None
    ) -> Request:
        """A request whose spans are beneath the one that `traceparent` (W3C) names."""
        ...


class HybridCache:
    """Keeps what a hybrid model computed in device memory, host memory and storage.

    Made by `open`; confined to the loop that opened it.
    """

    def __init__(self, spec: ModelSpec, config: CacheConfig, rooms: CacheParts) -> None:
        self.spec = spec
        self.config = config
        self._parts = rooms
        self._controller = rooms.controller
        self._tracer: RequestTracer | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        port: Port | None = None,
        device: Device | None = None,
    ) -> AsyncIterator[HybridCache]:
        """A cache for the duration of an `async with`.

        Args:
            spec: the model's pools.
            config: options; the defaults if None.
            storage: an open backend to use instead of the configured one; it stays the caller's.
            port: clock and threads; the real ones if None.
            device: an open device to use instead of the configured one; it stays the caller's.

        Raises:
            ConfigError: options contradict each other or the model.
            CapacityError: the pools need more memory than there is.
            StorageError: the storage location cannot be used.
        """
        config = CacheConfig() if config is None else config
        if not isinstance(spec, ModelSpec) or not isinstance(config, CacheConfig):
            given = f"{type(spec).__name__} and {type(config).__name__}"
            raise ConfigError(f"a cache is opened with a ModelSpec and a CacheConfig, not {given}")
        stack = AsyncExitStack()
        try:
            rooms = await _open_parts(stack, spec, config, storage, port, device)
            cache = cls(spec, config, rooms)
            stack.push_async_callback(cache._close)
            yield cache
        finally:
            # Whoever is cancelled meanwhile leaves no lock, thread or task behind.
            await shielded(stack.aclose())

    async def _close(self) -> None:
        self._controller.executor.close()
        try:
            async with asyncio.timeout(self.config.close_seconds):
                await self._controller.executor.idle()
                await self._controller.storage_writer.flush_touches()
        except TimeoutError:
            _log.warning("closed with work under way after %s s", self.config.close_seconds)
        finally:
            self._controller.stop()

    def request(
        self,
        tokens: Iterable[int],
        *,
        namespace: str | None = None,
        salt: str | None = None,
        stream: Stream | None = None,
        traceparent: str | None = None,
    ) -> Request:
        """One prompt to serve, as an async context manager.

        Args:
            tokens: token ids of the prompt; images and the like replaced by content ids.
            namespace: LoRA id, tenant or any other name; prefixes of different ones never meet.
            salt: the caller's cache salt; likewise.
            stream: where its forwards run, if they are enqueued and not waited for (`Request.run_on`).
            traceparent: the W3C header of the span that the request belongs to, for a tracer.

        Raises:
            InvalidTokensError: no tokens, or ids that are no integers of 0 to 2**63 - 1.
            ClosedError: the cache is closed.
        """
        self._controller.executor.check_open()
        controller = self._controller
        seed = controller.namespaces.seed(namespace, salt)
        if self._tracer is None:
            request = Request(controller, token_array(tokens)[:], seed)
        else:
            request = self._tracer.request(controller, token_array(tokens)[:], seed, traceparent)
        return request if stream is None else request.run_on(stream)

    def trace(self, tracer: RequestTracer | None) -> None:
        """Tell a tracer (`integrations.otel`) what takes time from now on; None for nobody, at no cost."""
        self._tracer = tracer
        self._controller.trace(tracer)

    def device_tensor(self, pool: str, tensor: str) -> torch.Tensor:
        """The device memory of one tensor of a pool.

        Returns:
            `[layers, slots, page_size, *shape]` for pages, `[layers, slots, *shape]` for states; layers
            in the order of the spec's `TensorSpec.layers`.

        Raises:
            KeyError: no such pool or tensor.
        """
        try:
            return self._parts.memories[pool].device.tensor(tensor)
        except KeyError:
            names = {one.name: [part.name for part in one.tensors] for one in self.spec.pools}
            raise KeyError(f"tensor {tensor!r} of pool {pool!r} is none of {names}") from None

    @property
    def device(self) -> Device:
        """The device, whose streams a compute engine may be ordered with."""
        return self._parts.device

    async def drain(self) -> None:
        """Until every copy and every storage call has ended that is in flight now, and what follows from
        them: a page that was published before the call is on the host and was written to storage, or was
        shed. What others begin meanwhile is not waited for.

        Raises:
            ClosedError: the cache is closed before that.
        """
        await asyncio.sleep(0)  # a cancellation point, also where there is nothing to wait for
        await self._controller.executor.settled()

    async def flush(self) -> None:
        """Forget everything in device and host memory that no request holds, once what is in flight now has
        ended; storage is left alone."""
        await self._controller.executor.checkpoint()
        await self._controller.executor.settled()
        self._controller.planner.flush()

    async def attach_storage(
        self, storage: StorageBackend | str, options: Mapping[str, object] | None = None
    ) -> None:
        """Have storage from now on; requests that are being served go on.

        What is in memory goes to storage as it is met again, or asked for with `Request.durable`.

        Args:
            storage: an open backend, which stays the caller's, or the name of one.
            options: of a named backend; an open one has its own.

        Raises:
            ConfigError: no backend of that name, options that are none or not its, or the cache has no
                `weight_version`.
            StorageError: the storage location cannot be used.
            UsageError: the cache has storage already, or it is being detached.
            ClosedError: the cache is closed.
        """
        await self._controller.executor.checkpoint()
        self._controller.storage_writer.check_none()  # before a store is opened that could be the same folder
        given = None if isinstance(storage, str) else storage
        config = self.config
        if not isinstance(options or {}, Mapping) or (options and given is not None):
            raise ConfigError(f"options {options!r} must be a mapping, for a backend that is named")
        if isinstance(storage, str):
            config = msgspec.structs.replace(config, storage=storage, storage_options=dict(options or {}))
        rooms = self._parts
        with self._controller.executor.busy():  # closing waits
            attachment = await _attachment(self.spec, config, rooms.memories, given, rooms.port)
            try:
                self._controller.executor.check_open()
                self._controller.storage_writer.attach(attachment)
            except (ClosedError, UsageError):
                await attachment.aclose()
                raise

    async def detach_storage(self) -> bool:
        """Have no storage from now on; False if there was none.

        Requests go on, and miss what was there. Calls that are under way are waited for, with the
        `closing` limit of `storage_limits`, and `durable` answers False.
        """
        return await shielded(self._controller.storage_writer.detach())

    async def clear_storage(self) -> int:
        """Forget every page that storage has of this model, with these weights and this salt, and no
        other; how many there were.

        Raises:
            StorageError: storage failed.
            ClosedError: the cache was closed, or storage detached, before it answered.
        """
        await self._controller.executor.checkpoint()
        return await self._controller.storage_writer.clear()

    def events(self, *, limit: int = 10_000) -> EventSubscription:
        """What becomes of pages from now on, as an async iterator; it costs nothing while nobody listens.

        Args:
            limit: events that may wait; beyond it the oldest are dropped, counted and reported.

        Raises:
            ConfigError: the limit is below 1.
            ClosedError: the cache is closed.
        """
        self._controller.executor.check_open()
        return self._controller.events.subscribe(limit)

    async def snapshot(self) -> list[PagesStored]:
        """What is in each tier now, for those who begin to listen: parents come before their children.

        Subscribe first: events that were told meanwhile may repeat what the snapshot says, and following
        them leads to the same end. Pages that are in storage only are not in it. Linear in the tree; the
        digests that it needs are computed in turns with other tasks.
        """
        await self._controller.executor.checkpoint()
        return await self._controller.events.snapshot()

    def verify(self, *, idle: bool = False) -> list[str]:
        """Broken invariants in words, with nodes and slots; empty when all is well.

        Linear in the slots, changes nothing, and never raises: for production as well, at any time.

        Args:
            idle: nobody uses the cache, so report whatever is held, under way, or lost to quarantine too.
        """
        return self._controller.verify(idle=idle)

    def statistics(self) -> CacheStatistics:
        return collect_statistics(self._controller, self._parts.engine, self._parts.stored)

    def __repr__(self) -> str:
        state = "closed" if self._controller.executor.closing else "open"
        return f"<HybridCache {state}, {self.spec.model}, {self._controller.planner.state.free}>"


@dataclass(frozen=True, slots=True)
class CacheParts:
    """Everything that a cache consists of, opened."""

    device: Device
    memories: Mapping[str, PoolMemory]
    engine: TransferEngine
    stored: StoragePools
    port: Port
    controller: HybridCacheController


async def _open_parts(
    stack: AsyncExitStack,
    spec: ModelSpec,
    config: CacheConfig,
    storage: StorageBackend | None,
    port: Port | None,
    device: Device | None,
) -> CacheParts:
    """Open from the bottom up; the stack closes in the opposite order."""
    if port is None:
        port = AsyncioPort(threads=config.io_threads, seed=config.seed)
        stack.push_async_callback(port.aclose)
    kept = stack.enter_context(ExitStack())
    # An emulated device of the caller's is to run the same way each time, whatever the machine does.
    measure = not config.inline if device is None else device.name != "cpu"
    owned = device is None
    if device is None:
        device = open_device(config)
        kept.callback(device.close)
    slots = plan_slots(spec, config, _memory(device))
    for pool in find_undersized_pools(spec, slots, config.pages_per_state):
        _log.warning("%s", pool)
    # To its end, also if this is cancelled: memory that a thread still pins could not be unpinned.
    memories = await shielded(
        port.run_blocking(partial(allocate_memories, spec, slots, device.name, config.host_layout, kept))
    )
    if owned:  # before the memory: what a failed device was given may still be on its way
        kept.callback(device.close)
    planner = _planner(spec, slots, config)
    stack.callback(planner.abandon)
    reactor = CompletionReactor(port)
    copying = CopyOptions(config.copy_path, config.audit, inline=config.inline, measure=measure)
    engine = await open_engine(device, memories, spec.layers, port, reactor, copying)
    stack.push_async_callback(close_transfers, engine, reactor, kept, memories, config.close_seconds)
    stored = StoragePools(planner.state)
    stack.push_async_callback(stored.aclose)
    if storage is not None or config.storage is not None:
        stored.attach(await _attachment(spec, config, memories, storage, port))
    tasks = OwnedTasks()
    stack.push_async_callback(tasks.aclose)
    await tasks.ready()
    controller = HybridCacheController(
        planner,
        Executor(planner, device, reactor, engine, tasks),
        stored,
        prefetch=config.prefetch,
        store_bytes=config.store_bytes,
        count_namespaces=config.count_namespaces,
    )
    if engine.audit is not None:
        planner.state.watch_host(engine.audit.forget)
    for growth in growing_pools(spec, memories, port, planner.state.open_host):
        tasks.spawn(growth)
    return CacheParts(device, memories, engine, stored, port, controller)


def _planner(spec: ModelSpec, slots: Mapping[str, tuple[int, int]], config: CacheConfig) -> Planner:
    return Planner(
        spec,
        slots,
        write_policy=config.write_policy,
        eviction_policy=config.eviction,
        clean_share=config.clean_share,
        checkpoints=CheckpointPolicy.parse(config.checkpoints),
    )


def open_device(config: CacheConfig) -> Device:
    """The device that a configuration names.

    Raises:
        ConfigError: no such kind of device.
        DeviceError: it is not there.
    """
    try:
        kind = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"device {config.device!r} must be cpu, cuda or cuda:N") from error
    if kind.type == "cpu" and not kind.index:
        return EmulatedDevice(InlineDriver() if config.inline else ThreadDriver())
    if kind.type == "cuda":
        return CudaDevice(kind.index or 0)
    raise ConfigError(f"device {config.device!r} must be cpu, cuda or cuda:N")


def _memory(device: Device) -> FreeMemory:
    host = memory_budget().available
    if device.name == "cpu":
        return FreeMemory(host, host, shared=True)
    return FreeMemory(torch.cuda.mem_get_info(device.name)[0], host, shared=False)


async def _attachment(
    spec: ModelSpec,
    config: CacheConfig,
    memories: Mapping[str, PoolMemory],
    storage: StorageBackend | None,
    port: Port,
) -> AttachedStorage:
    """The configured storage, or the one given, which stays the caller's, with every pool that has host
    slots for its pages to arrive in."""
    config.check_storage()
    bindings = [
        SlotBinding(memory.host, *_identity(spec, name, config), depends_on=spec.depends_on(name))
        for name, memory in memories.items()
        if memory.host.slots
    ]
    others = [pool.name for pool in spec.pools if pool.replicated and config.rank]
    owned = storage is None
    if storage is None:  # last: whatever could fail before would leave it open
        storage = open_backend(config.storage or "", config.storage_options, port)
    return await AttachedStorage.open(
        storage, bindings, port, config.storage_limits, owned=owned, read_only=others
    )


def _identity(spec: ModelSpec, name: str, config: CacheConfig) -> tuple[bytes, str]:
    """Fingerprint and shard of a pool's pages; of a replicated pool one copy serves all ranks."""
    pool = spec.pool(name)
    shard = "" if pool.replicated or config.ranks == 1 else f"{config.rank}/{config.ranks}"
    fingerprint = pool_fingerprint(
        model=spec.model,
        weight_version=config.weight_version or "",
        identity=spec.identity,
        pool=name,
        layout=SlotLayout.of(pool, spec.page_size, config.host_layout).signature(),
        page_size=spec.page_size,
        sharding="replicated" if pool.replicated else f"{config.ranks} ranks",
        salt=config.salt,
    )
    return fingerprint, shard


__all__ = ["CacheStatistics", "Hit", "HybridCache", "Occupancy", "Request"]
