"""A server of a test's own loop, which may be as hostile as it likes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None]]


@asynccontextmanager
async def listening(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Its port, while each connection is served by a task; closed in the end, with every connection."""
    clients: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append((writer, asyncio.create_task(serve(reader, writer))))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 20, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer, task in clients:
            task.cancel()
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
        await asyncio.gather(*(task for _, task in clients), return_exceptions=True)


@asynccontextmanager
async def counting(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A port that leads to another one of 127.0.0.1, and what each connection has sent to it, in bytes."""
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        sent.append(0)
        number = len(sent) - 1

        async def forth() -> None:
            while data := await reader.read(1 << 20):
                sent[number] += len(data)
                server_writer.write(data)
                await server_writer.drain()
            server_writer.close()

        async def back() -> None:
            while data := await server_reader.read(1 << 20):
                writer.write(data)
                await writer.drain()
            writer.close()

        with suppress(OSError):
            await asyncio.gather(forth(), back())

    async with listening(serve) as own:
        yield own, sent
