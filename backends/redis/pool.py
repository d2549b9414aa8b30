"""A few connections to one server, lent one at a time, made anew when they break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from asynchicache.backends.redis.connection import Connection
from asynchicache.errors import ClosedError


class ConnectionPool:
    """Connections that are made when they are needed; the one used last is lent first.

    Args:
        dial: makes a connection, or raises OSError.
        most: connections at once.
    """

    def __init__(self, dial: Callable[[], Awaitable[Connection]], most: int) -> None:
        self.most = most
        self._dial = dial
        self._turns = asyncio.Semaphore(most)
        self._idle: list[Connection] = []
        self._closed = False
        self._closing = asyncio.Lock()  # two that close would wait for each other's turns

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection of one's own. Whoever leaves by an exception may have read half a reply, so the
        connection is dropped then.

        Raises:
            OSError: the server cannot be reached.
            ClosedError: the pool is closed.
        """
        async with self._turns:
            if self._closed:
                raise ClosedError("the connections to the server are closed")
            connection = self._take_idle() or await self._dial()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)

    async def aclose(self) -> None:
        """Wait for connections that are lent, then close all; twice is harmless, also at once."""
        self._closed = True
        held = 0
        try:
            async with self._closing:
                while held < self.most:
                    await self._turns.acquire()
                    held += 1
                for connection in self._idle:
                    connection.close()
                self._idle.clear()
        finally:
            for _ in range(held):
                self._turns.release()

    def _take_idle(self) -> Connection | None:
        """One that still stands: the server may have gone, or restarted, since it was used."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    def _give_back(self, connection: Connection) -> None:
        if not connection.closed:
            self._idle.append(connection)
