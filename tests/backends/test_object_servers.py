"""The object engine over real servers of S3, Google Cloud Storage and Azure: conformance, bare and behind
wrappers; servers killed, stopped, emptied; what others put below our prefix; wrong credentials.

More than 400 lines: they share servers, which take seconds to start.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import obstore
import pytest

from asynchicache.backends.object import open_backend
from asynchicache.backends.object.stores import allows_http
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import BackendConformance
from asynchicache.testing.faults import FaultRates, Faulty, Latency, Persistent
from asynchicache.types import Outcome
from soaking import first
from storage.object_servers import (
    FRAME_BYTES,
    SERVERS,
    AzureServer,
    ObjectServer,
    S3Server,
    backend_at,
    bench_at,
    impatient,
    open_bench,
)

pytestmark = pytest.mark.engine("object")

ON_ONE_SERVER = pytest.mark.parametrize("server", first(1, SERVERS), indirect=True, scope="module")
"""What is the same code of ours for each server: `make soak` tries it on all."""

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CORRUPT, FAILED = Outcome.CORRUPT, Outcome.FAILED


@pytest.fixture(scope="module", params=SERVERS, ids=lambda kind: kind.scheme)
def server(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    with request.param() as running:
        yield running


@pytest.fixture
def fragile(server: ObjectServer) -> Iterator[ObjectServer]:
    """The server, which the test may kill or stop."""
    yield server
    if server.running:
        server.resume()
    else:
        server.start()


class ServerConformance(BackendConformance):
    many = 100

    @pytest.fixture(autouse=True)
    def _running(self, server: ObjectServer) -> None:
        self.server = server


@pytest.mark.asyncio
class TestBare(ServerConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend(self.server.options(f"bare/{tmp_path.name}"), port)


@ON_ONE_SERVER
@pytest.mark.asyncio
class TestWithIndexWithoutFaults(ServerConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        options = self.server.options(f"index/{tmp_path.name}", index=True)
        return Faulty(open_backend(options, port), FaultRates(), Random(0))


@pytest.mark.soak
@pytest.mark.asyncio
class TestInParts(ServerConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        options = self.server.options(f"parts/{tmp_path.name}")
        return Persistent(Faulty(open_backend(options, port), FaultRates(partial=0.3), Random(0)))


@pytest.mark.soak
@pytest.mark.asyncio
class TestSlow(ServerConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(open_backend(self.server.options(f"slow/{tmp_path.name}"), port), 0.001)


@pytest.mark.asyncio
async def test_faults_over_a_real_server_never_give_other_bytes(server: ObjectServer) -> None:
    async with backend_at(server.options("faults")) as backend:
        faults = Faulty(backend, FaultRates(partial=0.3, fail=0.1), Random(1))
        bench = await open_bench(faults)
        keys = bench.keys(*range(8))
        for _ in range(6):
            assert set(await bench.put(keys, range(8))) <= {STORED, EXISTS, FAILED}
            assert set(await bench.get(keys, range(16, 24))) <= {HIT, MISS, FAILED}
        assert set(faults.injected) == {"partial", "fail"}


@pytest.mark.asyncio
async def test_header_and_page_are_one_object_in_a_folder_for_each_pool(server: ObjectServer) -> None:
    async with bench_at(server.options("names", object_pages=1)) as bench:
        (key,) = bench.keys(1)
        await bench.put([key], [0])

        content = memoryview(obstore.get(server.store("names"), path_of(key)).bytes())
        assert content[:4096] == bench.binding.header(0)
        assert content[4096:] == bench.binding.page(0)[: bench.binding.page_bytes]
        assert await bench.put([key], [0]) == [EXISTS]


@pytest.mark.asyncio
@pytest.mark.parametrize(("pages", "learned"), [(1, 0), (32, 1)])
async def test_an_index_knows_what_was_there_and_what_it_stored_itself(
    server: ObjectServer, pages: int, learned: int
) -> None:
    """A read of a page that it does not know lists the page's group."""
    prefix = f"known/{pages}"
    async with bench_at(server.options(prefix, object_pages=pages)) as other:
        keys = other.keys(*range(4))
        await other.put(keys[:2], [0, 1])
        async with bench_at(server.options(prefix, index=True, object_pages=pages)) as bench:
            await other.put(keys[3:], [0])
            await other.engine.delete(keys[:1])

            assert await bench.engine.exists(keys) == bytes([1, 1, 0, 0])
            assert await bench.get(keys, range(4)) == [MISS, HIT, MISS, HIT]
            assert await bench.engine.exists(keys) == bytes([0, 1, 0, learned])
            assert await bench.put(keys[2:3], [0]) == [STORED]
            assert await bench.engine.exists(keys) == bytes([0, 1, 1, learned])


