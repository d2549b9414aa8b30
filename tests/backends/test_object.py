"""The object engine over a folder and memory: conformance, damaged objects, cancelled calls, and what is
refused when it is opened.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

import forking
from asynchicache.backends.object import open_backend
from asynchicache.backends.object.backend import ObjectBackend
from asynchicache.backends.object.options import ObjectOptions
from asynchicache.backends.object.stores import advice
from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.ports import Port
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import BackendConformance
from asynchicache.testing.faults import Latency
from asynchicache.types import Outcome
from storage.object_servers import FRAME_BYTES, backend_at, bench_at, open_bench

pytestmark = pytest.mark.engine("object")

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CORRUPT, FAILED, REJECTED = Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED


@pytest.mark.asyncio
class TestFolder(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": f"file://{tmp_path}/pages"}, port)


@pytest.mark.asyncio
class TestFolderOfPagesThatAreAlone(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": f"file://{tmp_path}/pages", "object_pages": 1}, port)


@pytest.mark.asyncio
class TestFolderWithIndexAndOneRequest(BackendConformance):
    page_bytes = 1

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": f"file://{tmp_path}/pages", "index": True, "requests": 1}, port)


@pytest.mark.asyncio
class TestStoreInMemory(BackendConformance):
    page_bytes = 1_300_000  # several pieces, checked in a thread

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": "memory:///"}, port)


@pytest.mark.soak
@pytest.mark.asyncio
class TestSlowFolder(BackendConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(open_backend({"url": f"file://{tmp_path}/pages"}, port), 0.001)


@pytest.mark.asyncio
async def test_requests_at_once_are_limited(tmp_path: Path) -> None:
    async with backend_at({"url": f"file://{tmp_path}/pages", "requests": 2, "object_pages": 1}) as backend:
        first, second = await open_bench(backend), await open_bench(backend, "mamba")
        most = running = 0
        inner = first.engine._receive

        async def watched(*call: object) -> Sequence[Outcome]:
            nonlocal most, running
            running += 1
            most = max(most, running)
            try:
                return await inner(*call)
            finally:
                running -= 1

        first.engine._receive = second.engine._receive = watched
        keys = first.keys(*range(12))
        await asyncio.gather(first.get(keys, range(12)), second.get(second.keys(*range(12)), range(12)))
        assert most == 2


@pytest.mark.asyncio
async def test_read_only_serves_and_changes_nothing(tmp_path: Path) -> None:
    place = {"url": f"file://{tmp_path}/pages"}
    async with bench_at(place) as bench:
        keys = bench.keys(1, 2)
        await bench.put(keys[:1], [0])
    async with bench_at({**place, "read_only": True}) as bench:
        assert await bench.get(keys, [1, 2]) == [HIT, MISS]
        assert await bench.put(keys, [1, 2]) == [REJECTED] * 2
        assert await bench.engine.delete(keys) == [Outcome.REJECTED] * 2
    async with bench_at({"url": f"file://{tmp_path}/empty", "read_only": True}) as bench:
        assert await bench.get(keys, [1, 2]) == [MISS] * 2
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("index", [False, True])
async def test_a_damaged_object_is_dropped_and_may_come_again(tmp_path: Path, index: bool) -> None:
    place = {"url": f"file://{tmp_path}/pages", "object_pages": 1}
    async with bench_at(place) as bench:
        keys = bench.keys(*range(5))
        await bench.put(keys, range(5))
        folder = tmp_path / "pages" / f"{keys[0].fingerprint.hex()[:32]}.kv"
        paths = [folder / key.digest.hex() for key in keys]
    async with bench_at({**place, "index": index}) as bench:
        whole = paths[0].read_bytes()
        paths[0].write_bytes(whole[:-1])
        paths[1].write_bytes(bytes(FRAME_BYTES))
        paths[2].write_bytes(whole)
        paths[3].write_bytes(whole * 3)

        assert await bench.get(keys, range(8, 13)) == [CORRUPT] * 4 + [HIT]
        assert await bench.engine.exists(keys) == bytes([0, 0, 0, 0, 1])
        bench.fill(keys, range(5))
        assert await bench.put(keys, range(5)) == [STORED] * 4 + [EXISTS]
        assert await bench.get(keys, range(8, 13)) == [HIT] * 5


@pytest.mark.asyncio
async def test_a_cancelled_call_starts_no_more_requests(tmp_path: Path) -> None:
    async with bench_at({"url": f"file://{tmp_path}/pages", "requests": 1, "object_pages": 1}) as bench:
        began, go_on = asyncio.Event(), asyncio.Event()
        calls = []
        inner = bench.engine._put

        async def held(*call: Any) -> list[Outcome]:
            calls.extend(call[-1])
            began.set()
            await go_on.wait()
            return await inner(*call)

        bench.engine._put = held
        keys = bench.keys(*range(8))
        call = asyncio.create_task(bench.put(keys, range(8)))
        await began.wait()
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done()  # slot 0 is still read
        go_on.set()
        await asyncio.wait([call])

        assert (call.cancelled(), calls) == (True, [0])
        assert await bench.get(keys, range(8, 16)) == [HIT] + [MISS] * 7


ABANDON = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from storage.object_servers import bench_at

CONFIG = {"region": "x", "access_key_id": "x", "secret_access_key": "x", "endpoint": sys.argv[1]}

async def main():
    async with bench_at({"url": f"file://{sys.argv[3]}/pages"}, page_bytes=300_000) as bench:
        keys = bench.keys(*range(32))
        await bench.put(keys, range(32))
        for _ in range(5):
            call = asyncio.create_task(bench.engine.get(keys, range(32)))
            await asyncio.sleep(0.002)
            call.cancel()
            call = asyncio.create_task(bench.engine.put(bench.keys(*range(40, 50)), range(10)))
            await asyncio.sleep(0.001)
            call.cancel()
    print("closed")

asyncio.run(main())
"""


