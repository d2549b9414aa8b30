"""What the halves of the connector tell each other in a step, and what they count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from asynchicache.integrations.vllm.connector_seam import KVConnectorMetadata, KVConnectorWorkerMetadata
from asynchicache.pools.shared import HostHandle
from asynchicache.transfer.remote import CopyOrder, CopyResult


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
