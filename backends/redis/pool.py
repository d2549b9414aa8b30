"""Threads, and connections of redis-py to the servers that they work with."""

from __future__ import annotations

import asyncio
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar, cast

from redis.connection import AbstractConnection, ConnectionPool
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    InvalidResponse,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as SocketTimeoutError

from asynchicache.backends.closing import off_the_loop
from asynchicache.backends.redis.wire import ErrorReply, ProtocolError, RefusedError, Wire
from asynchicache.errors import ClosedError
from asynchicache.ports import Port, Worker

T = TypeVar("T")

_THREAD_NAME = "asynchicache-redis"
_LOOKUPS = 2
"""Threads that only ask, and never wait for pages; two, since a cache has several pools."""


class _ThreadLane:
    """Threads for one kind of work, which waits for no other kind."""

    def __init__(self, count: int, port: Port) -> None:
        self.permits = asyncio.Semaphore(count)
        self.count = count
        self.threads: list[Worker] = [port.worker(_THREAD_NAME) for _ in range(count)]

    def free(self, thread: Worker) -> None:
        self.threads.append(thread)
        self.permits.release()


class WorkerPool:
    """Runs work that blocks in threads, with connections. Both are made when they are needed; the one that
    was used last is taken first.

    Args:
        connections: how many may move pages at once; a few more only ask.
    """

    def __init__(self, connections: int, port: Port) -> None:
        self.size = connections
        self._port = port
        self._pages = _ThreadLane(connections, port)
        self._lookups = _ThreadLane(_LOOKUPS, port)
        self._servers = _ThreadLane(1, port)
        self._probes = _ThreadLane(1, port)
        self._lanes = (self._pages, self._lookups, self._servers, self._probes)
        self._idle: defaultdict[ConnectionPool, list[AbstractConnection]] = defaultdict(list)
        self._closed = False
        self._closing = asyncio.Lock()  # two callers that close would wait for each other's turns

    async def run(
        self,
        server: ConnectionPool,
        work: Callable[[Wire], T],
        *,
        lookup: bool = False,
        probe: bool = False,
        asking: bool = False,
        on_turn: Callable[[], object] = bool,
    ) -> T:
        """Run `work` with a connection to a server, in a thread. A lookup waits only for other lookups, and a
        probe, which asks a server that hangs, for other probes.

        A call that is cancelled interrupts the connection, and ends when the thread has left the slots: they
        are not touched afterwards. A call that raises anything may have read half a reply, so its connection
        is dropped, and what is idle beside it.

        Args:
            asking: the server is receiving the keys from another node of its cluster.
            on_turn: called when the wait for a thread is over.

        Raises:
            OSError: the server cannot be reached, or the connection broke.
            ClosedError: the pool is closed.
        """
        lane = self._probes if probe else self._lookups if lookup else self._pages
        await self._permit(lane)
        on_turn()
        try:
            idle = self._idle[server]
            connection = cast(AbstractConnection, idle.pop() if idle else server.make_connection())
        except BaseException:
            lane.permits.release()
            raise
        wire = Wire(connection, asking=asking)
        try:
            return await self._in_thread(lane, partial(_connected, wire, work), wire, server)
        except BaseException:
            self.forget(server)
            raise

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work`, which uses redis-py's own clients, in a thread of its own; one at a time. A caller that
        is cancelled does not wait for it.

        Raises:
            OSError: a server cannot be reached, or refuses.
        """
        await self._permit(self._servers)
        return await self._in_thread(self._servers, partial(_understood, work))

    def forget(self, server: ConnectionPool | None = None) -> None:
        """Close idle connections to a server, or to all: whoever connects anew asks who is there now."""
        for pool in [server] if server is not None else list(self._idle):
            for connection in self._idle[pool]:
                connection.disconnect()

    async def aclose(self) -> None:
        """Wait for the calls in flight, then close all connections and threads. Closing twice, or from two
        tasks at once, is harmless."""
        self._closed = True
        async with self._closing, AsyncExitStack() as stack:
            for lane in self._lanes:
                for _ in range(lane.count):
                    await stack.enter_async_context(lane.permits)
            self.forget()
            await off_the_loop(self._port, self._close_threads, self._abandon_threads)

    def _close_threads(self) -> None:
        for lane in self._lanes:
            for thread in lane.threads:
                thread.close()

    def _abandon_threads(self) -> None:
        for lane in self._lanes:
            for thread in lane.threads:
                thread.abandon()

    async def _permit(self, lane: _ThreadLane) -> None:
        await lane.permits.acquire()
        if self._closed:
            lane.permits.release()
            raise ClosedError("the connections to the server are closed")

    async def _in_thread(
        self,
        lane: _ThreadLane,
        call: Callable[[], T],
        wire: Wire | None = None,
        server: ConnectionPool | None = None,
    ) -> T:
        """Run `call` in one of the lane's threads, of which a permit says that one is free."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        thread = lane.threads.pop()
        try:
            thread.submit(partial(self._run, call, partial(self._end, lane, thread, wire, server, ended)))
        except BaseException:
            lane.free(thread)
            raise
        try:
            await asyncio.wait([ended])
            return ended.result()
        except asyncio.CancelledError:
            if wire is not None and wire.interrupt():
                await _to_its_end(ended)
            ended.cancel()  # nobody asks how it went
            raise
        finally:
            del ended  # else the traceback of an exception holds itself by this name

    def _run(self, call: Callable[[], object], end: Callable[[object, Exception | None], None]) -> None:
        """In the thread: run `call`, and tell the loop."""
        self._port.post(partial(end, *_result(call)))

    def _end(
        self,
        lane: _ThreadLane,
        thread: Worker,
        wire: Wire | None,
        server: ConnectionPool | None,
        ended: asyncio.Future[Any],
        result: object,
        error: Exception | None,
    ) -> None:
        """On the loop: what the call used is free, before anybody who waits for it goes on."""
        if wire is not None and server is not None:
            if ended.cancelled():  # it was interrupted
                wire.connection.disconnect()
            self._idle[server].append(wire.connection)  # redis-py counts those that it made
        lane.free(thread)
        if not ended.done():
            ended.set_result(result) if error is None else ended.set_exception(error)


async def _to_its_end(ended: asyncio.Future[Any]) -> None:
    while not ended.done():  # however often the caller is cancelled
        with suppress(asyncio.CancelledError):
            await asyncio.wait([ended])
    ended.exception()  # seen: the cancellation is what the caller gets


def _connected(wire: Wire, work: Callable[[Wire], T]) -> T:
    """In the thread: connect if need be, and work."""
    connection = wire.connection
    try:
        if not _usable(connection):  # the server may have gone, or restarted, since the last call
            connection.disconnect()
            connection.connect()
        return work(wire)
    except BaseException:
        connection.disconnect()
        raise


def _understood(work: Callable[[], T]) -> T:
    """In the thread: redis-py takes it that its own questions are answered."""
    try:
        return work()
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ProtocolError(f"an answer that means nothing ({error})") from error


def _usable(connection: AbstractConnection) -> bool:
    """Whether it is open, and no unexpected bytes have come."""
    with suppress(RedisError):  # closed by the server
        return bool(connection.is_connected) and not connection.can_read()
    return False


def _result(call: Callable[[], object]) -> tuple[object, Exception | None]:
    # A function of its own: a traceback holds the frame that caught, and that of `_run` has `ended`.
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - the boundary of the thread
        traceback.clear_frames(error.__traceback__)  # of views of slots, before the call ends
        return None, _told(error)


def _told(error: Exception) -> Exception:
    """What redis-py raised, in words of this library."""
    cause = error.__cause__ or error.__context__
    match error:
        case AuthenticationError() | AuthorizationError() | ResponseError() | BusyLoadingError():
            told: Exception = RefusedError(ErrorReply.of(error))
        case SocketTimeoutError():
            told = TimeoutError(str(error))
        case InvalidResponse():
            told = ProtocolError(str(error))
        case RedisError() | RedisClusterException():
            reason = cause.strerror if isinstance(cause, OSError) else None
            told = ConnectionError(reason or str(error))
        case _:
            return error
    return told
