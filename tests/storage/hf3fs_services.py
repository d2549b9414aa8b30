"""The metadata service for tests: as a process that can be killed, and in this one, with a clock of ours."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from uuid import uuid4

import uvicorn

from asynchicache.backends.hf3fs import Hf3fsBackend, open_backend
from asynchicache.backends.hf3fs.metadata.service import MetadataService
from asynchicache.backends.hf3fs.metadata.store import MetadataStore
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from engines import Server

PAGE_BYTES = 5000
FRAME_BYTES = HEADER_BYTES + 8192


def service_process(folder: Path, port: int, *arguments: str) -> Server:
    """The service as its users start it."""
    command = [sys.executable, "-m", "asynchicache.backends.hf3fs.metadata"]
    flags = ["--dir", str(folder), "--port", str(port), *arguments]
    return Server([*command, *flags], ready="listening on")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@contextmanager
def service_over(store: MetadataStore) -> Iterator[str]:
    """Real HTTP on a real socket, from a thread of this process; its URL."""
    config = uvicorn.Config(MetadataService(store).app(), access_log=False, log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def service_here(folder: Path, clock: Clock) -> Iterator[str]:
    """A service in this process, whose leases end by a clock of ours."""
    with service_over(MetadataStore(folder, now=clock)) as url:
        yield url


@asynccontextmanager
async def backend_at(path: Path, url: str, **options: object) -> AsyncIterator[Hf3fsBackend]:
    """The backend over a folder and a service; closed in the end."""
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=4, seed=0)
        stack.push_async_callback(port.aclose)
        patient = {"capacity_bytes": 1 << 20, "metadata_seconds": 60}
        backend = open_backend({"path": path, "metadata": url, **patient, **options}, port)
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
