"""The redis backend: one namespace of a server or a cluster, which holds the pages of all pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from redis.connection import ConnectionPool

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.redis.calls import Caller
from asynchicache.backends.redis.engine import LABEL, RedisEngine
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.wire import (
    ErrorReply,
    ProtocolError,
    RedisCommand,
    RefusedError,
    RespReply,
    Wire,
)
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.hashing import DIGEST_BYTES
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAGIC, _VERSION = b"asynchicache redis store", 2
_MAX_VALUE_BYTES = 512 << 20  # `proto-max-bulk-len` of Redis, unless it is configured otherwise
SCAN_KEYS = 1000
_CLUSTER = frozenset({"MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN"})
_UNKNOWN = "what it does when it is full is unknown; let the user ask (+info), or look as another one"
_UNLIMITED = "has no maxmemory: it grows until the system ends it, and all pages are lost; set maxmemory"


class RedisBackend:
    """The pools of one namespace of a server.

    Args:
        options: which server, and how to use it.
    """

    name = "redis"

    def __init__(self, options: RedisOptions, port: Port) -> None:
        self._options = options
        self._caller = Caller(options, port)
        self._turn = asyncio.Lock()
        self._marker = f"{options.namespace}:FORMAT".encode()
        self._engines: EngineRegistry[RedisEngine] = EngineRegistry(f"redis backend of {options.server}")
        self._policy_checked = False

    async def open_pool(self, binding: PoolBinding) -> RedisEngine:
        """Reach the server, and check that the namespace is ours.

        Raises:
            StorageError: the server cannot be reached, refuses the login or a command that is needed, or is
                another one than the options say; the pool is open with another binding; its pages are larger
                than a Redis value may be.
            StorageFormatError: the namespace holds foreign data, or pages of a newer format.
            ClosedError: the backend is closed.
        """
        return await self._engines.open(binding, partial(self._open, binding))

    async def _open(self, binding: PoolBinding) -> RedisEngine:
        self._check_size(binding)
        await self.check()
        await self._check_policy()
        return RedisEngine(binding, self._caller, self._turn, self._options, self._clear)

    async def clear(self) -> int:
        """Delete every page of the namespace, of all pools and models. Other keys are not touched, nor are
        pages of other formats.

        Returns:
            The number of deleted pages.

        Raises:
            StorageError: the server cannot be reached, or refuses.
            StorageFormatError: the namespace holds foreign data, or pages of another format.
        """
        await self.check()
        await self._clear(f"{self._options.namespace}:*.{LABEL}")
        return await self._clear(f"{self._options.namespace}:*.{'?' * 2 * DIGEST_BYTES}")

    async def _clear(self, glob: str) -> int:
        """Delete the keys that match a glob pattern, except the marker; returns their number."""
        return sum([count async for count in self.steps(glob, self.unlink)])

    async def steps(
        self, glob: str, work: Callable[[Wire, list[bytes]], T], keys: int = SCAN_KEYS
    ) -> AsyncIterator[T]:
        """Do `work` with the keys that match a glob pattern, as each step of SCAN finds them, on all servers.

        Args:
            keys: about how many keys a step looks at.

        Raises:
            StorageError: a server cannot be reached, or refuses.
        """
        await self._told(self._caller.open())
        for server in self._caller.servers.all():
            cursor = b"0"
            while True:  # one deadline a step: there may be many
                step = partial(self._step, glob.encode(), cursor, work, keys)
                done, cursor = await self._told(self._caller.run(server, step))
                yield done
                if cursor == b"0":
                    break

    @staticmethod
    def _step(
        pattern: bytes, cursor: bytes, work: Callable[[Wire, list[bytes]], T], keys: int, wire: Wire
    ) -> tuple[T, bytes]:
        """Do `work` with what one step finds; returns its result, and the cursor of the next step."""
        scan: RedisCommand = ("SCAN", cursor, "MATCH", pattern, "COUNT", keys)
        cursor, names = _scanned(wire.ask(scan)[0])
        return work(wire, names), cursor

    def unlink(self, wire: Wire, names: list[bytes]) -> int:
        """Delete keys of a server, except the marker; returns how many there were."""
        # One by one: in a cluster they are of many hash slots.
        gone = wire.ask(*(("UNLINK", name) for name in names if name != self._marker))
        return sum(map(_number, gone))

    async def check(self) -> None:
        """Reach the server, and check that the namespace is ours.

        Raises:
            StorageError: as `open_pool`.
            StorageFormatError: as `open_pool`.
        """
        await self._told(self._caller.open())
        await self._check_format()

    async def aclose(self) -> None:
        await self._engines.aclose()
        await self._caller.aclose()

    @staticmethod
    def _check_size(binding: PoolBinding) -> None:
        size = binding.header_bytes + binding.page_bytes
        if size > _MAX_VALUE_BYTES:
            raise StorageError(
                f"pool {binding.pool!r}: a page of {size} bytes is above {_MAX_VALUE_BYTES}, the most that "
                "Redis stores under a key: use smaller pages, or another engine"
            )

    async def _told(self, talk: Awaitable[T]) -> T:
        """Talk to a server within the deadline; every failure becomes a StorageError that names it."""
        server, seconds = self._options.server, self._options.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await talk
        except RefusedError as error:
            raise StorageError(f"{server} does not let us in: {error}") from error
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
        # Never set, and in the hash slot of the marker.
        probe = f"{self._options.namespace}:{{{self._marker.decode()}}}PROBE"
        # In small letters: what the server logs tells them from uses.
        needed: dict[str, RedisCommand] = {"EXISTS": ("exists", probe), "TOUCH": ("touch", probe)}
        if not self._options.read_only:
            needed["UNLINK"] = ("unlink", probe)
            needed["SET"] = ("SET", self._marker, ours, "NX")
        needed["GET"] = ("GET", self._marker)
        (share,) = self._caller.servers.split([self._marker], [0])
        answers = await self._told(self._caller.run(share.server, lambda wire: wire.ask(*needed.values())))
        self._check_rights(dict(zip(needed, answers, strict=True)))
        found = answers[-1]
        if isinstance(found, ErrorReply):
            raise self._refused(found)
        if found is not None and found != ours:
            raise self._foreign(found)

    def _check_rights(self, answers: Mapping[str, RespReply]) -> None:
        """
        Raises:
            StorageError: the server forbids a command or our keys; says which.
        """
        refused = {verb: answer for verb, answer in answers.items() if isinstance(answer, ErrorReply)}
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
        """Warn if a server will lose pages once it is full."""
        if self._options.read_only or self._policy_checked:
            return
        self._policy_checked = True
        for server in self._caller.servers.all():
            with suppress(StorageError):  # a node of a cluster may be down: the others have their pages
                if text := _pages_lost(await self._memory_of(server), self._options):
                    logger.warning("%s %s", self._options.server, text)

    async def memory(self) -> list[dict[str, str]]:
        """What INFO says of the memory of each server; nothing where the user may not ask.

        Raises:
            StorageError: a server cannot be reached.
        """
        return [await self._memory_of(server) for server in self._caller.servers.all()]

    async def _memory_of(self, server: ConnectionPool) -> dict[str, str]:
        (answer,) = await self._told(self._caller.run(server, lambda wire: wire.ask(("INFO", "memory"))))
        lines = answer.decode("utf-8", "replace").splitlines() if isinstance(answer, bytes) else []
        return dict(line.split(":", 1) for line in lines if ":" in line)

    async def time(self) -> float:
        """The Unix time of a server, in seconds; ours if the user may not ask.

        Raises:
            StorageError: the server cannot be reached.
        """
        server, *_ = self._caller.servers.all()
        (answer,) = await self._told(self._caller.run(server, lambda wire: wire.ask(("TIME",))))
        return float(cast("bytes", answer[0])) if isinstance(answer, list) else time.time()

    async def faults(self) -> list[str]:
        """How the servers, as they are set up, lose pages, or themselves.

        Raises:
            StorageError: as `open_pool`.
            StorageFormatError: as `open_pool`.
        """
        await self.check()
        user = self._options.username or "default"
        said = set()
        for memory in await self.memory():
            if not memory:
                said.add(f"answers no INFO to user {user!r}: {_UNKNOWN}")
            elif memory.get("maxmemory") == "0":
                said.add(_UNLIMITED)
            else:
                said.add(_pages_lost(memory, self._options))
        return sorted(said - {""})

    def _refused(self, reply: ErrorReply) -> StorageError:
        if reply.code == "WRONGTYPE":
            return self._foreign(reply)
        if reply.code in _CLUSTER:
            return StorageError(f"{self._options.server} is part of a cluster in disorder: {reply.text}")
        return StorageError(f"{self._options.server} cannot be used: {reply.text}")

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


def _pages_lost(memory: Mapping[str, str], options: RedisOptions) -> str:
    """How a server loses pages once it is full, from its INFO; empty if it keeps those in use."""
    policy, size = memory.get("maxmemory_policy", ""), memory.get("maxmemory", "0")
    if size == "0":
        return ""
    if policy == "noeviction" or (policy.startswith("volatile-") and not options.ttl_seconds):
        way_out = "" if policy == "noeviction" else ", or option ttl_seconds"
        return (
            f"evicts no page (maxmemory-policy {policy}): once its {size} bytes are full, no more is stored; "
            f"set maxmemory-policy allkeys-lru{way_out}"
        )
    if policy.endswith("-random"):
        return (
            f"evicts at random (maxmemory-policy {policy}): a path loses its beginning as soon as its end; "
            "set maxmemory-policy allkeys-lru"
        )
    return ""


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
