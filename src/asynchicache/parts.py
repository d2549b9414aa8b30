"""Opens and closes what caches and ranks consist of: device, memory, copies, storage, running parts."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import torch

from asynchicache.config import CacheConfig, open_storage
from asynchicache.controller.cache_parts import CacheParts
from asynchicache.controller.executor import Executor
from asynchicache.controller.statistics import GroupStatistics
from asynchicache.controller.storage_pools import AttachedStorage, StoragePools
from asynchicache.controller.tasks import OwnedTasks, shielded
from asynchicache.errors import ConfigError
from asynchicache.hashing import pool_fingerprint
from asynchicache.kernels.select import compile_kernels
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.planner.planner import Planner
from asynchicache.pools.balance import find_few_slots, find_undersized_pools, find_unstorable
from asynchicache.pools.device import DevicePages, DevicePool
from asynchicache.pools.engine import EngineMemory
from asynchicache.pools.extents import ExtentPlan
from asynchicache.pools.host import HostPool, SteppedMemory, grow_pool
from asynchicache.pools.memory import process_memory
from asynchicache.pools.shared import HostHandle, SharedSlab, attach_pool, share
from asynchicache.pools.sizing import FreeMemory, plan_host_slots, plan_shared_host, plan_slots
from asynchicache.pools.slabs import Pinner, Slab
from asynchicache.ports import AsyncioPort, Port
from asynchicache.specs import ModelSpec
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.chain import in_each_store
from asynchicache.storage.divided import STAGED_PAGES, DividedPool, DividedStorage, StoredPart
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import InlineDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.audit import PageAudit
from asynchicache.transfer.calibration import measured_paths
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import LocalTransfers
from asynchicache.transfer.remote import RemoteCopies
from asynchicache.transfer.transfers import Transfers
from asynchicache.types import Tier, WritePolicy

_log = logging.getLogger(__name__)

T = TypeVar("T")


class OtherRanks(Protocol):
    """The other ranks of a sharded model; `ranks.RankGroup` is one."""

    async def agree(
        self,
        spec: ModelSpec,
        config: CacheConfig,
        slots: Mapping[str, tuple[int, int]],
        memory: FreeMemory,
        now: Callable[[], float],
        pages: Mapping[str, int] | None,
    ) -> Mapping[str, tuple[int, int]]:
        """Wait for all ranks; returns the slots by pool that every rank has memory for.

        `memory`: what is free here; `pages`: those of an engine that owns the device memory.
        """
        ...

    @property
    def shared_pools(self) -> Collection[str]:
        """Pools whose host memory other ranks map, once they have agreed."""
        ...

    async def share(self, hosts: Mapping[str, HostPool]) -> None:
        """Tell other ranks where the host memory of these pools is."""
        ...

    def copies(self, here: Transfers) -> Transfers:
        """Copies on all ranks, given those of this rank."""
        ...

    def storage(self, sharing: Callable[[int], Iterable[str]]) -> StoragePools:
        """Storage of all ranks."""
        ...

    async def start(self, on_failure: Callable[[BaseException], object]) -> None:
        """Wait until every rank is ready; `on_failure` is called when one is lost."""
        ...

    async def update_weights(self, version: str) -> None:
        """Use storage under another weight version on all ranks."""
        ...

    async def verify(self, free: Mapping[tuple[str, Tier], Sequence[int]], *, idle: bool) -> list[str]:
        """Describe what other ranks do that contradicts which slots are free here."""
        ...

    def statistics(self) -> GroupStatistics:
        """Counters of the other ranks."""
        ...


async def open_parts(
    stack: AsyncExitStack,
    spec: ModelSpec,
    config: CacheConfig,
    storage: StorageBackend | None,
    port: Port | None,
    device: Device | None,
    engine: EngineMemory | RemoteCopies | None,
    group: OtherRanks | None,
) -> CacheParts:
    """Open from the bottom up; the stack closes in the opposite order."""
    pages = None if engine is None else engine.pages(spec)
    if engine is not None:
        config = _for_engine(config, engine, alone=group is None)
    opened = OpenedDevice(stack, config, port, device)
    port, device = opened.port, opened.device
    slots, plan = await _agreed_slots(spec, config, free_memory(device), pages, port, group)
    memories, on_host = await _allocate(spec, slots, plan, opened, config.host_layout, engine, group)
    planner = _planner(spec, slots, config, pages, on_host, decides=group is not None or config.ranks == 1)
    inventory = planner.inventory
    stack.callback(planner.abandon)
    transfers: Transfers
    if isinstance(engine, RemoteCopies):
        engine.start(spec, share(on_host.pools, 0 if plan is None else plan.extent_bytes), port)
        transfers = engine
        opened.close_after(transfers, on_host)
    else:
        transfers = await opened.transfers(memories, spec.layers)
    stored = StoragePools(inventory.sharing) if group is None else group.storage(inventory.sharing)
    stack.push_async_callback(stored.aclose)
    if storage is not None or config.storage is not None:
        stored.attach(await attach_storage(spec, config, on_host.pools, storage, port))
    tasks = OwnedTasks()
    stack.push_async_callback(tasks.aclose)
    await tasks.ready()
    copies = transfers if group is None else group.copies(transfers)
    executor = Executor(planner, device, opened.reactor, copies, tasks)
    parts = CacheParts(
        planner,
        executor,
        device,
        transfers,
        memories,
        on_host.pools,
        stored,
        port,
        prefetch=config.prefetch,
        store_bytes=config.store_bytes,
        count_namespaces=config.count_namespaces,
    )
    if transfers.audit is not None:
        inventory.watch_host(transfers.audit.forget)
    for growth in growing_pools(spec, on_host, port, inventory.open_host, inventory.open_extents):
        tasks.spawn(growth)
    if group is not None:
        await group.start(executor.fail)
    return parts


async def _allocate(
    spec: ModelSpec,
    slots: Mapping[str, tuple[int, int]],
    plan: ExtentPlan | None,
    opened: OpenedDevice,
    layout: HostLayout,
    engine: EngineMemory | RemoteCopies | None,
    group: OtherRanks | None,
) -> tuple[dict[str, PoolMemory], HostMemory]:
    """Allocate the memory of both tiers, or of the host alone if the copies run elsewhere."""
    memories: dict[str, PoolMemory] = {}
    if isinstance(engine, RemoteCopies):
        counts = {name: host for name, (_, host) in slots.items()}
        every = [pool.name for pool in spec.pools]
        hosts = await opened.allocate(partial(allocate_hosts, spec, counts, layout, mapped=every, plan=plan))
    else:
        owned = None if engine is None else engine.pools
        mapped = () if group is None else group.shared_pools
        name = opened.device.name
        memories, hosts = await opened.allocate(
            partial(allocate_memories, spec, slots, name, layout, pages=owned, plan=plan, mapped=mapped)
        )
    if group is not None:
        await group.share(hosts.pools)
    return memories, hosts


def _move(hosts: Mapping[str, HostPool], pool: str, sources: list[int], destinations: list[int]) -> None:
    hosts[pool].move(sources, destinations)


def _for_engine(config: CacheConfig, engine: EngineMemory | RemoteCopies, *, alone: bool) -> CacheConfig:
    """
    Raises:
        ConfigError: an option does not fit device memory that an engine owns.
    """
    if config.write_policy is WritePolicy.WRITE_BACK:
        raise ConfigError(
            "write_policy 'write_back' keeps pages on the device until they are evicted there, but an engine "
            "owns that memory: use write_through or write_through_selective"
        )
    if isinstance(engine, RemoteCopies):
        if not alone:
            raise ConfigError("RemoteCopies with a group: copies of a group run in the process of each rank")
        return msgspec.structs.replace(config, device="cpu", inline=True)  # no work runs on it
    return engine_config(config, engine)


def engine_config(config: CacheConfig, engine: EngineMemory) -> CacheConfig:
    """The options of a cache over an engine's memory: its device, and how its pages look in the keys."""
    salt = f"{config.salt}\0{engine.identity}" if engine.identity else config.salt
    return msgspec.structs.replace(config, device=engine.device, salt=salt)


