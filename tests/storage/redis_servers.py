"""A real Redis server, and the engine over it, as tests open them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from msgspec import structs

from asynchicache.backends.redis import RedisBackend, open_backend
from asynchicache.backends.redis.engine import RedisEngine
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from engines import Server, executable, free_port

PAGE_BYTES = 5000
FRAME_BYTES = 4096 + PAGE_BYTES


class RedisServer(Server):
    """A server in a folder of its own that keeps nothing on disk.

    Args:
        folder: where its socket lies.
        arguments: more of its options, e.g. `--requirepass secret`.
        program: `redis-server`, or `valkey-server`, which takes the same options.
    """

    def __init__(self, folder: Path, *arguments: str, program: str = "redis-server") -> None:
        self.port = free_port()
        self.socket = folder / "redis.sock"
        command = [executable(program), "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        command += ["--appendonly", "no", "--dir", str(folder), "--unixsocket", str(self.socket)]
        super().__init__([*command, *arguments], ready="Ready to accept connections")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


@asynccontextmanager
async def backend_at(url: str, **options: object) -> AsyncIterator[RedisBackend]:
    """The redis backend of a server; closed in the end. Calls may take a minute, unless told otherwise."""
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=2, seed=0)
        stack.push_async_callback(port.aclose)
        backend = open_backend({"url": url, "timeout_seconds": 60, **options}, port)
        stack.push_async_callback(backend.aclose)
        yield backend


async def open_bench(
    backend: RedisBackend,
    pool: str = "kv",
    *,
    page_bytes: int = PAGE_BYTES,
    slots: int = 64,
    weights: str = "w1",
) -> PoolUnderTest:
    """One pool of the backend, and slots."""
    binding = SlotBinding(slab_of(pool, page_bytes, slots), fingerprint_of(weights))
    return PoolUnderTest(await backend.open_pool(binding), binding)


@asynccontextmanager
async def bench_at(
    url: str, *, page_bytes: int = PAGE_BYTES, slots: int = 64, **options: object
) -> AsyncIterator[PoolUnderTest]:
    """One pool of the redis backend of a server; closed in the end."""
    async with backend_at(url, **options) as backend:
        yield await open_bench(backend, page_bytes=page_bytes, slots=slots)


@contextmanager
def impatient(bench: PoolUnderTest, seconds: float) -> Iterator[None]:
    """Give the engine's calls this deadline within the block only: what comes before and after it may take
    as long as the machine needs."""
    engine = bench.engine
    assert isinstance(engine, RedisEngine)
    before = engine._options
    engine._options = structs.replace(before, timeout_seconds=seconds)
    try:
        yield
    finally:
        engine._options = before
