"""What carries bytes to and from a server: a plain socket, or TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from asynchicache.backends.redis.receiver import TURN_BYTES, Receiver
from asynchicache.backends.redis.sender import Sender
from asynchicache.backends.redis.views import Bytes, drop_first

Address: TypeAlias = "tuple[Any, ...] | str"
"""Where to connect, in the form that the socket's family has."""

MOST_PARTS = 1024
"""Parts of a group: IOV_MAX of Linux."""
_TLS_BUFFER = 1 << 20
_SEND_BUFFER, _SEND_BUFFER_LOCAL = 1 << 20, 512 << 10
"""The server has something to take while the thread that sends seals the next pages, and that thread is not
woken for every few pieces; more than that leaves the processor's cache."""
_SEND_BUFFER_LIMIT = Path("/proc/sys/net/core/wmem_max")


class Wire(Protocol):
    """Bytes both ways. Once a coroutine has ended, also by cancellation, its views are touched no more."""

    async def receive_into(self, views: Sequence[memoryview], least: int) -> int:
        """Fill views, one behind the other, until they have `least` bytes, perhaps with more.

        Returns:
            Bytes received; fewer than `least` if the server has closed.

        Raises:
            OSError: the connection broke.
        """
        ...

    async def send(self, parts: Sequence[Bytes]) -> None:
        """Send parts, one behind the other; at most `MOST_PARTS`.

        Raises:
            OSError: the connection broke.
        """
        ...

    async def send_groups(self, groups: Iterator[Sequence[Bytes]], lines: int) -> None:
        """Send groups of parts, one behind the other, for large values. A group is made when its turn
        comes, perhaps in a thread; at most `MOST_PARTS` in one. The server answers with `lines` lines:
        they may be waited for, and are not read.

        Raises:
            OSError: the connection broke.
        """
        ...

    def quiet(self) -> bool:
        """Whether the connection stands, and nothing has come that nobody asked for."""
        ...

    def close(self) -> None:
        """Drop the connection and what was not sent; twice is harmless."""
        ...


class SocketWire:
    """A connected, non-blocking socket; the kernel copies straight from and into the views.

    Args:
        connected: the socket.
        sender: the thread for what is sent in groups.
    """

    def __init__(self, connected: socket.socket, sender: Sender) -> None:
        self._socket = connected
        self._sender = sender
        self._receiver = Receiver(connected)
        self._loop = asyncio.get_running_loop()
        self._moved = 0

    async def receive_into(self, views: Sequence[memoryview], least: int) -> int:
        return await self._receiver.receive_into(views, least)

    async def send(self, parts: Sequence[Bytes]) -> None:
        views = [memoryview(part) for part in parts]
        while views:
            sent = self._send_some(views)
            drop_first(sent, views)
            await (self._give_turn(sent) if sent else self._writable())

    async def send_groups(self, groups: Iterator[Sequence[Bytes]], lines: int) -> None:
        await self._sender.send(self._socket, groups, lines)

    def _send_some(self, views: Sequence[memoryview]) -> int:
        """As much as the kernel takes now, in one call, each of which may wake the server."""
        try:
            return self._socket.sendmsg(views)
        except BlockingIOError:
            return 0

    async def _writable(self) -> None:
        """Wait until the kernel has room again."""
        room = asyncio.Event()
        self._loop.add_writer(self._socket, room.set)
        try:
            await room.wait()
        finally:
            self._loop.remove_writer(self._socket)

    async def _give_turn(self, count: int) -> None:
        """A socket that is always ready never suspends; now and then it is the loop's turn."""
        self._moved += count
        if self._moved >= TURN_BYTES:
            self._moved = 0
            await asyncio.sleep(0)

    def quiet(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # the server's farewell, or a reply that is none of ours

    def close(self) -> None:
        self._receiver.unwatch()
        self._socket.close()


class TlsWire:
    """TLS by asyncio's streams, which copy each byte once more than a socket does.

    Args:
        reader, writer: connected.
        turn: of who sends in groups.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: asyncio.Lock
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = turn

    async def receive_into(self, views: Sequence[memoryview], least: int) -> int:
        count = 0
        for view in views:
            while len(view) and count < least:
                data = await self._reader.read(len(view))
                if not data:
                    return count
                view[: len(data)] = data
                view = view[len(data) :]
                count += len(data)
        return count

    async def send(self, parts: Sequence[Bytes]) -> None:
        self._writer.write(b"".join(parts))  # a copy: asyncio may keep it longer than the caller its slot
        await self._writer.drain()

    async def send_groups(self, groups: Iterator[Sequence[Bytes]], lines: int) -> None:
        async with self._turn:
            for parts in groups:
                await self.send(parts)

    def quiet(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.transport.abort()


async def connect_socket(family: int, address: Address, sender: Sender) -> SocketWire:
    """
    Args:
        family, address: where to connect.
        sender: as `SocketWire` has it.

    Raises:
        OSError: nobody listens there.
    """
    fresh = socket.socket(family, socket.SOCK_STREAM)
    try:
        fresh.setblocking(False)
        await asyncio.get_running_loop().sock_connect(fresh, address)
        if family != socket.AF_UNIX:
            fresh.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fresh.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            _do_not_pace(fresh)
        _widen(fresh, _SEND_BUFFER_LOCAL if family == socket.AF_UNIX else _SEND_BUFFER)
    except BaseException:
        fresh.close()
        raise
    return SocketWire(fresh, sender)


def _do_not_pace(connected: socket.socket) -> None:
    """Take Reno for a server on this machine. Nothing is congested there, and BBR, which some systems choose,
    sends by a timer (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue, 2016).
    """
    with suppress(OSError, AttributeError):  # a system without this choice
        if ip_address(connected.getpeername()[0]).is_loopback:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _widen(connected: socket.socket, size: int) -> None:
    """Ask for a send buffer. Where a system allows less, the one that it grows by itself may be larger."""
    with suppress(OSError, ValueError):  # no Linux, or a container that hides it
        if int(_SEND_BUFFER_LIMIT.read_text("ascii")) >= size:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


async def connect_tls(host: str, port: int, ca_file: str | None, sender: Sender) -> TlsWire:
    """
    Args:
        ca_file: certificates to trust, in PEM; None for those of the system.
        sender: whose turns are kept.

    Raises:
        OSError: nobody listens there, or the certificate does not hold.
    """
    context = ssl.create_default_context(cafile=ca_file)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=_TLS_BUFFER)
    return TlsWire(reader, writer, sender.turn)


async def try_addresses(addresses: list[tuple[int, Address]], sender: Sender) -> SocketWire:
    """A connection to the first address that answers.

    Raises:
        OSError: of the last one, if none does.
    """
    for family, address in addresses[:-1]:
        with suppress(OSError):
            return await connect_socket(family, address, sender)
    return await connect_socket(*addresses[-1], sender)
