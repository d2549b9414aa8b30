"""Clients by hand, over sockets that they keep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from integrations.serve.serving import Running


class Peer:
    """A client by hand, over a connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def announce(self, path: str, length: int) -> None:
        """The head of a request whose body has `length` bytes."""
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        self.send(f"{head}content-length: {length}\r\n\r\n".encode())

    async def closed(self) -> bool:
        """Waits until it is; whether nothing was said before."""
        try:
            return not await self._reader.read()
        except ConnectionError:
            return True

    async def rest(self) -> bytes:
        """All that is said until the server closes the connection."""
        said = b""
        with suppress(ConnectionError):
            while more := await self._reader.read(65536):
                said += more
        return said

    def gone(self) -> bool:
        """Whether the server has closed the connection."""
        return self._reader.at_eof() or self._writer.transport.is_closing()

    async def answer(self) -> httpx.Response:
        """To a request that was sent."""
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        text = await self._reader.readexactly(int(headers["content-length"]))
        return httpx.Response(int(status.split()[1]), headers=headers, content=text)

    async def ask(self, path: str, request: dict[str, Any] | None = None) -> httpx.Response:
        content = json.dumps(request).encode()
        if request:
            self.announce(path, len(content))
            self.send(content)
        else:
            self.send(f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
        return await self.answer()


@asynccontextmanager
async def connected(server: Running, count: int) -> AsyncIterator[list[Peer]]:
    """Connections that the server has all taken, in this order."""
    port = int(server.url.rpartition(":")[2])
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        yield [Peer(*stream) for stream in streams]
    finally:
        for _, writer in streams:
            writer.close()
