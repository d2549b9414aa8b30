"""Real storage for a soak, and its faults: killed servers and damaged files."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from asynchicache.cache import HybridCache
from asynchicache.errors import ConfigError, StorageError
from asynchicache.layouts import ALIGNMENT, HEADER_BYTES, round_up
from asynchicache.specs import ModelSpec
from asynchicache_lab.bench.soak.model import SharedBound

_FILE_BYTES = 16 << 10  # allowance for the small files of a folder
_ENTRIES_BYTES = 256 << 10  # of a segment, of which a pool of a soak has one
_KEY_BYTES = 120  # of a page in Redis
_SAMPLES = 64  # keys that Redis compares to find the oldest; its default is 5
_ANSWER_SECONDS = 30.0

Fault = Callable[[HybridCache], Awaitable[None]]


class SoakStore(Protocol):
    """One kind of storage: how a cache opens it, and its faults by name. Awaiting a fault injects it and
    repairs the storage."""

    @property
    def engine(self) -> str: ...

    @property
    def options(self) -> Mapping[str, object]: ...

    @property
    def faults(self) -> Mapping[str, Fault]: ...

    async def start(self) -> None: ...

    async def bounds(self, spec: ModelSpec) -> Sequence[SharedBound]:
        """Number of pages and states of each pool that it can hold. It must be started and empty."""
        ...

    async def stop(self) -> None: ...


class FileStore:
    """A folder. Its fault changes bytes of pages while no cache has it open."""

    engine = "file"

    def __init__(self, folder: Path, chance: random.Random, capacity_bytes: int) -> None:
        self._folder = folder / "pages"
        self._chance = chance
        self._capacity = capacity_bytes
        self.options: Mapping[str, object] = {"path": str(self._folder), "capacity_bytes": capacity_bytes}
        self.faults: Mapping[str, Fault] = {"damage": self._damage}

    async def start(self) -> None:
        """Nothing to start."""

    async def bounds(self, spec: ModelSpec) -> Sequence[SharedBound]:
        """In the long run, each pool gets an equal share of the folder's bytes."""
        share = (self._capacity - _FILE_BYTES) // len(spec.pools) - _ENTRIES_BYTES
        sizes = {pool.name: round_up(pool.slot_bytes(spec.page_size), ALIGNMENT) for pool in spec.pools}
        return [SharedBound({name: size}, share) for name, size in sizes.items()]

    async def stop(self) -> None:
        """Nothing to stop."""

    async def _damage(self, cache: HybridCache) -> None:
        await cache.detach_storage()
        await asyncio.to_thread(self._flip)
        await cache.attach_storage(self.engine, self.options)

    def _flip(self) -> None:
        """Change one byte in the files of some pages."""
        for path in sorted(self._folder.rglob("*.pages")):
            with path.open("r+b") as file:
                for _ in range(16):
                    place = self._chance.randrange(path.stat().st_size)
                    byte = os.pread(file.fileno(), 1, place)
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 0xFF]), place)


class RedisStore:
    """A separate Redis server, which loses everything when killed.

    Raises:
        ConfigError: `redis-server` is not on the path.
    """

    engine = "redis"

    def __init__(self, folder: Path, chance: random.Random, capacity_bytes: int) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise ConfigError("--storage redis: there is no redis-server on the path")
        self._chance = chance
        self._capacity = capacity_bytes
        self._port = _free_port()
        self._command = [program, "--bind", "127.0.0.1", "--port", str(self._port), "--dir", str(folder)]
        self._command += ["--save", "", "--appendonly", "no"]
        self._command += ["--maxmemory", str(capacity_bytes), "--maxmemory-policy", "allkeys-lru"]
        self._command += ["--maxmemory-samples", str(_SAMPLES)]
        setpriv = shutil.which("setpriv")
        if setpriv is not None:  # the kernel then ends the server with this process, even after a crash
            self._command[:0] = [setpriv, "--pdeathsig", "KILL", "--"]
        self.options: Mapping[str, object] = {
            "url": f"redis://127.0.0.1:{self._port}",
            "timeout_seconds": 1.0,
        }
        self.faults: Mapping[str, Fault] = {"kill": self._kill, "pause": self._pause}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the server; return when it answers.

        Raises:
            StorageError: the server does not answer in time.
        """
        quiet = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=quiet, stderr=quiet)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                while not await self._answers():  # noqa: ASYNC110 - it must be asked
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise StorageError(f"redis-server does not answer on port {self._port}") from None

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        finally:
            writer.close()

    async def bounds(self, spec: ModelSpec) -> Sequence[SharedBound]:
        """Ask the server for the memory that one page takes, and for its memory when empty."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            costs = {}
            for pool in spec.pools:
                size = HEADER_BYTES + pool.slot_bytes(spec.page_size)
                name = "k" * _KEY_BYTES
                writer.write(
                    f"SETRANGE {name} {size - 1} x\r\nMEMORY USAGE {name}\r\nDEL {name}\r\n".encode()
                )
                _, usage, _ = [await reader.readline() for _ in range(3)]
                costs[pool.name] = int(usage[1:])
            writer.write(b"INFO memory\r\n")
            info = await reader.readexactly(int((await reader.readline())[1:]))
        finally:
            writer.close()
        used = int(info.partition(b"used_memory:")[2].split()[0])
        return [SharedBound(costs, self._capacity - used)]

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await process.wait()

    async def _kill(self, cache: HybridCache) -> None:
        await self.stop()
        await asyncio.sleep(self._chance.uniform(0, 1))
        await self.start()

    async def _pause(self, cache: HybridCache) -> None:
        """Suspend the server: it keeps its connections but does not answer for a while."""
        assert self._process is not None, "it was started"
        self._process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._chance.uniform(0, 2))
        finally:
            self._process.send_signal(signal.SIGCONT)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


STORES: Mapping[str, Callable[[Path, random.Random, int], SoakStore]] = {
    "file": FileStore,
    "redis": RedisStore,
}
