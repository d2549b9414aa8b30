"""What a cache and a rank open alike: the device, the sizes of free memory, and storage."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asynchicache.config import CacheConfig, open_backend
from asynchicache.controller.storage_pools import AttachedStorage
from asynchicache.errors import ConfigError
from asynchicache.hashing import pool_fingerprint
from asynchicache.layouts import SlotLayout
from asynchicache.pools.host import HostPool
from asynchicache.pools.memory import process_memory
from asynchicache.pools.sizing import FreeMemory
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.divided import STAGED_PAGES, DividedPool, DividedStorage, StoredPart
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import InlineDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice


def open_device(config: CacheConfig) -> Device:
    """Open the device that a configuration names.

    Raises:
        ConfigError: the kind of device is unknown.
        DeviceError: the device does not exist.
    """
    try:
        kind = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigError(f"device {config.device!r} must be cpu, cuda or cuda:N") from error
    if kind.type == "cpu" and not kind.index:
        return EmulatedDevice(InlineDriver() if config.inline else ThreadDriver())
    if kind.type == "cuda":
        return CudaDevice(kind.index or 0)
    raise ConfigError(f"device {config.device!r} must be cpu, cuda or cuda:N")


def free_memory(device: Device) -> FreeMemory:
    """Free memory of a device and of its host."""
    host = process_memory().available
    if device.name == "cpu":
        return FreeMemory(host, host, shared=True)
    return FreeMemory(torch.cuda.mem_get_info(device.name)[0], host, shared=False)


async def attach_storage(
    spec: ModelSpec,
    config: CacheConfig,
    hosts: Mapping[str, HostPool],
    storage: StorageBackend | None,
    port: Port,
) -> AttachedStorage:
    """Open the configured storage, or use the given one, which the caller closes; with all pools that have
    host slots."""
    config.check_storage()
    bindings = [
        SlotBinding(host, *_identity(spec, name, config), depends_on=spec.depends_on(name))
        for name, host in hosts.items()
        if host.slots
    ]
    others = [pool.name for pool in spec.pools if not pool.writes or (pool.replicated and config.rank)]
    owned = storage is None
    if storage is None:  # last, so that no earlier failure leaves it open
        storage = open_backend(config.storage or "", config.storage_options, port)
    if config.store_parts:
        storage = DividedStorage(storage, _divided(spec, config, hosts), port)
    return await AttachedStorage.open(
        storage, bindings, port, config.storage_limits, owned=owned, read_only=others
    )


def rank_parts(spec: ModelSpec, config: CacheConfig) -> dict[str, tuple[str, bool]]:
    """By pool that is not the same on all ranks: the name of the rank's part, and whether it writes it.

    Ranks with the same name have the same keys, so they must have the same bytes.

    Raises:
        ConfigError: the spec is that of a rank, and the options name a rank too.
    """
    found = {}
    for pool in spec.pools:
        if not pool.replicated:
            fingerprint, shard = _identity(spec, pool.name, config)
            found[pool.name] = f"{fingerprint.hex()[:16]} {shard}".strip(), pool.writes
    return found


def _divided(spec: ModelSpec, config: CacheConfig, hosts: Mapping[str, HostPool]) -> dict[str, DividedPool]:
    """By pool that tensor-parallel ranks divide, the parts that its pages are stored as.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    if config.ranks > 1:
        raise ConfigError("store_parts: give each rank its pools (ModelSpec.shard), not the option ranks")
    found: dict[str, dict[str, StoredPart]] = {}
    for part in spec.stored_as(config.store_parts):
        for name, rows in part.rows.items():
            pool = part.spec.pool(name)
            if hosts[name].slots and pool.shard != spec.pool(name).shard:
                staging = HostPool(pool, spec.page_size, STAGED_PAGES, pin=False, layout=config.host_layout)
                keys = _identity(part.spec, name, config)
                binding = SlotBinding(staging, *keys, depends_on=spec.depends_on(name))
                found.setdefault(name, {})[pool.shard] = StoredPart(binding, staging, rows)
    return {name: DividedPool(hosts[name], list(parts.values())) for name, parts in found.items()}


def _identity(spec: ModelSpec, name: str, config: CacheConfig) -> tuple[bytes, str]:
    """Fingerprint and shard of a pool's pages; a replicated pool has one copy for all ranks.

    Raises:
        ConfigError: the spec is that of a rank, and the options name a rank too.
    """
    pool = spec.pool(name)
    if config.ranks > 1 and (pool.shard or not pool.writes):
        raise ConfigError(
            f"rank {config.rank} of {config.ranks}: pool {name!r} is {pool.shard or 'a copy'} of the model "
            "already (ModelSpec.shard), so the options rank and ranks say nothing more: leave them out"
        )
    shard = "" if pool.replicated or config.ranks == 1 else f"{config.rank}/{config.ranks}"
    sharding = "replicated" if pool.replicated else "shards" if pool.shard else f"{config.ranks} ranks"
    fingerprint = pool_fingerprint(
        model=spec.model,
        weight_version=config.weight_version or "",
        identity=spec.identity,
        pool=name,
        layout=SlotLayout.of(pool, spec.page_size, config.host_layout).signature(),
        page_size=spec.page_size,
        sharding=sharding,
        salt=config.salt,
    )
    return fingerprint, pool.shard or shard
