"""What a server knows about its cache, as one JSON object: for `asynchicache top` and the dashboard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from asynchicache.cache import CacheStatistics
from asynchicache.histograms import Distribution
from asynchicache.integrations.serve.api import Api
from asynchicache.pools.sizing import pool_bytes
from asynchicache.types import MissReason, Tier

PAGE = Path(__file__).with_name("dashboard.html")
"""The page at `/dashboard`: one file, without a build step."""


def picture(api: Api, uptime: float) -> dict[str, Any]:
    """Describe the cache now. Names no prompt and no token.

    Args:
        uptime: seconds since it started.
    """
    cache, counts = api.model.cache, api.counts
    statistics = cache.statistics()
    served = statistics.served
    size = cache.spec.page_size
    return {
        "model": api.served.name,
        "uptime_s": uptime,
        "requests": {
            "running": api.model.running,
            "waiting": api.model.waiting,
            "answered": counts.answered,
            "cancelled": counts.cancelled,
            "refused": sum(counts.refused.values()),
        },
        "first_token_ms": _latency(api.first_token.snapshot()),
        "tokens": {
            "prompt": served.prompt_tokens,
            "cached": sum(served.hit_tokens.values()),
            "by_tier": {tier.name.lower(): served.hit_tokens[tier] for tier in Tier},
        },
        "reasons": {reason.value: served.reasons[reason] for reason in MissReason if served.reasons[reason]},
        "memory_bytes": {tier.name.lower(): nbytes for tier, nbytes in statistics.memory_bytes.items()},
        "pools": _pools(api, statistics),
        "storage": {
            "name": api.storage.name,
            "state": api.storage_state(),
            "writing_bytes": statistics.storing_bytes,
            "pools": {
                name: {
                    "breaker": pool.breaker.value,
                    "get_ms": _latency(pool.get.latencies),
                    "put_ms": _latency(pool.put.latencies),
                    "read_bytes": pool.get.bytes,
                    "written_bytes": pool.put.bytes,
                }
                for name, pool in statistics.storage.items()
            },
        },
        "prefixes": [
            {
                "parent": one.parent,
                "digest": one.digest,
                "tokens": one.pages * size,
                "end": one.end * size,
                "continuations": one.below,
                "users": one.users,
                "tiers": [
                    name for name, there in (("device", one.on_device), ("host", one.on_host)) if there
                ],
            }
            for one in cache.prefixes()
        ],
    }


def _pools(api: Api, statistics: CacheStatistics) -> dict[str, Any]:
    spec, pools = api.model.spec, {}
    for name, tiers in statistics.occupancy.items():
        pools[name] = {
            tier: {
                "held": slots.held,
                "capacity": slots.capacity,
                "evicted": statistics.evicted[name][number],
                "bytes": pool_bytes(spec, name, slots.capacity, host=tier == "host"),
            }
            for number, (tier, slots) in enumerate(zip(("device", "host"), tiers, strict=True))
        }
        if name in statistics.host_bytes:  # of one memory for all: what it has now, and what it could have
            host = pools[name]["host"]
            host["most_bytes"], host["bytes"] = host["bytes"], statistics.host_bytes[name]
    return pools


def _latency(seen: Distribution) -> dict[str, float | None]:
    """Bounds in milliseconds; None for none: nothing was seen, or it took longer than the last bucket."""
    quantiles = {"p50": seen.quantile(0.5), "p90": seen.quantile(0.9)}
    return {
        name: None if not seen.count or math.isinf(seconds) else seconds * 1000
        for name, seconds in quantiles.items()
    }
