"""A TCP server that takes Redis' commands and answers whatever a test says, true or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from storage.listening import listening

Answer = Callable[[list[bytes], asyncio.StreamWriter], Awaitable[None]]
"""What is done with one command's words."""

MARKER = b"asynchicache redis store 2"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


class HostileServer:
    """Logs clients in as Redis does, keeps values, and lies where `lies` has the command's name.

    Attributes:
        values: by key; as a true server keeps them.
        lies: by command; each replaces the true answer.
        left: set once a client has closed its connection.
        connections: how many there were.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.lies: dict[bytes, Answer] = {}
        self.left = asyncio.Event()
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def say(self, verb: bytes, data: bytes, *, close: bool = False) -> None:
        """Answer every `verb` with these bytes."""

        async def lie(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(data)
            if close:
                writer.close()

        self.lies[verb] = lie

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                words = await self._command(reader)
                lie = self.lies.get(words[0])
                if lie is not None:
                    await lie(words, writer)
                else:
                    writer.write(self._truth(words))
                await writer.drain()
        self.left.set()
        writer.close()

    async def _command(self, reader: asyncio.StreamReader) -> list[bytes]:
        count = int((await reader.readuntil(b"\r\n"))[1:])
        words = []
        for _ in range(count):
            size = int((await reader.readuntil(b"\r\n"))[1:])
            words.append((await reader.readexactly(size + 2))[:-2])
        return words

    def _truth(self, words: list[bytes]) -> bytes:
        match words:
            case [b"SET", key, _, b"NX"] if key in self.values or key.endswith(b":FORMAT"):
                return b"$-1\r\n"
            case [b"GET", key] if key.endswith(b":FORMAT"):
                return bulk(MARKER)
            case [b"SET", key, value, b"NX"]:
                self.values[key] = value
            case [b"GET", key]:
                return bulk(self.values[key]) if key in self.values else b"$-1\r\n"
            case [b"EXISTS", key]:
                return b":%d\r\n" % (key in self.values)
            case [b"UNLINK", key]:
                return b":%d\r\n" % (self.values.pop(key, None) is not None)
        return b"+OK\r\n"


@asynccontextmanager
async def hostile_server() -> AsyncIterator[HostileServer]:
    """One that listens; closed in the end, with every connection."""
    hostile = HostileServer()
    async with listening(hostile.serve) as hostile.port:
        yield hostile
