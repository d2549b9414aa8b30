"""Stand-ins for what vLLM 0.32 and 0.33 let a connector and a secondary tier extend, for use without vLLM.

Tests, replays and type checkers use them. Names, fields and values are those of
`vllm.distributed.kv_transfer.kv_connector.v1` and `vllm.v1.kv_offload`; `tests/data/seams` records them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt


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


T = TypeVar("T")


class LookupResult(Enum):
    """A tier's answer for one chunk."""

    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class OffloadPolicy(Enum):
    """Which chunks of a request vLLM offers to a tier: new ones, or all."""

    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


class Medium(Enum):
    """The medium that a tier stores on."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    """Whether a tier is on the engine's machine."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass(eq=True)
class RequestOffloadingContext:
    """A tier's answer to a new request."""

    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass(eq=True)
class ReqContext:
    """A request, as passed to tiers."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    _state: dict[type, Any] = field(default_factory=dict, repr=False, init=False)

    def set_state(self, val: Any) -> None:
        """Store a value for the tier; one per type."""
        self._state[type(val)] = val

    def get_state(self, cls: type[T]) -> T | None:
        return self._state.get(cls)


class ScheduleEndContext(NamedTuple):
    """Requests that a scheduler step started and preempted."""

    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]


@dataclass(eq=True)
class TransferJob:
    """Chunks to move between a tier and rows of the primary tier."""

    job_id: int
    keys: Collection[bytes]
    chunk_ids: npt.NDArray[np.int32]
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass(eq=True)
class JobResult:
    """The result of a job; `successful_keys` is set if a load failed in part."""

    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass(eq=True)
class OffloadingEvent:
    """Chunks that a tier added or removed."""

    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    """A metric that a tier declares."""

    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata):
    """A counter."""


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    """A gauge."""

    multiprocess_mode: str = "mostrecent"


class OffloadingConnectorStats:
    """Observations since the last call, by metric and label values."""

    def __init__(self) -> None:
        self.data: dict[str, dict[str, Any]] = {"types": {}, "data": {}}

    def is_empty(self) -> bool:
        return not self.data["data"]

    def increase_counter(
        self,
        counter_name: str,
        counter_increase_value: float = 1,
        labelvalues: tuple[str, ...] = (),
    ) -> None:
        self.data["types"][counter_name] = "counter"
        values = self.data["data"].setdefault(counter_name, {})
        values[labelvalues] = values.get(labelvalues, 0) + counter_increase_value

    def set_gauge(self, gauge_name: str, gauge_value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.data["types"][gauge_name] = "gauge"
        self.data["data"].setdefault(gauge_name, {})[labelvalues] = gauge_value


class SecondaryTierManager:
    """The part of vLLM's base class that the tier uses."""

    medium: ClassVar[Medium | None] = None

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        self.tier_type = tier_type
        self.locality: Locality | None = None
        self.bp_detector = backpressure_detector

    def take_events(self) -> Iterable[OffloadingEvent]:
        return ()


class TieringOffloadingSpec:
    """vLLM's offloading spec; vLLM creates one in each worker and one in the scheduler."""

    replicated_layout: bool = False
    cpu_page_size_per_worker: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config

    def get_worker(self, kv_caches: Any) -> Any:
        """Return the worker side, which copies blocks to rows and back."""
        return None

    def get_manager(self) -> Any:
        """Return the scheduler side, with its tiers."""
        return None