def test_a_process_that_gave_up_on_calls_ends_in_peace(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    done = forking.run(["-c", ABANDON, "http://127.0.0.1:1", tests, tmp_path])
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


# Opening.


def local(**config: str) -> dict[str, object]:
    """S3 at a port where nobody is, credentials included, so that no request leaves this machine."""
    nowhere = "http://127.0.0.1:1"
    settings = {"region": "us-east-1", "endpoint": nowhere, "metadata_endpoint": nowhere, **config}
    return {"url": "s3://bucket/prefix", "config": settings, "retries": 0, "timeout_seconds": 60}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (local(), "s3://bucket/prefix cannot be used: no credentials were found: name them in option config"),
        (
            local(access_key_id="a", secret_access_key="b"),
            "cannot be used: Generic S3 error: Error performing GET",
        ),
    ],
)
async def test_what_is_missing_is_said_at_open(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    async with backend_at(options) as backend:
        with pytest.raises(StorageError, match=message):
            await open_bench(backend)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"url='' must be s3://"),
        ({"url": "bucket/prefix"}, r"must be s3://"),
        ({"url": "s3://"}, r"must be s3://"),
        ({"url": "s3://key:secret@bucket"}, r"must be s3://"),
        ({"url": "ftp://host/x"}, r"must be s3://"),
        ({"url": "file://"}, r"must be s3://"),
        ({"url": "s3://b?region=x"}, r"must be s3://"),
        ({"url": "s3://b", "config": {"colour": "red"}}, r"option config: Configuration key: 'colour'"),
        ({"url": "s3://b", "config": {"allow_http": True}}, "'allow_http' is not a setting of a store"),
        ({"url": "s3://b", "config": {"Timeout": "5 s"}}, "deadlines are option timeout_seconds"),
        ({"url": "s3://b", "config": {"region": ["x"]}}, r"config=\{'region': 'list'\} must map"),
        ({"url": "s3://b", "config": "region"}, r"config='str' must be a table"),
        ({"url": "s3://key:secret@b/pages"}, r"url='s3://\*\*\*@b/pages' must be s3://bucket"),
        (
            {"url": "file:///tmp/x", "config": {"region": "x"}},
            r"config=\['region'\] has no effect with file://",
        ),
        ({"url": "memory:///", "ca_file": __file__}, r"ca_file='.*' has no effect with memory://"),
        ({"url": "s3://b/c", "ca_file": "/nope.crt"}, r"ca_file='/nope.crt' must be a file of certificates"),
        ({"url": "s3://b/c", "ca_file": __file__}, r"ca_file='.*' must be a file of certificates in PEM"),
        (
            {"url": "s3://b", "refresh_days": 1, "object_pages": 1},
            r"refresh_days=1 needs a bucket",
        ),
        ({"url": "file:///tmp/x", "refresh_days": 1}, r"refresh_days=1 needs a bucket"),
        ({"url": "memory:///", "credentials_file": "/x"}, r"credentials_file='/x' has no effect with memory"),
        ({"url": "s3://b", "credentials_file": "/nope"}, r"credentials_file='/nope' must be a file"),
        ({"url": "s3://b", "credentials_command": "'"}, r"credentials_command=.* must be a command line"),
        (
            {"url": "s3://b", "credentials_file": __file__, "credentials_command": "x"},
            r"credentials_file='.*' excludes credentials_command",
        ),
        ({"url": "memory:///", "object_pages": 65}, r"object_pages=65 must be at most 64"),
        ({"url": "memory:///", "object_pages": 0}, r"object_pages=0 must be a whole number above 0"),
        ({"url": "memory:///", "requests": 0}, r"requests=0 must be a whole number above 0"),
        ({"url": "memory:///", "retries": -1}, r"retries=-1 must be a whole number of at least 0"),
        ({"url": "memory:///", "timeout_seconds": float("nan")}, r"timeout_seconds=nan must be"),
        ({"url": "memory:///", "index": 1}, r"index=1 must be true or false"),
        ({"url": "memory:///", "capacity_bytes": 1}, r"has no option 'capacity_bytes'"),
    ],
)
async def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with backend_at(options):
            pass