async def _agreed_slots(
    spec: ModelSpec,
    config: CacheConfig,
    memory: FreeMemory,
    pages: Mapping[str, int] | None,
    port: Port,
    group: OtherRanks | None,
) -> tuple[dict[str, tuple[int, int]], ExtentPlan | None]:
    """As `_slots`; of a group, those that every rank has memory for."""
    slots, plan = _slots(spec, config, memory, pages, alone=group is None)
    if group is not None:
        slots = dict(await group.agree(spec, config, slots, memory, port.now, pages))
    return slots, plan


def _slots(
    spec: ModelSpec,
    config: CacheConfig,
    memory: FreeMemory,
    pages: Mapping[str, int] | None,
    *,
    alone: bool,
) -> tuple[dict[str, tuple[int, int]], ExtentPlan | None]:
    """Device and host slots of each pool; no device slots if an engine has `pages` of its own. And the host
    memory that pools share: not with other ranks, whose log has no moves within the host."""
    may_share = alone and config.host_layout.whole_slots
    if pages is not None:
        plan = plan_shared_host(spec, config, pages, memory, engine=True) if may_share else None
        on_host = plan_host_slots(spec, config, pages, memory, plan)
        return {name: (0, count) for name, count in on_host.items()}, plan
    slots = plan_slots(spec, config, memory)
    device = {name: count for name, (count, _) in slots.items()}
    for words in find_few_slots(spec, config, device):
        _log.warning("%s", words)
    plan = plan_shared_host(spec, config, device, memory, engine=False) if may_share else None
    shared = {} if plan is None else {name: plan.slots(name) for name in plan.slot_bytes}
    for pool in find_undersized_pools(spec, slots, config.tokens_per_state):
        if pool.pool not in shared:
            _log.warning("%s", pool)
    return {name: (count, shared.get(name, host)) for name, (count, host) in slots.items()}, plan


