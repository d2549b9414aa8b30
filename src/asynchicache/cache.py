"""The front door: opens devices, pools, transfers, storage and controller, and closes them in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import torch

from asynchicache.config import CacheConfig, open_backend
from asynchicache.controller.books import Counters
from asynchicache.controller.checkpoints import CheckpointPolicy
from asynchicache.controller.controller import HybridCacheController, Served, Traffic
from asynchicache.controller.planner import Planner
from asynchicache.controller.request import Hit, Request
from asynchicache.controller.stored import StoredPool, StoredPools
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import ConfigError
from asynchicache.hashing import namespace_seed, pool_fingerprint
from asynchicache.layouts import SlotLayout
from asynchicache.pools.balance import starving
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.memory import memory_budget
from asynchicache.pools.sizing import Memory, plan_slots
from asynchicache.ports import AsyncioPort, Port
from asynchicache.specs import ModelSpec, PoolSpec
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.pool import GuardedPool
from asynchicache.storage.protocol import StorageBackend
from asynchicache.storage.statistics import PoolStatistics
from asynchicache.streams.base import Device
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import InlineDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.engine import TransferEngine, TransferStatistics
from asynchicache.types import token_array

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots of one pool in one tier."""

    capacity: int
    held: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache did since it was opened, and what it holds now.

    Attributes:
        served: requests, prompt tokens, and hit tokens by tier and reason.
        occupancy: by pool, of device and host.
        planner, traffic, transfers: decisions, writes, copies.
        storage: by pool, calls and outcomes.
        pages_read: pages and states that came from storage.
    """

    served: Served
    occupancy: Mapping[str, tuple[Occupancy, Occupancy]]
    planner: Counters
    traffic: Traffic
    transfers: TransferStatistics
    storage: Mapping[str, PoolStatistics]
    pages_read: int


class HybridCache:
    """Keeps what a hybrid model computed in device memory, host memory and storage.

    Made by `open`; confined to the loop that opened it.
    """

    def __init__(self, spec: ModelSpec, config: CacheConfig, rooms: Rooms) -> None:
        self.spec = spec
        self.config = config
        self._rooms = rooms
        self._controller = rooms.controller

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
        config = config or CacheConfig()
        async with AsyncExitStack() as stack:
            rooms = await _open_rooms(stack, spec, config, storage, port, device)
            cache = cls(spec, config, rooms)
            try:
                yield cache
            finally:
                await _shielded(cache._close())

    async def _close(self) -> None:
        self._controller.close()
        try:
            async with asyncio.timeout(self.config.close_seconds):
                await self._controller.idle()
        except TimeoutError:
            _log.warning("closed with work under way after %s s", self.config.close_seconds)
        finally:
            self._controller.stop()

    def request(
        self, tokens: Iterable[int], *, namespace: str | None = None, salt: str | None = None
    ) -> Request:
        """One prompt to serve, as an async context manager.

        Args:
            tokens: token ids of the prompt; images and the like replaced by content ids.
            namespace: LoRA id, tenant or any other name; prefixes of different ones never meet.
            salt: the caller's cache salt; likewise.

        Raises:
            InvalidTokensError: no tokens, or ids that are no integers of 0 to 2**63 - 1.
            ClosedError: the cache is closed.
        """
        self._controller.check_open()
        return Request(self._controller, token_array(tokens)[:], namespace_seed(namespace, salt))

    def device_tensor(self, pool: str, tensor: str) -> torch.Tensor:
        """The device memory of one tensor of a pool.

        Returns:
            `[layers, slots, page_size, *shape]` for pages, `[layers, slots, *shape]` for states; layers
            in the order of the spec's `TensorSpec.layers`.

        Raises:
            KeyError: no such pool or tensor.
        """
        return self._rooms.memories[pool].device.tensor(tensor)

    @property
    def device(self) -> Device:
        """The device, whose streams a compute engine may be ordered with."""
        return self._rooms.device

    async def drain(self) -> None:
        """Until every copy, and every write to storage, has ended; new ones may follow."""
        await self._controller.idle()

    async def flush(self) -> None:
        """Forget everything in device and host memory that no request holds; storage is left alone."""
        self._controller.check_open()
        await self._controller.idle()
        self._controller.planner.flush()

    def verify(self) -> list[str]:
        """Broken invariants in words, empty when all is well; linear in the slots, changes nothing."""
        return self._controller.planner.books.verify()

    def statistics(self) -> CacheStatistics:
        books = self._controller.planner.books
        occupancy = {}
        for number, name in enumerate(books.names):
            tiers = [Occupancy(f.capacity, f.held, f.quarantined) for f in books.free[2 * number :][:2]]
            occupancy[name] = (tiers[0], tiers[1])
        return CacheStatistics(
            served=replace(self._controller.served),
            occupancy=occupancy,
            planner=replace(books.counters),
            traffic=replace(self._controller.traffic),
            transfers=self._rooms.engine.statistics(),
            storage={name: pool.guard.statistics() for name, pool in self._rooms.pools.items()},
            pages_read=self._controller.fetcher.pages_read,
        )

    def __repr__(self) -> str:
        state = "closed" if self._controller.closing else "open"
        return f"<HybridCache {state}, {self.spec.model}, {self._controller.planner.books.free}>"


@dataclass(frozen=True, slots=True)
class Rooms:
    """Everything that a cache consists of, opened."""

    device: Device
    memories: Mapping[str, PoolMemory]
    engine: TransferEngine
    pools: Mapping[str, StoredPool]
    controller: HybridCacheController


async def _open_rooms(
    stack: AsyncExitStack,
    spec: ModelSpec,
    config: CacheConfig,
    storage: StorageBackend | None,
    port: Port | None,
    device: Device | None,
) -> Rooms:
    """Open from the bottom up; the stack closes in the opposite order."""
    if port is None:
        port = AsyncioPort(threads=config.io_threads, seed=config.seed)
        stack.push_async_callback(port.aclose)
    kept = stack.enter_context(ExitStack())
    if device is None:
        device = open_device(config)
        kept.callback(device.close)
    slots = plan_slots(spec, config.sizes(), _memory(device))
    for pool in starving(spec, slots, config.pages_per_state):
        _log.warning("%s", pool)
    memories = await port.run_blocking(lambda: _allocate(spec, slots, device))
    for memory in memories.values():
        kept.callback(memory.host.close)
    reactor = CompletionReactor(port)
    engine = TransferEngine(device, memories, spec.layers, port, reactor, submit_inline=config.inline)
    stack.push_async_callback(_close_transfers, engine, reactor, kept, config.close_seconds)
    pools = await _open_storage(stack, spec, config, memories, storage, port)
    planner = Planner(
        spec,
        slots,
        write_policy=config.write_policy,
        eviction_policy=config.eviction,
        clean_share=config.clean_share,
        checkpoints=CheckpointPolicy.parse(config.checkpoints),
    )
    tasks = OwnedTasks()
    stack.push_async_callback(tasks.aclose)
    await tasks.ready()
    stored = StoredPools(planner.books, pools)
    controller = HybridCacheController(
        planner,
        device,
        reactor,
        engine,
        stored,
        tasks,
        prefetch=config.prefetch,
        store_bytes=config.store_bytes,
    )
    return Rooms(device, memories, engine, pools, controller)


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
    if kind.type == "cpu":
        return EmulatedDevice(InlineDriver() if config.inline else ThreadDriver())
    if kind.type == "cuda":
        return CudaDevice(kind.index or 0)
    raise ConfigError(f"device {config.device!r} must be cpu, cuda or cuda:N")


def _memory(device: Device) -> Memory:
    host = memory_budget().available
    if device.name == "cpu":
        return Memory(host, host, shared=True)
    return Memory(torch.cuda.mem_get_info(device.name)[0], host, shared=False)


def _allocate(spec: ModelSpec, slots: Mapping[str, tuple[int, int]], device: Device) -> dict[str, PoolMemory]:
    return {pool.name: _pool_memory(spec, pool, slots, device) for pool in spec.pools}


def _pool_memory(
    spec: ModelSpec, pool: PoolSpec, slots: Mapping[str, tuple[int, int]], device: Device
) -> PoolMemory:
    on_device, on_host = slots[pool.slots_of or pool.name]
    host = HostPool(pool, spec.page_size, on_host, pin=device.name != "cpu")
    return PoolMemory(DevicePool(pool, spec.page_size, on_device, device.name), host)


async def _open_storage(
    stack: AsyncExitStack,
    spec: ModelSpec,
    config: CacheConfig,
    memories: Mapping[str, PoolMemory],
    storage: StorageBackend | None,
    port: Port,
) -> dict[str, StoredPool]:
    """A guarded engine for every pool that has host slots for its pages to arrive in."""
    if storage is None:
        if config.storage is None:
            return {}
        storage = open_backend(config.storage, config.storage_options, port)
        stack.push_async_callback(storage.aclose)
    elif not config.weight_version:
        raise ConfigError("storage needs weight_version: a name that changes with the weights")
    pools = {}
    for name, memory in memories.items():
        if memory.host.slots:
            fingerprint, shard = _identity(spec, name, config)
            binding = SlotBinding(memory.host, fingerprint, shard)
            guard = GuardedPool(await storage.open_pool(binding), binding, port, config.storage_limits)
            stack.push_async_callback(guard.aclose)
            pools[name] = StoredPool(guard, binding)
    return pools


def _identity(spec: ModelSpec, name: str, config: CacheConfig) -> tuple[bytes, str]:
    """Fingerprint and shard of a pool's pages; of a replicated pool one copy serves all ranks."""
    pool = spec.pool(name)
    shard = "" if pool.replicated or config.ranks == 1 else f"{config.rank}/{config.ranks}"
    fingerprint = pool_fingerprint(
        model=spec.model,
        weight_version=config.weight_version or "",
        identity=spec.identity,
        pool=name,
        layout=SlotLayout.of(pool, spec.page_size).signature(),
        page_size=spec.page_size,
        sharding="replicated" if pool.replicated else f"{config.ranks} ranks",
        salt=config.salt,
    )
    return fingerprint, shard


async def _close_transfers(
    engine: TransferEngine, reactor: CompletionReactor, kept: ExitStack, seconds: float
) -> None:
    """Memory that a copy may still write to is never given back: it is leaked, deliberately, and so is
    the device, because closing it would wait for the copy."""
    idle = kept.pop_all()  # not closed either if this is cancelled
    await engine.aclose(seconds)
    if await reactor.aclose(seconds):
        _log.error("closed with copies in flight; the device and the host memory are leaked")
    else:
        idle.close()


async def _shielded(closing: Coroutine[object, object, None]) -> None:
    """Run to the end even if the caller is cancelled meanwhile, then be cancelled."""
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


__all__ = ["CacheStatistics", "Hit", "HybridCache", "Occupancy", "Request"]
