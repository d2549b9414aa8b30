"""One pool's pages in a server: header and page are one value, and a value is received into its slot."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import NamedTuple

from asynchicache.backends.redis.calls import UNANSWERED, Caller, KeyCall
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.wire import (
    ErrorReply,
    Piece,
    ProtocolError,
    RedisCommand,
    ValueReader,
    Wire,
    set_command,
)
from asynchicache.errors import ClosedError, StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import DIGEST_BYTES, ObjectKey
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

LABEL = "label"
"""What the name of a pool's label ends with, where that of a page has its digest."""
_CLAIM = b"claim"
"""What the name of a claim ends with."""
_CLAIMED_PAGES = 16
"""Pages of a path that one claim is for: they share what it costs."""

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
_UNKNOWN = 2
"""What stands for 0 or 1 where a server did not answer."""
_REFUSALS = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"})
"""Error codes of a server that works, but takes no writes."""


class _PageCall(NamedTuple):
    """One call that moves pages. The answers are outcomes."""

    keys: Sequence[ObjectKey]
    slots: Sequence[int]  # of the binding
    call: KeyCall

    def outcomes(self) -> list[Outcome]:
        return [one if isinstance(one, Outcome) else Outcome.FAILED for one in self.call.answers]


_PageWork = Callable[[_PageCall, Wire, Sequence[int]], None]


