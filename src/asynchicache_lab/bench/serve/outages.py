"""Storage of a server that can be killed and restarted."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from asynchicache.errors import ConfigError

_PATIENCE = 10.0


class Outage(Protocol):
    """Storage that can fail on request."""

    @property
    def flags(self) -> list[str]:
        """The flags of `asynchicache serve` for this storage."""
        ...

    def kill(self) -> None:
        """Remove the storage and its contents."""
        ...

    def restart(self) -> None:
        """Restart the storage, empty."""
        ...


class FolderOutage:
    """A folder that is removed while its store is open, and recreated."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "pages"

    @property
    def flags(self) -> list[str]:
        return ["--storage-path", str(self._folder)]

    def kill(self) -> None:
        shutil.rmtree(self._folder)

    def restart(self) -> None:
        self._folder.mkdir()


class RedisOutage:
    """A separate `redis-server` without persistence, killed as by a machine failure.

    Raises:
        ConfigError: the program is not installed or does not start.
    """

    def __init__(self) -> None:
        found = shutil.which("redis-server")
        if found is None:
            raise ConfigError("--storage redis: redis-server is not installed; --storage file needs nothing")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._command = [found, "--port", str(self._port), "--bind", "127.0.0.1", "--save", ""]
        self.restart()

    @property
    def flags(self) -> list[str]:
        return ["--storage", "redis", "--storage-option", f"url=redis://127.0.0.1:{self._port}"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)  # noqa: S603
        until = time.monotonic() + _PATIENCE
        while not self._listens():
            if time.monotonic() > until or self._process.poll() is not None:
                raise ConfigError(f"{' '.join(self._command)} does not start")
            time.sleep(0.02)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
        except OSError:
            return False
        return True


@contextmanager
def open_outage(storage: str, folder: Path) -> Iterator[Outage]:
    """Open the storage of that name; remove it at the end.

    Raises:
        ConfigError: the storage is not available on this machine.
    """
    if storage == "file":
        yield FolderOutage(folder)
        return
    redis = RedisOutage()
    try:
        yield redis
    finally:
        redis.kill()
