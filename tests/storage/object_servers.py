"""Real servers that speak what S3, Google Cloud Storage and Azure speak, and the object engine over them,
as tests open them.
"""

from __future__ import annotations

import hmac
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from email.utils import formatdate
from hashlib import sha256
from http.client import HTTPConnection

import obstore
from msgspec import structs
from obstore.store import ObjectStore, from_url

from asynchicache.backends.object import ObjectBackend, open_backend
from asynchicache.backends.object.engine import ObjectEngine
from asynchicache.backends.object.stores import make_store
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from engines import Server, executable, free_port

PAGE_BYTES = 5000
FRAME_BYTES = 4096 + PAGE_BYTES
BUCKET = "pages"


class ObjectServer(Server):
    """A server with one bucket. It keeps everything in memory: a restart forgets all but the bucket.

    Attributes:
        scheme: of its URLs.
        complaint: what its client's errors begin with.
        config: the engine's option of that name.
        listed: most objects in one answer to a listing.
    """

    scheme: str
    complaint: str
    port: int
    config: dict[str, str]
    listed = 1000

    def start(self) -> None:
        super().start()
        self.make_bucket()

    def make_bucket(self) -> None:
        self.request("PUT", f"/{BUCKET}")

    def request(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> None:
        """A request without a client library.

        Raises:
            AssertionError: it is refused.
        """
        connection = HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        assert answer.status < 300, f"{method} {path}: {answer.status} {content!r}"

    def options(self, prefix: str, **more: object) -> dict[str, object]:
        """The engine's options for a prefix of the bucket; with them a request may take a minute."""
        url = f"{self.scheme}://{BUCKET}/{prefix}"
        return {"url": url, "config": self.config, "timeout_seconds": 60, **more}

    def store(self, prefix: str) -> ObjectStore:
        """The prefix as others see it, without our engine."""
        url = f"{self.scheme}://{BUCKET}/{prefix}"
        return from_url(url, config=self.config, client_options={"allow_http": True})

    def upload(self, prefix: str, name: str, content: bytes) -> None:
        """What somebody else puts below our prefix."""
        obstore.put(self.store(prefix), name, content, use_multipart=False)

    def names(self, prefix: str) -> set[str]:
        """What lies below the prefix."""
        return {entry["path"] for found in obstore.list(self.store(prefix)) for entry in found}


class MotoServer(ObjectServer):
    """moto: the XML interface that S3 has, and Google Cloud Storage too. It looks at no credentials."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [executable("moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]
        super().__init__(command, ready="Running on")
        self.endpoint = f"http://127.0.0.1:{self.port}"


class S3Server(MotoServer):
    """S3, signed requests."""

    scheme, complaint = "s3", "Generic S3 error"

    def __init__(self) -> None:
        super().__init__()
        self.config = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "tests",
            "secret_access_key": "tests",
        }


class GoogleServer(MotoServer):
    """Google Cloud Storage's XML interface, with a token that is taken as it is."""

    scheme, complaint = "gs", "Generic GCS error"

    def __init__(self) -> None:
        super().__init__()
        self.config = {"base_url": self.endpoint, "bearer_token": "tests"}


class AzureServer(ObjectServer):
    """Azurite, Microsoft's own emulator. It checks signatures, against a key that is public."""

    scheme, complaint = "az", "Generic MicrosoftAzure error"
    listed = 5000
    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self) -> None:
        self.port = free_port()
        command = [executable("azurite-blob"), "--blobPort", str(self.port), "--inMemoryPersistence"]
        command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        super().__init__(command, ready="successfully listens")
        self.config = {
            "account_name": self.account,
            "account_key": self.key,
            "endpoint": f"http://127.0.0.1:{self.port}/{self.account}",
        }

    def make_bucket(self) -> None:
        named = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        lines = [f"{name}:{text}" for name, text in named.items()]
        resource = f"/{self.account}/{self.account}/{BUCKET}"
        signed = "\n".join(["PUT", *[""] * 11, *lines, resource, "restype:container"])
        proof = b64encode(hmac.digest(b64decode(self.key), signed.encode(), sha256)).decode()
        named["Authorization"] = f"SharedKey {self.account}:{proof}"
        self.request("PUT", f"/{self.account}/{BUCKET}?restype=container", named)


SERVERS = (S3Server, GoogleServer, AzureServer)


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
) -> PoolUnderTest:
    """One pool of the backend, and slots."""
    binding = SlotBinding(slab_of(pool, page_bytes, slots), fingerprint_of("w1"))
    return PoolUnderTest(await backend.open_pool(binding), binding)


@asynccontextmanager
async def bench_at(
    options: dict[str, object], *, page_bytes: int = PAGE_BYTES, slots: int = 64
) -> AsyncIterator[PoolUnderTest]:
    """One pool of the object backend of a place; closed in the end."""
    async with backend_at(options) as backend:
        yield await open_bench(backend, page_bytes=page_bytes, slots=slots)


@contextmanager
def impatient(bench: PoolUnderTest, seconds: float) -> Iterator[None]:
    """Give the engine's requests this deadline within the block only: what comes before and after it may take
    as long as the machine needs."""
    engine = bench.engine
    assert isinstance(engine, ObjectEngine)
    patient = engine._requests.store
    engine._requests.store = make_store(structs.replace(engine._options, timeout_seconds=seconds))
    try:
        yield
    finally:
        engine._requests.store = patient
