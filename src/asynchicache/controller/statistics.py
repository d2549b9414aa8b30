"""Statistics of a cache as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from asynchicache.controller.cache_parts import CacheParts
from asynchicache.controller.hit_counters import HitCounters
from asynchicache.controller.storage_writer import WriteCounters
from asynchicache.histograms import Distribution
from asynchicache.planner.inventory import PlannerCounters, SlotInventory
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.pools.extents import ExtentAllocator
from asynchicache.storage.statistics import PoolStatistics
from asynchicache.transfer.statistics import TransferStatistics
from asynchicache.tree.node import place_of
from asynchicache.types import Tier


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots of one pool in one tier.

    `closed`: not usable yet, because their memory is not pinned. In memory that pools share, `capacity` is
    what the pool could have if the others kept what they have now.
    """

    capacity: int
    held: int
    quarantined: int
    closed: int = 0


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """A follower, as the leader of its group sees it.

    Attributes:
        lag: from an entry of the log to this rank's answer; the copies of a step include the wait for it.
        lost: whether this rank ended the group.
    """

    lag: Distribution
    lost: bool = False


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """The other ranks of a sharded model.

    Attributes:
        ranks: the followers, by number.
        log_bytes: bytes of the log; each follower gets all of them.
        steps: steps that were marked.
        open_operations: operations that some rank has not answered.
        failed: whether the group goes on cold.
    """

    ranks: Mapping[int, RankStatistics] = field(default_factory=dict)
    log_bytes: int = 0
    steps: int = 0
    open_operations: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters since a cache was opened, and its current occupancy.

    Attributes:
        served: requests, prompt tokens, and hit tokens by tier and reason.
        occupancy: by pool, of device and host.
        evicted: by pool, evicted pages or states, on device and host.
        planner, traffic, transfers: decisions, writes, copies.
        storage: by pool, calls and outcomes.
        stages: by stage of a chain of stores, the nearest first, and pool; empty without a chain.
        storing_bytes: bytes of storage writes in flight.
        pages_read: pages and states read from storage.
        prefetch_waits: durations of waits for storage.
        tokens_per_end: cached tokens for each end of a path in memory, in the larger tier: what the traffic
            asks for as `tokens_per_state`. 0 if nothing is cached.
        group: the other ranks of a sharded model; None if there are none.
        host_bytes: by pool that shares host memory with others, the bytes that it has now.
        memory_bytes: bytes of all slots of a tier, with headers and padding; what pools share counts once.
        room_waits: durations of `admit` and `reserve`, which wait for other requests to free slots.
    """

    served: HitCounters
    occupancy: Mapping[str, tuple[Occupancy, Occupancy]]
    evicted: Mapping[str, tuple[int, int]]
    planner: PlannerCounters
    traffic: WriteCounters
    transfers: TransferStatistics
    storage: Mapping[str, PoolStatistics]
    storing_bytes: int
    pages_read: int
    prefetch_waits: Distribution
    room_waits: Distribution
    tokens_per_end: int = 0
    group: GroupStatistics | None = None
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[Tier, int] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, PoolStatistics]] = field(default_factory=dict)


def collect_statistics(
    parts: CacheParts,
    group: GroupStatistics | None = None,
) -> CacheStatistics:
    """Copy all counters as they are now."""
    inventory = parts.planner.inventory
    return CacheStatistics(
        served=parts.hits.copy(),
        occupancy=_occupancy(inventory),
        evicted=_evicted(inventory),
        planner=inventory.counters.copy(),
        traffic=replace(parts.storage_writer.traffic.copy(), copies_failed=parts.executor.copies_failed),
        transfers=parts.transfers.statistics(),
        storage=parts.storage.statistics(),
        stages=parts.storage.stages(),
        storing_bytes=parts.storage_writer.storing_bytes,
        pages_read=parts.prefetcher.pages_read,
        prefetch_waits=parts.prefetcher.waits.snapshot(),
        room_waits=parts.admission.waits.snapshot(),
        tokens_per_end=inventory.tokens_per_end(),
        group=group,
        host_bytes=inventory.host_bytes(),
        memory_bytes={tier: inventory.memory_bytes(tier) for tier in (Tier.DEVICE, Tier.HOST)},
    )


def _occupancy(inventory: SlotInventory) -> dict[str, tuple[Occupancy, Occupancy]]:
    occupancy = {}
    for component_id, name in enumerate(inventory.names):
        tiers = [_of(free) for free in inventory.free[2 * component_id :][:2]]
        occupancy[name] = (tiers[0], tiers[1])
    return occupancy


def _of(free: SlotAllocator) -> Occupancy:
    capacity = free.capacity
    if isinstance(free, ExtentAllocator):
        capacity = free.held + free.available + free.quarantined + free.closed
    return Occupancy(capacity, free.held, free.quarantined, free.closed)


def _evicted(inventory: SlotInventory) -> dict[str, tuple[int, int]]:
    evicted = inventory.counters.evicted
    return {
        name: (evicted[place_of(component_id, Tier.DEVICE)], evicted[place_of(component_id, Tier.HOST)])
        for component_id, name in enumerate(inventory.names)
    }
