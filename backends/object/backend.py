"""The object backend: one prefix of a store holds the pages of all pools."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import obstore

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.object.clock import ObjectClock
from asynchicache.backends.object.engine import ObjectEngine
from asynchicache.backends.object.objects import longest_name
from asynchicache.backends.object.options import ObjectOptions
from asynchicache.backends.object.requests import Requests, RequestTurns, Turns
from asynchicache.backends.object.stores import FAILURES, advice, make_store
from asynchicache.errors import ClosedError, StorageError, StorageFormatError
from asynchicache.hashing import DIGEST_BYTES, ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding

T = TypeVar("T")

_FORMAT = "FORMAT"
_MAGIC, _VERSION = "asynchicache object store", 2
_OURS = f"{_MAGIC} {_VERSION}\n".encode()
_MAX_FORMAT_BYTES = 100
_MAX_NAME_BYTES = 1024
"""Of an object's name, with the prefix: what S3, Google Cloud Storage and Azure allow."""
_POOL_FOLDER = re.compile(r"[0-9a-f]{32}\.[a-z0-9_]+(\.[0-9a-z_-]+)?")


class ObjectBackend:
    """The pools below one URL.

    Args:
        options: the store, and how to use it.
        port: threads.

    Raises:
        ConfigError: a setting is unknown or missing.
        StorageError: the location cannot be used.
    """

    name = "object"

    def __init__(self, options: ObjectOptions, port: Port) -> None:
        self._options = options
        self._port = port
        self._store = make_store(options)
        self._turns = RequestTurns(Turns(options.requests), Turns(options.requests))
        self._clock = ObjectClock(options.url, self._store_time, port.now, time.time)
        self._engines: EngineRegistry[ObjectEngine] = EngineRegistry()
        self._closed = False

    async def open_pool(self, binding: PoolBinding) -> ObjectEngine:
        """Connect to the store and check the prefix; with `index`, list the pool's pages.

        Raises:
            StorageError: the store cannot be reached or refuses, the prefix is too long, or the pool is
                open with another binding.
            StorageFormatError: the prefix holds foreign data, or pages of a newer version.
            ClosedError: the backend is closed.
        """
        if self._closed:
            raise ClosedError(f"object backend of {self._options.url} is closed")
        return await self._engines.open(binding, partial(self._open, binding))

    async def _open(self, binding: PoolBinding) -> ObjectEngine:
        self._check_names(binding)
        patience = self._options.timeout_seconds / 2  # a call of the core ends with a reason of ours
        requests = Requests(self._store, self._turns, binding.pool, patience)
        engine = ObjectEngine(binding, self._port, requests, self._options, self._clock)
        await self._prepare(engine)
        return engine

    async def aclose(self) -> None:
        self._closed = True
        await self._engines.aclose()

    def _check_names(self, binding: PoolBinding) -> None:
        """Refuse a prefix that is too long for page names."""
        key = ObjectKey(binding.fingerprint, bytes(DIGEST_BYTES), binding.pool, binding.shard)
        longest = longest_name(key, self._options.object_pages)
        prefix = getattr(self._store, "prefix", None)  # a folder and memory have none, and other limits
        size = len(f"{prefix}/{longest}".encode())
        if prefix is not None and size > _MAX_NAME_BYTES:
            raise StorageError(
                f"{self._options.url} cannot be used: with it names of objects have {size} bytes, "
                f"{_MAX_NAME_BYTES} are allowed: give a shorter prefix"
            )

    async def _prepare(self, engine: ObjectEngine) -> None:
        await self.check()
        if self._options.index:
            try:
                await engine.load_index()
            except FAILURES as error:
                raise StorageError(f"{self._options.url} cannot be listed: {advice(error)}") from error

    async def check(self) -> None:
        """Reach the store; mark an empty prefix as ours, unless `read_only`, and refuse a foreign one.

        Raises:
            StorageError: the store cannot be reached, or refuses.
            StorageFormatError: the prefix holds foreign data, or pages of another format.
        """
        async with self._explained():
            await self._check_format()

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        """Turn every failure into a StorageError that names the location and says what to do."""
        patience = self._options.timeout_seconds * 2  # a try that is cut short, and one more
        try:
            async with asyncio.timeout(patience):
                yield
        except StorageError:
            raise
        except TimeoutError:
            raise StorageError(f"{self._options.url} does not answer within {patience:g} s") from None
        except FAILURES as error:
            raise StorageError(f"{self._options.url} cannot be used: {advice(error)}") from error

    async def _check_format(self) -> None:
        found = await self._read_format()
        if found is None:
            if await self._holds_nothing_else():
                if not self._options.read_only:
                    await self._send(obstore.put_async, _FORMAT, _OURS, use_multipart=False)
                return
            found = await self._read_format()  # another process may have marked it between the two questions
        if found != _OURS:
            raise self._foreign(found or b"")

    async def renew_format(self) -> float:
        """Store the mark of the format anew; the Unix time at which the store did it.

        Raises:
            BaseError, OSError: there is none, or the store refuses.
        """
        await self._send(obstore.head_async, _FORMAT)
        await self._send(obstore.put_async, _FORMAT, _OURS, use_multipart=False)
        found = await self._send(obstore.head_async, _FORMAT)
        return found["last_modified"].timestamp()

    async def _store_time(self) -> float:
        await self.check()  # what others have made of the prefix meanwhile is not overwritten
        return await self.renew_format()

    async def _send(self, request: Callable[..., Awaitable[T]], *given: Any, **named: Any) -> T:
        """Send one request of obstore, again and again while the store has no time for it."""
        return await self._turns.lookups.send(
            partial(request, self._store, *given, **named), self._options.timeout_seconds / 2
        )

    async def _read_format(self) -> bytes | None:
        try:
            answer = await self._send(obstore.get_async, _FORMAT)
        except FileNotFoundError:
            return None
        if answer.meta["size"] > _MAX_FORMAT_BYTES:
            return b""
        return bytes(await answer.bytes_async())

    async def _holds_nothing_else(self) -> bool:
        """Whether the prefix is empty or has only our folders: an expiry rule may have deleted the marker."""
        listed = await self._send(obstore.list_with_delimiter_async)
        folders = [path.rpartition("/")[2] for path in listed["common_prefixes"]]
        return not listed["objects"] and all(map(_POOL_FOLDER.fullmatch, folders))

    def _foreign(self, found: bytes) -> StorageFormatError:
        magic, _, version = found.decode("utf-8", "replace").strip().rpartition(" ")
        if magic == _MAGIC and version.isdecimal():
            return StorageFormatError.of_version(self._options.url, int(version), _VERSION, "prefix")
        return StorageFormatError(
            f"{self._options.url} is not empty and holds no pages: give an empty or new prefix"
        )

    def __repr__(self) -> str:
        return f"<ObjectBackend {self._options.url}: {len(self._engines)} pools>"


def open_backend(options: Mapping[str, object], port: Port) -> ObjectBackend:
    """The object engine; see `ObjectOptions` for its options. The store is reached when a pool is opened.

    Raises:
        ConfigError: an option is missing, unknown, or breaks its rule.
        StorageError: the place cannot be used.
    """
    return ObjectBackend(ObjectOptions.of(options), port)
