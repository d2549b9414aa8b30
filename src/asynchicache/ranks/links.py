"""Connections between ranks: asyncio streams over Unix sockets on one host, or TCP between hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from asynchicache.errors import ConfigError, RankLostError

_CHUNK = 1 << 18

MAX_UNSENT = 256 << 20
"""The most bytes that wait for a rank to read them. Beyond it the rank counts as lost."""


class Link(Protocol):
    """A connection to another rank: bytes in order, both ways."""

    def send(self, data: bytes) -> None:
        """Send bytes, later if the other side does not read them now.

        Raises:
            RankLostError: the other side has not read `MAX_UNSENT` bytes, or the connection has ended.
        """
        ...

    async def receive(self) -> bytes:
        """The next bytes; empty once the connection has ended."""
        ...

    async def aclose(self) -> None:
        """Close the connection, without waiting for the other side."""
        ...


BROKEN = (OSError, EOFError, RuntimeError)
"""What a link of an engine's own may raise if its connection has failed."""


def send(link: Link, data: bytes) -> None:
    """Send over any link, also one of an engine's own.

    Raises:
        RankLostError: it raises that, or one of `BROKEN`.
    """
    try:
        link.send(data)
    except BROKEN as error:
        raise RankLostError(f"its connection failed: {error!r}") from error


async def receive(link: Link) -> bytes:
    """Receive from any link.

    Raises:
        RankLostError: it raises that, or one of `BROKEN`.
    """
    try:
        return await link.receive()
    except BROKEN as error:
        raise RankLostError(f"its connection failed: {error!r}") from error


class StreamLink:
    """A `Link` over a socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            raise RankLostError("its connection has ended")
        if transport.get_write_buffer_size() > MAX_UNSENT:
            raise RankLostError(f"it has not read {MAX_UNSENT} bytes of what was sent to it")
        self._writer.write(data)

    async def receive(self) -> bytes:
        try:
            return await self._reader.read(_CHUNK)
        except OSError:  # reset by the other side
            return b""

    async def aclose(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(1):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):  # it had ended, or the other side does not read
            self._writer.transport.abort()


class Address(NamedTuple):
    """Where a leader listens: a Unix socket, or a TCP host and port."""

    path: str | None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """
        Raises:
            ConfigError: `text` is neither `unix:PATH` nor `HOST:PORT`.
        """
        if text.startswith("unix:") and len(text) > len("unix:"):
            return cls(text[len("unix:") :])
        host, colon, port = text.rpartition(":")
        if colon and host and port.isdecimal() and int(port) < 1 << 16:
            return cls(None, host.strip("[]"), int(port))
        raise ConfigError(f"address {text!r} of a rank group must be unix:PATH or HOST:PORT")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.path is None else f"unix:{self.path}"


async def connect(address: Address) -> StreamLink:
    """
    Raises:
        OSError: no leader listens there.
    """
    if address.path is not None:
        return StreamLink(*await asyncio.open_unix_connection(address.path))
    return StreamLink(*await asyncio.open_connection(address.host, address.port))


async def listen(address: Address, accepted: Callable[[Link], Awaitable[None]]) -> asyncio.Server:
    """Accept connections. A Unix socket is readable by its owner only.

    Raises:
        ConfigError: the address is in use, or cannot be used.
    """

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accepted(StreamLink(reader, writer))

    try:
        if address.path is None:
            return await asyncio.start_server(accept, address.host, address.port)
        if await _answers(address):  # asyncio itself replaces a socket, whoever uses it
            raise ConfigError(f"rank group cannot listen at {address}: another leader listens there")
        server = await asyncio.start_unix_server(accept, address.path)
        _make_private(address.path)
    except OSError as error:
        raise ConfigError(f"rank group cannot listen at {address}: {error.strerror or error}") from error
    return server


def _make_private(path: str) -> None:
    Path(path).chmod(0o600)


async def _answers(address: Address) -> bool:
    try:
        link = await connect(address)
    except OSError:
        return False
    await link.aclose()
    return True
