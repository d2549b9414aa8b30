"""Storage for engines with their own host memory and keys: pools of opaque pages over any backend.

A call returns only when storage no longer uses its pages, even after a deadline or a cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from asynchicache.config import open_storage
from asynchicache.errors import ClosedError, ConfigError
from asynchicache.hashing import pool_fingerprint
from asynchicache.integrations.page_memory import PageMemory
from asynchicache.integrations.page_pool import PagePool, PagePoolStatistics
from asynchicache.integrations.page_slots import PlacedSlots, StagedSlots
from asynchicache.options import Options, Positive
from asynchicache.ports import AsyncioPort, Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.chain import open_stored
from asynchicache.storage.deadlines import close
from asynchicache.storage.labels import label_maker
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import StorageBackend

logger = logging.getLogger(__name__)

_LOCAL = frozenset({"file", "memory"})
"""Backends whose calls always end. A read from a dead server cannot be cancelled: in place, it would hold the
caller's page until the network times out; through a staging slot, it costs only its deadline."""


class PageStoreConfig(Options, frozen=True, kw_only=True):
    """Storage options.

    Attributes:
        storage: name of a backend: `file`, `memory`, `redis`, `object`, `mooncake`, `hf3fs`, or one that
            an entry point adds.
        storage_options: the backend's own options.
        storage_limits: timeouts and limits of the backend, see `storage.limits.PoolLimits`.
        zero_copy: read and write aligned pages in place. None: only with `file` and `memory`, whose calls
            always end. Default: None.
        staging_bytes: staging memory of a pool whose pages are not used in place. Default: 64 MiB.
        io_threads: threads for storage. Default: 8.
    """

    storage: str
    storage_options: dict[str, Any] = {}  # noqa: RUF012  copied for each struct
    storage_limits: PoolLimits = PoolLimits()
    zero_copy: bool | None = None
    staging_bytes: Positive = 64 << 20
    io_threads: Positive = 8

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Self:
        """Check options as read from JSON or TOML.

        Raises:
            ConfigError: an option is unknown, missing, or outside its rule; the message names it.
        """
        return cls.read(options)

    @property
    def in_place(self) -> bool:
        """Whether pages are used in place where they can be."""
        return self.storage in _LOCAL if self.zero_copy is None else self.zero_copy


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What must match for processes to share pages; together with the geometry it makes the fingerprint.

    Attributes:
        engine: the engine that wrote the pages, e.g. `sglang`.
        model: name of the model.
        weight_version: identifies the weights.
        dtype: dtype of the content.
        layout: memory order of the content.
        shard: name of this rank's part of a sharded page: up to 32 of a-z, 0-9, `/` and `-`. Empty if every
            rank holds the same bytes (MLA), so that one key serves all ranks.
        salt: separates deployments that share a storage.
        settings: digest of what else the content depends on.
    """

    engine: str
    model: str
    weight_version: str
    dtype: str
    layout: str
    shard: str = ""
    salt: str = ""
    settings: str = ""

    def __post_init__(self) -> None:
        for name in ("engine", "model", "weight_version"):
            if not getattr(self, name):
                raise ConfigError(
                    f"{name} is empty; it keeps pages of one {name} from being taken for another's"
                )

    def fingerprint(self, pool: str, memory: PageMemory) -> bytes:
        """Return 32 bytes for the keys of one pool."""
        return pool_fingerprint(
            model=self.model,
            weight_version=self.weight_version,
            identity=f"{self.engine} {self.settings}".strip(),
            pool=pool,
            layout=f"{self.layout}:{self.dtype}:{memory.page_bytes}:{memory.units}x{memory.unit_bytes}",
            page_size=1,
            sharding="sharded" if self.shard else "replicated",
            salt=self.salt,
        )


class PageStore:
    """One backend with pools of an engine's pages; confined to the loop that opened it. See `open`."""

    def __init__(self, backend: StorageBackend, config: PageStoreConfig, port: Port) -> None:
        self.config = config
        self._backend = backend
        self._port = port
        self._pools: dict[str, PagePool] = {}
        self._stack = AsyncExitStack()
        self._closed = False

    @classmethod
    async def open(
        cls, config: PageStoreConfig, *, port: Port | None = None, backend: StorageBackend | None = None
    ) -> Self:
        """
        Args:
            port: clock and threads. Default: real ones, closed with the store.
            backend: an open backend to use instead of the configured one; the caller closes it.

        Raises:
            ConfigError: the backend is unknown, or its options are invalid.
            StorageError: the storage cannot be used.
        """
        async with AsyncExitStack() as stack:
            if port is None:
                port = AsyncioPort(threads=config.io_threads)
                stack.push_async_callback(port.aclose)
            if backend is None:
                backend = open_storage(config.storage, config.storage_options, port)
                closing = config.storage_limits.closing
                stack.push_async_callback(close, backend, closing, f"storage {backend.name!r}")
            store = cls(backend, config, port)
            store._stack = stack.pop_all()
        return store

    async def open_pool(
        self, name: str, memory: PageMemory, identity: PageIdentity, *, writes: bool = True
    ) -> PagePool:
        """Open a pool; also possible while others are in use.

        Args:
            name: name of the pool: a-z, 0-9 and `_`.
            writes: False if another rank writes the same pages: `put` then does nothing.

        Raises:
            ConfigError: the name or the shard has invalid characters, or the pool is open already.
            CapacityError: no memory for staging slots.
            StorageError: the storage cannot be used, or took longer than `storage_limits.opening`.
            ClosedError: the store is closed.
        """
        if self._closed:
            raise ClosedError("the page store is closed")
        if name in self._pools:
            raise ConfigError(f"pool {name!r} is open already")
        slots = self._slots(name, memory)
        try:
            binding = SlotBinding(slots, identity.fingerprint(name, memory), identity.shard)
            guard = await open_stored(self._backend, binding, self._port, self.config.storage_limits)
            guard.labelled(label_maker(binding, identity.model, identity.weight_version))
        except BaseException:
            slots.close()
            raise
        pool = PagePool(memory, slots, guard, binding, self._port, writes=writes)
        self._pools[name] = pool
        return pool

    def _slots(self, name: str, memory: PageMemory) -> PlacedSlots | StagedSlots:
        run = memory.in_place() if self.config.in_place else None
        if run is not None:
            return PlacedSlots(name, run, memory.unit_bytes)
        if self.config.in_place:
            logger.warning("pool %s: pages are staged, which costs a copy: %s", name, memory.obstacle())
        count = max(2, self.config.staging_bytes // memory.unit_bytes)
        slots = min(count, memory.pages * memory.units)
        return StagedSlots(name, memory.unit_bytes, slots, self.config.storage_limits.deadline)

    async def close_pool(self, name: str) -> None:
        """Close a pool, which then no longer uses its memory; a no-op if it is not open."""
        pool = self._pools.pop(name, None)
        if pool is not None:
            await pool.aclose()

    async def clear(self) -> int:
        """Delete all pages of the open pools, of these weights and shards; return the number of units.

        Raises:
            StorageError: the backend failed.
            ClosedError: the store is closed.
        """
        return sum([await pool.clear() for pool in self._pools.values()])

    def statistics(self) -> dict[str, PagePoolStatistics]:
        """Return the statistics of each pool."""
        return {name: pool.statistics() for name, pool in self._pools.items()}

    async def aclose(self) -> None:
        """Wait for running calls, up to a time limit, and close everything. Idempotent.

        A backend that raises, or does not close within `storage_limits.closing` seconds, is abandoned.
        """
        self._closed = True
        await asyncio.gather(*(pool.aclose() for pool in self._pools.values()))
        await self._close_backend(self.config.storage_limits.closing)

    async def _close_backend(self, timeout_s: float) -> None:
        closing = asyncio.ensure_future(self._stack.aclose())
        try:
            await asyncio.wait([closing], timeout=timeout_s)
        finally:
            closing.cancel()
        if closing.done():
            closing.result()
        else:
            logger.warning("storage %s did not close within %g s", self.config.storage, timeout_s)

    def __repr__(self) -> str:
        return f"<PageStore {self.config.storage}: {', '.join(self._pools) or 'no pools'}>"