@pytest.mark.parametrize("server", [S3Server], indirect=True, scope="module")
@pytest.mark.parametrize("allowed", [None, "true"])
@pytest.mark.asyncio
async def test_an_address_without_tls_may_come_from_the_environment(
    server: ObjectServer, allowed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in server.config.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", text)
    if allowed is not None:
        monkeypatch.setenv("AWS_ALLOW_HTTP", allowed)
    async with bench_at({**server.options(f"environment/{allowed}"), "config": {}}) as bench:
        assert await bench.put(bench.keys(1), [0]) == [STORED]
        assert await bench.get(bench.keys(1), [1]) == [HIT]


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({"endpoint": "http://127.0.0.1:1"}, True),
        ({"region": "x"}, True),
        ({"aws_endpoint_url": "https://127.0.0.1:1"}, False),
    ],
)
def test_an_address_with_tls_keeps_it(config: dict[str, str], allowed: bool) -> None:
    assert allows_http(config) is allowed


@pytest.mark.soak
@pytest.mark.asyncio
async def test_more_pages_than_a_server_lists_at_once(server: ObjectServer) -> None:
    count = server.listed + 50
    async with bench_at(server.options("many"), page_bytes=1) as bench:
        for start in range(0, count, 50):
            assert set(await bench.put(bench.keys(*range(start, start + 50)), range(50))) == {STORED}
        async with bench_at(server.options("many", index=True), page_bytes=1) as other:
            found = await other.engine.exists(other.keys(*range(count + 1)))
            assert found == bytes([1] * count + [0])
            assert await other.engine.clear() == count
        assert server.names("many") == {"FORMAT"}


@pytest.mark.asyncio
@pytest.mark.parametrize("prefix", ["with space/ü&+=%41", "q%2Fr", "dot.", "'\"<>"])
async def test_prefixes_with_letters_that_mean_something_in_urls(server: ObjectServer, prefix: str) -> None:
    async with bench_at(server.options(prefix)) as bench:
        keys = bench.keys(1, 2)
        assert await bench.put(keys, [0, 1]) == [STORED] * 2
        async with bench_at(server.options(prefix, index=True)) as other:
            assert await other.engine.exists(keys) == bytes([1, 1])
            assert await other.get(keys, [2, 3]) == [HIT] * 2
        assert await bench.engine.clear() == 2


# What others put below our prefix.


def path_of(key: ObjectKey) -> str:
    return f"{key.fingerprint.hex()[:32]}.{key.pool}/{key.digest.hex()}"


@pytest.mark.asyncio
async def test_foreign_objects_under_our_keys_are_dropped_and_pages_come_again(
    server: ObjectServer, tmp_path: Path
) -> None:
    prefix = f"foreign/{tmp_path.name}"
    async with bench_at(server.options(prefix, object_pages=1)) as bench:
        keys = bench.keys(*range(6))
        await bench.put(keys, range(6))
        whole = bytes(obstore.get(server.store(prefix), path_of(keys[5])).bytes())
        contents = [b"", whole[:-1], whole + b"x", bytes(FRAME_BYTES), whole]
        for key, content in zip(keys, contents, strict=False):
            server.upload(prefix, path_of(key), content)

        assert await bench.engine.exists(keys) == bytes([0, 0, 0, 1, 1, 1])
        assert await bench.get(keys, range(8, 14)) == [CORRUPT] * 5 + [HIT]
        assert await bench.engine.exists(keys) == bytes([0, 0, 0, 0, 0, 1])
        assert await bench.put(keys, range(6)) == [STORED] * 5 + [EXISTS]
        assert await bench.get(keys, range(8, 14)) == [HIT] * 6


