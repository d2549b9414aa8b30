"""Opens and closes what copies need: the memory of pools, its growth in the background, an engine."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.pools.device import DevicePages, DevicePool
from asynchicache.pools.extents import ExtentPlan
from asynchicache.pools.host import HostPool, SteppedMemory, grow_pool
from asynchicache.pools.shared import HostHandle, SharedSlab, attach_pool
from asynchicache.pools.slabs import Pinner, Slab
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec
from asynchicache.streams.base import Device
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.audit import PageAudit
from asynchicache.transfer.calibration import measured_paths
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.engine import TransferEngine
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.transfers import Transfers

_log = logging.getLogger(__name__)


class CopyOptions(NamedTuple):
    """How pages are copied.

    Attributes:
        path: the copy path; None chooses by measured rates.
        audit: share of the pages that leave the device whose bytes are compared when they return.
        inline: enqueue on the loop.
        measure: whether to measure; if not, recorded rates of a CPU are used.
    """

    path: CopyPath | None
    audit: float
    inline: bool
    measure: bool


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
        spec: the model.
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
        spec: the model.
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
        spec: the model.
        hosts: the host memory.
        port: runs blocking calls.
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


async def open_engine(
    device: Device,
    memories: Mapping[str, PoolMemory],
    layers: int,
    port: Port,
    reactor: CompletionReactor,
    options: CopyOptions,
) -> TransferEngine:
    """An engine over `memories`, after measuring its device's copy paths.

    Raises:
        ConfigError: the requested path is not available.
    """
    paths = None
    if options.measure and options.path is None:
        paths = await port.run_blocking(partial(measured_paths, device.name))
    audit = None
    if options.audit:
        devices = {name: memory.device for name, memory in memories.items()}
        audit = PageAudit(devices, options.audit, random.Random(port.random.random()))
    return TransferEngine(
        device,
        memories,
        layers,
        port,
        reactor,
        submit_inline=options.inline,
        paths=paths,
        copy_path=options.path,
        audit=audit,
    )


_leaked: dict[ExitStack, object] = {}
"""Memory that a copy may still write to, and what would close it; kept until the process ends."""


async def close_transfers(
    engine: Transfers,
    reactor: CompletionReactor,
    kept: ExitStack,
    memories: object,
    seconds: float,
) -> None:
    """Close the engine, then the memory and the device, unless a copy is still in flight.

    Memory that a copy may still write to is leaked on purpose, never freed: its next owner would find foreign
    bytes in it. The device is leaked too, because closing it would wait for the copy.
    """
    idle = kept.pop_all()
    _leaked[idle] = memories  # stays there if this is cancelled
    # Operations that were given up may not be enqueued yet, so the reactor need not know of them.
    given_up = await engine.aclose(seconds)
    if await reactor.aclose(seconds) or given_up:
        _log.error("closed with copies in flight; the device and the host memory are leaked")
    else:
        del _leaked[idle]
        idle.close()
