"""Receives straight into the callers' memory, and tells the loop's selector once where asyncio's own
`sock_recv_into` tells it twice for each wait."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from asynchicache.backends.redis.views import drop_first, first

TURN_BYTES = 512 << 10
"""Moved in one step of the loop; a quarter of a millisecond, for each connection."""


class Receiver:
    """Receives through one socket.

    The loop watches the socket from the first wait on until something comes that nobody waits for. What is
    waited for is received where the loop tells of it, and the waiter is woken once, when all is there.

    Args:
        connected: non-blocking.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._watched = False
        self._tells_late = connected.family != socket.AF_UNIX
        self._told_from = 1
        self._moved = 0
        self._views: list[memoryview] = []
        self._missing = 0
        self._at_once = 1
        self._closed = False
        self._came: asyncio.Future[None] | None = None

    async def receive_into(self, views: Sequence[memoryview], least: int) -> int:
        """Fill views, one behind the other, until they have `least` bytes, and with what else has come; no
        view is touched once this has ended, also by cancellation.

        Returns:
            Bytes received; fewer than `least` if the server has closed.

        Raises:
            OSError: the connection broke.
        """
        self._views, self._missing = list(views), least
        self._at_once = TURN_BYTES if least > TURN_BYTES else 1
        try:
            while not self._done():
                if self._moved >= TURN_BYTES or not self._receive():
                    await self._wait()
            return least - self._missing
        finally:
            self._views = []  # whoever keeps a view keeps its memory from being closed

    def unwatch(self) -> None:
        """The loop forgets the socket, as it must before that is closed; twice is harmless."""
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._socket)

    async def _wait(self) -> None:
        """Wait until all has come that is missing, which may be later than the socket is ready: others get
        their turn."""
        self._be_told_late()
        self._came = self._loop.create_future()
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._socket, self._readable)
        await self._came

    def _readable(self) -> None:
        """The loop says that something is there."""
        if self._came is None or self._came.done():
            self.unwatch()
            return
        self._moved = 0
        try:
            self._receive()
        except OSError as error:
            self._came.set_exception(error)
        else:
            if self._done():
                self._came.set_result(None)
            else:
                self._be_told_late()

    def _be_told_late(self) -> None:
        """Let the loop tell of a large page once a good part of it is there, or no more can come: taken in
        small pieces it costs the server more. Unix sockets tell of each byte all the same.

        Source: SO_RCVLOWAT in socket(7).
        """
        count = min(self._at_once, self._missing)
        if self._tells_late and count != self._told_from:
            self._told_from = count
            with suppress(OSError):  # a system without it
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _done(self) -> bool:
        return self._missing <= 0 or self._closed

    def _receive(self) -> bool:
        """Take what the kernel has, in one call; whether it had anything to say."""
        views = self._views if self._missing <= TURN_BYTES else list(first(TURN_BYTES, self._views))
        try:
            count = self._socket.recvmsg_into(views)[0]
        except BlockingIOError:
            return False
        drop_first(count, self._views)
        self._missing -= count
        self._moved += count
        self._closed = not count
        return True
