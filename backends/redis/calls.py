"""One call at the servers of its keys: divided among them, and followed where they send it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeAlias, TypeVar

from redis.connection import ConnectionPool

from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.pool import WorkerPool
from asynchicache.backends.redis.servers import KeyShare, Servers
from asynchicache.backends.redis.wire import ErrorReply, Wire
from asynchicache.errors import ClosedError
from asynchicache.ports import Port

T = TypeVar("T")

_ATTEMPTS = 5
"""Redirections that a call follows: redis-py's number for one command is 16, each of one key."""
_MOVED = frozenset({"MOVED", "ASK"})
_PROBE_SECONDS = 1.0
"""Within which a node that hung shall say that it is back, and between two questions."""
UNANSWERED = object()
"""What stands for an answer of a server that gave none."""


class HangingError(OSError):
    """A node of a cluster did not answer in time, and is not asked until it does."""


@dataclass(slots=True, eq=False)
class KeyCall:
    """Keys, and what came of them; places are numbers of keys from 0 on.

    Attributes:
        answers: one for each key; UNANSWERED as long as there is none.
        elsewhere: by place, the refusals of servers that do not have the key, or are replicas.
    """

    names: Sequence[bytes]
    answers: list[object] = field(init=False)
    elsewhere: dict[int, ErrorReply] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.answers = [UNANSWERED] * len(self.names)

    def refused(self, place: int, reply: ErrorReply, answer: object) -> None:
        """The server did not do it: `answer` counts unless another one does."""
        self.answers[place] = answer
        if reply.code in _MOVED or reply.code == "READONLY":
            self.elsewhere[place] = reply


KeyWork: TypeAlias = "Callable[[Wire, Sequence[int]], None]"
"""Does what a call asks at some of its places, in a thread, and sets their answers."""


def parts(places: Sequence[int], count: int) -> list[Sequence[int]]:
    """`places` in at most `count` runs of nearly equal length, none empty."""
    step = max(1, -(-len(places) // max(1, count)))
    return [places[start : start + step] for start in range(0, len(places), step)]


def _deadline(until: float) -> asyncio.Timeout:
    return asyncio.timeout_at(None if until == inf else until)


class Caller:
    """Sends calls to the servers of their keys."""

    def __init__(self, options: RedisOptions, port: Port) -> None:
        self.size = options.connections
        self.servers = Servers(options)
        self._workers = WorkerPool(options.connections, port)
        self._renewing = asyncio.Lock()
        self._renewals = 0
        self._looking: asyncio.Task[None] | None = None
        self._hanging: dict[ConnectionPool, asyncio.Task[None]] = {}  # and who waits for their answer

    async def open(self) -> None:
        """Find the servers, once.

        Raises:
            OSError: they cannot be reached, or are not what the options say.
        """
        await self._workers.call(self.servers.open)

    async def run(self, server: ConnectionPool, work: Callable[[Wire], T]) -> T:
        """Ask one server.

        Raises:
            OSError: it cannot be reached, or the connection broke.
        """
        return await self._workers.run(server, work, lookup=True)

    async def send(
        self, call: KeyCall, work: KeyWork, *, lookup: bool = False, most: int = 1, until: float = inf
    ) -> list[OSError]:
        """Do `work` at the servers of the keys, on at most `most` connections. Where a server sends us to
        another one, or is lost and there are others, do it there.

        Args:
            until: time of the loop at which a server that has not answered is late. One of several is then
                left alone until it answers.

        Returns:
            Why keys have no answer.

        Raises:
            OSError: a server was lost, and nobody says where its keys are now.
        """
        shares = self.servers.split(call.names, range(len(call.names)))
        renewed = False
        for _ in range(_ATTEMPTS):
            seen = self._renewals
            call.elsewhere.clear()
            errors = await self._attempt(shares, work, lookup, most, until)
            shares = self.servers.redirected(
                {place: reply for place, reply in call.elsewhere.items() if reply.code in _MOVED}, call.names
            )
            replicas = [place for place, reply in call.elsewhere.items() if reply.code == "READONLY"]
            lost = any(isinstance(error, ConnectionError) for error in errors)
            if (replicas or lost) and not renewed:
                renewed = True
                async with _deadline(until):
                    changed = await self._renew(seen, replica=bool(replicas))
                if changed:
                    open_places = [n for n, answer in enumerate(call.answers) if answer is UNANSWERED]
                    shares += self.servers.split(call.names, [*replicas, *(open_places if lost else ())])
            if not shares:
                break
        return errors

    async def _attempt(
        self, shares: Sequence[KeyShare], work: KeyWork, lookup: bool, most: int, until: float
    ) -> list[OSError]:
        errors: list[OSError] = []

        async def one(share: KeyShare, places: Sequence[int]) -> None:
            begun: list[ConnectionPool] = []  # a call that waits for its turn tells nothing of the server
            try:
                async with _deadline(until):
                    await self._workers.run(
                        share.server,
                        lambda wire: work(wire, places),
                        lookup=lookup,
                        asking=share.asking,
                        on_turn=lambda: begun.append(share.server),
                    )
            except OSError as error:
                errors.append(error)
                if isinstance(error, TimeoutError) and begun:
                    self._late(share.server)

        async with asyncio.TaskGroup() as group:
            for share in shares:
                if share.server in self._hanging:
                    errors.append(HangingError("a node hangs, and is not asked"))
                    continue
                for places in parts(share.places, most // len(shares)):
                    group.create_task(one(share, places))
        return errors

    async def _renew(self, seen: int, *, replica: bool) -> bool:
        """Find the servers anew, unless another call did it since this one began."""
        async with self._renewing:
            if self._renewals != seen:
                return True
            changed = await self._workers.call(partial(self.servers.renew, replica=replica))
            self._renewals += changed
            if changed:
                self._workers.forget()
            return changed

    @property
    def degraded(self) -> bool:
        """Whether some servers hang, and others do not."""
        return 0 < len(self._hanging) < len(self.servers.all())

    def _late(self, server: ConnectionPool) -> None:
        """One of several servers is left alone until it answers; the only one is what calls are for."""
        if len(self.servers.all()) < 2:
            self.suspect()
        elif server not in self._hanging:
            self._hanging[server] = asyncio.create_task(self._watch(server))

    async def _watch(self, server: ConnectionPool) -> None:
        """Until a node answers again, or another one has its place."""
        try:
            while server in self.servers.all() and not await self._answers(server):
                await self._look()
                await asyncio.sleep(_PROBE_SECONDS)
        finally:
            del self._hanging[server]

    async def _answers(self, server: ConnectionPool) -> bool:
        """Whether a server says anything, or is gone, which calls are told at once."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._workers.run(server, lambda wire: wire.ask(("PING",)), probe=True)
        except TimeoutError:
            return False
        except (OSError, ClosedError):
            return True
        return True

    def suspect(self) -> None:
        """A server did not answer in time. Another one may have its place by now: find out, meanwhile."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        with suppress(OSError, ClosedError):
            await self._renew(self._renewals, replica=False)

    async def aclose(self) -> None:
        tasks = [*self._hanging.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._workers.aclose()
        self.servers.close()
