"""vLLM's classes, or stand-ins if vLLM is not installed. Only this module imports vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.words import (
    CacheHitSource,
    JobResult,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    Locality,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    SecondaryTierManager,
    SupportsHMA,
    TieringOffloadingSpec,
    TransferJob,
)

SUPPORTED = "0.33"
"""The minor version whose interface the tier implements; the connector serves 0.32 too."""

if not TYPE_CHECKING:
    try:
        import vllm
    except ModuleNotFoundError:
        vllm = None
    if vllm is not None:
        try:
            from vllm.distributed.kv_transfer.kv_connector.v1.base import (
                KVConnectorBase_V1,
                KVConnectorMetadata,
                KVConnectorRole,
                KVConnectorTransferResults,
                KVConnectorWorkerMetadata,
                SupportsHMA,
            )
            from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
                KVConnectorPromMetrics,
                KVConnectorStats,
            )
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
                OffloadingConnectorStats,
            )
            from vllm.v1.kv_offload.base import (
                Locality,
                LookupResult,
                Medium,
                OffloadingCounterMetadata,
                OffloadingEvent,
                OffloadingGaugeMetadata,
                OffloadingMetricMetadata,
                ReqContext,
                RequestOffloadingContext,
                ScheduleEndContext,
            )
            from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
            from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
            from vllm.v1.metrics.cache_hit_source import CacheHitSource
        except ImportError as error:
            raise ConfigError(
                f"vLLM {getattr(vllm, '__version__', '(no version)')} lacks what a plug-in extends "
                f"({error}); this release supports vLLM {SUPPORTED}: pip install 'vllm=={SUPPORTED}.*'"
            ) from error

__all__ = [
    "CacheHitSource",
    "JobResult",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingMetricMetadata",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "SupportsHMA",
    "TieringOffloadingSpec",
    "TransferJob",
]
