"""What a server says about itself when it starts: model, pools, bytes by tier, storage."""

from __future__ import annotations

from collections.abc import Iterator

from asynchicache.integrations.serve.api import Api
from asynchicache.pools.sizing import slot_cost
from asynchicache.specs import ModelSpec


def describe(api: Api) -> Iterator[str]:
    """One line each for the model, the pools, the memory of both tiers, and the storage."""
    served, cache = api.served, api.model.cache
    spec = cache.spec
    yield (
        f"serving {served.name!r}: {spec.model}, {spec.layers} layers, on {cache.device.name}; up to "
        f"{served.context:,} tokens a request, {api.model.capacity_tokens:,} in all"
    )
    slots = {
        name: (device.capacity, host.capacity)
        for name, (device, host) in cache.statistics().occupancy.items()
    }
    for name, (device, host) in slots.items():
        kind = "pages" if spec.pool(name).per_token else "states"
        yield (
            f"pool {name!r}: {device:,} {kind} on the device ({_size(pool_bytes(spec, name, device))}), "
            f"{host:,} on the host ({_size(pool_bytes(spec, name, host, host=True))})"
        )
    on_device = sum(pool_bytes(spec, name, device) for name, (device, _) in slots.items())
    on_host = sum(pool_bytes(spec, name, host, host=True) for name, (_, host) in slots.items())
    sizes = f"{_size(on_device)} on the device, {_size(on_host)} on the host"
    yield f"memory: {sizes}; pages of {spec.page_size} tokens"
    yield f"storage: {_storage(api)}"


def _storage(api: Api) -> str:
    state = api.storage_state()
    if state == "none":
        return "none: what does not fit in memory is lost, and all of it at the end; see --storage-path"
    return f"{api.storage}, {'open' if state == 'ok' else 'unavailable, so requests go on without it'}"


def pool_bytes(spec: ModelSpec, pool: str, slots: int, *, host: bool = False) -> int:
    """Bytes of a pool and of those that share its slots."""
    sharing = [one for one in spec.pools if (one.slots_of or one.name) == pool]
    return sum(slot_cost(one, spec.page_size, host=host) for one in sharing) * slots


def _size(nbytes: int) -> str:
    """Bytes in a unit that leaves one to four digits."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