def _planner(
    spec: ModelSpec,
    slots: Mapping[str, tuple[int, int]],
    config: CacheConfig,
    pages: Mapping[str, int] | None,
    on_host: HostMemory,
    *,
    decides: bool,
) -> Planner:
    """`decides`: no other process must find the same prefixes by itself."""
    options = msgspec.structs.replace(config, tails=config.tails and decides)
    planner = Planner(spec, slots, options, engine_pages=pages, extents=on_host.plan)
    planner.inventory.on_move = partial(_move, on_host.pools)
    return planner


class HostMemory(NamedTuple):
    """The host memory of a cache.

    Attributes:
        pools: by name.
        shared: what pools share, or None.
        plan: how that is divided.
    """

    pools: Mapping[str, HostPool]
    shared: SteppedMemory | None = None
    plan: ExtentPlan | None = None


def allocate_hosts(
    spec: ModelSpec,
    slots: Mapping[str, int],
    layout: HostLayout,
    kept: ExitStack,
    *,
    pinner: Pinner | None = None,
    mapped: Collection[str] = (),
    attached: HostHandle | None = None,
    plan: ExtentPlan | None = None,
) -> HostMemory:
    """Every pool's host slots; pinned for a GPU, a first step of it. Blocking.

    Args:
        slots: by pool that owns slots.
        layout: of host memory.
        kept: closes the memory, including what was pinned before an error.
        pinner: pins it. Default: it is not pinned.
        mapped: pools whose memory other processes can map.
        attached: memory of pools that another process has, to be mapped.
        plan: of the memory that the pools named there share.

    Raises:
        CapacityError: the system has no room.
        ConfigError: memory of another process cannot be mapped.
    """
    shared = None
    if plan is not None:
        make = SharedSlab if mapped else Slab
        shared = SteppedMemory(make(plan.nbytes), plan.extent_bytes, pinner=pinner)
        kept.callback(shared.close)
    pools = {}
    for pool in spec.pools:
        count = slots[pool.slots_of or pool.name]
        memory: Slab | SteppedMemory
        if attached is not None and pool.name in attached.pools:
            host = attach_pool(spec, pool.name, attached, pinner)
        else:
            if shared is not None and plan is not None and pool.name in plan.slot_bytes:
                memory = shared
            else:
                make = SharedSlab if pool.name in mapped else Slab
                memory = make(SlotLayout.of(pool, spec.page_size, layout).nbytes(max(count, 1)))
            host = HostPool(pool, spec.page_size, count, pin=pinner or False, layout=layout, memory=memory)
        kept.callback(host.close)
        pools[pool.name] = host
    return HostMemory(pools, shared, plan)


