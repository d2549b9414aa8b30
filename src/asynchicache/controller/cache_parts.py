"""CacheParts: what one open cache consists of.

The planner decides and the executor carries out. Storage reads and writes, admission and events are separate
parts. A failure costs a hit, never a request.
"""

from __future__ import annotations

from collections.abc import Mapping

from asynchicache.controller.admission import Admission
from asynchicache.controller.event_hub import EventHub
from asynchicache.controller.executor import Executor
from asynchicache.controller.hit_counters import HitCounters
from asynchicache.controller.namespaces import Namespaces
from asynchicache.controller.prefetcher import Prefetcher
from asynchicache.controller.presence_queries import PresenceQueries
from asynchicache.controller.recorder import TraceRecorder
from asynchicache.controller.storage_pools import StoragePools
from asynchicache.controller.storage_writer import StorageWriter
from asynchicache.controller.verify import InFlightWork, problems
from asynchicache.planner.costs import LoadCosts
from asynchicache.planner.options import PrefetchOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.pools.host import HostPool
from asynchicache.ports import Port
from asynchicache.streams.base import Device
from asynchicache.tracing import Tracer
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.transfers import Transfers
from asynchicache.types import Tier


class CacheParts:
    """What one open cache consists of.

    Attributes:
        device: has the memory of the device tier.
        transfers: copies between device and host, on this rank.
        memories: by pool, of both tiers; empty if the copies run in another process.
        hosts: by pool, the host memory.
        storage: the attached storage; empty without storage.
        admission: gives device slots to requests.
        prefetcher, storage_writer: read from storage, and write to it.
        namespaces: namespaces by seed.
        events: sends cache events to subscribers.
    """

    def __init__(
        self,
        planner: Planner,
        executor: Executor,
        device: Device,
        transfers: Transfers,
        memories: Mapping[str, PoolMemory],
        hosts: Mapping[str, HostPool],
        storage: StoragePools,
        port: Port,
        *,
        prefetch: PrefetchOptions,
        store_bytes: int,
        count_namespaces: int,
    ) -> None:
        """
        Args:
            planner, executor, device, transfers, memories, hosts, storage, port: see the attributes.
            store_bytes: bytes of storage writes in flight, beyond which writes are shed.
            count_namespaces: the most namespaces with counters of their own.
        """
        self.planner = planner
        self.executor = executor
        self.admission = Admission(planner, executor)
        self.device = device
        self.transfers = transfers
        self.memories = memories
        self.hosts = hosts
        self.storage = storage
        self.port = port
        self.namespaces = Namespaces(planner.inventory.tree.roots)
        self.events = EventHub(planner, self.namespaces)
        self.hits = HitCounters()
        presence = PresenceQueries(storage, executor)
        self.storage_writer = StorageWriter(planner, executor, storage, presence, limit_bytes=store_bytes)
        self.costs = LoadCosts(prefetch.min_fetch_tokens)
        self.reports_costs = prefetch.load_or_compute
        self.prefetcher = Prefetcher(
            planner,
            executor,
            storage,
            presence,
            self.storage_writer,
            prefetch,
            self.costs,
            self.admission.is_waited_for,
        )
        self._count_namespaces = count_namespaces
        self.recorder: TraceRecorder | None = None

    def tell_time(self) -> None:
        """Tell the planner the time, which is a value to it, before it decides."""
        self.planner.set_time(self.port.now())

    def trace(self, tracer: Tracer | None) -> None:
        """Report the begin and end of copies, writes and evictions to `tracer`; None: stop."""
        self.executor.tracer = self.planner.inventory.tracer = self.storage_writer.tracer = tracer

    def count_served(self, request: RequestState) -> None:
        """Count a request whose prefix is loaded."""
        prompt, hit = request.prompt, request.hit_tokens(self.planner.inventory.page_size)
        reason = self.planner.reason(request)
        self.hits.count(prompt, hit, request.tier, reason, self.planner.held_back_by(request))
        self.hits.hit_slots.update(request.sources)
        if request.tier is Tier.STORAGE:
            self.hits.stage_tokens.update(self.storage.by_stage(request.stage, hit))
        if self._count_namespaces:
            name = self.namespaces.named(request.seed).name or ""
            self.hits.count_namespace(name, prompt, hit, self._count_namespaces)

    def verify(self, *, idle: bool) -> list[str]:
        """Describe broken invariants; if `idle`, also everything still held, in flight or lost."""
        executor = self.executor
        in_flight = InFlightWork(executor.copies, executor.calls, executor.left_tasks, executor.in_flight())
        return problems(self.planner, in_flight, idle=idle)

    def open_requests(self) -> list[str]:
        """Describe the requests that were entered and not closed, with the place where each was made."""
        requests = self.planner.inventory.requests
        left = [one for one in requests if not one.closed]
        return sorted(f"one of {len(one.tokens)} tokens, made at {one.made_at or '?'}" for one in left)

    def stop(self) -> None:
        """Start nothing more after work in flight; its waiters get `ClosedError`."""
        self.storage_writer.stop()
        self.executor.stop()
        self.events.close()
