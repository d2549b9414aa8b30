"""Scripts, of this folder if nothing else is said, as processes of `forking`, watched by a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from forking import start

FOLDER = Path(__file__).parent
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


class Follower:
    """Of `asyncio.subprocess.Process`, what tests use; `stdin` and `stdout` are there if it is piped."""

    def __init__(self, pid: int, told: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._ended = asyncio.ensure_future(self._see_end(told, writer))

    async def _see_end(self, told: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.returncode = int(await told.readline())
        writer.close()

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        assert self.returncode is not None
        if self.stdin is not None:
            self.stdin.close()
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and this loop has not read so yet
                os.kill(self.pid, number)


async def launch(script: str, *arguments: str, piped: bool = False, quiet: bool = False) -> Follower:
    """Start a script; `piped`: with its standard input and output; `quiet`: without its errors."""
    ours, theirs = socket.socketpair() if piped else (None, None)
    with Path(os.devnull).open("r+") as nothing:  # noqa: ASYNC230  it takes no time
        stream = nothing.fileno() if theirs is None else theirs.fileno()
        streams = (stream, stream if piped else 1, nothing.fileno() if quiet else 2)
        told = start([FOLDER / script, *arguments], streams, env=ENVIRONMENT)
    reader, writer = await asyncio.open_connection(sock=told)
    follower = Follower(int(await reader.readline()), reader, writer)
    if ours is not None and theirs is not None:
        theirs.close()
        follower.stdout, follower.stdin = await asyncio.open_connection(sock=ours)
    return follower
