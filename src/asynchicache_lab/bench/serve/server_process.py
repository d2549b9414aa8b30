"""An `asynchicache serve` process, observed from outside."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asynchicache.errors import ConfigError

_READY = re.compile(rb"listening on (\S+)")
_START_SECONDS = 300.0
_STOP_SECONDS = 60.0
_UNHANDLED = ("Traceback", "never retrieved", "Unclosed", "Exception in")


class ServerProcess:
    """A running server.

    Attributes:
        address: `http://127.0.0.1:PORT`.
    """

    def __init__(self, process: Process, address: str, log: Path) -> None:
        self.address = address
        self._process = process
        self._log = log

    @property
    def rss_bytes(self) -> int:
        """Current resident memory in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text("ascii")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) * 1024 if found else 0

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def kill(self) -> None:
        """End it at once, as the system does where memory is short."""
        self._process.kill()

    def unhandled(self) -> list[str]:
        """Log lines about unhandled errors."""
        lines = self._log.read_text("utf-8", errors="replace").splitlines()
        return [line for line in lines if any(word in line for word in _UNHANDLED)]


@asynccontextmanager
async def server_process(log: Path, flags: Sequence[str]) -> AsyncIterator[ServerProcess]:
    """Run a server for the duration of the block; end it with SIGTERM.

    Args:
        log: file for its standard error.
        flags: flags of `asynchicache serve`.

    Raises:
        ConfigError: the server does not start; quotes its log.
    """
    words = ["-P", "-m", "asynchicache.cli.main", "serve", "--port", "0", "--threads", "1", *flags]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=DEVNULL, stdout=PIPE, stderr=errors
        )
        try:
            yield ServerProcess(process, await _address(process, log), log)
        finally:
            await _stop(process)


async def _address(process: Process, log: Path) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_SECONDS):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    found = _READY.search(line)
    if found is None:
        raise ConfigError(f"the server does not start: {_end_of(log)}")
    return found[1].decode()


def _end_of(log: Path) -> str:
    return log.read_text("utf-8", errors="replace")[-500:]


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
