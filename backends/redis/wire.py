"""The way of pages: redis-py's connections, and values that are received straight into slots.

redis-py connects, logs in, packs commands and reads every other reply. A value it would copy three times,
which costs more than half of the speed, and it sends each piece by a system call of its own.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

from redis.connection import AbstractConnection
from redis.exceptions import ResponseError

from asynchicache.errors import StorageError

Piece: TypeAlias = "bytes | memoryview"
RedisCommand: TypeAlias = "tuple[bytes | str | int, ...]"

_NEWLINE = b"\r\n"
_BUFFER_BYTES = 16 << 10
"""Received at once when a line is expected. The beginning of a page that comes with it is copied."""
_WASTE_BYTES = 1 << 20
_MAX_LINE_BYTES = 4096
_MAX_PIECES = 1024  # of one system call: IOV_MAX of Linux
_MAX_DIGITS = 13  # of a value's size: far above what a server may hold under a key


class ProtocolError(StorageError):
    """Raised when the server sends something that is not RESP2. The connection cannot be used further."""


class ErrorReply(NamedTuple):
    """An error reply to one command; the connection stays usable.

    Attributes:
        text: the whole message, e.g. `OOM command not allowed when used memory > 'maxmemory'.`
    """

    text: str

    @property
    def code(self) -> str:
        """The first word, in capitals by convention: `OOM`, `LOADING`, `MOVED`, `ERR`, ..."""
        return self.text.partition(" ")[0]

    @classmethod
    def of(cls, error: Exception) -> ErrorReply:
        """redis-py keeps the code apart, where it knows it."""
        code = getattr(error, "status_code", None)
        return cls(f"{code} {error}" if code else str(error))


class RefusedError(StorageError):
    """Raised when a server refuses the login, or a command of redis-py's own.

    Attributes:
        reply: what it said.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.text)
        self.reply = reply


RespReply: TypeAlias = "bytes | int | list[RespReply] | ErrorReply | None"


class Wire:
    """One connection while a thread works with it. Replies come in the order of the commands.

    Any other thread may call `interrupt` meanwhile.

    Args:
        connection: of redis-py, connected or not.
        asking: a cluster is moving the keys to this server: each command says that we know.
    """

    def __init__(self, connection: AbstractConnection, *, asking: bool = False) -> None:
        self.connection = connection
        self.asking = asking
        self._lock = threading.Lock()
        self._left = False
        self._slots_in_use = False

    def interrupt(self) -> bool:
        """End whatever the connection waits for, soon; it cannot be used afterwards.

        Returns:
            Whether the thread uses slots now. If not, it will not use any.
        """
        with self._lock:
            self._left = True
            sock = _socket_of(self.connection)
            if sock is not None:
                with suppress(OSError):  # not connected any more
                    # `SSLSocket.shutdown` would make the other thread receive what was not decrypted.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
            return self._slots_in_use

    @contextmanager
    def slots(self) -> Iterator[None]:
        """Where the thread reads or writes slots: a call that ends early waits for the end of this block.

        Raises:
            OSError: the call has ended.
        """
        with self._lock:
            if self._left:
                raise ConnectionAbortedError("the call has ended")
            self._slots_in_use = True
        try:
            yield
        finally:
            with self._lock:
                self._slots_in_use = False

    def ask(self, *commands: RedisCommand) -> list[RespReply]:
        """Send commands at once, and read as many replies, which are no pages."""
        self.send(self.packed(commands))
        return [self.reply() for _ in commands]

    def packed(self, commands: Sequence[RedisCommand]) -> list[bytes]:
        if self.asking:
            commands = [each for one in commands for each in (("ASKING",), one)]
        packed: list[bytes] = self.connection.pack_commands(commands)
        return packed

    def send(self, pieces: Sequence[Piece]) -> None:
        """Send pieces, one after another, in as few system calls as the kernel allows."""
        sock = _socket_of(self.connection)
        if sock is None or isinstance(sock, ssl.SSLSocket):  # which has no `sendmsg`
            self.connection.send_packed_command(pieces)
            return
        views = [memoryview(piece) for piece in pieces if len(piece)]
        first = 0
        while first < len(views):
            sent = sock.sendmsg(views[first : first + _MAX_PIECES])
            while sent:
                taken = min(sent, len(views[first]))
                views[first] = views[first][taken:]
                sent -= taken
                first += not views[first]

    def reply(self) -> RespReply:
        if self.asking:
            self.connection.read_response()
        try:
            answer: RespReply = self.connection.read_response()
        except ResponseError as error:
            return ErrorReply.of(error)
        return answer


