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
