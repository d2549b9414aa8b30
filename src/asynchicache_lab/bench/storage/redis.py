"""The limit of the redis engine: redis-py with hiredis, its C parser, used in three ways."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asynchicache.errors import ConfigError, StorageError
from asynchicache_lab.bench.storage.limits import Peer, PlainClient, Setup

_CONNECTIONS = 4  # as many as the engine has by default
_FULL = 0.95  # of `maxmemory`: a server that evicts stays a value or two below it

_RedisCall = Callable[[Any, Mapping[str, memoryview]], Awaitable[None]]
"""Moves pages, by key, from or to their memory with a `redis.asyncio.Redis`."""


class Idiom(NamedTuple):
    """One way to move many values.

    Attributes:
        name: part of its keys.
        title: its description in reports.
        put, get: move one batch.
    """

    name: str
    title: str
    put: _RedisCall
    get: _RedisCall


async def _put_pipelined(client: Any, pages: Mapping[str, memoryview]) -> None:
    async with client.pipeline(transaction=False) as pipeline:
        for name, page in pages.items():
            pipeline.set(name, page)
        await pipeline.execute()


async def _get_pipelined(client: Any, pages: Mapping[str, memoryview]) -> None:
    async with client.pipeline(transaction=False) as pipeline:
        for name in pages:
            pipeline.get(name)
        _place(pages, await pipeline.execute())


async def _put_together(client: Any, pages: Mapping[str, memoryview]) -> None:
    await client.mset(pages)


async def _get_together(client: Any, pages: Mapping[str, memoryview]) -> None:
    _place(pages, await client.mget(list(pages)))


async def _put_gathered(client: Any, pages: Mapping[str, memoryview]) -> None:
    await asyncio.gather(*(client.set(name, page) for name, page in pages.items()))


async def _get_gathered(client: Any, pages: Mapping[str, memoryview]) -> None:
    async def get(name: str, page: memoryview) -> None:
        _place({name: page}, [await client.get(name)])

    await asyncio.gather(*(get(name, page) for name, page in pages.items()))


def _place(pages: Mapping[str, memoryview], values: Sequence[bytes | None]) -> None:
    for page, value in zip(pages.values(), values, strict=True):
        if value is None:
            raise StorageError("the server gave up a page of this round: give it more memory, or fewer pages")
        page[:] = value


PIPELINE = Idiom("pipeline", "redis-py with hiredis, one pipeline a batch", _put_pipelined, _get_pipelined)
"""What redis-py's documentation has for storing all the values of a list."""
TOGETHER = Idiom("mset", "redis-py with hiredis, one MSET or MGET a batch", _put_together, _get_together)
GATHERED = Idiom("set", "redis-py with hiredis, a SET or GET a page, gathered", _put_gathered, _get_gathered)


class RedisPyLimit:
    """One idiom, with the engine's number of connections. It copies received values to their slots.

    The number of batches in flight equals the engine's. Both sides put pages under new names, because
    overwriting a value would save the server an allocation.

    Args:
        setup: the pages; its folder's name is the namespace of engine and limit.
        client: a `redis.asyncio.Redis`.
        idiom: the way to use it.
        evicts: whether the server is full and evicts by itself.
    """

    def __init__(self, setup: Setup, client: Any, idiom: Idiom, *, evicts: bool) -> None:
        self.evicts = evicts
        self._setup = setup
        self._client = client
        self._idiom = idiom
        self._prefix = f"{setup.folder.name}:{setup.pool}:{idiom.name}"
        self._turns = [0] * setup.pages

    async def put(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._turns[index] += 1
        await self._idiom.put(self._client, self._pages(indices))

    async def get(self, indices: Sequence[int]) -> None:
        await self._idiom.get(self._client, self._pages(indices))

    async def clear(self) -> None:
        """Delete pages; return when the server's threads have freed their memory."""
        await self._client.unlink(*self._pages(range(self._setup.pages)))
        while (await self._client.info("memory"))["lazyfree_pending_objects"]:  # noqa: ASYNC110 - it must be asked
            await asyncio.sleep(0)

    async def server_seconds(self) -> float | None:
        """Of the thread that serves all clients, in Redis from 6.2 on."""
        used = await self._client.info("cpu")
        parts = [used.get(f"used_cpu_{kind}_main_thread") for kind in ("user", "sys")]
        return None if None in parts else sum(parts)

    async def aclose(self) -> None:
        async for name in self._client.scan_iter(f"{self._setup.folder.name}:*", count=1000):
            await self._client.unlink(name)
        await self._client.aclose()

    def _pages(self, indices: Sequence[int]) -> dict[str, memoryview]:
        return {f"{self._prefix}:{i}:{self._turns[i]}": self._setup.memory(i) for i in indices}


async def open_limit(setup: Setup, idiom: Idiom) -> PlainClient:
    """Open a client of the server that the engine uses.

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
    connected = client.Redis.from_pool(pool)
    try:
        return RedisPyLimit(setup, connected, idiom, evicts=await _evicts(connected))
    except BaseException:
        await connected.aclose()
        raise


async def _evicts(client: Any) -> bool:
    """Whether the server is full and evicts old pages for new ones."""
    memory = await client.info("memory")
    full = 0 < _FULL * memory["maxmemory"] < memory["used_memory"]
    return full and str(memory["maxmemory_policy"]).startswith("allkeys-")


def engine_options(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The engine's options, with a separate namespace.

    Raises:
        ConfigError: the user did not set the server, or set the namespace.
    """
    if "namespace" in options:
        raise ConfigError(f"--option namespace={options['namespace']}: the bench has one of its own")
    if "url" not in options:
        raise ConfigError("--engine redis: say which server, --option url=redis://127.0.0.1:6379")
    return {**options, "namespace": folder.name}


_BESIDE = tuple(Peer(idiom.title, partial(open_limit, idiom=idiom)) for idiom in (TOGETHER, GATHERED))
PEER = Peer(PIPELINE.title, partial(open_limit, idiom=PIPELINE), engine_options, _BESIDE)
