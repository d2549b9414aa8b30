"""One pool's pages in a server: header and page are one value, and a value is received into its slot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import chain, compress
from typing import NamedTuple

from asynchicache.backends.compute import INLINE_BYTES, over_page
from asynchicache.backends.redis.connection import Connection
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.pool import ConnectionPool
from asynchicache.backends.redis.resp import ErrorReply, ProtocolError, Reply, command, set_command
from asynchicache.backends.redis.views import Bytes
from asynchicache.backends.redis.wires import MOST_PARTS
from asynchicache.errors import ClosedError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_CALL_BYTES = 64 << 20
_MOST_PAGES = 512
_GET_PART_BYTES = 1 << 20
"""Less than this is not worth a second connection."""
_WINDOW_BYTES = 2 << 20
"""Asked for ahead on a connection: the server is never idle, and its output buffers stay small."""
_GROUP_BYTES = 2 << 20
"""Sealed, then sent in one system call, while they are in the processor's cache. While pages are sealed the
server runs out of work and sleeps: to wake it costs more than a few pages that have left the nearer cache."""
_FEW_PAGES = 16
"""A call of no more, and of no more bytes than a group, is not worth a question and a thread: two round trips
take longer than its pages, and the loop seals so many in some hundred microseconds."""
_PAGE_PARTS = 4
"""Parts in which a page is sent: what goes before its header, header, page, what goes behind it."""
_REFUSALS = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS"})
"""Error codes of a server that is well, but does not take writes."""


class _Batch(NamedTuple):
    """One call: places in it are numbers from 0 on."""

    keys: Sequence[ObjectKey]
    slots: Sequence[int]  # of the binding
    outcomes: list[Outcome]


Work = Callable[[Connection, _Batch, Sequence[int]], Awaitable[None]]


def parts(places: Sequence[int], count: int) -> list[Sequence[int]]:
    """`places` in at most `count` runs of nearly equal length, none empty."""
    step = max(1, -(-len(places) // max(1, count)))
    return [places[start : start + step] for start in range(0, len(places), step)]


class RedisEngine:
    """One pool in one server.

    A call ends, by an answer, an exception or a cancellation, only when nothing touches its slots
    any more: a connection that is in the middle of a value is closed.

    Args:
        binding: the pool's slots in host memory.
        port: threads, in which large pages are checked.
        pool: connections, shared by all pools.
        options: what the user chose.
        delete_matching: deletes the keys that match a glob; how many.
    """

    def __init__(
        self,
        binding: PoolBinding,
        port: Port,
        pool: ConnectionPool,
        options: RedisOptions,
        delete_matching: Callable[[str], Awaitable[int]],
    ) -> None:
        self.closed = False
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._pool = pool
        self._options = options
        self._delete_matching = delete_matching
        self._prefix = f"{options.namespace}:".encode()
        self._frame_bytes = binding.header_bytes + binding.page_bytes
        self._over_page = partial(over_page, port, binding.page_bytes)
        self._told: set[str] = set()
        self._group = min(-(-_GROUP_BYTES // self._frame_bytes), MOST_PARTS // _PAGE_PARTS)
        large = binding.page_bytes > INLINE_BYTES  # the loop does not seal it
        self._few = 0 if large else min(self._group, _FEW_PAGES)
        self._window = max(2, _WINDOW_BYTES // self._frame_bytes)
        self.capabilities = Capabilities(
            durable=True,
            checks=True,
            shared=True,
            batch_pages=max(1, min(_MOST_PAGES, _CALL_BYTES // self._frame_bytes)),
            concurrency=options.connections,
        )

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """
        Raises:
            StorageError: the server does not answer, or refuses.
            ClosedError: the engine is closed; as all four calls.
        """
        self._check_open()
        return await self._count(b"EXISTS", keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        batch = _Batch(keys, slots, [Outcome.FAILED] * len(keys))
        connections = min(self._pool.most, len(keys) * self._frame_bytes // _GET_PART_BYTES)
        await self._run("get", self._get, batch, range(len(keys)), connections)
        damaged = [key for key, found in zip(keys, batch.outcomes, strict=True) if found is Outcome.CORRUPT]
        if damaged:
            await self._drop(damaged)
        return batch.outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        batch = _Batch(keys, slots, [Outcome.FAILED] * len(keys))
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
        """Tell the server of uses, in this order. Its clock for them ticks once a second: of pages that were
        used in one second none is more recent than another.

        A server that is only read from is told too: what is used of it is not to be evicted.

        Raises:
            StorageError: the server does not answer, or refuses.
        """
        self._check_open()
        await self._count(b"TOUCH", keys)

    async def clear(self) -> int:
        """
        Raises:
            StorageError: the server cannot be reached, or refuses.
        """
        self._check_open()
        binding = self._binding
        any_page = ObjectKey(binding.fingerprint, bytes(32), binding.pool, binding.shard)
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
        """Ask one question a key, whose answer is 0 or 1."""
        if not keys:
            return bytearray()
        try:
            async with self._deadline(), self._pool.connection() as connection:
                replies = await connection.ask(*(command(verb, self._name(key)) for key in keys))
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
            logger.warning("pool %s: %s", self._binding.pool, error)
            return None

    def _bit(self, verb: bytes, reply: Reply) -> int:
        if isinstance(reply, ErrorReply):
            raise StorageError(f"{self._options.server} refuses {verb.decode()}: {reply.text}")
        if not isinstance(reply, int) or not 0 <= reply <= 1:
            raise ProtocolError(f"{reply!r:.40} is no answer to {verb.decode()}")
        return reply

    async def _run(
        self, verb: str, work: Work, batch: _Batch, places: Sequence[int], connections: int
    ) -> None:
        """Do `work` on so many connections at once; places that none gets to keep their outcome."""
        try:
            async with self._deadline(), asyncio.TaskGroup() as group:
                for part in parts(places, connections):
                    group.create_task(self._part(verb, work, batch, part))
        except TimeoutError:
            self._warn(verb, places, f"no end after {self._options.timeout_seconds:g} s")

    async def _part(self, verb: str, work: Work, batch: _Batch, places: Sequence[int]) -> None:
        try:
            async with self._pool.connection() as connection:
                await work(connection, batch, places)
        except OSError as error:
            self._warn(verb, places, _text(error))

    async def _get(self, connection: Connection, batch: _Batch, places: Sequence[int]) -> None:
        """Read values into slots, asking ahead: half of the window each time that so much has come."""
        commands = [command(b"GET", self._name(batch.keys[place])) for place in places]
        step = self._window // 2
        await connection.send(b"".join(commands[: self._window]))
        for index, place in enumerate(places):
            size = await connection.read_value_size()
            if size == self._frame_bytes:
                await self._receive_page(connection, batch, place)
            else:
                batch.outcomes[place] = self._absent(size)
                await self._skip(connection, size)
            came = index + 1
            if came % step == 0 and (more := commands[came - step + self._window :][:step]):
                await connection.send(b"".join(more))
        if any(batch.outcomes[place] is Outcome.CORRUPT for place in places):
            connection.close()  # perhaps no page is damaged, but replies are out of step

    async def _receive_page(self, connection: Connection, batch: _Batch, place: int) -> None:
        slot, key = batch.slots[place], batch.keys[place]
        page = self._binding.page(slot)[: self._binding.page_bytes]
        await connection.read_value_into(self._binding.header(slot), page)
        batch.outcomes[place] = await self._over_page(partial(self._binding.check, slot, key))

    def _absent(self, size: int | ErrorReply | None) -> Outcome:
        """The outcome of a key whose value is no page."""
        if size is None:
            return Outcome.MISS
        if not isinstance(size, ErrorReply):
            return Outcome.CORRUPT
        return Outcome.CORRUPT if size.code == "WRONGTYPE" else self._refused(size, Outcome.FAILED)

    async def _skip(self, connection: Connection, size: int | ErrorReply | None) -> None:
        if not isinstance(size, int):
            return
        if size > self._frame_bytes:  # to read on could take for ever
            raise ProtocolError(f"a value of {size} bytes, where {self._frame_bytes} are the most")
        await connection.skip_value(size)

    async def _drop(self, keys: Sequence[ObjectKey]) -> None:
        """Delete damaged pages, so that they can be stored anew."""
        self.corrupt += len(keys)
        if not self._options.read_only:
            await self._try_count(b"UNLINK", keys)

    async def _put_few(self, batch: _Batch) -> None:
        """Send the pages of a short call at once; the server says which were there."""
        await self._run("put", self._send_at_once, batch, range(len(batch.keys)), 1)
        refused = [place for place, end in enumerate(batch.outcomes) if end is Outcome.REJECTED]
        await self._mark_existing(batch, refused)  # a full server refuses whatever it is sent

    async def _put_many(self, batch: _Batch) -> None:
        """Ask what is there, which is cheaper than to send it once more, and send the rest."""
        if await self._mark_existing(batch, range(len(batch.keys))):
            fresh = [place for place, end in enumerate(batch.outcomes) if end is not Outcome.EXISTS]
            await self._run("put", self._send_in_groups, batch, fresh, 1)

    async def _mark_existing(self, batch: _Batch, places: Sequence[int]) -> bool:
        """EXISTS becomes the outcome of places whose pages are there; whether there was an answer."""
        there = await self._try_count(b"EXISTS", [batch.keys[place] for place in places])
        for place in compress(places, there or ()):
            batch.outcomes[place] = Outcome.EXISTS
        return there is not None

    async def _send_at_once(self, connection: Connection, batch: _Batch, places: Sequence[int]) -> None:
        await connection.send(*chain.from_iterable(self._groups(batch, places)))
        await self._read_stored(connection, batch, places)

    async def _send_in_groups(self, connection: Connection, batch: _Batch, places: Sequence[int]) -> None:
        await connection.send_groups(self._groups(batch, places), len(places))
        await self._read_stored(connection, batch, places)

    async def _read_stored(self, connection: Connection, batch: _Batch, places: Sequence[int]) -> None:
        for place in places:
            batch.outcomes[place] = self._stored(await connection.read_reply())

    def _groups(self, batch: _Batch, places: Sequence[int]) -> Iterator[list[Bytes]]:
        """Pages as they are sent, sealed when their turn comes."""
        for start in range(0, len(places), self._group):
            group = places[start : start + self._group]
            yield [part for place in group for part in self._sealed(batch.slots[place], batch.keys[place])]

    def _sealed(self, slot: int, key: ObjectKey) -> tuple[Bytes, ...]:
        """The command that stores a page, in `_PAGE_PARTS` parts."""
        self._binding.seal(slot, key)
        head, tail = set_command(self._name(key), self._frame_bytes, self._options.ttl_seconds)
        page = self._binding.page(slot)[: self._binding.page_bytes]
        return head, self._binding.header(slot), page, tail

    def _stored(self, reply: Reply) -> Outcome:
        if reply == b"OK":
            return Outcome.STORED
        if reply is None:
            return Outcome.EXISTS
        if not isinstance(reply, ErrorReply):
            raise ProtocolError(f"{reply!r:.40} is no answer to SET")
        return self._refused(reply, Outcome.REJECTED if reply.code in _REFUSALS else Outcome.FAILED)

    def _refused(self, reply: ErrorReply, outcome: Outcome) -> Outcome:
        """`outcome`; the first refusal of a kind is worth a line in the log."""
        if reply.code not in self._told:
            self._told.add(reply.code)
            logger.warning("%s refuses, pool %s: %s", self._options.server, self._binding.pool, reply.text)
        return outcome

    def _warn(self, verb: str, items: Sequence[object], reason: object) -> None:
        server, pool = self._options.server, self._binding.pool
        logger.warning("%s, pool %s: %s of %d pages: %s", server, pool, verb, len(items), reason)

    def __repr__(self) -> str:
        return f"<RedisEngine {self._binding.pool} at {self._options.server}: {self.corrupt} corrupt>"


def _text(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error)