def _socket_of(connection: AbstractConnection) -> socket.socket | None:
    sock: socket.socket | None = connection._sock  # noqa: SLF001 - redis-py's parsers take it there too
    return sock


def set_command(
    key: bytes, size: int, ttl_seconds: int | None, *, asking: bool = False
) -> tuple[bytes, bytes]:
    """A SET of a value of `size` bytes, to expire after `ttl_seconds` if given. The server sets it only if
    the key is new, and sends a null reply otherwise.

    Args:
        asking: see `Wire`.

    Returns:
        What to send before and after the value.
    """
    before = b"*1\r\n" + _bulk(b"ASKING") if asking else b""
    options = (b"NX",) if ttl_seconds is None else (b"NX", b"EX", b"%d" % ttl_seconds)
    head = before + b"*%d\r\n" % (3 + len(options)) + _bulk(b"SET") + _bulk(key) + b"$%d\r\n" % size
    return head, _NEWLINE + b"".join(map(_bulk, options))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


class ValueReader:
    """Receives the replies to GET: values into the caller's memory.

    All methods raise OSError if the connection breaks, and ProtocolError if the server does not speak RESP2.
    """

    def __init__(self, wire: Wire) -> None:
        sock = _socket_of(wire.connection)
        if sock is None:
            raise ConnectionAbortedError("the connection is closed")
        self._asking = wire.asking
        self._socket = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    @property
    def in_step(self) -> bool:
        """Whether nothing was received beyond what was read."""
        return self._start == self._end

    def size(self) -> int | ErrorReply | None:
        """The size of the value that comes next; `read_into` or `skip` must read that value.

        Returns:
            None if there is no value, ErrorReply if the server refused; no value follows then.
        """
        if self._asking:
            self._line()
        line = self._line()
        digits = line[1:]
        if line[:1] == b"-":
            return ErrorReply(digits.decode("utf-8", "replace"))
        if line == b"$-1":
            return None
        if line[:1] == b"$" and digits.isdigit() and len(digits) <= _MAX_DIGITS:
            return int(digits)
        raise ProtocolError(f"{line[:40]!r} begins no value")

    def read_into(self, *views: memoryview) -> None:
        """Fill views, one after another, with a value of exactly their size."""
        for view in views:
            self._fill_view(view)
        end = bytearray(len(_NEWLINE))
        self._fill_view(memoryview(end))
        if end != _NEWLINE:
            raise ProtocolError(f"a value is followed by {bytes(end)!r}")

    def skip(self, size: int) -> None:
        """Receive a value of `size` bytes, and forget it."""
        waste = memoryview(bytearray(min(size, _WASTE_BYTES)))
        for start in range(0, size, _WASTE_BYTES):
            self._fill_view(waste[: size - start])
        self.read_into()

    def _fill_view(self, view: memoryview) -> None:
        """Fill `view` with what the buffer has, and receive the rest: large parts directly."""
        while view:
            count = min(len(view), self._end - self._start)
            if count:
                view[:count] = self._view[self._start : self._start + count]
                self._start += count
            elif len(view) >= _BUFFER_BYTES:
                count = self._receive(view)
            else:
                self._fill_buffer()
            view = view[count:]

    def _line(self) -> bytes:
        """The next line without its end."""
        while (stop := self._buffer.find(_NEWLINE, self._start, self._end)) < 0:
            if self._end - self._start > _MAX_LINE_BYTES:
                raise ProtocolError("a line does not end")
            self._fill_buffer()
        line = bytes(self._view[self._start : stop])
        self._start = stop + len(_NEWLINE)
        return line

    def _fill_buffer(self) -> None:
        """Receive some more bytes."""
        rest = self._end - self._start
        if self._start:
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        self._end += self._receive(self._view[self._end :])

    def _receive(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count