@pytest.mark.asyncio
async def test_clear_deletes_nothing_foreign(server: ObjectServer, tmp_path: Path) -> None:
    prefix = f"clear/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        *keys, never = bench.keys(1, 2, 3)
        await bench.put(keys, [0, 1])
        folder, _, digest = path_of(keys[0]).partition("/")
        page = bytes(FRAME_BYTES)
        foreign = {
            "README.txt": b"hello",
            "backup/1": page,
            digest: page,
            f"{folder}/notes.txt": page,
            f"{folder}/{digest.upper()}": page,
            f"{folder}/{digest}.old": page,
            f"{folder}/backup/{digest}": page,
            f"{folder}/backup/{never.digest.hex()}": page,
            f"{folder}/{'0' * 64}": b"another length",
            f"{folder}.old/{digest}": page,
            f"{folder}2/{digest}": page,
        }
        for name, content in foreign.items():
            server.upload(prefix, name, content)
        async with bench_at(server.options(prefix, index=True)) as other:
            assert await other.engine.exists([*keys, never]) == bytes([1, 1, 0])

        assert await bench.engine.clear() == 2

        assert server.names(prefix) == {"FORMAT", *foreign}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("FORMAT", b"asynchicache object store 3\n", "format 3; this version reads format 2: update"),
        ("FORMAT", b"asynchicache object store 1\n", "format 2: open it with an older asynchicache"),
        ("FORMAT", b"somebody's", "is not empty and holds no pages: give an empty or new prefix"),
        ("FORMAT", b"x" * 1000, "is not empty and holds no pages"),
        ("FORMAT", b"\xff\xfe", "is not empty and holds no pages"),
        ("photo.jpg", b"x", "is not empty and holds no pages"),
        ("photos/1.jpg", b"x", "is not empty and holds no pages"),
        (f"{'0' * 31}g.kv/1.jpg", b"x", "is not empty and holds no pages"),
    ],
)
async def test_foreign_or_newer_data_is_refused(
    server: ObjectServer, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    server.upload(tmp_path.name, name, content)
    async with backend_at(server.options(tmp_path.name)) as backend:
        with pytest.raises(StorageFormatError, match=message):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_pages_are_found_after_a_rule_deleted_what_is_oldest(server: ObjectServer) -> None:
    async with backend_at(server.options("expired")) as backend:
        bench, states = await open_bench(backend), await open_bench(backend, "mamba")
        keys = bench.keys(1, 2)
        await bench.put(keys, [0, 1])
        await states.put(states.keys(1), [0])
    obstore.delete(server.store("expired"), "FORMAT")

    async with bench_at(server.options("expired")) as bench:
        assert await bench.get(keys, [2, 3]) == [HIT] * 2
    assert "FORMAT" in server.names("expired")


# A server that fails.


@pytest.mark.asyncio
async def test_a_killed_server_is_a_miss_and_comes_back(
    fragile: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = f"p/{tmp_path.name}"
    async with bench_at(fragile.options(prefix, retries=1)) as bench:
        keys = bench.keys(*range(4))
        assert await bench.put(keys, range(4)) == [STORED] * 4

        fragile.kill()

        assert await bench.get(keys, range(8, 12)) == [FAILED] * 4
        assert await bench.put(keys, range(4)) == [FAILED] * 4
        assert await bench.engine.delete(keys) == [FAILED] * 4
        with pytest.raises(StorageError, match=rf"{fragile.scheme}://pages/p/.*: {fragile.complaint}"):
            await bench.engine.exists(keys)
        with pytest.raises(StorageError, match=rf"{fragile.scheme}://pages/p/.* cannot be listed: "):
            await bench.engine.clear()
        gc.collect()
        assert "never retrieved" not in caplog.text

        fragile.start()

        assert await bench.get(keys, range(8, 12)) == [MISS] * 4  # it forgot everything
        assert await bench.put(keys, range(4)) == [STORED] * 4
        assert await bench.get(keys, range(8, 12)) == [HIT] * 4


@ON_ONE_SERVER
@pytest.mark.asyncio
async def test_a_server_killed_in_the_middle_of_a_transfer(fragile: ObjectServer, tmp_path: Path) -> None:
    options = fragile.options(f"p/{tmp_path.name}", retries=0, requests=2, object_pages=1)
    async with bench_at(options, page_bytes=4_000_000, slots=8) as bench:
        keys = bench.keys(*range(4))
        assert await bench.put(keys, range(4)) == [STORED] * 4
        bench.poison([4])
        reading = asyncio.create_task(bench.get(keys, range(4, 8)))
        await something_of(bench.binding.page(4))

        fragile.kill()

        outcomes = await reading
        assert set(outcomes) <= {HIT, FAILED}
        assert outcomes[3] is FAILED

        fragile.start()
        stored, inner = asyncio.Event(), bench.engine._put

        async def watched(*call: Any) -> list[Outcome]:
            outcomes = await inner(*call)
            stored.set()
            return outcomes

        bench.engine._put = watched
        writing = asyncio.create_task(bench.put(keys, range(4)))
        await stored.wait()
        fragile.kill()
        assert set(await writing) == {STORED, FAILED}

        fragile.start()
        assert await bench.get(keys, range(4, 8)) == [MISS] * 4
        assert await bench.put(keys, range(4)) == [STORED] * 4
        assert await bench.get(keys, range(4, 8)) == [HIT] * 4


async def something_of(page: memoryview) -> None:
    """Until the first bytes of a poisoned page have come."""
    while bytes(page[:8]) == b"\xa5" * 8:  # noqa: ASYNC110 - no event says so
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_server_that_stands_still_costs_the_deadline(fragile: ObjectServer, tmp_path: Path) -> None:
    async with bench_at(fragile.options(f"p/{tmp_path.name}", retries=0)) as bench:
        keys = bench.keys(*range(4))
        await bench.put(keys, range(4))
        fragile.pause()

        with impatient(bench, 0.4):
            assert await bench.get(keys, range(8, 12)) == [FAILED] * 4

            fragile.resume()
            while await bench.get(keys, range(8, 12)) != [HIT] * 4:
                pass  # the same client is served once the server is quick enough again


@pytest.mark.asyncio
async def test_a_cancelled_call_ends_when_nothing_uses_its_slots(
    fragile: ObjectServer, tmp_path: Path
) -> None:
    async with bench_at(fragile.options(f"p/{tmp_path.name}", retries=0)) as bench:
        keys = bench.keys(1, 2)
        fragile.pause()
        with impatient(bench, 0.4):
            call = asyncio.create_task(bench.put(keys, [0, 1]))
            await asyncio.sleep(0)
            while not bench.engine._requests.running:  # noqa: ASYNC110 - until its requests are out
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])

        assert call.cancelled()
        assert not bench.engine._requests.running
        fragile.resume()
        assert await bench.get(keys, [2, 3]) == [MISS] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize(("pages", "answer"), [(1, MISS), (32, FAILED)])
