"""A few connections to one server, each with a thread of its own."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from asynchicache.backends.closing import off_the_loop
from asynchicache.backends.redis.connection import RedisConnection
from asynchicache.backends.redis.dialing import dial, look_up
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.errors import ClosedError
from asynchicache.ports import Port, Worker

T = TypeVar("T")

_THREAD_NAME = "asynchicache-redis"
_LOOKUPS = 2
"""Connections that only ask, and never wait for pages; two, since a cache has several pools."""


class ConnectionPool:
    """Runs work that blocks on connections, in their threads.

    Threads and connections are made when they are needed. The connection that was used last is taken first.

    Args:
        options: the server, and how many connections may move pages at once; a few more only ask.
        port: threads.
    """

    def __init__(self, options: RedisOptions, port: Port) -> None:
        self.size = options.connections
        self._options = options
        self._port = port
        self._free = [_ConnectionThread(options, port) for _ in range(self.size + _LOOKUPS)]
        self._pages = asyncio.Semaphore(self.size)
        self._lookups = asyncio.Semaphore(_LOOKUPS)
        self._closed = False
        self._closing = asyncio.Lock()  # two callers that close would wait for each other's turns

    async def run(self, work: Callable[[RedisConnection], T], *, lookup: bool = False) -> T:
        """Run `work` with a connection, in a thread. A lookup waits only for other lookups.

        A call that is cancelled interrupts the connection, and ends when the thread has left the work: its
        memory is not touched afterwards. A call that raises anything may have read half a reply, so its
        connection is dropped.

        Raises:
            OSError: the server cannot be reached, or the connection broke.
            ClosedError: the pool is closed.
        """
        async with self._lookups if lookup else self._pages:
            if self._closed:
                raise ClosedError("the connections to the server are closed")
            thread = self._free.pop()
            try:
                return await thread.run(work)
            finally:
                self._free.append(thread)

    async def aclose(self) -> None:
        """Wait for the calls in flight, then close all connections and threads. Closing twice, or from two
        tasks at once, is harmless."""
        self._closed = True
        async with self._closing, AsyncExitStack() as stack:
            for turns in [self._pages] * self.size + [self._lookups] * _LOOKUPS:
                await stack.enter_async_context(turns)
            for thread in self._free:
                thread.drop()
            await off_the_loop(self._port, self._close_threads, self._abandon_threads)

    def _close_threads(self) -> None:
        for thread in self._free:
            thread.worker.close()

    def _abandon_threads(self) -> None:
        for thread in self._free:
            thread.worker.abandon()


class _ConnectionThread:
    """A thread, and its connection while there is one."""

    def __init__(self, options: RedisOptions, port: Port) -> None:
        self.worker: Worker = port.worker(_THREAD_NAME)
        self._options = options
        self._port = port
        self._connection = RedisConnection(options.timeout_seconds)

    async def run(self, work: Callable[[RedisConnection], T]) -> T:
        try:
            if not self._connection.usable:  # the server may have gone, or restarted, since the last call
                await self._redial()
            return await self._in_thread(partial(work, self._connection))
        except BaseException:
            self._connection.close()
            raise

    def drop(self) -> None:
        self._connection.close()

    async def _redial(self) -> None:
        self._connection.close()
        self._connection = RedisConnection(self._options.timeout_seconds)
        addresses = await look_up(self._options.server, self._port)
        await self._in_thread(partial(dial, self._connection, self._options, addresses))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread, to its end."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.worker.submit(partial(_run, self._port, call, ended))
        try:
            await asyncio.wait([ended])
            return ended.result()
        except asyncio.CancelledError:
            self._connection.interrupt()
            while not ended.done():  # however often the caller is cancelled
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            ended.exception()  # seen: the cancellation is what the caller gets
            raise
        finally:
            del ended  # else the traceback of an exception holds itself by this name


def _run(port: Port, call: Callable[[], object], ended: asyncio.Future[Any]) -> None:
    """In the thread: run `call`, and tell the loop."""
    result, error = _result(call)
    port.post(partial(ended.set_result, result) if error is None else partial(ended.set_exception, error))


def _result(call: Callable[[], object]) -> tuple[object, Exception | None]:
    # A function of its own: a traceback holds the frame that caught, and that of `_run` has `ended`.
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001 - the boundary of the thread
        traceback.clear_frames(error.__traceback__)  # of views of slots, before the call ends
        return None, error
