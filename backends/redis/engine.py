"""One pool's pages in a server: header and page are one value, and a value is received into its slot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import compress
from typing import NamedTuple

from asynchicache.backends.redis.connection import Piece, RedisConnection
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.pool import ConnectionPool
from asynchicache.backends.redis.resp import ErrorReply, ProtocolError, RespReply, command, set_command
from asynchicache.errors import ClosedError, StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import DIGEST_BYTES, ObjectKey
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_CALL_BYTES = 64 << 20
_MAX_PAGES = 512
_GET_PART_BYTES = 1 << 20
"""A smaller part is not worth a second connection."""
_WINDOW_BYTES = 2 << 20
"""Requested ahead on a connection: the server is never idle, and its output buffers stay small."""
_GROUP_BYTES = 2 << 20
"""Sealed, then sent in one system call while they are in the processor's cache. The server runs out of work
and sleeps while pages are sealed, and to wake it costs more than a few pages that have left the nearer
cache."""
_FEW_PAGES = 16
_FEW_PAGE_BYTES = 1 << 20
"""A call of no more pages, none larger, and no more than a group, does not ask first which pages are there:
that round trip takes longer than its pages."""
_REFUSALS = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"})
"""Error codes of a server that works, but takes no writes."""


class _PageBatch(NamedTuple):
    """One call; places in it are numbers from 0 on."""

    keys: Sequence[ObjectKey]
    slots: Sequence[int]  # of the binding
    outcomes: list[Outcome]


_RedisWork = Callable[[RedisConnection, _PageBatch, Sequence[int]], None]
"""Moves the pages at some places of a batch, in a thread."""


def parts(places: Sequence[int], count: int) -> list[Sequence[int]]:
    """`places` in at most `count` runs of nearly equal length, none empty."""
    step = max(1, -(-len(places) // max(1, count)))
    return [places[start : start + step] for start in range(0, len(places), step)]


class RedisEngine:
    """One pool in one server.

    A call ends, by an answer, an exception or a cancellation, only when no thread touches its slots any more.
    A connection that is in the middle of a reply is closed then.

    Args:
        binding: the pool's slots in host memory.
        pool: connections, shared by all pools.
        turn: held by the call that sends many pages. The server has one thread, which needs twice the time
            for pages that arrive on several connections at once.
        options: what the user chose.
        delete_matching: deletes the keys that match a glob pattern, and returns their number.
    """

    def __init__(
        self,
        binding: PoolBinding,
        pool: ConnectionPool,
        turn: asyncio.Lock,
        options: RedisOptions,
        delete_matching: Callable[[str], Awaitable[int]],
    ) -> None:
        self.closed = False
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._pool = pool
        self._turn = turn
        self._options = options
        self._delete_matching = delete_matching
        self._prefix = f"{options.namespace}:".encode()
        self._frame_bytes = binding.header_bytes + binding.page_bytes
        self._failures = FailureLog(logger)
        self._group = -(-_GROUP_BYTES // self._frame_bytes)
        self._few = min(self._group, _FEW_PAGES) if binding.page_bytes <= _FEW_PAGE_BYTES else 0
        self._window = max(2, _WINDOW_BYTES // self._frame_bytes)
        self.capabilities = Capabilities(
            durable=True,
            checks=True,
            shared=True,
            batch_pages=max(1, min(_MAX_PAGES, _CALL_BYTES // self._frame_bytes)),
            concurrency=options.connections,
        )

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """
        Raises:
            StorageError: the server does not answer, or refuses.
            ClosedError: the engine is closed; as all calls.
        """
        self._check_open()
        return await self._count(b"EXISTS", keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        batch = _PageBatch(keys, slots, [Outcome.FAILED] * len(keys))
        connections = min(self._pool.size, len(keys) * self._frame_bytes // _GET_PART_BYTES)
        await self._run("get", self._get, batch, parts(range(len(keys)), connections))
        damaged = [key for key, found in zip(keys, batch.outcomes, strict=True) if found is Outcome.CORRUPT]
        if damaged:
            await self._drop(damaged)
        return batch.outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        batch = _PageBatch(keys, slots, [Outcome.FAILED] * len(keys))
        await (self._put_few if len(keys) <= self._few else self._put_many)(batch)
        return batch.outcomes

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        self._check_open()
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        gone = await self._try_count(b"UNLINK", keys)
        if gone is None:
            return [Outcome.FAILED] * len(keys)
        return [Outcome.HIT if bit else Outcome.MISS for bit in gone]

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Tell the server that pages were used, in this order. Its clock for this ticks once a second: pages
        used in the same second count as equally recent.

        A read-only engine tells it too: pages in use should not be evicted.

        Raises:
            StorageError: the server does not answer, or refuses.
        """
        self._check_open()
        await self._count(b"TOUCH", keys)

    async def clear(self) -> int:
        """Delete the pool's pages; returns their number.

        Raises:
            StorageError: the server cannot be reached, or refuses.
        """
        self._check_open()
        binding = self._binding
        any_page = ObjectKey(binding.fingerprint, bytes(DIGEST_BYTES), binding.pool, binding.shard)
        return await self._delete_matching(f"{self._options.namespace}:{any_page.pattern()}")

    async def aclose(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"redis engine of pool {self._binding.pool!r} is closed")

    def _deadline(self) -> asyncio.Timeout:
        return asyncio.timeout(self._options.timeout_seconds)

    def _name(self, key: ObjectKey) -> bytes:
        return self._prefix + key.text().encode()

    async def _count(self, verb: bytes, keys: Sequence[ObjectKey]) -> bytearray:
        """Send one command a key, each of which answers 0 or 1 and moves no bytes."""
        if not keys:
            return bytearray()
        commands = [command(verb, self._name(key)) for key in keys]
        try:
            async with self._deadline():
                replies = await self._pool.run(lambda connection: connection.ask(*commands), lookup=True)
        except OSError as error:
            raise StorageError(
                f"{self._options.server}: {verb.decode()} of {len(keys)} keys: {_text(error)}"
            ) from error
        return bytearray(self._bit(verb, reply) for reply in replies)

    async def _try_count(self, verb: bytes, keys: Sequence[ObjectKey]) -> bytearray | None:
        """As `_count`; None, and a line in the log, if there is no answer."""
        try:
            return await self._count(verb, keys)
        except StorageError as error:
            self._failures.warning(
                (verb, type(error)), "pool %s: %s", self._binding.pool, error, pages=len(keys)
            )
            return None

    def _bit(self, verb: bytes, reply: RespReply) -> int:
        if isinstance(reply, ErrorReply):
            raise StorageError(f"{self._options.server} refuses {verb.decode()}: {reply.text}")
        if not isinstance(reply, int) or not 0 <= reply <= 1:
            raise ProtocolError(f"{reply!r:.40} is no answer to {verb.decode()}")
        return reply

    async def _run(
        self,
        verb: str,
        work: _RedisWork,
        batch: _PageBatch,
        split: Sequence[Sequence[int]],
        turn: AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        """Do `work` for each part of the batch on a connection of its own, while `turn` is held. Places that
        it does not reach keep their outcome."""
        errors: list[OSError] = []
        try:
            async with self._deadline(), turn or nullcontext(), asyncio.TaskGroup() as group:
                for places in split:
                    group.create_task(self._part(errors, work, batch, places))
        except TimeoutError:
            late = f"no end after {self._options.timeout_seconds:g} s"
            self._warn(verb, len(batch.keys), TimeoutError, late)
        if errors:
            self._warn(verb, batch.outcomes.count(Outcome.FAILED), type(errors[0]), _text(errors[0]))

    async def _part(
        self, errors: list[OSError], work: _RedisWork, batch: _PageBatch, places: Sequence[int]
    ) -> None:
        try:
            await self._pool.run(lambda connection: work(connection, batch, places))
        except OSError as error:
            errors.append(error)

    # In a thread:

    def _get(self, connection: RedisConnection, batch: _PageBatch, places: Sequence[int]) -> None:
        """Read values into slots. Half a window is requested each time that half a window has come."""
        commands = [command(b"GET", self._name(batch.keys[place])) for place in places]
        step = self._window // 2
        connection.send([b"".join(commands[: self._window])])
        for index, place in enumerate(places):
            size = connection.read_value_size()
            if size == self._frame_bytes:
                batch.outcomes[place] = self._receive_page(connection, batch.slots[place], batch.keys[place])
            else:
                batch.outcomes[place] = self._absent(size)
                self._skip(connection, size)
            came = index + 1
            if came % step == 0:
                connection.send([b"".join(commands[came - step + self._window :][:step])])
        if any(batch.outcomes[place] is Outcome.CORRUPT for place in places):
            connection.close()  # perhaps no page is damaged, but replies are out of step

    def _receive_page(self, connection: RedisConnection, slot: int, key: ObjectKey) -> Outcome:
        page = self._binding.page(slot)[: self._binding.page_bytes]
        connection.read_value_into(self._binding.header(slot), page)
        return self._binding.check(slot, key)

    def _absent(self, size: int | ErrorReply | None) -> Outcome:
        """The outcome of a key whose value is no page."""
        if size is None:
            return Outcome.MISS
        if not isinstance(size, ErrorReply):
            return Outcome.CORRUPT
        return Outcome.CORRUPT if size.code == "WRONGTYPE" else self._refused(size, Outcome.FAILED)

    def _skip(self, connection: RedisConnection, size: int | ErrorReply | None) -> None:
        if not isinstance(size, int):
            return
        if size > self._frame_bytes:  # to read on could take for ever
            raise ProtocolError(f"a value of {size} bytes, where {self._frame_bytes} are the most")
        connection.skip_value(size)

    def _send(self, connection: RedisConnection, batch: _PageBatch, places: Sequence[int]) -> None:
        for start in range(0, len(places), self._group):
            connection.send(self._sealed(batch, places[start : start + self._group]))
        for place in places:
            batch.outcomes[place] = self._stored(connection.read_reply())

    def _sealed(self, batch: _PageBatch, places: Sequence[int]) -> Iterator[Piece]:
        """The commands that store pages, in parts."""
        for place in places:
            slot, key = batch.slots[place], batch.keys[place]
            self._binding.seal(slot, key)
            head, tail = set_command(self._name(key), self._frame_bytes, self._options.ttl_seconds)
            page = self._binding.page(slot)[: self._binding.page_bytes]
            yield from (head, self._binding.header(slot), page, tail)

    def _stored(self, reply: RespReply) -> Outcome:
        if reply == b"OK":
            return Outcome.STORED
        if reply is None:
            return Outcome.EXISTS
        if not isinstance(reply, ErrorReply):
            raise ProtocolError(f"{reply!r:.40} is no answer to SET")
        return self._refused(reply, Outcome.REJECTED if reply.code in _REFUSALS else Outcome.FAILED)

    def _refused(self, reply: ErrorReply, outcome: Outcome) -> Outcome:
        """`outcome`; refusals are logged."""
        message, server = "%s refuses, pool %s: %s", self._options.server
        self._failures.warning(reply.code, message, server, self._binding.pool, reply.text)
        return outcome

    # On the loop:

    async def _drop(self, keys: Sequence[ObjectKey]) -> None:
        """Delete damaged pages, so that they can be stored anew."""
        self.corrupt += len(keys)
        if not self._options.read_only:
            await self._try_count(b"UNLINK", keys)

    async def _put_few(self, batch: _PageBatch) -> None:
        """Send the pages of a short call at once; the server says which were there."""
        await self._run("put", self._send, batch, [range(len(batch.keys))])
        refused = [place for place, end in enumerate(batch.outcomes) if end is Outcome.REJECTED]
        await self._mark_existing(batch, refused)  # a full server refuses before it looks for the key

    async def _put_many(self, batch: _PageBatch) -> None:
        """Ask which pages are there, which is cheaper than to send them once more, and send the rest."""
        if await self._mark_existing(batch, range(len(batch.keys))):
            fresh = [place for place, end in enumerate(batch.outcomes) if end is not Outcome.EXISTS]
            await self._run("put", self._send, batch, parts(fresh, 1), self._turn)

    async def _mark_existing(self, batch: _PageBatch, places: Sequence[int]) -> bool:
        """Set the outcome of pages that are there to EXISTS; returns whether the server answered."""
        there = await self._try_count(b"EXISTS", [batch.keys[place] for place in places])
        for place in compress(places, there or ()):
            batch.outcomes[place] = Outcome.EXISTS
        return there is not None

    def _warn(self, verb: str, count: int, kind: type[OSError], reason: str) -> None:
        server, pool, message = self._options.server, self._binding.pool, "%s, pool %s: %s of %d pages: %s"
        self._failures.warning((verb, kind), message, server, pool, verb, count, reason, pages=count)

    def __repr__(self) -> str:
        return f"<RedisEngine {self._binding.pool} at {self._options.server}: {self.corrupt} corrupt>"


def _text(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
