"""What a server says about itself when it starts: model, pools, bytes by tier, storage."""

from __future__ import annotations

from collections.abc import Iterator

from asynchicache.integrations.serve.api import Api
from asynchicache.pools.sizing import pool_bytes
from asynchicache.types import Tier


def describe(api: Api) -> Iterator[str]:
    """One line each for the model, the pools, the memory of both tiers, and the storage."""
    served, cache = api.served, api.model.cache
    spec = cache.spec
    yield (
        f"serving {served.name!r}: {spec.model}, {spec.layers} layers, on {cache.device.name}; up to "
        f"{served.context:,} tokens a request, {api.model.capacity_tokens:,} in all"
    )
    statistics = cache.statistics()
    for name, (device, host) in statistics.occupancy.items():
        kind, on_host = "pages" if spec.pool(name).per_token else "states", host.capacity
        up_to = "up to " if name in statistics.host_bytes else ""  # all pools share one memory there
        yield (
            f"pool {name!r}: {device.capacity:,} {kind} on the device "
            f"({_size(pool_bytes(spec, name, device.capacity))}), {up_to}{on_host:,} on the host "
            f"({up_to}{_size(pool_bytes(spec, name, on_host, host=True))})"
        )
    sizes = [_size(statistics.memory_bytes[tier]) for tier in (Tier.DEVICE, Tier.HOST)]
    yield f"memory: {sizes[0]} on the device, {sizes[1]} on the host; pages of {spec.page_size} tokens"
    yield f"storage: {_storage(api)}"


def _storage(api: Api) -> str:
    state = api.storage_state()
    if state == "none":
        return "none: what does not fit in memory is lost, and all of it at the end; see --storage-path"
    words = {
        "ok": "open",
        "full": "open, and its medium is full",
        "unavailable": "unavailable, so requests go on without it",
    }
    return f"{api.storage.name}, {words[state]}"


def _size(nbytes: int) -> str:
    """Bytes in a unit that leaves one to four digits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
