"""The redis backend: one namespace of a server, which holds the pages of all pools."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.redis.connection import RedisConnection
from asynchicache.backends.redis.engine import RedisEngine
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.pool import ConnectionPool
from asynchicache.backends.redis.resp import ErrorReply, ProtocolError, RespReply, command
from asynchicache.errors import ClosedError, StorageError, StorageFormatError
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAGIC, _VERSION = b"asynchicache redis store", 2
_MAX_VALUE_BYTES = 512 << 20  # `proto-max-bulk-len` of Redis, unless it is configured otherwise
_SCAN_KEYS = 1000
_PROBES = (b"PROBE0", b"PROBE1")
"""Keys that are never set. Their hash slots differ after any prefix, so a cluster refuses both at once."""
_CLUSTER = frozenset({"MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN"})


class RedisBackend:
    """The pools of one namespace of a server.

    Args:
        options: which server, and how to use it.
        port: threads.
    """

    name = "redis"

    def __init__(self, options: RedisOptions, port: Port) -> None:
        self._options = options
        self._pool = ConnectionPool(options, port)
        self._turn = asyncio.Lock()
        self._marker = f"{options.namespace}:FORMAT".encode()
        self._engines: EngineRegistry[RedisEngine] = EngineRegistry()
        self._policy_checked = False
        self._closed = False

    async def open_pool(self, binding: PoolBinding) -> RedisEngine:
        """Reach the server, and check that the namespace is ours.

        Raises:
            StorageError: the server cannot be reached, refuses the login or a command that is needed, or is a
                node of a cluster; the pool is open with another binding; its pages are larger than a Redis
                value may be.
            StorageFormatError: the namespace holds foreign data, or pages of a newer format.
            ClosedError: the backend is closed.
        """
        if self._closed:
            raise ClosedError(f"redis backend of {self._options.server} is closed")
        return await self._engines.open(binding, partial(self._open, binding))

    async def _open(self, binding: PoolBinding) -> RedisEngine:
        self._check_size(binding)
        await self._check_format()
        await self._check_policy()
        return RedisEngine(binding, self._pool, self._turn, self._options, self._clear)

    async def clear(self) -> int:
        """Delete every page of the namespace, of all pools and models. Other keys are not touched.

        Returns:
            The number of deleted pages.

        Raises:
            StorageError: the server cannot be reached, or refuses.
        """
        return await self._clear(f"{self._options.namespace}:*")

    async def _clear(self, glob: str) -> int:
        """Delete the keys that match a glob pattern, except the marker; returns their number."""
        count, cursor = 0, b"0"
        while True:  # one deadline a step: there may be many
            deleted, cursor = await self._talk(partial(self._clear_some, glob.encode(), cursor))
            count += deleted
            if cursor == b"0":
                return count

    def _clear_some(self, pattern: bytes, cursor: bytes, connection: RedisConnection) -> tuple[int, bytes]:
        """Delete what one step of SCAN finds.

        Returns:
            How many were deleted, and the cursor of the next step.
        """
        scan = command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_KEYS)
        cursor, names = _scanned(connection.ask(scan)[0])
        found = [name for name in names if name != self._marker]
        return _number(connection.ask(command(b"UNLINK", *found))[0]) if found else 0, cursor

    async def aclose(self) -> None:
        self._closed = True
        await self._engines.aclose()
        await self._pool.aclose()

    @staticmethod
    def _check_size(binding: PoolBinding) -> None:
        size = binding.header_bytes + binding.page_bytes
        if size > _MAX_VALUE_BYTES:
            raise StorageError(
                f"pool {binding.pool!r}: a page of {size} bytes is above {_MAX_VALUE_BYTES}, the most that "
                "Redis stores under a key: use smaller pages, or another engine"
            )

    async def _talk(self, work: Callable[[RedisConnection], T]) -> T:
        """Send a few commands; every failure becomes a StorageError that names the server."""
        server, seconds = self._options.server, self._options.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._pool.run(work)
        except ProtocolError as error:
            raise StorageError(f"{server} does not speak Redis: {error}; is url right?") from error
        except StorageError:
            raise
        except TimeoutError:
            raise StorageError(f"{server} does not answer within {seconds:g} s") from None
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(
                f"{server} cannot be reached: {reason}; is it running, and url right?"
            ) from error

    async def _check_format(self) -> None:
        """Mark a new namespace as ours; refuse a foreign one, and a server that forbids what we need."""
        ours = b"%b %d" % (_MAGIC, _VERSION)
        one, other = (self._marker.replace(b"FORMAT", name) for name in _PROBES)
        # In small letters: what the server logs tells them from uses.
        needed = {"EXISTS": command(b"exists", one, other), "TOUCH": command(b"touch", one)}
        if not self._options.read_only:
            needed["UNLINK"] = command(b"unlink", one)
            needed["SET"] = command(b"SET", self._marker, ours, b"NX")
        needed["GET"] = command(b"GET", self._marker)
        answers = await self._talk(lambda connection: connection.ask(*needed.values()))
        self._check_rights(dict(zip(needed, answers, strict=True)))
        found = answers[-1]
        if isinstance(found, ErrorReply):
            raise self._refused(found)
        if found is not None and found != ours:
            raise self._foreign(found)

    def _check_rights(self, answers: Mapping[str, RespReply]) -> None:
        """
        Raises:
            StorageError: the server is a node of a cluster, or forbids a command or our keys; says which.
        """
        refused = {verb: answer for verb, answer in answers.items() if isinstance(answer, ErrorReply)}
        for answer in refused.values():
            if answer.code in _CLUSTER:
                raise self._refused(answer)
        forbidden = {verb: answer.text for verb, answer in refused.items() if answer.code == "NOPERM"}
        if not forbidden:
            return
        verbs = [verb for verb, text in forbidden.items() if " command" in text]
        if not verbs:
            missing, rights = "these keys", f"~{self._options.namespace}:*"
        else:
            missing, rights = ", ".join(verbs), " ".join(f"+{verb.lower()}" for verb in answers)
        user = self._options.username or "default"
        raise StorageError(
            f"{self._options.server} does not let user {user!r} use {missing}: "
            f"it needs {rights} ({next(iter(forbidden.values()))})"
        )

    async def _check_policy(self) -> None:
        """Warn if the server will refuse pages once it is full. Not all users may ask."""
        if self._options.read_only or self._policy_checked:
            return
        self._policy_checked = True
        (answer,) = await self._talk(lambda connection: connection.ask(command(b"INFO", b"memory")))
        lines = answer.decode("utf-8", "replace").splitlines() if isinstance(answer, bytes) else []
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        policy, size = facts.get("maxmemory_policy", ""), facts.get("maxmemory", "0")
        keeps = policy == "noeviction" or (policy.startswith("volatile-") and not self._options.ttl_seconds)
        if keeps and size != "0":
            logger.warning(
                "%s evicts no page (maxmemory-policy %s): once its %s bytes are full, no more is stored; "
                "set maxmemory-policy allkeys-lru%s",
                self._options.server,
                policy,
                size,
                "" if policy == "noeviction" else ", or option ttl_seconds",
            )

    def _refused(self, reply: ErrorReply) -> StorageError:
        if reply.code == "WRONGTYPE":
            return self._foreign(reply)
        if reply.code in _CLUSTER:
            return StorageError(
                f"{self._options.server} is part of a cluster ({reply.text}): give a server of its own"
            )
        if reply.code == "NOAUTH":
            return StorageError(f"{self._options.server} does not let us in: {reply.text}")
        advice = (
            "; is it a Sentinel? Give the server that it watches" if "unknown command" in reply.text else ""
        )
        return StorageError(f"{self._options.server} cannot be used: {reply.text}{advice}")

    def _foreign(self, found: RespReply) -> StorageFormatError:
        where = f"{self._options.server}, namespace {self._options.namespace!r}"
        magic, _, version = found.rpartition(b" ") if isinstance(found, bytes) else (b"", b"", b"")
        if magic == _MAGIC and version.isdigit():
            return StorageFormatError.of_version(where, int(version), _VERSION, "namespace")
        return StorageFormatError(f"{where} holds something else: give another namespace")

    def __repr__(self) -> str:
        return f"<RedisBackend {self._options.server}: {len(self._engines)} pools>"


def _scanned(reply: RespReply) -> tuple[bytes, list[bytes]]:
    """The next cursor and the keys that SCAN answered."""
    if isinstance(reply, ErrorReply):
        raise StorageError(f"SCAN is refused: {reply.text}")
    match reply:
        case [bytes(cursor), list(names)]:
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise ProtocolError(f"{reply!r:.40} is no answer to SCAN")


def _number(reply: RespReply) -> int:
    if isinstance(reply, ErrorReply):
        raise StorageError(f"UNLINK is refused: {reply.text}")
    if not isinstance(reply, int):
        raise ProtocolError(f"{reply!r:.40} is no answer to UNLINK")
    return reply


def open_backend(options: Mapping[str, object], port: Port) -> RedisBackend:
    """The Redis engine; see `RedisOptions` for its options. The server is reached when a pool is opened.

    Raises:
        ConfigError: an option is missing, unknown, or breaks its rule.
    """
    return RedisBackend(RedisOptions.of(options), port)
