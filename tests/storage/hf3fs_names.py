"""Where tests keep names of the 3FS engine: SQLite, with a clock of ours, and Redis, which can be killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from uuid import uuid4

from asynchicache.backends.hf3fs import Hf3fsBackend, open_backend
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from storage.redis_servers import RedisServer

PAGE_BYTES = 5000
FRAME_BYTES = HEADER_BYTES + 8192


def names_server(folder: Path) -> RedisServer:
    """A server that loses nothing when it is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    return RedisServer(folder, "--appendonly", "yes", "--appendfsync", "always")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


class ClockedPort(AsyncioPort):
    """A port whose clock is ours."""

    def __init__(self, clock: Clock | None, *, threads: int = 4, seed: int = 0) -> None:
        super().__init__(threads=threads, seed=seed)
        self._clock = clock

    def now(self) -> float:
        return self._clock() if self._clock else super().now()


class Place(str):
    """A folder of names whose leases end by a clock of ours."""

    clock: Clock


@contextmanager
def names_here(folder: Path, clock: Clock) -> Iterator[Place]:
    place = Place(folder)
    place.clock = clock
    yield place


@asynccontextmanager
async def backend_at(path: Path, url: str, **options: object) -> AsyncIterator[Hf3fsBackend]:
    """The backend over a folder and names; closed in the end."""
    async with AsyncExitStack() as stack:
        port = ClockedPort(getattr(url, "clock", None))
        stack.push_async_callback(port.aclose)
        patient = {"capacity_bytes": 1 << 20, "metadata_seconds": 60}
        backend = open_backend({"path": path, "metadata": str(url), **patient, **options}, port)
        stack.push_async_callback(backend.aclose)
        yield backend


async def open_bench(
    backend: Hf3fsBackend, pool: str = "kv", *, weights: str = "", shard: str = "", slots: int = 64
) -> PoolUnderTest:
    """One pool of the backend, and slots. Without `weights` nobody else has its pages."""
    fingerprint = fingerprint_of(weights or uuid4().hex)
    binding = SlotBinding(slab_of(pool, PAGE_BYTES, slots), fingerprint, shard)
    return PoolUnderTest(await backend.open_pool(binding), binding)


@asynccontextmanager
async def bench_at(
    path: Path, url: str, *, weights: str = "", **options: object
) -> AsyncIterator[PoolUnderTest]:
    """One pool of the backend; closed in the end."""
    async with backend_at(path, url, **options) as backend:
        yield await open_bench(backend, weights=weights)
