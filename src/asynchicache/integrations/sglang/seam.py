"""SGLang's classes for storage backends, or stand-ins if SGLang is not installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from asynchicache.errors import ConfigError

SUPPORTED = "0.5.23"
"""The supported release; tests compare the stand-ins with signatures recorded from it."""


class StandInStorage:
    """`HiCacheStorage` without SGLang: only what subclasses need."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def on_host_pools_registered(self) -> None:
        """Called after all initial pools have been registered."""


@dataclass(eq=True)
class StandInTransferResult:
    """`PoolTransferResult` without SGLang.

    Attributes:
        kv_hit_pages: the longest prefix that every pool can restore.
        extra_pool_hit_pages: the longest prefix that each pool can restore, by pool name.
        restorable_prefix_pages: all lengths that every pool can restore, ascending.
    """

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass(eq=True)
class StandInMetrics:
    """`StorageMetrics` without SGLang: pages and GB/s of each call since the last report."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


def load_seam() -> tuple[Any, Any, Any]:
    """Return `HiCacheStorage`, `PoolTransferResult` and `StorageMetrics`.

    Raises:
        ConfigError: the installed SGLang has a different interface.
    """
    if find_spec("sglang") is None:
        return StandInStorage, StandInTransferResult, StandInMetrics
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
        from sglang.srt.observability.metrics_collector import StorageMetrics
    except ImportError as error:
        raise ConfigError(
            f"the SGLang that is installed cannot use this backend: {error}; "
            f"install sglang=={SUPPORTED}, which it is made for"
        ) from error
    if "restorable_prefix_pages" not in PoolTransferResult.__dataclass_fields__:
        raise ConfigError(
            "the SGLang that is installed takes one hit length for all pools, which loses states of hybrid "
            f"models; install sglang=={SUPPORTED}"
        )
    return HiCacheStorage, PoolTransferResult, StorageMetrics


HiCacheStorage, PoolTransferResult, StorageMetrics = load_seam()
