"""One thread that sends the pages of all calls, one call after another, and waits for nothing in between."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from asynchicache.backends.closing import off_the_loop
from asynchicache.backends.redis.views import Bytes, drop_first
from asynchicache.ports import Port

_PEEK_BYTES = 64 << 10


class _Call:
    """One call's pages.

    Attributes:
        connected: where they go.
        groups: parts, made when their turn comes.
        lines: that the server answers with.
        ended: on the loop, once the thread has nothing more to do with it.
        unwanted: it was cancelled.
    """

    def __init__(self, connected: socket.socket, groups: Iterator[Sequence[Bytes]], lines: int) -> None:
        self.connected = connected
        self.groups = groups
        self.lines = lines
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unwanted = False

    def answered(self) -> bool:
        """Whether all its lines have come, or something that makes it no use to wait for them."""
        try:
            seen = self.connected.recv(_PEEK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not seen or len(seen) == _PEEK_BYTES or seen.count(b"\n") >= self.lines


class Sender:
    """Calls that send pages, by turns. The server has one thread, which goes from one connection to the next
    if all have much for it: what waits in their buffers leaves the processor's cache, and costs it twice
    the time.

    The turns are a thread's. If the loop gave them, the server would have nothing to do meanwhile. And since
    the loop, while it runs, keeps the thread from the interpreter, it is woken once for a call: when all
    answers are there.

    Args:
        port: a worker, and the way back to the loop.
    """

    def __init__(self, port: Port) -> None:
        self.turn = asyncio.Lock()
        """Of those who send without the thread."""
        self._port = port
        self._worker = port.worker("asynchicache-redis")
        self._waiting: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()

    async def send(self, connected: socket.socket, groups: Iterator[Sequence[Bytes]], lines: int) -> None:
        """Send groups of parts, one behind the other, through a non-blocking socket that nobody else uses
        meanwhile. Returns when they are sent, or later, but no later than `lines` lines have come back.

        A cancelled call shuts the connection, and ends when the thread has left its parts alone.

        Raises:
            OSError: the connection broke.
        """
        call = _Call(connected, groups, lines)
        self._submit(call)
        try:
            await asyncio.wait([call.ended])
        except asyncio.CancelledError:
            await self._withdraw(call)
            raise
        call.ended.result()

    async def aclose(self) -> None:
        """End the thread, once no call is under way; twice is harmless."""
        # At worst it is not waited for: the loop must not stand still for a server that does not read.
        await off_the_loop(self._port, self._worker.close, self._worker.abandon)

    def _submit(self, call: _Call) -> None:
        self._waiting.append(call)
        try:
            self._worker.submit(self._next)
        except RuntimeError:  # no thread is to be had; a later call must not find this one before it
            self._waiting.remove(call)
            raise

    async def _withdraw(self, call: _Call) -> None:
        """Take a call back; if the thread is at it, wait, however often the waiter is cancelled."""
        call.unwanted = True
        if _taken(self._waiting, call) or _taken(self._sent, call):
            return
        with suppress(OSError):
            call.connected.shutdown(socket.SHUT_RDWR)  # a thread that waits for the server is let go
        while not call.ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call.ended])
        call.ended.exception()  # seen: the cancellation is what the caller gets

    def _next(self) -> None:
        """In the thread: the call whose turn it is, unless it was taken back."""
        try:
            call = self._waiting.popleft()
        except IndexError:
            pass
        else:
            self._send(call)
        if not self._waiting:
            self._tell(list(self._sent))

    def _send(self, call: _Call) -> None:
        try:
            self._send_blocking(call)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            self._port.post(partial(_end, call, error))
            return
        self._sent.append(call)
        if call.unwanted:  # perhaps it was neither waiting nor sent when it was to be taken back
            self._tell([call])

    def _send_blocking(self, call: _Call) -> None:
        """The kernel holds the thread until it has taken a group: the loop would be woken, and would make a
        call, for each piece that fits into the kernel's buffer."""
        descriptor = call.connected.fileno()
        os.set_blocking(descriptor, True)  # the kernel's flag; to Python the socket stays non-blocking
        try:
            for parts in call.groups:
                _send_all(call.connected, parts)
                self._tell([one for one in list(self._sent) if one.answered()])
        finally:
            os.set_blocking(descriptor, False)

    def _tell(self, calls: Sequence[_Call]) -> None:
        """Let calls go on that were sent."""
        for call in calls:
            if _taken(self._sent, call):
                self._port.post(partial(_end, call, None))


def _taken(calls: deque[_Call], call: _Call) -> bool:
    """Take one out, unless the other thread was quicker."""
    try:
        calls.remove(call)
    except ValueError:
        return False
    return True


def _end(call: _Call, error: Exception | None) -> None:
    if error is None:
        call.ended.set_result(None)
    else:
        call.ended.set_exception(error)


def _send_all(connected: socket.socket, parts: Sequence[Bytes]) -> None:
    """Send parts through a socket that blocks, in one call unless the kernel stops early."""
    views = [memoryview(part) for part in parts]
    while views:
        drop_first(connected.sendmsg(views), views)