def allocate_memories(
    spec: ModelSpec,
    slots: Mapping[str, tuple[int, int]],
    device: str,
    layout: HostLayout,
    kept: ExitStack,
    pages: Mapping[str, DevicePages] | None = None,
    plan: ExtentPlan | None = None,
    *,
    mapped: Collection[str] = (),
    attached: HostHandle | None = None,
) -> tuple[dict[str, PoolMemory], HostMemory]:
    """Every pool's slots in both tiers; host memory pinned for a GPU, a first step of it. Blocking.

    Args:
        slots: by pool that owns slots, on the device and on the host.
        device: torch's name.
        layout: of host memory.
        kept: closes the host memory, including what was pinned before an error.
        pages: device memory that an engine owns, by pool. Default: it is allocated.
        plan: of the host memory that the pools named there share.
        mapped, attached: as for `allocate_hosts`.

    Raises:
        CapacityError: the device or the system has no room.
        ConfigError: memory of another process cannot be mapped.
    """
    on_host = {name: host for name, (_, host) in slots.items()}
    hosts = allocate_hosts(
        spec, on_host, layout, kept, pinner=Pinner.of(device), mapped=mapped, attached=attached, plan=plan
    )
    own = pages or {
        pool.name: DevicePool(pool, spec.page_size, slots[pool.slots_of or pool.name][0], device)
        for pool in spec.pools
    }
    return {name: PoolMemory(own[name], host) for name, host in hosts.pools.items()}, hosts


def growing_pools(
    spec: ModelSpec,
    hosts: HostMemory,
    port: Port,
    opened: Callable[[str, int], object],
    extents_opened: Callable[[int], object],
) -> Iterator[Coroutine[object, object, None]]:
    """Coroutines that pin the rest of the host memory.

    Args:
        opened: called now and after each step with the name of a pool that owns slots and has memory of its
            own, and how many of its host slots are ready in all pools that share them.
        extents_opened: the same for the memory that pools share, with the extents that are ready.
    """
    for owner in spec.owners:
        if hosts.plan is not None and owner.name in hosts.plan.slot_bytes:
            continue
        sharing = [hosts.pools[pool.name] for pool in spec.pools if owner.name in (pool.name, pool.slots_of)]

        def tell(_: int, name: str = owner.name, pools: list[HostPool] = sharing) -> None:
            opened(name, min(host.ready for host in pools))

        tell(0)
        yield from (grow_pool(port, host, tell) for host in sharing if host.growing)
    if hosts.shared is not None and hosts.plan is not None:
        yield from _growing_extents(spec, hosts, hosts.shared, hosts.plan, port, extents_opened)


