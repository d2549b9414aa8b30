"""An asyncio-native hierarchical cache for what hybrid language models have already computed.

The public names; each is imported when it is first used, so that `import asynchicache` pulls in nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asynchicache.cache import CacheStatistics, HybridCache
    from asynchicache.config import CacheConfig, PrefetchOptions
    from asynchicache.controller.request import Hit, Request
    from asynchicache.errors import (
        CacheError,
        CapacityError,
        ClosedError,
        ConfigError,
        DeviceError,
        InvalidTokensError,
        RequestStateError,
        StorageError,
        StorageFormatError,
        StorageLockedError,
        TransferError,
        UnsupportedModelError,
        UsageError,
    )
    from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
    from asynchicache.types import Coverage, MissReason, Outcome, PrefetchPolicy, Tier, WritePolicy

_HOMES = {
    "asynchicache.cache": ("CacheStatistics", "HybridCache"),
    "asynchicache.config": ("CacheConfig", "PrefetchOptions"),
    "asynchicache.controller.request": ("Hit", "Request"),
    "asynchicache.errors": (
        "CacheError",
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "DeviceError",
        "InvalidTokensError",
        "RequestStateError",
        "StorageError",
        "StorageFormatError",
        "StorageLockedError",
        "TransferError",
        "UnsupportedModelError",
        "UsageError",
    ),
    "asynchicache.specs": ("ModelSpec", "PoolSpec", "TensorSpec"),
    "asynchicache.types": ("Coverage", "MissReason", "Outcome", "PrefetchPolicy", "Tier", "WritePolicy"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CacheConfig",
    "CacheError",
    "CacheStatistics",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "Coverage",
    "DeviceError",
    "Hit",
    "HybridCache",
    "InvalidTokensError",
    "MissReason",
    "ModelSpec",
    "Outcome",
    "PoolSpec",
    "PrefetchOptions",
    "PrefetchPolicy",
    "Request",
    "RequestStateError",
    "StorageError",
    "StorageFormatError",
    "StorageLockedError",
    "TensorSpec",
    "Tier",
    "TransferError",
    "UnsupportedModelError",
    "UsageError",
    "WritePolicy",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'asynchicache' has no attribute {name!r}")
    return getattr(import_module(home), name)