async def test_a_bucket_that_is_gone_is_a_miss(
    server: ObjectServer, tmp_path: Path, pages: int, answer: Outcome
) -> None:
    options = server.options(tmp_path.name, object_pages=pages)
    elsewhere = {**options, "url": f"{server.scheme}://nobody/p"}
    async with bench_at(options) as bench, backend_at(elsewhere) as gone:
        bench.engine._requests.store = gone._store
        keys = bench.keys(1, 2)

        assert await bench.get(keys, [0, 1]) == [answer] * 2
        assert await bench.put(keys, [0, 1]) == [FAILED] * 2
        assert await bench.engine.delete(keys) == [answer] * 2


# Opening.


@pytest.mark.asyncio
async def test_a_bucket_that_is_not_there_is_said_at_open(server: ObjectServer) -> None:
    options = {**server.options("p"), "url": f"{server.scheme}://nobody/p"}
    async with backend_at(options) as backend:
        with pytest.raises(
            StorageError, match=r"://nobody/p cannot be used: there is no such bucket"
        ) as caught:
            await open_bench(backend)
    assert "404 Not Found: " in str(caught.value)
    assert str(caught.value).endswith(("NoSuchBucket)", "ContainerNotFound)"))


@pytest.mark.asyncio
async def test_a_server_that_never_answers_is_said_at_open(fragile: ObjectServer, tmp_path: Path) -> None:
    fragile.pause()
    async with backend_at(fragile.options(f"p/{tmp_path.name}", retries=0, timeout_seconds=0.3)) as backend:
        with pytest.raises(StorageError, match=r"pages/p/.* (does not answer|cannot be used)"):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_a_closed_port_is_said_at_open(fragile: ObjectServer) -> None:
    fragile.kill()
    async with backend_at(fragile.options("p", retries=0)) as backend:
        with pytest.raises(
            StorageError, match=f"pages/p cannot be used: {fragile.complaint}: Error performing"
        ):
            await open_bench(backend)


