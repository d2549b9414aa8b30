"""What a cache did, and what it holds, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from asynchicache.controller.books import Books, Counters
from asynchicache.controller.controller import HybridCacheController, Served
from asynchicache.controller.stored import StoredPools
from asynchicache.controller.storing import Traffic
from asynchicache.storage.statistics import PoolStatistics
from asynchicache.transfer.engine import TransferEngine
from asynchicache.transfer.statistics import TransferStatistics


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots of one pool in one tier; `closed`: their memory is not pinned yet."""

    capacity: int
    held: int
    quarantined: int
    closed: int = 0


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


def collect_statistics(
    controller: HybridCacheController, engine: TransferEngine, stored: StoredPools
) -> CacheStatistics:
    """Copies of all counters as they are now."""
    books = controller.planner.books
    return CacheStatistics(
        served=replace(controller.served),
        occupancy=_occupancy(books),
        planner=replace(books.counters),
        traffic=controller.storer.traffic.copy(),
        transfers=engine.statistics(),
        storage=stored.statistics(),
        pages_read=controller.fetcher.pages_read,
    )


def _occupancy(books: Books) -> dict[str, tuple[Occupancy, Occupancy]]:
    occupancy = {}
    for number, name in enumerate(books.names):
        tiers = [Occupancy(f.capacity, f.held, f.quarantined, f.closed) for f in books.free[2 * number :][:2]]
        occupancy[name] = (tiers[0], tiers[1])
    return occupancy