TOKENS = "Generic GCS error: Error performing token request: Error performing"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{TOKENS} GET http://169.254.169.254/x - 403 Forbidden: denied", "no credentials were found"),
        (f"{TOKENS} POST https://login.example/token - 401 Unauthorized", "the credentials are wrong"),
        (f"{TOKENS} POST https://login.example/token - error sending request", "no credentials were found"),
        ("Generic S3 error: list request - 403 Forbidden: <?xml?>", "the credentials are wrong"),
        ("Generic S3 error: GET http://host/metadata/FORMAT - error sending request", "Generic S3 error"),
        ("404 Not Found: <?xml?>\n<Code>NoSuchBucket</Code>", r"there is no such .*Found: NoSuchBucket\)"),
    ],
)
def test_what_to_do_is_said_for_each_failure_at_open(text: str, words: str) -> None:
    assert re.match(words, advice(GenericError(text)))


@pytest.mark.asyncio
async def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for options, message in [
        ({"url": f"file://{tmp_path}/file"}, "cannot be used"),
        ({"url": "az://container/prefix", "config": {}}, "Account must be specified"),
    ]:
        with pytest.raises(StorageError, match=message):
            async with bench_at(options):
                pass


@pytest.mark.asyncio
async def test_misuse_raises(tmp_path: Path) -> None:
    async with backend_at({"url": "memory:///"}) as backend:
        bench = await open_bench(backend)
        with pytest.raises(StorageError, match="pool 'kv', shard '' is open"):
            await open_bench(backend)
        await bench.engine.aclose()
        with pytest.raises(ClosedError):
            await bench.engine.exists([])
    with pytest.raises(ClosedError):
        await open_bench(backend)


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(
        ObjectOptions.of({"url": "s3://b", "config": {"secret_access_key": "s3cret"}})
    )


@pytest.mark.asyncio
async def test_a_folder_that_another_process_begins_meanwhile_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question for the marker and the list of what is there, another rank puts the marker."""
    read = ObjectBackend._read_format
    marker = tmp_path / "pages" / "FORMAT"

    async def late(self: ObjectBackend) -> bytes | None:
        found = await read(self)
        if found is None:
            marker.write_bytes(b"asynchicache object store 2\n")
        return found

    monkeypatch.setattr(ObjectBackend, "_read_format", late)
    async with bench_at({"url": f"file://{tmp_path}/pages"}) as bench:
        assert await bench.engine.exists([]) == b""
    assert marker.exists()
