"""Stores that lie over HTTP, or are busy: never other bytes, never a hang, and served again once honest."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import pytest

from asynchicache import HybridCache
from asynchicache.errors import StorageError
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome
from cache.engine import SPEC, Engine, config
from engines import executable
from storage.listening import listening
from storage.object_servers import FRAME_BYTES, bench_at

pytestmark = [
    pytest.mark.engine("object"),
    pytest.mark.asyncio,
    pytest.mark.parametrize("scheme", ["s3", "gs", "az"]),
]

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CORRUPT, FAILED, REJECTED, CLAIMED = Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED, Outcome.CLAIMED


def response(status: str, body: bytes = b"", *, length: int | None = None, head: bool = False) -> bytes:
    """An HTTP response; `length` is what it says of its body, whatever that is."""
    size = len(body) if length is None else length
    fields = f'Content-Length: {size}\r\nETag: "1"\r\nLast-Modified: Sat, 21 Nov 2026 12:00:00 GMT\r\n'
    return f"HTTP/1.1 {status}\r\n{fields}\r\n".encode() + (b"" if head else body)


BUSY = {"s3": "503 Slow Down", "gs": "429 Too Many Requests", "az": "503 Server Busy"}
"""How each cloud asks to be asked less often."""

ADDRESS = "http://127.0.0.1:PORT"
CONFIGS = {
    "s3": {"endpoint": ADDRESS, "region": "x", "access_key_id": "x", "secret_access_key": "x"},
    "gs": {"base_url": ADDRESS, "bearer_token": "x"},
    "az": {"endpoint": ADDRESS, "account_name": "x", "account_key": "eA=="},
}


CONDITIONS = ("if-none-match:", "if-match:", "x-goog-if-generation-match:")

EMPTY = {
    "s3": b"<ListBucketResult></ListBucketResult>",
    "gs": b"<ListBucketResult></ListBucketResult>",
    "az": b"<EnumerationResults><Blobs></Blobs></EnumerationResults>",
}


class HostileStore:
    """Objects by path, as all three clouds serve them; `lies` has, by method, what is said of pages instead,
    `patience` how often; `unconditional` what is said to writes on a condition, if not "".
    """

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.objects: dict[str, bytes] = {}
        self.lies: dict[str, bytes] = {}
        self.patience = 10**9
        self.port = 0
        self.bucket = "/bucket"
        self.signed: list[str] = []
        self.room = 10**9
        self.refusal = b""
        self.unconditional = ""
        self.serving = self.refused = self.busy = 0

    @property
    def options(self) -> dict[str, object]:
        address = str(self.port)
        config = {name: text.replace("PORT", address) for name, text in CONFIGS[self.scheme].items()}
        # Every lie ends by itself: no test waits for the deadline, after which nothing is tried again.
        place = {"url": f"{self.scheme}://bucket/p", "config": config, "object_pages": 1}
        return {**place, "retries": 1, "timeout_seconds": 60}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                fields = head.splitlines()
                self.signed += [line for line in fields if line.lower().startswith("authorization")]
                sizes = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
                body = await reader.readexactly(int(sizes[0].split(":")[1]) if sizes else 0)
                if method in self.lies and "FORMAT" not in path and self.patience:
                    self.patience -= 1
                    # A client that does not know it sends its next request into a connection that we close.
                    writer.write(self.lies[method].replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                    await writer.drain()
                    break
                self.serving += 1
                answer = self.answer(method, path.partition("?")[0], body, head)
                if self.serving > self.room or self.busy:
                    self.refused += 1
                    self.busy -= self.busy > 0
                    answer = self.refusal
                elif self.room < 10**9:
                    await asyncio.sleep(0.005)  # a request takes time
                self.serving -= 1
                writer.write(answer)
        writer.close()

    def answer(self, method: str, path: str, body: bytes, head: str) -> bytes:
        if self.unconditional and any(mark in head.lower() for mark in CONDITIONS):
            self.refused += 1
            return response(self.unconditional)
        return self.truth(method, path, body)

    def truth(self, method: str, path: str, body: bytes) -> bytes:
        if method == "PUT":
            self.objects[path] = body
        elif method == "DELETE":
            self.objects.pop(path, None)
        elif path.rstrip("/") == self.bucket:  # a list, asked for once, when there is nothing
            return response("200 OK", EMPTY[self.scheme])
        elif path not in self.objects:
            return response("404 Not Found")
        else:
            return response("200 OK", self.objects[path], head=method == "HEAD")
        return response("200 OK")


@asynccontextmanager
async def scene(scheme: str, **options: object) -> AsyncIterator[tuple[HostileStore, PoolUnderTest]]:
    """A store that is honest so far and holds pages 0 and 1, and one pool over it."""
    store = HostileStore(scheme)
    async with listening(store.serve) as store.port, bench_at({**store.options, **options}) as bench:
        assert await bench.put(bench.keys(0, 1), [0, 1]) == [STORED] * 2
        yield store, bench


async def recovers(store: HostileStore, bench: PoolUnderTest) -> None:
    store.lies.clear()
    keys = bench.keys(0, 1)
    assert set(await bench.put(keys, [0, 1])) <= {STORED, EXISTS}
    assert await bench.get(keys, [8, 9]) == [HIT] * 2


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (response("404 Not Found"), MISS),
        (response("200 OK", b"short"), CORRUPT),
        (response("200 OK", bytes(FRAME_BYTES)), CORRUPT),
        (response("200 OK", bytes(FRAME_BYTES + 1)), CORRUPT),
        (response("200 OK", b"x", length=10**13), CORRUPT),
        (response("200 OK", bytes(FRAME_BYTES - 9), length=FRAME_BYTES), FAILED),
        (response("200 OK", length=FRAME_BYTES), FAILED),
        (response("403 Forbidden"), FAILED),
        (response("500 Internal Server Error"), FAILED),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", FAILED),
        (b"HTTP/1.1 200 OK\r\n\r\n", FAILED),
        (b"$9096\r\nno HTTP at all\r\n", FAILED),
        (b"", FAILED),
    ],
)
async def test_what_a_get_may_be_answered(scheme: str, answer: bytes, outcome: Outcome) -> None:
    async with scene(scheme) as (store, bench):
        store.lies["GET"] = answer

        assert await bench.get(bench.keys(0, 1), [5, 6]) == [outcome] * 2

        await recovers(store, bench)


@pytest.mark.parametrize("answer", [response("403 Forbidden"), response("500 Oops"), b"no HTTP\r\n", b""])
async def test_a_put_that_fails(scheme: str, answer: bytes) -> None:
    async with scene(scheme) as (store, bench):
        store.lies["PUT"] = answer

        assert await bench.put(bench.keys(0, 7), [0, 5]) == [EXISTS, FAILED]

        await recovers(store, bench)


@pytest.mark.parametrize(
    "answer",
    [
        response("507 Insufficient Storage"),
        response("403 Forbidden", b"<?xml version='1.0'?><Error><Code>QuotaExceeded</Code></Error>"),
    ],
)
async def test_a_full_store_refuses_and_is_read(scheme: str, answer: bytes) -> None:
    async with scene(scheme) as (store, bench):
        store.lies["PUT"] = answer

        assert await bench.put(bench.keys(0, 7), [0, 5]) == [EXISTS, REJECTED]
        assert await bench.get(bench.keys(0), [6]) == [HIT]

        await recovers(store, bench)


def certified(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's certificate for 127.0.0.1, and that of the private authority that signed it."""

    def openssl(*words: str) -> None:
        subprocess.run([executable("openssl"), *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=test")
    openssl("req", "-x509", *new, "-days", "2", "-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", *new, "-keyout", "server.key", "-out", "server.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.crt")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.crt", folder / "server.key")
    return tls, folder / "ca.crt"


async def test_a_store_of_a_private_authority(scheme: str, tmp_path: Path) -> None:
    store = HostileStore(scheme)
    tls, authority = certified(tmp_path)
    async with listening(store.serve, tls) as store.port:
        config = {name: text.replace("http:", "https:") for name, text in store.options["config"].items()}
        options = {**store.options, "config": config, "retries": 0}
        with pytest.raises(StorageError, match=r"certificate is not trusted: .*ca_file .*UnknownIssuer"):
            async with bench_at(options):
                pass
        async with bench_at({**options, "ca_file": str(authority)}) as bench:
            assert await bench.put(bench.keys(0), [0]) == [STORED]
            assert await bench.get(bench.keys(0), [1]) == [HIT]


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT"])
async def test_a_store_that_is_busy_is_asked_again(scheme: str, method: str) -> None:
    async with scene(scheme) as (store, bench):
        store.lies[method], store.patience = response(BUSY[scheme], head=method == "HEAD"), 1

        assert await bench.put(bench.keys(7), [5]) == [STORED]
        assert await bench.get(bench.keys(7), [6]) == [HIT]
        assert store.patience == 0


async def test_a_store_that_stays_busy_refuses(scheme: str) -> None:
    status = BUSY[scheme]
    async with scene(scheme, timeout_seconds=1) as (store, bench):  # for half of which it asks again
        for method in ("GET", "PUT"):
            store.lies[method] = response(status)

        assert await bench.put(bench.keys(7), [5]) == [REJECTED]
        assert await bench.get(bench.keys(0), [6]) == [FAILED]
        store.lies["HEAD"] = response(status, head=True)
        with pytest.raises(StorageError, match=status[:3]):
            await bench.engine.exists(bench.keys(0))
        assert await bench.put(bench.keys(7), [5]) == [FAILED], "nobody knows whether it is there"

    async with scene(scheme) as (store, bench):
        store.lies["GET"], store.patience = response(status), 5  # more than `retries`
        assert await bench.get(bench.keys(0), [6]) == [HIT]


async def test_a_store_with_room_for_few_requests_loses_no_page(scheme: str) -> None:
    """It refuses what comes while it serves two requests, of the twelve that we would send at once."""
    async with scene(scheme) as (store, bench):
        store.room, store.refusal = 2, response(f"{BUSY[scheme]}\r\nRetry-After: 1")
        keys, slots = bench.keys(*range(10, 22)), list(range(12))

        assert await bench.put(keys, slots) == [STORED] * len(keys)
        assert await bench.get(keys, slots) == [HIT] * len(keys)
        assert store.refused
        before = store.refused
        for key, slot in zip(keys, slots, strict=True):
            assert await bench.get([key], [slot]) == [HIT]
        assert store.refused == before


async def test_a_store_that_is_busy_is_opened(scheme: str) -> None:
    store = HostileStore(scheme)
    store.busy, store.refusal = 5, response(BUSY[scheme])  # more than `retries`
    async with listening(store.serve) as store.port, bench_at(store.options) as bench:
        assert await bench.put(bench.keys(0), [0]) == [STORED]
    assert store.refused == 5


async def test_a_cache_before_a_throttled_store_keeps_its_hits(scheme: str) -> None:
    store, prompt = HostileStore(scheme), list(range(32))
    async with listening(store.serve) as store.port:
        chosen = config(storage="object", storage_options=store.options)
        async with HybridCache.open(SPEC, chosen) as cache:
            store.room, store.refusal = 2, response(BUSY[scheme])
            await Engine(cache).serve(prompt)
            await cache.drain()
        store.room = 10**9  # to open what is there
        async with HybridCache.open(SPEC, chosen) as cache:
            store.room, store.refused = 2, 0
            assert (await Engine(cache).serve([*prompt, 32])).tokens == len(prompt)
            pools = cache.statistics().storage
    assert store.refused
    assert {pool.opened for pool in pools.values()} == {0}, "no breaker"


@pytest.mark.parametrize("virtual_hosted", [False, True])
async def test_the_bucket_is_in_the_path_or_in_the_host(scheme: str, virtual_hosted: bool) -> None:
    """The endpoint of a virtual-hosted bucket is its own; S3 alone has both."""
    store = HostileStore(scheme)
    store.bucket = "" if virtual_hosted and scheme == "s3" else "/bucket"
    async with listening(store.serve) as store.port:
        given = store.options
        if virtual_hosted and scheme == "s3":
            given["config"] = {**given["config"], "virtual_hosted_style_request": True}
        async with bench_at({**given, "object_pages": 32}) as bench:
            assert await bench.put(bench.keys(0), [0]) == [STORED]
            assert await bench.get(bench.keys(0), [1]) == [HIT]
    assert store.objects
    assert all(unquote(path).removeprefix(store.bucket).startswith("/p/") for path in store.objects)


async def test_heads_that_lie_cost_a_miss(scheme: str) -> None:
    async with scene(scheme) as (store, bench):
        store.lies["HEAD"] = response("200 OK", bytes(FRAME_BYTES), head=True)
        assert await bench.engine.exists(bench.keys(0, 9)) == bytes([1, 1])
        assert await bench.get(bench.keys(0, 9), [5, 6]) == [HIT, MISS]

        store.lies["HEAD"] = response("200 OK", b"short", head=True)
        assert await bench.engine.exists(bench.keys(0)) == bytes([0])

        store.lies["HEAD"] = response("500 Oops", head=True)
        with pytest.raises(StorageError, match=f"{scheme}://bucket/p: "):
            await bench.engine.exists(bench.keys(0))
        assert await bench.put(bench.keys(7), [5]) == [FAILED]
        assert await bench.engine.delete(bench.keys(0)) == [FAILED]

        await recovers(store, bench)


async def test_a_store_without_conditional_writes(scheme: str) -> None:
    async with scene(scheme) as (store, bench):
        store.lies["PUT"], store.patience = response("501 Not Implemented"), 2  # and once more
        assert await bench.put(bench.keys(7), [5]) == [STORED]
        assert await bench.get(bench.keys(7), [6]) == [HIT]
        assert store.patience == 0


async def test_a_store_without_conditional_writes_has_no_claims(scheme: str) -> None:
    async with scene(scheme, object_pages=32) as (store, bench):
        store.lies["PUT"], store.patience = response("501 Not Implemented"), 2  # and once more
        keys = bench.keys(7, 8)
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 2
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 2
        assert store.patience == 0
        assert await bench.put(keys, [5, 6]) == [STORED] * 2
        assert not [path for path in store.objects if "claim" in path]


WRONG = ["412 Precondition Failed", "409 Conflict", "404 Not Found"]
"""What gateways answer to every write on the condition that nothing is there."""
UNKNOWING = ["400 Bad Request", "403 Forbidden", "500 Internal Server Error"]
"""What others answer to it, which says nothing of the condition."""


@pytest.mark.parametrize("status", WRONG)
async def test_a_store_that_refuses_every_claim_has_none(
    scheme: str, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(scheme, object_pages=32, retries=0) as (store, bench):
        store.unconditional, keys = status, bench.keys(7, 8)
        answers = [await bench.engine.claim(keys, 60.0) for _ in range(4)]
        assert answers == [[CLAIMED] * 2] * 2 + [[MISS] * 2] * 2
        asked = store.refused
        assert await bench.put(keys, [5, 6]) == [STORED] * 2
        assert store.refused == asked
        assert caplog.text.count("conditional writes are refused where nothing is") == 1

        conditions, key = bench.engine._conditions, bench.keys(9)
        conditions._now = partial(float, conditions._until)
        assert await bench.engine.claim(key, 60.0) == [MISS], "it is tried again, once"
        assert store.refused > asked
        store.unconditional = ""
        assert await bench.engine.claim(key, 60.0) == [MISS]
        assert not [path for path in store.objects if "claim" in path]
        conditions._now = partial(float, conditions._until)
        assert await bench.engine.claim(key, 60.0) == [MISS]
        assert [path for path in store.objects if "claim" in path]


@pytest.mark.parametrize("status", WRONG + UNKNOWING)
async def test_pages_are_stored_where_every_condition_is_refused(scheme: str, status: str) -> None:
    async with scene(scheme, retries=0) as (store, bench):
        store.unconditional, keys = status, bench.keys(*range(10, 15))
        for slot, key in enumerate(keys):
            assert await bench.put([key], [slot]) == [STORED]
        assert store.refused == 3
        assert await bench.get(keys, range(10, 15)) == [HIT] * 5


@pytest.mark.parametrize("status", UNKNOWING)
async def test_claims_end_where_every_condition_fails(
    scheme: str, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(scheme, object_pages=32, retries=0) as (store, bench):
        store.unconditional, keys = status, bench.keys(*range(10, 15))
        for slot, key in enumerate(keys):
            assert await bench.engine.claim([key], 60.0) == [MISS]
            assert await bench.put([key], [slot]) == [STORED]
        assert store.refused == 6, "of three pages the claim and the object"
        assert caplog.text.count("conditional writes are refused where nothing is") == 1


@pytest.mark.parametrize("status", WRONG + UNKNOWING)
async def test_a_batch_is_stored_where_every_condition_is_refused(scheme: str, status: str) -> None:
    async with scene(scheme, retries=0, requests=4) as (store, bench):
        store.unconditional, keys = status, bench.keys(*range(10, 30))
        assert await bench.put(keys, range(20)) == [STORED] * 20
        assert await bench.put(bench.keys(30), [20]) == [STORED]
        assert store.refused <= 6, "four at once; after the first three that were stored without, two more"
        assert await bench.get(keys, range(30, 50)) == [HIT] * 20


@pytest.mark.parametrize("status", WRONG + UNKNOWING)
async def test_a_store_that_refuses_every_write_is_asked_once_more_a_batch(scheme: str, status: str) -> None:
    async with scene(scheme, retries=0) as (store, bench):
        store.lies["PUT"] = response(status)
        for _ in range(5):
            before = store.patience
            assert await bench.put(bench.keys(*range(10, 20)), range(10)) == [FAILED] * 10
            assert before - store.patience == 11
        store.lies.clear()
        store.unconditional = "412 Precondition Failed"
        assert await bench.put(bench.keys(10), [0]) == [STORED]
        assert store.refused == 1, "conditions were not taken for broken"


@pytest.mark.parametrize("status", ["412 Precondition Failed", "500 Internal Server Error"])
async def test_one_refusal_is_no_proof(scheme: str, status: str) -> None:
    """Between two writes that are refused one is done."""
    async with scene(scheme, retries=0) as (store, bench):
        for slot in range(8):
            store.unconditional = "" if slot % 2 else status
            assert await bench.put(bench.keys(10 + slot), [slot]) == [STORED]
        assert store.refused == 4


async def test_a_cache_does_not_wait_for_claims_that_nobody_has(scheme: str) -> None:
    store, prompt = HostileStore(scheme), list(range(32))
    async with listening(store.serve) as store.port:
        store.unconditional = "412 Precondition Failed"
        chosen = config(
            storage="object",
            storage_options={**store.options, "object_pages": 32},
            storage_limits={"claim_seconds": 3600.0},
        )
        async with HybridCache.open(SPEC, chosen) as cache, asyncio.timeout(60):
            await Engine(cache).serve(prompt)
            await cache.drain()
        assert not [path for path in store.objects if "claim" in path]
        assert len(store.objects) > 2


async def test_of_two_writers_one_stores(scheme: str) -> None:
    """The other has looked before; what is there is kept, unless it is cut short."""
    async with scene(scheme) as (store, bench):
        exists = b"<?xml version='1.0'?><Error><Code>BlobAlreadyExists</Code></Error>"
        status = "409 Conflict" if scheme == "az" else "412 Precondition Failed"
        store.lies["HEAD"] = response("404 Not Found", head=True)
        store.lies["PUT"], store.patience = response(status, exists), 2
        assert await bench.put(bench.keys(0), [5]) == [EXISTS]
        assert store.patience == 0
        (path,) = [path for path in store.objects if bench.keys(0)[0].digest.hex() in path]
        store.objects[path], store.patience = b"short", 2
        assert await bench.put(bench.keys(0), [0]) == [STORED]
        assert await bench.get(bench.keys(0), [6]) == [HIT]


ROTATING = {
    "s3": {"Version": 1, "AccessKeyId": "KEY", "SecretAccessKey": "s3cret"},
    "gs": {"token": "KEY"},
    "az": {"token": "KEY"},
}


@pytest.mark.parametrize("option", ["credentials_file", "credentials_command"])
async def test_credentials_are_read_again_before_they_expire(
    scheme: str, option: str, tmp_path: Path
) -> None:
    store, source = HostileStore(scheme), tmp_path / "keys.json"

    def rotate(key: str, seconds: float) -> None:
        expires = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
        text = json.dumps({**ROTATING[scheme], "expires_at": expires}).replace("KEY", key)
        source.write_text(text)

    rotate("first", 0)  # each request needs new ones
    async with listening(store.serve) as store.port:
        plain = {name: text for name, text in store.options["config"].items() if "key" not in name}
        config = {name: text for name, text in plain.items() if "token" not in name}
        given = str(source) if option == "credentials_file" else f"cat '{source}'"
        async with bench_at({**store.options, "config": config, option: given}) as bench:
            assert await bench.put(bench.keys(0), [0]) == [STORED]
            assert "first" in store.signed[-1]
            rotate("second", 3600)
            assert await bench.get(bench.keys(0), [1]) == [HIT]
            assert "second" in store.signed[-1]
            source.unlink()
            assert await bench.get(bench.keys(0), [1]) == [HIT], "they are good for a while"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sh -c 'echo no key today >&2; exit 3'", "credentials_command sh ended with 3: no key today"),
        ("echo s3cret", "credentials of echo are no JSON object"),
        ("""echo '{"token": "s3cret", "Expiration": "soon"}'""", "Expiration is no time in ISO 8601"),
        ("/nowhere", "No such file or directory: '/nowhere'"),
    ],
)
async def test_credentials_that_cannot_be_had_are_said_at_open(
    scheme: str, command: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = HostileStore(scheme)
    async with listening(store.serve) as store.port:
        options = {**store.options, "config": {"account_name": "x"} if scheme == "az" else {}}
        with pytest.raises(StorageError, match=words) as raised:
            async with bench_at({**options, "credentials_command": command}):
                pass
    assert "s3cret" not in f"{raised.value}{caplog.text}"
