"""Stand-ins for what a connector of vLLM 0.32 and 0.33 extends, for use without vLLM: tests, type checkers.

Names and fields are those of `vllm.distributed.kv_transfer.kv_connector.v1`; `tests/data/seams` records them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any


class KVConnectorRole(Enum):
    """Which half of a connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the scheduler's half tells the workers' in one step."""


class KVConnectorWorkerMetadata:
    """What a worker's half answers."""


class SupportsHMA:
    """Marks a connector that knows several KV cache groups."""


class KVConnectorBase_V1:  # noqa: N801 - vLLM's name
    """The base of connectors."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._role = role
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: KVConnectorMetadata | None = None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata


@dataclass(eq=False)
class KVConnectorTransferResults:
    """Requests whose transfers have ended."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass(eq=False)
class KVConnectorStats:
    """Statistics on their way from the engine to the server's metrics."""

    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    """The server's metrics of a connector."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues


class CacheHitSource(StrEnum):
    """Where cached tokens came from."""

    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"