class RedisEngine:
    """One pool in a server, or in the nodes of a cluster.

    A call ends, by an answer, an exception or a cancellation, only when no thread touches its slots any more.
    A connection that is in the middle of a reply is closed then.

    Args:
        turn: held by the call that sends many pages. The server has one thread, which needs twice the time
            for pages that arrive on several connections at once.
        delete_matching: deletes the keys that match a glob pattern, and returns their number.
    """

    def __init__(
        self,
        binding: PoolBinding,
        caller: Caller,
        turn: asyncio.Lock,
        options: RedisOptions,
        delete_matching: Callable[[str], Awaitable[int]],
    ) -> None:
        self.closed = False
        self.full = False
        """The server refused the last page, for want of room say."""
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._caller = caller
        self._turn = turn
        self._options = options
        self._delete_matching = delete_matching
        self._prefix = f"{options.namespace}:".encode()
        self._frame_bytes = binding.header_bytes + binding.page_bytes
        self._failures = FailureLog(logger)
        self._claims: Counter[bytes] = Counter()
        """Our claims, and for how many calls of `put`."""
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
        return await self._count(b"EXISTS", self._names(keys))

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        connections = min(self._caller.size, len(keys) * self._frame_bytes // _GET_PART_BYTES)
        outcomes = await self._move("get", self._get, keys, slots, connections)
        damaged = [key for key, found in zip(keys, outcomes, strict=True) if found is Outcome.CORRUPT]
        if damaged:
            await self._drop(damaged)
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        outcomes = await (self._put_few if len(keys) <= self._few else self._put_many)(keys, slots)
        if self._claims:
            await self._release(self._claims.keys() & set(map(self._claim_name, keys)))
        return outcomes

    async def claim(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        """
        Raises:
            StorageError: the server does not answer, or refuses.
        """
        self._check_open()
        if self._options.read_only:
            return [Outcome.MISS] * len(keys)
        claims = [self._claim_name(key) for key in keys]
        names = list(dict.fromkeys(claims))
        claim = (b"NX", b"PX", max(1, round(seconds * 1000)))
        # In this order: a page whose claim has ended is found.
        commands: list[RedisCommand] = [(b"SET", name, b"", *claim) for name in names]
        commands += [(b"EXISTS", self._name(key)) for key in keys]
        replies = await self._ask(b"EXISTS", commands)
        there = bytearray(self._bit(b"EXISTS", reply) for reply in replies[len(names) :])
        # Of a server that takes no writes, or does not answer, `put` finds out why.
        lost = {name for name, reply in zip(names, replies, strict=False) if reply is UNANSWERED}
        new = {name for name, reply in zip(names, replies, strict=False) if reply is not None}
        new -= self._claims.keys() | lost
        needed = {name for name, bit in zip(claims, there, strict=True) if not bit}
        self._claims.update((new | self._claims.keys()) & needed)
        if new - needed:
            await self._release(new - needed)
        return [
            Outcome.EXISTS
            if bit == 1
            else Outcome.MISS
            if bit == _UNKNOWN or name in self._claims or name in lost
            else Outcome.CLAIMED
            for name, bit in zip(claims, there, strict=True)
        ]

    async def _release(self, names: Set[bytes]) -> None:
        """End claims, unless another call of `put` needs them too."""
        self._claims.subtract(names)
        done = [name for name in names if self._claims[name] <= 0]
        for name in done:
            del self._claims[name]
        if done:
            await self._try_count(b"UNLINK", done)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        self._check_open()
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        gone = await self._try_count(b"UNLINK", self._names(keys))
        if gone is None:
            return [Outcome.FAILED] * len(keys)
        return [(Outcome.MISS, Outcome.HIT, Outcome.FAILED)[bit] for bit in gone]

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Tell the server that pages were used, in this order. Its clock for this ticks once a second: pages
        used in the same second count as equally recent.

        A read-only engine tells it too: pages in use should not be evicted.

        Raises:
            StorageError: the server does not answer, or refuses.
        """
        self._check_open()
        await self._count(b"TOUCH", self._names(keys))

    async def clear(self) -> int:
        """Delete the pool's pages; returns their number.

        Raises:
            StorageError: the server cannot be reached, or refuses.
        """
        self._check_open()
        binding = self._binding
        any_page = ObjectKey(binding.fingerprint, bytes(DIGEST_BYTES), binding.pool, binding.shard)
        return await self._delete_matching(f"{self._options.namespace}:{any_page.pattern()}")

    async def label(self, label: bytes) -> None:
        """
        Raises:
            StorageError: the server cannot be reached, or refuses.
        """
        if self._options.read_only:
            return
        binding = self._binding
        any_page = ObjectKey(binding.fingerprint, bytes(DIGEST_BYTES), binding.pool, binding.shard)
        name = self._prefix + f"{any_page.text().rpartition('.')[0]}.{LABEL}".encode()
        (share,) = self._caller.servers.split([name], [0])
        try:
            async with asyncio.timeout_at(self._until()):
                (answer,) = await self._caller.run(share.server, lambda wire: wire.ask(("SET", name, label)))
        except OSError as error:
            raise StorageError(f"{self._options.server}: SET of a label: {_text(error)}") from error
        if isinstance(answer, ErrorReply):
            raise StorageError(f"{self._options.server}: SET of a label: {answer.text}")

    async def aclose(self) -> None:
        self.closed = True

    @property
    def degraded(self) -> bool:
        """Whether some nodes of a cluster hang, and others do not."""
        return self._caller.degraded

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"redis engine of pool {self._binding.pool!r} is closed")

    def _until(self) -> float:
        return asyncio.get_running_loop().time() + self._options.timeout_seconds

    def _name(self, key: ObjectKey) -> bytes:
        return self._prefix + key.text().encode()

    def _names(self, keys: Sequence[ObjectKey]) -> list[bytes]:
        return list(map(self._name, keys))

    def _claim_name(self, key: ObjectKey) -> bytes:
        group = ObjectKey(key.fingerprint, key.group, key.pool, key.shard)
        return b"%b.%d.%b" % (self._name(group), key.place // _CLAIMED_PAGES, _CLAIM)

    async def _count(self, verb: bytes, names: Sequence[bytes]) -> bytearray:
        """Send one command a key, each of which answers 0 or 1; `_UNKNOWN` where one of several servers did
        not answer."""
        replies = await self._ask(verb, [(verb, name) for name in names])
        return bytearray(self._bit(verb, reply) for reply in replies)

    async def _ask(self, verb: bytes, commands: Sequence[RedisCommand]) -> list[object]:
        """Send one command a key, which stands second and moves no page, to the servers of the keys; those of
        a server in this order. One of several servers that does not answer leaves UNANSWERED.

        Raises:
            StorageError: no server answers.
        """
        call = KeyCall([name for _, name, *_ in commands if isinstance(name, bytes)])

        def ask(wire: Wire, places: Sequence[int]) -> None:
            replies = wire.ask(*(commands[place] for place in places))
            for place, reply in zip(places, replies, strict=True):
                if isinstance(reply, ErrorReply):
                    call.refused(place, reply, reply)
                else:
                    call.answers[place] = reply

        try:
            errors = await self._caller.send(call, ask, lookup=True, until=self._until())
        except OSError as error:
            errors = [error]
        lost = call.answers.count(UNANSWERED)
        if errors and lost == len(commands):
            raise StorageError(
                f"{self._options.server}: {verb.decode()} of {lost} keys: {_text(errors[0])}"
            ) from errors[0]
        if errors:
            self._warn(verb.decode(), lost, errors[0])
        return call.answers

    async def _try_count(self, verb: bytes, names: Sequence[bytes]) -> bytearray | None:
        """As `_count`; None, and a line in the log, if there is no answer."""
        try:
            return await self._count(verb, names)
        except StorageError as error:
            self._failures.warning(
                (verb, type(error)), "pool %s: %s", self._binding.pool, error, pages=len(names)
            )
            return None

    def _bit(self, verb: bytes, reply: object) -> int:
        if reply is UNANSWERED:
            return _UNKNOWN
        if isinstance(reply, ErrorReply):
            raise StorageError(f"{self._options.server} refuses {verb.decode()}: {reply.text}")
        if not isinstance(reply, int) or not 0 <= reply <= 1:
            raise ProtocolError(f"{reply!r:.40} is no answer to {verb.decode()}")
        return reply

    async def _move(
        self,
        verb: str,
        work: _PageWork,
        keys: Sequence[ObjectKey],
        slots: Sequence[int],
        connections: int = 1,
        turn: AbstractAsyncContextManager[object] | None = None,
    ) -> list[Outcome]:
        """Do `work`, on at most so many connections, while `turn` is held; returns what came of each page."""
        pages, until = _PageCall(keys, slots, KeyCall(self._names(keys))), self._until()
        try:
            async with AsyncExitStack() as held:
                if turn is not None:
                    async with asyncio.timeout_at(until):
                        await held.enter_async_context(turn)
                errors = await self._caller.send(
                    pages.call, partial(work, pages), most=connections, until=until
                )
        except TimeoutError:
            errors = [TimeoutError(f"no end after {self._options.timeout_seconds:g} s")]
        except StorageError as error:  # no node has a key
            errors = [error]
        outcomes = pages.outcomes()
        if errors:
            self._warn(verb, outcomes.count(Outcome.FAILED), errors[0])
        return outcomes

    # In a thread:

    def _get(self, pages: _PageCall, wire: Wire, places: Sequence[int]) -> None:
        """Read values into slots. Half a window is requested each time that half a window has come."""
        commands = [(b"GET", pages.call.names[place]) for place in places]
        step = self._window // 2
        with wire.slots():
            wire.send(wire.packed(commands[: self._window]))
            reader = ValueReader(wire)
            for came, place in enumerate(places, 1):
                self._receive(reader, pages, place)
                if came % step == 0:
                    wire.send(wire.packed(commands[came - step + self._window :][:step]))
        damaged = any(pages.call.answers[place] is Outcome.CORRUPT for place in places)
        if damaged or not reader.in_step:  # perhaps no page is damaged, but replies are out of step
            wire.connection.disconnect()

    def _receive(self, reader: ValueReader, pages: _PageCall, place: int) -> None:
        size, answers = reader.size(), pages.call.answers
        if isinstance(size, ErrorReply):
            answers[place] = Outcome.CORRUPT
            if size.code != "WRONGTYPE":
                pages.call.refused(place, size, self._refused(size, Outcome.FAILED))
        elif size == self._frame_bytes:
            slot = pages.slots[place]
            page = self._binding.page(slot)[: self._binding.page_bytes]
            reader.read_into(self._binding.header(slot), page)
            answers[place] = self._binding.check(slot, pages.keys[place])
        else:
            answers[place] = Outcome.MISS if size is None else Outcome.CORRUPT
            self._skip(reader, size)

    def _skip(self, reader: ValueReader, size: int | None) -> None:
        if size is not None and size > max(self._frame_bytes, _CALL_BYTES):  # takes too long
            raise ProtocolError(f"a value of {size} bytes, where a page has {self._frame_bytes}")
        if size is not None:
            reader.skip(size)

    def _send(self, pages: _PageCall, wire: Wire, places: Sequence[int]) -> None:
        with wire.slots():
            for start in range(0, len(places), self._group):
                wire.send(list(self._sealed(pages, places[start : start + self._group], wire.asking)))
        for place in places:
            reply = wire.reply()
            if isinstance(reply, ErrorReply):
                outcome = Outcome.REJECTED if reply.code in _REFUSALS else Outcome.FAILED
                pages.call.refused(place, reply, self._refused(reply, outcome))
                self.full = outcome is Outcome.REJECTED
            elif reply is None or reply == b"OK":
                pages.call.answers[place] = Outcome.EXISTS if reply is None else Outcome.STORED
                self.full = False
            else:
                raise ProtocolError(f"{reply!r:.40} is no answer to SET")

    def _sealed(self, pages: _PageCall, places: Sequence[int], asking: bool) -> Iterator[Piece]:
        """The commands that store pages, in pieces: what is small, and a page, by turns."""
        tail = b""
        for place in places:
            slot = pages.slots[place]
            self._binding.seal(slot, pages.keys[place])
            head, end = set_command(
                pages.call.names[place], self._frame_bytes, self._options.ttl_seconds, asking=asking
            )
            yield b"".join((tail, head, self._binding.header(slot)))
            yield self._binding.page(slot)[: self._binding.page_bytes]
            tail = end
        yield tail

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
            await self._try_count(b"UNLINK", self._names(keys))

    async def _put_few(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Send the pages of a short call at once; the server says which were there."""
        outcomes = await self._move("put", self._send, keys, slots)
        refused = [place for place, end in enumerate(outcomes) if end is Outcome.REJECTED]
        # A full server refuses before it looks for the key.
        there = await self._try_count(b"EXISTS", self._names([keys[place] for place in refused]))
        for place, bit in zip(refused, there or (), strict=False):
            if bit == 1:
                outcomes[place] = Outcome.EXISTS
        return outcomes

    async def _put_many(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Ask which pages are there, which is cheaper than to send them once more, and send the rest."""
        there = await self._try_count(b"EXISTS", self._names(keys))
        if there is None:
            return [Outcome.FAILED] * len(keys)
        new = [place for place, bit in enumerate(there) if not bit]
        new_keys, new_slots = [keys[place] for place in new], [slots[place] for place in new]
        sent = await self._move("put", self._send, new_keys, new_slots, turn=self._turn)
        outcomes = [Outcome.FAILED if bit == _UNKNOWN else Outcome.EXISTS for bit in there]
        for place, outcome in zip(new, sent, strict=True):
            outcomes[place] = outcome
        return outcomes

    def _warn(self, verb: str, count: int, error: OSError) -> None:
        message, server, pool = "%s, pool %s: %s of %d pages: %s", self._options.server, self._binding.pool
        self._failures.warning(
            (verb, type(error)), message, server, pool, verb, count, _text(error), pages=count
        )

    def __repr__(self) -> str:
        return f"<RedisEngine {self._binding.pool} at {self._options.server}: {self.corrupt} corrupt>"


def _text(error: OSError) -> str:
    return str(error) or "no answer in time"
