"""An asyncio-native hierarchical cache for what hybrid language models have already computed.

The public names; each is imported when it is first used, so that `import asynchicache` pulls in nothing.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynchicache.cache import CacheStatistics, HybridCache
    from asynchicache.config import CacheConfig, PrefetchOptions
    from asynchicache.controller.request import Hit, Request
    from asynchicache.errors import (
        AuditError,
        BusyError,
        CacheError,
        CapacityError,
        ClosedError,
        ConfigError,
        DeviceError,
        InternalError,
        InvalidTokensError,
        LeaseWarning,
        RankError,
        RankLostError,
        RankProtocolError,
        RequestStateError,
        StorageError,
        StorageFormatError,
        StorageLockedError,
        TransferError,
        UnknownPoolError,
        UnsupportedModelError,
        UsageError,
        WireFormatError,
    )
    from asynchicache.integrations.transformers.asking import spec_from_model as spec_from_model
    from asynchicache.integrations.transformers.bridge import CacheBridge as CacheBridge
    from asynchicache.integrations.transformers.generate import CachedGenerate as CachedGenerate
    from asynchicache.integrations.transformers.generate import prefix_cached as prefix_cached
    from asynchicache.integrations.transformers.generation import Generation as Generation
    from asynchicache.integrations.transformers.model import PrefixCachedModel as PrefixCachedModel
    from asynchicache.integrations.transformers.sampling import Sampling as Sampling
    from asynchicache.layouts import HostLayout
    from asynchicache.planner.hints import CacheHint
    from asynchicache.pools.engine import EngineMemory, EnginePages
    from asynchicache.ranks.joining import RankGroup
    from asynchicache.ranks.options import RankLimits
    from asynchicache.ranks.worker import RankWorker
    from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
    from asynchicache.storage.limits import PoolLimits
    from asynchicache.transfer.ticket import Ticket
    from asynchicache.types import (
        Coverage,
        MissReason,
        Outcome,
        PrefetchPolicy,
        Tier,
        WritePolicy,
    )

_HOMES = {
    "asynchicache.cache": ("CacheStatistics", "HybridCache"),
    "asynchicache.config": ("CacheConfig", "PrefetchOptions"),
    "asynchicache.controller.request": ("Hit", "Request"),
    "asynchicache.errors": (
        "AuditError",
        "BusyError",
        "CacheError",
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "DeviceError",
        "InternalError",
        "InvalidTokensError",
        "LeaseWarning",
        "RankError",
        "RankLostError",
        "RankProtocolError",
        "RequestStateError",
        "StorageError",
        "StorageFormatError",
        "StorageLockedError",
        "TransferError",
        "UnknownPoolError",
        "UnsupportedModelError",
        "UsageError",
        "WireFormatError",
    ),
    "asynchicache.layouts": ("HostLayout",),
    "asynchicache.planner.hints": ("CacheHint",),
    "asynchicache.pools.engine": ("EngineMemory", "EnginePages"),
    "asynchicache.ranks.joining": ("RankGroup",),
    "asynchicache.ranks.options": ("RankLimits",),
    "asynchicache.ranks.worker": ("RankWorker",),
    "asynchicache.specs": ("ModelSpec", "PoolSpec", "TensorSpec"),
    "asynchicache.storage.limits": ("PoolLimits",),
    "asynchicache.transfer.ticket": ("Ticket",),
    "asynchicache.types": ("Coverage", "MissReason", "Outcome", "PrefetchPolicy", "Tier", "WritePolicy"),
}
_NEED_TRANSFORMERS = {
    "asynchicache.integrations.transformers.asking": ("spec_from_model",),
    "asynchicache.integrations.transformers.bridge": ("CacheBridge",),
    "asynchicache.integrations.transformers.generate": ("CachedGenerate", "prefix_cached"),
    "asynchicache.integrations.transformers.generation": ("Generation",),
    "asynchicache.integrations.transformers.model": ("PrefixCachedModel",),
    "asynchicache.integrations.transformers.sampling": ("Sampling",),
}
"""Not in `__all__`: a star import must not need the extra `transformers`."""

_HOME_OF = {name: home for home, names in (_HOMES | _NEED_TRANSFORMERS).items() for name in names}

__all__ = [
    "AuditError",
    "BusyError",
    "CacheConfig",
    "CacheError",
    "CacheHint",
    "CacheStatistics",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "Coverage",
    "DeviceError",
    "EngineMemory",
    "EnginePages",
    "Hit",
    "HostLayout",
    "HybridCache",
    "InternalError",
    "InvalidTokensError",
    "LeaseWarning",
    "MissReason",
    "ModelSpec",
    "Outcome",
    "PoolLimits",
    "PoolSpec",
    "PrefetchOptions",
    "PrefetchPolicy",
    "RankError",
    "RankGroup",
    "RankLimits",
    "RankLostError",
    "RankProtocolError",
    "RankWorker",
    "Request",
    "RequestStateError",
    "StorageError",
    "StorageFormatError",
    "StorageLockedError",
    "TensorSpec",
    "Ticket",
    "Tier",
    "TransferError",
    "UnknownPoolError",
    "UnsupportedModelError",
    "UsageError",
    "WireFormatError",
    "WritePolicy",
]


def __dir__() -> list[str]:
    names = {name for names in _NEED_TRANSFORMERS.values() for name in names}
    return sorted({*globals(), *__all__, *(names if find_spec("transformers") else ())})


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'asynchicache' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if home in _NEED_TRANSFORMERS:
            message = f"{name} needs {error.name}: pip install 'asynchicache[transformers]'"
            raise ModuleNotFoundError(message, name=error.name) from error
        raise
