"""What the redis engine is measured against: redis-py with its parser in C, hiredis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asynchicache.bench.storage.limits import Limit, Peer, Setup
from asynchicache.errors import ConfigError

_CONNECTIONS = 4  # as many as the engine has by default


class RedisPyLimit:
    """One SET or GET a page, over as many connections as the engine has; what arrives is copied to its place.

    All pages of a batch are asked for at once, and the batches in flight are as many as the engine's. Both
    sides put pages under new names: to overwrite a value spares the server fresh memory. Both forget a
    round's pages after it, and the server's threads are done with that before anything is timed.

    Args:
        setup: the pages; the name of its folder is the namespace that engine and limit use.
        client: a `redis.asyncio.Redis`.
    """

    def __init__(self, setup: Setup, client: Any) -> None:
        self._setup = setup
        self._client = client
        self._namespace = setup.folder.name
        self._turns = [0] * setup.pages

    async def put(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._turns[index] += 1
        await asyncio.gather(*map(self._put, indices))

    async def get(self, indices: Sequence[int]) -> None:
        await asyncio.gather(*map(self._get, indices))

    async def clear(self) -> None:
        await self._client.unlink(*map(self._name, range(self._setup.pages)))
        while (await self._client.info("memory"))["lazyfree_pending_objects"]:  # noqa: ASYNC110 - it must be asked
            await asyncio.sleep(0)

    async def server_seconds(self) -> float | None:
        """Of the thread that serves all clients, in Redis from 6.2 on."""
        used = await self._client.info("cpu")
        parts = [used.get(f"used_cpu_{kind}_main_thread") for kind in ("user", "sys")]
        return None if None in parts else sum(parts)

    async def aclose(self) -> None:
        async for name in self._client.scan_iter(f"{self._namespace}:*", count=1000):
            await self._client.unlink(name)
        await self._client.aclose()

    async def _put(self, index: int) -> None:
        await self._client.set(self._name(index), self._setup.memory(index))

    async def _get(self, index: int) -> None:
        self._setup.memory(index)[:] = await self._client.get(self._name(index))

    def _name(self, index: int) -> str:
        return f"{self._namespace}:limit:{index}:{self._turns[index]}"


async def open_limit(setup: Setup) -> Limit:
    """A client of the server that the engine uses.

    Raises:
        ConfigError: redis-py or hiredis is not installed.
    """
    try:
        import hiredis  # noqa: F401 - redis-py takes it where it finds it
        from redis import asyncio as client
    except ImportError as error:
        raise ConfigError(f"redis is measured beside redis-py: pip install redis hiredis ({error})") from None
    most = int(str(setup.options.get("connections", _CONNECTIONS)))
    url = str(setup.options["url"])
    pool = client.BlockingConnectionPool.from_url(url, max_connections=most, timeout=None)
    return RedisPyLimit(setup, client.Redis.from_pool(pool))


def engine_options(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """Pages go into a namespace of their own.

    Raises:
        ConfigError: nobody said which server, or somebody names the namespace.
    """
    if "namespace" in options:
        raise ConfigError(f"--option namespace={options['namespace']}: the bench has one of its own")
    if "url" not in options:
        raise ConfigError("--engine redis: say which server, --option url=redis://127.0.0.1:6379")
    return {**options, "namespace": folder.name}


PEER = Peer("redis-py with hiredis", open_limit, engine_options)
