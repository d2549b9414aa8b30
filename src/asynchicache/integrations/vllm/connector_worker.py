"""The worker's half of the connector, what it is told and what it answers: it copies, and decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from asynchicache.errors import CacheError
from asynchicache.integrations.bridge import Job, JobState, LoopBridge
from asynchicache.integrations.copy_worker import CopyWorker
from asynchicache.integrations.vllm.kv_groups import KvGroups
from asynchicache.integrations.vllm.seam import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from asynchicache.pools.engine import EngineMemory
from asynchicache.pools.shared import HostHandle
from asynchicache.streams.base import Event
from asynchicache.streams.cuda import CudaDevice
from asynchicache.transfer.remote import CopyOrder, CopyResult
from asynchicache.types import Direction

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0


@dataclass(eq=False)
class StepOrders(KVConnectorMetadata):
    """From the scheduler to the workers.

    Attributes:
        host: host memory; a worker maps its part when it sees it first.
        orders: copies to begin in this step; each worker copies its part.
        loads: requests that wait for an order, by its id.
        loaded: requests whose load had nothing to copy.
        failed: requests whose load was refused; vLLM computes them.
        idle: whether the step computes nothing.
    """

    host: HostHandle
    orders: list[CopyOrder] = field(default_factory=list)
    loads: dict[int, str] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    idle: bool = False


@dataclass(eq=False)
class StepResults(KVConnectorWorkerMetadata):
    """From the workers to the scheduler: copies that have ended, by the worker's rank."""

    results: dict[int, list[CopyResult]]

    def aggregate(self, other: Self) -> Self:
        """Join the results of workers."""
        return type(self)(self.results | other.results)


class ConnectorWorker:
    """Carries out orders between the blocks of one worker and host memory.

    Args:
        idle_wait_s: longest wait for copies in a step that computed nothing.
        rank: of the worker, among those that share the model.
    """

    def __init__(self, groups: KvGroups, idle_wait_s: float, rank: int = 0) -> None:
        self._groups = groups
        self._idle_wait_s = idle_wait_s
        self._rank = rank
        self._spec = groups.spec_of(rank)
        self._pools = {
            Direction.LOAD: frozenset(pool.name for pool in self._spec.pools),
            Direction.BACKUP: groups.written_by(rank),
        }
        self._bridge = LoopBridge(name="asynchicache-vllm-worker")
        self._caches: Any = None
        self._memory: EngineMemory | None = None
        self._copier: CopyWorker | None = None
        self._waiting: dict[int, str] = {}
        self._results: list[CopyResult] = []
        self._ended = KVConnectorTransferResults()

    def register(self, caches: Any) -> None:
        """Take the blocks that orders name from now on.

        Raises:
            ConfigError: a layer's memory is not what its group says.
        """
        self.unregister()
        self._caches = caches
        self._memory = self._groups.memory(caches, self._rank)

    def unregister(self) -> None:
        """Let go of the blocks, once copies in flight have ended."""
        if self._copier is not None:
            self._bridge.drain()
            self._collect()
            self._bridge.call(self._copier.aclose())
        self._memory = self._copier = None

    def restore(self) -> None:
        """Take the blocks of before again, at their addresses of now."""
        self.register(self._caches)

    def start_loads(self, step: StepOrders) -> None:
        """Begin copies to blocks."""
        self._waiting.update(step.loads)
        self._ended.finished_recving |= step.loaded | step.failed
        self._ended.failed_recving |= step.failed
        self._start(step.host, [order for order in step.orders if order.direction is Direction.LOAD])

    def start_backups(self, step: StepOrders) -> None:
        """Begin copies from blocks, which the step's forward has filled."""
        jobs = self._start(step.host, [order for order in step.orders if order.direction is Direction.BACKUP])
        if self._memory is not None and self._memory.device == "cpu":
            # Copies would compete with the next forward; so the scheduler gets its blocks back in this step.
            for job in jobs:
                job.wait()

    def _start(self, host: HostHandle, orders: Sequence[CopyOrder]) -> list[Job[list[CopyResult]]]:
        if not orders:
            return []
        try:
            copier = self._opened(host)
        except (CacheError, OSError) as error:
            logger.exception("host memory cannot be used: every load and backup fails")
            self._settle([CopyResult(order.id, str(error)) for order in orders])
            return []
        mine = [_part(order, self._pools[order.direction]) for order in orders]
        running = copier.run(mine, after=_forward(copier, self._memory))
        return [self._bridge.submit(running, tag=[order.id for order in orders])]

    def _opened(self, host: HostHandle) -> CopyWorker:
        """Map host memory; the scheduler's half opened it after this worker had registered its blocks."""
        if self._copier is None:
            assert self._memory is not None, "vLLM registers its caches before the first step"
            self._copier = self._bridge.call(self._open(self._memory, host))
        return self._copier

    async def _open(self, memory: EngineMemory, host: HostHandle) -> CopyWorker:
        return await CopyWorker.open(self._spec, memory, host)

    def ended(self, *, idle: bool) -> KVConnectorTransferResults:
        """Return requests whose loads have ended since the last call."""
        if idle and self._waiting and self._idle_wait_s:
            self._bridge.wait_finished(self._idle_wait_s)
        self._collect()
        ended, self._ended = self._ended, KVConnectorTransferResults()
        return ended

    def results(self) -> StepResults | None:
        """Return copies that have ended since the last call."""
        self._collect()
        results, self._results = self._results, []
        return StepResults({self._rank: results}) if results else None

    def _collect(self) -> None:
        for job in self._bridge.finished():
            self._settle(_results_of(job))

    def _settle(self, results: Sequence[CopyResult]) -> None:
        self._results += results
        for result in results:
            request = self._waiting.pop(result.id, None)
            if request is not None:
                self._ended.finished_recving.add(request)
                if result.error:
                    self._ended.failed_recving.add(request)

    def close(self) -> None:
        """Wait for copies, up to a time limit, and unmap host memory. Idempotent."""
        if self._bridge.closed:
            return
        self._bridge.drain(_CLOSE_SECONDS)
        if self._copier is not None:
            self._bridge.call(self._copier.aclose())
        self._bridge.close(_CLOSE_SECONDS)


def _part(order: CopyOrder, pools: Collection[str]) -> CopyOrder:
    """What one worker does of an order; it may be nothing, which ends at once."""
    mine = [transfer for transfer in order.transfers if transfer.pool in pools]
    return CopyOrder(order.id, order.direction, tuple(mine))


def _forward(copier: CopyWorker, memory: EngineMemory | None) -> Event | None:
    """The end of what vLLM has enqueued on a GPU: it may still read blocks that loads write to."""
    if not isinstance(copier.device, CudaDevice) or memory is None:
        return None
    return copier.mark(copier.device.wrap(torch.cuda.current_stream(memory.device)))


def _results_of(job: Job[list[CopyResult]]) -> list[CopyResult]:
    """Results of a job; all of its orders failed if the job did."""
    if job.state is JobState.DONE:
        return job.result()
    ids: list[int] = job.tag  # type: ignore[assignment]  # set by `_start`
    return [CopyResult(order, f"the copy did not run: {job.exception()}") for order in ids]
