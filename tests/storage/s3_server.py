"""A real server that speaks S3, and the object engine over it, as tests open them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http.client import HTTPConnection

from asynchicache.backends.object import ObjectBackend, open_backend
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import Bench, fingerprint_of, slab_of
from engines import Server, executable, free_port

PAGE_BYTES = 5000
FRAME_BYTES = 4096 + PAGE_BYTES
BUCKET = "pages"


class S3Server(Server):
    """moto, which keeps everything in memory: a restart forgets it. It has one bucket when it is started."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [executable("moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]
        super().__init__(command, ready="Running on")
        self.config = {
            "endpoint": f"http://127.0.0.1:{self.port}",
            "region": "us-east-1",
            "access_key_id": "tests",
            "secret_access_key": "tests",
        }

    def start(self) -> None:
        super().start()
        self.ask("PUT", f"/{BUCKET}")

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """A request without a client library."""
        connection = HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, f"{method} {path}: {answer.status} {content!r}"
        return content

    def options(self, prefix: str, **more: object) -> dict[str, object]:
        """The engine's options for a prefix of the bucket."""
        return {"url": f"s3://{BUCKET}/{prefix}", "config": self.config, **more}


@asynccontextmanager
async def backend_at(options: dict[str, object]) -> AsyncIterator[ObjectBackend]:
    """The object backend of a place; closed in the end."""
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=2, seed=0)
        stack.push_async_callback(port.aclose)
        backend = open_backend(options, port)
        stack.push_async_callback(backend.aclose)
        yield backend


async def open_bench(
    backend: ObjectBackend, pool: str = "kv", *, page_bytes: int = PAGE_BYTES, slots: int = 64
) -> Bench:
    """One pool of the backend, and slots."""
    binding = SlotBinding(slab_of(pool, page_bytes, slots), fingerprint_of("w1"))
    return Bench(await backend.open_pool(binding), binding)


@asynccontextmanager
async def bench_at(
    options: dict[str, object], *, page_bytes: int = PAGE_BYTES, slots: int = 64
) -> AsyncIterator[Bench]:
    """One pool of the object backend of a place; closed in the end."""
    async with backend_at(options) as backend:
        yield await open_bench(backend, page_bytes=page_bytes, slots=slots)
