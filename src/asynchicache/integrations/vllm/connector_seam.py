"""vLLM's connector classes, or stand-ins if vLLM is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.words import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

SUPPORTED_BY_CONNECTOR = "0.32 and 0.33"

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
            from vllm.v1.metrics.cache_hit_source import CacheHitSource
        except ImportError as error:
            raise ConfigError(
                f"vLLM {getattr(vllm, '__version__', '(no version)')} lacks what the connector extends "
                f"({error}); this release supports vLLM {SUPPORTED_BY_CONNECTOR}"
            ) from error

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]
