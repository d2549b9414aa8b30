"""The Mooncake backend: one cluster that holds the pages of many pools."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.mooncake.engine import LABEL, MooncakeEngine
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.large_calls import LARGE_BYTES
from asynchicache.backends.mooncake.options import MooncakeOptions
from asynchicache.backends.mooncake.slots import RegisteredMemory, RegisteredSlots
from asynchicache.backends.mooncake.store import MooncakeClient, MooncakeStore
from asynchicache.hashing import DIGEST_BYTES
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding

T = TypeVar("T")


class MooncakeBackend:
    """The pools of one cluster. Opening the first pool joins the cluster.

    Calls run in dedicated threads because they block for up to 30 s when a node or the master dies.

    Args:
        options: the cluster, and how to use it.
        store: an initialised `MooncakeDistributedStore`, such as the serving engine's own. The caller must
            close it, after this backend. Default: the backend creates one.
    """

    name = "mooncake"

    def __init__(self, options: MooncakeOptions, store: MooncakeStore | None = None) -> None:
        self._options = options
        self._given = store
        self._threads = ThreadPoolExecutor(options.threads, "asynchicache-mooncake")
        self._lookups = ThreadPoolExecutor(options.threads, "asynchicache-mooncake-lookups")
        self._joining: asyncio.Task[MooncakeClient] | None = None
        self._engines: EngineRegistry[MooncakeEngine] = EngineRegistry(
            f"mooncake backend of {options.master}"
        )
        self._fingerprints: dict[str, bytes] = {}  # of the pools that were opened last
        self._memory: RegisteredMemory | None = None

    async def open_pool(self, binding: PoolBinding) -> MooncakeEngine:
        """Join the cluster if necessary and register the pool's memory.

        Raises:
            StorageError: the pool is open with another binding, Mooncake is not installed, its master does
                not answer, or Mooncake refuses the options or the memory.
            ClosedError: the backend is closed.
        """
        return await self._engines.open(binding, partial(self._open, binding))

    async def clear(self) -> int:
        """Delete all pages of the namespace, for all pools and models. Other keys are kept.

        Returns:
            The number of deleted pages.

        Raises:
            StorageError: the cluster cannot be joined, or does not answer.
            ClosedError: the backend is closed.
        """
        client = await self.client()
        count = await self._run(
            partial(client.clear, f"{self._options.namespace}:*.{'?' * 2 * DIGEST_BYTES}")
        )
        await self._run(partial(client.clear, f"{self._options.namespace}:*.{LABEL}"))
        return count

    async def client(self) -> MooncakeClient:
        """The client, which has joined the cluster.

        Raises:
            StorageError: as `open_pool`.
            ClosedError: as `open_pool`.
        """
        self._engines.check_open()
        return await self._join()

    async def aclose(self) -> None:
        await self._engines.aclose()
        await self._leave()
        self._threads.shutdown(wait=False)
        self._lookups.shutdown(wait=False)

    async def _open(self, binding: PoolBinding) -> MooncakeEngine:
        client = await self._join()
        if self._memory is None:
            self._memory = RegisteredMemory(client.store)
        slots = await self._run(partial(RegisteredSlots, self._memory, binding))
        self._fingerprints[binding.pool] = binding.fingerprint
        options = self._options
        return MooncakeEngine(
            binding,
            client,
            slots,
            self._threads,
            self._lookups,
            concurrency=options.threads,
            namespace=options.namespace,
            fingerprints=self._fingerprints,
        )

    async def _join(self) -> MooncakeClient:
        """Join the cluster once. If joining fails, the next pool tries again."""
        if self._joining is None or (self._joining.done() and self._joining.exception() is not None):
            self._joining = asyncio.create_task(self._client())
        return await asyncio.shield(self._joining)

    async def _client(self) -> MooncakeClient:
        options = self._options
        store = self._given if self._given is not None else await self._run(partial(join, options))
        large = LARGE_BYTES if options.protocol == "tcp" else math.inf
        address, pin = options.master_address, options.soft_pin_seconds
        return MooncakeClient(store, address, options.replicas, large, pin)

    async def _leave(self) -> None:
        """Close the store unless the caller owns it. No call may be running."""
        joined, self._joining = self._joining, None
        if joined is not None:
            await asyncio.wait([joined])  # `clear` may still be joining
        if joined is not None and joined.exception() is None and self._given is None:
            await self._run(joined.result().close)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def __repr__(self) -> str:
        return f"<MooncakeBackend {self._options.master}: {len(self._engines)} pools>"


def open_backend(options: Mapping[str, object], port: Port) -> MooncakeBackend:
    """Create the Mooncake backend. Opening a pool joins the cluster and reports whether it is reachable.

    Args:
        port: unused; every backend receives one.

    Raises:
        ConfigError: an option is missing, unknown, or breaks its rule.
    """
    return MooncakeBackend(MooncakeOptions.of(options))
