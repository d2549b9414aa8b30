"""A blocking connection: commands out, replies in, values received straight into the caller's memory."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from asynchicache.backends.redis.resp import (
    NEWLINE,
    ErrorReply,
    ProtocolError,
    RespReply,
    error_reply,
    integer,
    length,
)

Piece: TypeAlias = "bytes | memoryview"

_BUFFER_BYTES = 16 << 10
"""Received at once when a line is expected. The beginning of a page that comes with it is copied."""
_MAX_LINE_BYTES = 4096
_MAX_WORD_BYTES = 64 << 10
_MAX_WORDS = 1 << 20
_MAX_DEPTH = 3
_MAX_PARTS = 1024
"""IOV_MAX of Linux."""
_SEND_BUFFER, _SEND_BUFFER_UNIX = 1 << 20, 512 << 10
"""The server has something to read while the thread seals the next pages. Larger buffers leave the
processor's cache."""
_SEND_BUFFER_LIMIT = Path("/proc/sys/net/core/wmem_max")


class SocketAddress(NamedTuple):
    """Where to connect: a socket's family, and an address in the form of that family."""

    family: int
    address: tuple[Any, ...] | str


class RedisConnection:
    """One socket, plain or TLS.

    One thread at a time may use it. Any other thread may call `interrupt` meanwhile. Replies come in the
    order of the commands, so a caller that stops before it has read all replies must close the connection.
    All methods that send or receive raise OSError if the connection breaks, and ProtocolError if the server
    does not speak RESP.

    Args:
        timeout_seconds: the longest wait of one socket operation. It is a second line of defence, for a loop
            that stands still: the deadline of a whole call is kept by the loop, which interrupts.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()  # no socket is closed, and its number reused, while it is shut down
        self._open: socket.socket | None = None
        self._interrupted = False
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    def connect(self, addresses: Sequence[SocketAddress]) -> None:
        """Connect to the first address that answers.

        Raises:
            OSError: none does; the error of the last one.
        """
        for address in addresses[:-1]:
            with suppress(OSError):
                return self._connect(address)
        return self._connect(addresses[-1])

    def start_tls(self, host: str, ca_file: str | None) -> None:
        """Encrypt from here on.

        Args:
            host: whom the server's certificate must name.
            ca_file: certificates to trust, in PEM; None for the system's.

        Raises:
            OSError: the certificate is not valid, or the server does not speak TLS.
        """
        context = ssl.create_default_context(cafile=ca_file)
        wrapped = context.wrap_socket(self._socket, server_hostname=host, do_handshake_on_connect=False)
        self._hold(wrapped)
        wrapped.do_handshake()

    def interrupt(self) -> None:
        """End whatever the connection waits for; it cannot be used afterwards."""
        with self._lock:
            self._interrupted = True
            if self._open is not None:
                with suppress(OSError):  # not connected yet, or not any more
                    # `SSLSocket.shutdown` would make the other thread receive what was not decrypted.
                    socket.socket.shutdown(self._open, socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop the connection and what is in transit; closing twice is harmless."""
        with self._lock:
            self._interrupted = True
            if self._open is not None:
                self._open.close()
                self._open = None

    @property
    def usable(self) -> bool:
        """Whether it is open, and no unexpected bytes have come."""
        if self._interrupted or self._open is None or self._start < self._end:
            return False
        if isinstance(self._open, ssl.SSLSocket) and self._open.pending():
            return False
        # The server closed the connection, or sent what no command asked for; of TLS, encrypted bytes.
        readable = select.poll()
        readable.register(self._open, select.POLLIN)
        return not readable.poll(0)

    def send(self, parts: Iterable[Piece]) -> None:
        """Send parts, one after another, in as few system calls as the kernel allows."""
        views = [memoryview(part) for part in parts if len(part)]
        while views:
            sent = self._send_some(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def ask(self, *commands: bytes) -> list[RespReply]:
        """Send commands at once, and read as many replies."""
        self.send([b"".join(commands)])
        return [self.read_reply() for _ in commands]

    def read_reply(self, depth: int = 0) -> RespReply:
        """Read one reply that is no page."""
        line = self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return integer(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return error_reply(rest)
        if kind == b"$":
            return self._read_word(length(rest, _MAX_WORD_BYTES))
        if kind == b"*" and depth < _MAX_DEPTH:
            count = length(rest, _MAX_WORDS)
            return None if count is None else [self.read_reply(depth + 1) for _ in range(count)]
        raise ProtocolError(f"{line[:40]!r} begins no reply")

    def read_value_size(self) -> int | ErrorReply | None:
        """The size of the value that comes next; `read_value_into` or `skip_value` must read that value.

        Returns:
            None if there is no value, ErrorReply if the server refused; no value follows then.
        """
        line = self._read_line()
        if line[:1] == b"$":
            return length(line[1:], 1 << 40)
        if line[:1] == b"-":
            return error_reply(line[1:])
        raise ProtocolError(f"{line[:40]!r} begins no value")

    def read_value_into(self, *views: memoryview) -> None:
        """Fill views, one after another, with a value of exactly their size."""
        for view in views:
            self._read_into(view)
        self._end_value()

    def skip_value(self, size: int) -> None:
        """Receive a value of `size` bytes, and forget it."""
        scratch = memoryview(bytearray(min(size, _BUFFER_BYTES)))
        while size:
            part = scratch[:size]
            self._read_into(part)
            size -= len(part)
        self._end_value()

    @property
    def _socket(self) -> socket.socket:
        if self._open is None:
            raise ConnectionAbortedError("the connection is closed")
        return self._open

    def _connect(self, address: SocketAddress) -> None:
        fresh = socket.socket(address.family, socket.SOCK_STREAM)
        self._hold(fresh)
        fresh.settimeout(self._timeout_seconds)
        fresh.connect(address.address)
        if address.family == socket.AF_UNIX:
            return _widen(fresh, _SEND_BUFFER_UNIX)
        fresh.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fresh.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _do_not_pace(fresh)
        return _widen(fresh, _SEND_BUFFER)

    def _hold(self, fresh: socket.socket) -> None:
        """Make `fresh` the socket that `interrupt` shuts down, in place of the one before."""
        with self._lock:
            if self._open is not None:
                self._open.close()
            self._open = fresh
            if self._interrupted:
                raise ConnectionAbortedError("the connection was interrupted")

    def _send_some(self, views: Sequence[memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.send(views[0])  # it has no `sendmsg`
        return self._socket.sendmsg(views[:_MAX_PARTS])

    def _receive(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _read_into(self, view: memoryview) -> None:
        """Fill `view` with what the buffer has, and receive the rest into it."""
        buffered = min(len(view), self._end - self._start)
        view[:buffered] = self._view[self._start : self._start + buffered]
        self._start += buffered
        rest = view[buffered:]
        while len(rest):
            rest = rest[self._receive(rest) :]

    def _end_value(self) -> None:
        end = bytearray(len(NEWLINE))
        while self._end - self._start < len(NEWLINE):
            self._fill()
        self._read_into(memoryview(end))
        if end != NEWLINE:
            raise ProtocolError(f"a value is followed by {bytes(end)!r}")

    def _read_word(self, size: int | None) -> bytes | None:
        if size is None:
            return None
        word = bytearray(size)
        self.read_value_into(memoryview(word))
        return bytes(word)

    def _read_line(self) -> bytes:
        """The next line without its end."""
        while (stop := self._buffer.find(NEWLINE, self._start, self._end)) < 0:
            if self._end - self._start > _MAX_LINE_BYTES:
                raise ProtocolError("a line does not end")
            self._fill()
        line = bytes(self._view[self._start : stop])
        self._start = stop + len(NEWLINE)
        return line

    def _fill(self) -> None:
        """Receive some more bytes into the buffer."""
        rest = self._end - self._start
        if self._start:
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        self._end += self._receive(self._view[self._end :])


def _do_not_pace(connected: socket.socket) -> None:
    """Take Reno for a server on this machine. Nothing is congested there, and BBR, which some systems choose,
    sends by a timer (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue, 2016).
    """
    with suppress(OSError, AttributeError):  # a system without this choice
        if ip_address(connected.getpeername()[0]).is_loopback:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _widen(connected: socket.socket, size: int) -> None:
    """Ask for a send buffer. Where a system allows less, the one that it grows by itself may be larger."""
    with suppress(OSError, ValueError):  # not Linux, or a container that hides it
        if int(_SEND_BUFFER_LIMIT.read_text("ascii")) >= size:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
