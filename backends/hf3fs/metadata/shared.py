"""Names in Redis or Valkey: for the processes of many hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha1
from typing import Any
from uuid import uuid4

from asynchicache.backends.hf3fs.metadata.script import SCRIPT
from asynchicache.backends.hf3fs.metadata.words import (
    LEASE_SECONDS,
    Located,
    OpenedNamespace,
    Reserved,
    SlotVersion,
)
from asynchicache.backends.redis.calls import Caller, KeyCall
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.wire import ErrorReply, RedisCommand, Wire
from asynchicache.errors import ConfigError, StorageError, StorageFormatError
from asynchicache.ports import Port

_SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_MARKER = "STORE 1"


class SharedNames:
    """Namespaces as hashes and sorted sets, each in one hash slot; a script makes each call one step.

    Args:
        options: the server, cluster or Sentinels; its `namespace` is the prefix of all keys.
        lease_seconds: how long a reservation or a read lease lasts unless its client ends it.
    """

    def __init__(self, options: RedisOptions, port: Port, lease_seconds: float = LEASE_SECONDS) -> None:
        self.where = str(options.server)
        self._options = options
        self._caller = Caller(options, port)
        self._lease_ms = int(lease_seconds * 1000)
        self._marker = f"{options.namespace}:{_MARKER}"

    async def open(self, name: str, slots: int, frame_bytes: int) -> OpenedNamespace:
        async with self._answering("open"):
            await self._caller.open()
            mark, ask = ("SET", self._marker, uuid4().hex, "NX"), ("GET", self._marker)
            store = (await self._ask(self._marker, mark, ask))[-1]
            (memory,) = await self._ask(self._marker, ("INFO", "memory"))
        if not isinstance(store, bytes):
            raise StorageFormatError(f"{self.where}: {self._marker!r} holds something else")
        self._check_policy(memory)
        (found, *before) = await self.call(name, "open", (), slots, frame_bytes)
        if before:
            raise StorageFormatError(f"{name} has frames of {before[0]} bytes, {frame_bytes} were asked for")
        return OpenedNamespace(name, store.decode(), found)

    async def call(self, handle: str, verb: str, finished: Sequence[int], *given: Any) -> Any:
        key = f"{self._options.namespace}:{{{handle}}}"
        words = (verb, self._lease_ms, len(finished), *finished, *_flat(given))
        async with self._answering(verb):
            (answer,) = await self._ask(key, ("EVALSHA", _SHA, 1, key, *words))
            if isinstance(answer, ErrorReply) and answer.code == "NOSCRIPT":
                (answer,) = await self._ask(key, ("EVAL", SCRIPT, 1, key, *words))
        if isinstance(answer, ErrorReply):
            raise StorageError(f"{self.where}: {answer.text}")
        try:
            return _READ[verb](answer)
        except (TypeError, ValueError, AttributeError) as error:
            raise StorageError(f"{self.where}: {answer!r:.60} is no answer to {verb}") from error

    async def time(self) -> float:
        async with self._answering("time"):
            await self._caller.open()
            (answer,) = await self._ask(self._marker, ("TIME",))
        return float(answer[0]) if isinstance(answer, list) else time.time()

    async def aclose(self) -> None:
        await self._caller.aclose()

    async def _ask(self, key: str, *commands: RedisCommand) -> list[Any]:
        """Send commands to the server of a key; once more if it is lost, as all verbs bear."""
        call = KeyCall([key.encode()])

        def ask(wire: Wire, places: Sequence[int]) -> None:
            replies = wire.ask(*commands)
            call.answers[0] = replies
            for reply in replies:
                if isinstance(reply, ErrorReply):
                    call.refused(0, reply, replies)

        errors = await self._caller.send(call, ask, lookup=True)
        if errors:
            raise errors[0]
        answers: list[Any] = call.answers[0]  # type: ignore[assignment]
        return answers

    def _answering(self, verb: str) -> _Answering:
        return _Answering(self.where, verb, self._options.timeout_seconds, self._caller.suspect)

    def _check_policy(self, memory: object) -> None:
        """Not all users may ask; then nothing is known."""
        lines = memory.decode("utf-8", "replace").splitlines() if isinstance(memory, bytes) else []
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = facts.get("maxmemory_policy", "")
        if facts.get("maxmemory", "0") != "0" and policy.startswith("allkeys-"):
            raise StorageError(
                f"{self.where} evicts any key once it is full (maxmemory-policy {policy}), also names of "
                "pages: set maxmemory-policy noeviction, or give another server"
            )


def open_names(words: Mapping[str, object], port: Port) -> SharedNames:
    """Names at a server.

    Raises:
        ConfigError: one breaks its rule.
    """
    own = {"namespace": "asynchicache-hf3fs", "connections": 1}
    try:
        return SharedNames(RedisOptions.of({**own, **words}), port)
    except ConfigError as error:
        raise ConfigError(f"storage backend 'hf3fs', option metadata: {error}") from error


class _Answering:
    """The deadline of a call; every failure becomes a StorageError that names the server."""

    def __init__(self, where: str, verb: str, seconds: float, late: Callable[[], None]) -> None:
        self._late = late
        self._where, self._verb, self._seconds = where, verb, seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            self._late()
            raise StorageError(f"{self._where}: {self._verb}: no answer in {self._seconds:g} s") from None
        if isinstance(error, OSError):
            raise StorageError(f"{self._where}: {self._verb}: {error}") from error


def _flat(given: Iterable[Any]) -> list[str | int]:
    words: list[str | int] = []
    for one in given:
        words += [one] if isinstance(one, (str, int)) else _flat(one)
    return words


def _number(answer: Any) -> int:
    if not isinstance(answer, int):
        raise TypeError(answer)
    return answer


def _numbers(answer: Any) -> list[int]:
    if not isinstance(answer, list):
        raise TypeError(answer)
    return [_number(one) for one in answer]


def _flags(answer: Any) -> list[bool]:
    return [bool(one) for one in _numbers(answer)]


def _place(slot: int, generation: int) -> SlotVersion | None:
    return None if slot == -1 else SlotVersion(slot, generation)


def _located(answer: Any) -> Located:
    lease, *rest = _numbers(answer)
    return Located(lease, [_place(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)])


def _reserved(answer: Any) -> Reserved:
    numbers = _numbers(answer)
    places = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    return Reserved(_flags(answer[::3]), [_place(slot, generation) for _, slot, generation in places])


def _verdicts(answer: Any) -> list[str]:
    words = [one.decode() for one in answer]
    if not set(words) <= {"stored", "existed", "lost"}:
        raise ValueError(answer)
    return words


_READ: dict[str, Callable[[Any], Any]] = {
    "exists": _flags,
    "locate": _located,
    "touch": _number,
    "reserve": _reserved,
    "open": _numbers,
    "leaving": lambda answer: [one.decode() for one in answer],
    "confirm": _verdicts,
    "release": _number,
    "forget": _flags,
    "delete": _flags,
    "clear": _number,
}