def _growing_extents(
    spec: ModelSpec,
    hosts: HostMemory,
    shared: SteppedMemory,
    plan: ExtentPlan,
    port: Port,
    opened: Callable[[int], object],
) -> Iterator[Coroutine[object, object, None]]:
    beside = {
        hosts.pools[pool.name]: plan.slot_bytes[pool.slots_of]
        for pool in spec.pools
        if pool.slots_of is not None and pool.slots_of in plan.slot_bytes
    }
    memories: list[HostPool | SteppedMemory] = [shared, *beside]

    def tell(_: int) -> None:
        ready = [host.ready * slot_bytes for host, slot_bytes in beside.items() if host.ready < host.slots]
        opened(min([shared.ready, *ready]) // plan.extent_bytes)

    tell(0)
    yield from (grow_pool(port, memory, tell) for memory in memories if memory.growing)


_leaked: dict[ExitStack, object] = {}
"""Memory that a copy may still write to, and what would close it; kept until the process ends."""


class OpenedDevice:
    """A device, and the memory that its copies use, which are closed once no copy runs.

    Attributes:
        port, device: those given, or opened here.
        reactor: tells when work of the device has ended.
    """

    def __init__(
        self, stack: AsyncExitStack, config: CacheConfig, port: Port | None, device: Device | None
    ) -> None:
        """
        Args:
            stack: closes what is opened here.
            config: names the device, how copies run and how long closing waits.
            port, device: given ones stay open.
        """
        if port is None:
            port = AsyncioPort(threads=config.io_threads, seed=config.seed)
            stack.push_async_callback(port.aclose)
        self.port = port
        self.reactor = CompletionReactor(port)
        self._config = config
        self._stack = stack
        self._kept = stack.enter_context(ExitStack())
        self._owned = device is None
        # An emulated device of the caller must run the same way each time, so nothing is measured.
        self._measures = not config.inline if device is None else device.name != "cpu"
        if device is None:
            device = open_device(config)
            self._kept.callback(device.close)
        self.device = device

    async def allocate(self, allocate: Callable[[ExitStack], T]) -> T:
        """What `allocate` returns, run in a thread; the stack it takes closes the memory after all copies."""
        # Shielded from cancellation: memory that a thread still pins could not be unpinned.
        memory = await shielded(self.port.run_blocking(partial(allocate, self._kept)))
        if self._owned:  # closes before the memory: a failed device may still run copies
            self._kept.callback(self.device.close)
        return memory

    async def transfers(self, memories: Mapping[str, PoolMemory], layers: int) -> LocalTransfers:
        """Open transfers over `memories`, after measuring the device's copy paths.

        Raises:
            ConfigError: the requested path is not available.
        """
        config, paths, audit = self._config, None, None
        if self.device.name != "cpu":  # else the loop would wait for it below
            index = int(self.device.name.partition(":")[2] or 0)
            await self.port.run_blocking(partial(compile_kernels, index))
        if self._measures and config.copy_path is None:
            paths = await self.port.run_blocking(partial(measured_paths, self.device.name))
        if config.audit:
            devices = {name: memory.device for name, memory in memories.items()}
            audit = PageAudit(devices, config.audit, random.Random(self.port.random.random()))
        transfers = LocalTransfers(
            self.device,
            memories,
            layers,
            self.port,
            self.reactor,
            submit_inline=config.inline,
            paths=paths,
            copy_path=config.copy_path,
            audit=audit,
        )
        self.close_after(transfers, memories)
        return transfers

    def close_after(self, transfers: Transfers, memories: object) -> None:
        """Have the stack close `transfers`, then the memory and the device."""
        self._stack.push_async_callback(self._close, transfers, memories)

    async def _close(self, transfers: Transfers, memories: object) -> None:
        """Close the copies, then the memory and the device, unless a copy is still in flight.

        Memory that a copy may still write to is leaked on purpose, never freed: its next owner would find
        foreign bytes in it. The device is leaked too, because closing it would wait for the copy.
        """
        idle, seconds = self._kept.pop_all(), self._config.close_seconds
        _leaked[idle] = memories  # stays there if this is cancelled
        # Operations that were given up may not be enqueued yet, so the reactor need not know of them.
        given_up = await transfers.aclose(seconds)
        if await self.reactor.aclose(seconds) or given_up:
            _log.error("closed with copies in flight; the device and the host memory are leaked")
        else:
            del _leaked[idle]
            idle.close()


def open_device(config: CacheConfig) -> Device:
    """Open the device that a configuration names.

    Raises:
        ConfigError: the kind of device is unknown.
        DeviceError: the device does not exist.
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


def free_memory(device: Device) -> FreeMemory:
    """Free memory of a device and of its host."""
    host = process_memory().available
    if device.name == "cpu":
        return FreeMemory(host, host, shared=True)
    return FreeMemory(torch.cuda.mem_get_info(device.name)[0], host, shared=False)


async def attach_storage(
    spec: ModelSpec,
    config: CacheConfig,
    hosts: Mapping[str, HostPool],
    storage: StorageBackend | None,
    port: Port,
    *,
    without: Collection[str] = (),
) -> AttachedStorage:
    """Open the configured storage, or use the given one, which the caller closes; with all pools that have
    host slots. `without`: as of `open_storage`."""
    config.check_storage()
    if words := find_unstorable(spec, {name: pool.slots for name, pool in hosts.items()}):
        _log.warning("%s", words)
    bindings = [
        SlotBinding(host, *_identity(spec, name, config), depends_on=spec.depends_on(name))
        for name, host in hosts.items()
        if host.slots
    ]
    others = [pool.name for pool in spec.pools if not pool.writes or (pool.replicated and config.rank)]
    owned = storage is None
    if storage is None:  # last, so that no earlier failure leaves it open
        storage = open_storage(config.storage or "", config.storage_options, port, without=without)
    if config.store_parts:
        storage = in_each_store(
            storage, lambda one: DividedStorage(one, _divided(spec, config, hosts), port), port
        )
    return await AttachedStorage.open(
        storage,
        bindings,
        port,
        config.storage_limits,
        owned=owned,
        read_only=others,
        model=spec.model,
        weight_version=config.weight_version or "",
    )


def rank_parts(spec: ModelSpec, config: CacheConfig) -> dict[str, tuple[str, bool]]:
    """By pool that is not the same on all ranks: the name of the rank's part, and whether it writes it.

    Ranks with the same name have the same keys, so they must have the same bytes.

    Raises:
        ConfigError: the spec is that of a rank, and the options name a rank too.
    """
    found = {}
    for pool in spec.pools:
        if not pool.replicated:
            fingerprint, shard = _identity(spec, pool.name, config)
            found[pool.name] = f"{fingerprint.hex()[:16]} {shard}".strip(), pool.writes
    return found


def _divided(spec: ModelSpec, config: CacheConfig, hosts: Mapping[str, HostPool]) -> dict[str, DividedPool]:
    """By pool that tensor-parallel ranks divide, the parts that its pages are stored as.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    if config.ranks > 1:
        raise ConfigError("store_parts: give each rank its pools (ModelSpec.shard), not the option ranks")
    found: dict[str, dict[str, StoredPart]] = {}
    for part in spec.stored_as(config.store_parts):
        for name, rows in part.rows.items():
            pool = part.spec.pool(name)
            if hosts[name].slots and pool.shard != spec.pool(name).shard:
                staging = HostPool(pool, spec.page_size, STAGED_PAGES, pin=False, layout=config.host_layout)
                keys = _identity(part.spec, name, config)
                binding = SlotBinding(staging, *keys, depends_on=spec.depends_on(name))
                found.setdefault(name, {})[pool.shard] = StoredPart(binding, staging, rows)
    return {name: DividedPool(hosts[name], list(parts.values())) for name, parts in found.items()}


def _identity(spec: ModelSpec, name: str, config: CacheConfig) -> tuple[bytes, str]:
    """Fingerprint and shard of a pool's pages; a replicated pool has one copy for all ranks.

    Raises:
        ConfigError: the spec is that of a rank, and the options name a rank too.
    """
    pool = spec.pool(name)
    if config.ranks > 1 and (pool.shard or not pool.writes):
        raise ConfigError(
            f"rank {config.rank} of {config.ranks}: pool {name!r} is {pool.shard or 'a copy'} of the model "
            "already (ModelSpec.shard), so the options rank and ranks say nothing more: leave them out"
        )
    shard = "" if pool.replicated or config.ranks == 1 else f"{config.rank}/{config.ranks}"
    sharding = "replicated" if pool.replicated else "shards" if pool.shard else f"{config.ranks} ranks"
    fingerprint = pool_fingerprint(
        model=spec.model,
        weight_version=config.weight_version or "",
        identity=spec.identity,
        pool=name,
        layout=SlotLayout.of(pool, spec.page_size, config.host_layout).signature(),
        page_size=spec.page_size,
        sharding=sharding,
        salt=config.salt,
    )
    return fingerprint, pool.shard or shard
