"""vLLM's words for its secondary tiers, as of 0.33, for where vLLM is not: tests, replays, type checkers.

Same names, fields and values as in `vllm.v1.kv_offload`; `tests/data/seams` records them from the wheel.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


class LookupResult(Enum):
    """What a tier says of one chunk."""

    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class OffloadPolicy(Enum):
    """Which chunks of a request a tier is offered: new ones, or all."""

    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"


class Medium(Enum):
    """What a tier stores on."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    """Whether a tier is beside the engine."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass(eq=True)
class RequestOffloadingContext:
    """A tier's answer to a new request."""

    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL


@dataclass(eq=True)
class ReqContext:
    """One request, as tiers see it."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    _state: dict[type, Any] = field(default_factory=dict, repr=False, init=False)

    def set_state(self, val: Any) -> None:
        """Keep a value of the tier's, one of each type."""
        self._state[type(val)] = val

    def get_state(self, cls: type[T]) -> T | None:
        return self._state.get(cls)


class ScheduleEndContext(NamedTuple):
    """What a scheduler step began and preempted."""

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
    """What became of a job; `successful_keys` of a load that failed in part."""

    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


@dataclass(eq=True)
class OffloadingEvent:
    """Chunks that a tier has now, or has no longer."""

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
    """One that only grows."""


@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    """One that goes up and down."""

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
    """What vLLM's base class does for a tier."""

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
    """What vLLM makes of its configuration, once in each worker and once in the scheduler."""

    replicated_layout: bool = False
    cpu_page_size_per_worker: int = 0

    def __init__(self, config: Any) -> None:
        self.config = config

    def get_worker(self, kv_caches: Any) -> Any:
        """A worker's half: what copies its blocks to rows and back."""
        return None

    def get_manager(self) -> Any:
        """The scheduler's half, with its tiers."""
        return None
