"""One connection: commands out, replies in, values received straight into the caller's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asynchicache.backends.redis.resp import (
    NEWLINE,
    ErrorReply,
    ProtocolError,
    Reply,
    error_reply,
    integer,
    length,
)
from asynchicache.backends.redis.views import Bytes
from asynchicache.backends.redis.wires import Wire

_BUFFER_BYTES = 64 << 10
_AHEAD_BYTES = 32
"""Received behind a value: its end, and the line that announces the next one. More would be the beginning of
that value, which were then copied to its place."""
_MOST_LINE_BYTES = 4096
_MOST_WORD_BYTES = 64 << 10
_MOST_WORDS = 1 << 20
_MOST_DEPTH = 3


class Connection:
    """Replies come in the order of the commands; whoever breaks that off has to close it.

    Args:
        wire: connected.
    """

    def __init__(self, wire: Wire) -> None:
        self.closed = False
        self._wire = wire
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    @property
    def usable(self) -> bool:
        """Whether it is open, and nothing has come that belongs to no command."""
        return not self.closed and self._start == self._end and self._wire.quiet()

    def close(self) -> None:
        """Twice is harmless; what was on its way is lost."""
        self.closed = True
        self._wire.close()

    async def send(self, *parts: Bytes) -> None:
        """Send parts, one behind the other.

        Raises:
            OSError: the connection broke.
        """
        await self._wire.send(parts)

    async def send_groups(self, groups: Iterator[Sequence[Bytes]], lines: int) -> None:
        """Send groups of parts, one behind the other; each is made when its turn comes, perhaps in a thread.
        The server answers with `lines` lines, to be read next.

        Raises:
            OSError: the connection broke.
        """
        await self._wire.send_groups(groups, lines)

    async def ask(self, *commands: bytes) -> list[Reply]:
        """Send commands at once, and read as many replies.

        Raises:
            OSError: the connection broke.
            ProtocolError: what came is no reply.
        """
        await self.send(b"".join(commands))
        return [await self.read_reply() for _ in commands]

    async def read_reply(self, depth: int = 0) -> Reply:
        """One reply of small parts.

        Raises:
            OSError: the connection broke.
            ProtocolError: what came is no reply.
        """
        line = await self._read_line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return integer(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return error_reply(rest)
        if kind == b"$":
            return await self._read_word(length(rest, _MOST_WORD_BYTES))
        if kind == b"*" and depth < _MOST_DEPTH:
            count = length(rest, _MOST_WORDS)
            return None if count is None else [await self.read_reply(depth + 1) for _ in range(count)]
        raise ProtocolError(f"{line[:40]!r} begins no reply")

    async def read_value_size(self) -> int | ErrorReply | None:
        """Bytes of the value that follows, which `read_value_into` or `skip_value` must take next.

        Returns:
            None if there is no value, ErrorReply if the server refused; nothing follows then.

        Raises:
            OSError: the connection broke.
            ProtocolError: what came is no value.
        """
        line = await self._read_line(_AHEAD_BYTES)
        if line[:1] == b"$":
            return length(line[1:], 1 << 40)
        if line[:1] == b"-":
            return error_reply(line[1:])
        raise ProtocolError(f"{line[:40]!r} begins no value")

    async def read_value_into(self, *views: memoryview) -> None:
        """Fill views, one behind the other, with all of a value.

        Raises:
            OSError: the connection broke.
            ProtocolError: the value goes on.
        """
        await self._read_into(*views)
        await self._end_value()

    async def skip_value(self, size: int) -> None:
        """Receive a value of `size` bytes that nobody wants.

        Raises:
            OSError: the connection broke.
            ProtocolError: the value goes on.
        """
        scratch = memoryview(bytearray(min(size, _BUFFER_BYTES)))
        while size:
            part = scratch[:size]
            await self._read_into(part)
            size -= len(part)
        await self._end_value()

    async def _read_into(self, *views: memoryview) -> None:
        """Fill views, one behind the other."""
        rest = [view[self._take(view) :] for view in views]
        if missing := sum(map(len, rest)):  # so the buffer is empty
            ahead = self._view[:_AHEAD_BYTES]
            self._start, self._end = 0, await self._receive([*rest, ahead], missing) - missing

    async def _end_value(self) -> None:
        while self._end - self._start < len(NEWLINE):
            await self._fill(_AHEAD_BYTES)
        stop = self._start + len(NEWLINE)
        end, self._start = self._buffer[self._start : stop], stop
        if end != NEWLINE:
            raise ProtocolError(f"a value is followed by {bytes(end)!r}")

    async def _read_word(self, size: int | None) -> bytes | None:
        if size is None:
            return None
        word = bytearray(size)
        await self._read_into(memoryview(word))
        await self._end_value()
        return bytes(word)

    async def _read_line(self, at_once: int = _BUFFER_BYTES) -> bytes:
        """The next line without its end; what is not there yet is received so many bytes at once."""
        while (stop := self._buffer.find(NEWLINE, self._start, self._end)) < 0:
            if self._end - self._start > _MOST_LINE_BYTES:
                raise ProtocolError("a line does not end")
            await self._fill(at_once)
        line = bytes(self._view[self._start : stop])
        self._start = stop + len(NEWLINE)
        return line

    def _take(self, view: memoryview) -> int:
        """Move what the buffer has into `view`."""
        size = min(len(view), self._end - self._start)
        view[:size] = self._view[self._start : self._start + size]
        self._start += size
        return size

    async def _fill(self, most: int) -> None:
        """Receive 1 to `most` bytes behind what the buffer has."""
        rest = self._end - self._start
        if self._start:
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        self._end += await self._receive([self._view[self._end :][:most]], 1)

    async def _receive(self, views: Sequence[memoryview], least: int) -> int:
        count = await self._wire.receive_into(views, least)
        if count < least:
            raise ConnectionResetError("the server closed the connection")
        return count