@pytest.mark.asyncio
@pytest.mark.parametrize(("pages", "name"), [(1, "0" * 80), (32, f"{'0' * 48}/{'0' * 10}/33.{'0' * 257}")])
async def test_names_may_have_1024_bytes(server: ObjectServer, pages: int, name: str) -> None:
    tail = len(f"/{'0' * 32}.kv/{name}")
    longest = "ü" * ((1024 - tail) // 2)
    async with bench_at(server.options(longest, object_pages=pages)) as bench:
        keys = bench.keys(*range(pages + 1))
        assert await bench.put(keys, range(pages + 1)) == [STORED] * len(keys)
        assert await bench.get(keys[-1:], [1]) == [HIT]
    async with backend_at(server.options(f"{longest}é", object_pages=pages)) as backend:
        with pytest.raises(
            StorageError, match=r"names of objects have 102\d bytes, 1024 are allowed: give a"
        ):
            await open_bench(backend)


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    with AzureServer() as running:
        yield running


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"account_key": "d3Jvbmc="}, "the credentials are wrong, or may not do this .*AuthorizationFailure"),
        ({"account_name": "nobody"}, "the credentials are wrong, or may not do this .*AuthorizationFailure"),
        ({"account_key": "s3cret!"}, "cannot be used: Generic MicrosoftAzure error: Invalid Access Key"),
        ({"account_key": None, "sas_key": "sv=2021-12-02&sig=s3cret"}, "the credentials are wrong"),
        ({"account_key": None, "msi_endpoint": "http://127.0.0.1:1"}, "no credentials were found: name them"),
    ],
)
async def test_wrong_credentials_are_said_at_open_and_not_shown(
    azure: AzureServer, settings: dict[str, str | None], message: str
) -> None:
    config = {name: text for name, text in {**azure.config, **settings}.items() if text is not None}
    with pytest.raises(StorageError, match=message) as caught:
        async with bench_at({**azure.options("p"), "config": config, "retries": 0}):
            pass
    assert "s3cret" not in str(caught.value)


@pytest.mark.asyncio
async def test_credentials_that_are_wrong_later_cost_misses(azure: AzureServer) -> None:
    options = azure.options("rotated")
    wrong = {**options, "config": {**azure.config, "account_key": "d3Jvbmc="}}
    async with bench_at(options) as bench, backend_at(wrong) as rotated:
        keys = bench.keys(1, 2)
        await bench.put(keys[:1], [0])
        bench.engine._requests.store, right = rotated._store, bench.engine._requests.store

        assert await bench.get(keys, [2, 3]) == [FAILED] * 2
        assert await bench.put(keys, [0, 1]) == [FAILED] * 2
        assert await bench.engine.delete(keys) == [FAILED] * 2
        with pytest.raises(StorageError, match=r"cannot be listed: .*AuthorizationFailure"):
            await bench.engine.clear()

        bench.engine._requests.store = right
        assert await bench.get(keys, [2, 3]) == [HIT, MISS]
