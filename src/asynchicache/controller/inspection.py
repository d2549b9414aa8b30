"""The inside of an open cache, for tests and tools that look for bugs. Nothing here is a stable interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from asynchicache.controller.cache_parts import CacheParts
from asynchicache.planner.observer import Observer


class Inspection:
    """What `HybridCache.inspect` returns: a view of one cache that stays true while the cache is open.

    To be read between two turns of the loop, and not changed.

    Attributes:
        planner: all decisions. `planner.inventory` knows who holds which slot: the tree with its nodes, the
            allocators by place, requests, copies and locks; `planner.prefetches` has the reads in flight.
        storage: the attached storage, with the breaker of each pool; false without one.
        costs: what was measured of reading and computing.
        memories: by pool, its memory on device and host; empty if an engine owns the device.
    """

    def __init__(self, parts: CacheParts) -> None:
        self.planner = parts.planner
        self.storage = parts.storage
        self.costs = parts.costs
        self.memories = parts.memories
        self.transfers = parts.transfers
        self._executor = parts.executor
        self._writer = parts.storage_writer

    @property
    def failed(self) -> bool:
        """Whether a copy has failed, so that nothing copied can be trusted."""
        return self._executor.failure is not None

    @property
    def clearing(self) -> bool:
        """Whether storage is being cleared."""
        return self._writer.clearing > 0

    def marked_stored(self) -> Iterator[tuple[str, Sequence[bytes]]]:
        """By node and pool, the digests of pages and states that are believed to be stored."""
        inventory = self.planner.inventory
        for node in inventory.tree.nodes():
            digests = inventory.tree.digests(node)
            for component_id in range(len(inventory.names)):
                if node.stored >> component_id & 1:
                    for pool in inventory.sharing(component_id):
                        yield pool, digests if inventory.spec.pool(pool).per_token else digests[-1:]

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """During the body, tell `observer` what happens; asked for room before those that came first."""
        observers = self.planner.inventory.observers
        observers.insert(0, observer)
        try:
            yield
        finally:
            observers.remove(observer)
