"""Scripts of this folder as processes that are forked from one which has imported what they need.

That one is `python launch.py`, whose standard input is a socket. Each message is a script and its arguments,
with descriptors: of a socket that is told the number of the process and its exit code, and of its input and
output.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
PRELOADED = (
    "torch.distributed",
    "transformers.generation.utils",
    "asynchicache.integrations.transformers.follower",
    "integrations.zoo",
)
MESSAGE_BYTES = 65536


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
            os.kill(self.pid, number)


async def launch(script: str, *arguments: str, piped: bool = False, quiet: bool = False) -> Follower:
    """Start a script; `piped`: with its standard input and output; `quiet`: without its errors."""
    told, status = socket.socketpair()
    ours, theirs = socket.socketpair() if piped else (None, None)
    descriptors = [status.fileno()] + ([] if theirs is None else [theirs.fileno()])
    words = json.dumps([script, *arguments, *(["--quiet"] if quiet else [])])
    socket.send_fds(_server(), [words.encode()], descriptors)
    status.close()
    reader, writer = await asyncio.open_connection(sock=told)
    follower = Follower(int(await reader.readline()), reader, writer)
    if ours is not None and theirs is not None:
        theirs.close()
        follower.stdout, follower.stdin = await asyncio.open_connection(sock=ours)
    return follower


@functools.cache
def _server() -> socket.socket:
    """The way to the process that forks, of this process of pytest, with which it ends."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    path = {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, __file__], stdin=theirs.fileno(), env=path)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def main() -> None:
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # a child collects only what is its own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who watches a follower ends unheard
    asked = socket.socket(fileno=os.dup(0))
    while True:
        words, descriptors, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 2)
        if not words:
            return
        if os.fork() == 0:
            asked.close()
            watch(json.loads(words), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def watch(words: list[str], status: int, stream: int | None = None) -> None:
    """Fork the script's process, and tell how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(status)
        become(words, stream)
        return
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    if stream is not None:
        os.close(stream)
    os.write(status, b"%d\n" % child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(status, b"%d\n" % code)


def become(words: list[str], stream: int | None) -> None:
    script, *arguments = words
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing if stream is None else stream, 0)
    if stream is not None:
        os.dup2(stream, 1)
        os.close(stream)
    if arguments[-1] == "--quiet":
        os.dup2(nothing, 2)
        del arguments[-1]
    os.close(nothing)
    sys.argv = [script, *arguments]
    runpy.run_path(str(FOLDER / script), run_name="__main__")


if __name__ == "__main__":
    main()
