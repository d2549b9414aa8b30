"""A store that fails costs a few lines in the log, whatever the number of pages and of requests."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asynchicache import HybridCache
from asynchicache.backends.hf3fs import open_backend
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.types import Outcome
from cache.engine import SPEC, Engine, config
from storage.file_stores import bench_at as file_bench
from storage.hf3fs_names import names_server
from storage.listening import listening
from storage.object_servers import bench_at as object_bench
from storage.redis_servers import RedisServer
from storage.redis_servers import bench_at as redis_bench

pytestmark = pytest.mark.asyncio

PAGES = 32
ROUNDS = 10
STORED, HIT = Outcome.STORED, Outcome.HIT


@asynccontextmanager
async def guarded(bench: PoolUnderTest) -> AsyncIterator[GuardedPool]:
    """A pool whose breaker lets each call through."""
    port = AsyncioPort(threads=1, seed=0)
    pool = GuardedPool(bench.engine, bench.binding, port, PoolLimits(failures=10**6))
    yield pool
    await pool.aclose()
    await port.aclose()


async def use(bench: PoolUnderTest) -> None:
    """Make all calls that move pages or ask for some, many times; none gets what it wants."""
    keys = bench.keys(*range(PAGES))
    async with guarded(bench) as pool:
        for _ in range(ROUNDS):
            answers = [await pool.exists(keys, fresh=True), await pool.get(keys, range(PAGES))]
            answers += [await pool.put(bench.keys(*range(100, 100 + PAGES)), range(PAGES))]
            answers += [await pool.delete(keys)]
            for answer in answers[1:3]:
                assert not {HIT, STORED} & set(answer.outcomes)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("asynchicache")]


class Denying:
    """An object store that answers 403 to everything once `deny` is set."""

    deny = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(size[0].split(b":")[1]) if size else 0)
                body = b"<ListBucketResult></ListBucketResult>" if b"list-type" in head else b""
                status = b"403 No" if self.deny else b"200 OK" if body or head[:3] == b"put" else b"404 No"
                sized = b'HTTP/1.1 %b\r\nContent-Length: %d\r\nETag: "1"\r\n\r\n%b'
                writer.write(sized % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.mark.engine("object")
async def test_an_object_store_that_denies_everything(caplog: pytest.LogCaptureFixture) -> None:
    store = Denying()
    async with listening(store.serve) as port:
        settings = {"endpoint": f"http://127.0.0.1:{port}", "region": "x"}
        settings |= {"access_key_id": "x", "secret_access_key": "x"}
        async with object_bench({"url": "s3://bucket/p", "config": settings, "retries": 0}) as bench:
            store.deny = True
            await use(bench)

    assert 1 <= len(lines(caplog)) <= 8
    assert any(f"get of {PAGES} pages: 1 requests failed" in line and "403" in line for line in lines(caplog))


@pytest.mark.engine("redis")
async def test_a_redis_server_that_was_killed(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with redis_bench(server.url) as bench:
            server.kill()
            await use(bench)

    assert 1 <= len(lines(caplog)) <= 8, lines(caplog)


async def test_a_disk_that_fails(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    async with file_bench(tmp_path) as bench:
        await bench.put(bench.keys(*range(PAGES)), range(PAGES))
        for call in ("preadv", "pwritev"):
            monkeypatch.setattr(os, call, fail)
        await use(bench)
        monkeypatch.undo()

    assert 1 <= len(lines(caplog)) <= 6, lines(caplog)
    assert f"pool kv: {PAGES} pages are not read: [Errno 5] Input/output error" in lines(caplog)


async def test_a_full_disk(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    async with file_bench(tmp_path) as bench:
        await use(bench)

    assert len(lines(caplog)) == 1


async def test_a_file_that_was_cut(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The whole cache: a prompt of many pages, of which one call finds none."""
    options = {"path": tmp_path / "pages"}
    prompt = list(range(1000, 1000 + 120))
    sizes = {"kv": 64, "mamba": 8}
    chosen = config(device_slots=sizes, host_slots=sizes, storage="file", storage_options=options)
    async with HybridCache.open(SPEC, chosen) as cache:
        await Engine(cache).serve(prompt)
    async with HybridCache.open(SPEC, chosen) as cache:
        for path in (tmp_path / "pages").rglob("*.pages"):
            os.truncate(path, 70_000)
        caplog.clear()
        await Engine(cache).serve([*prompt, 1])

    assert len(lines(caplog)) <= 4, lines(caplog)


@pytest.mark.engine("redis")
async def test_a_server_of_names_that_is_gone(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    port, server = AsyncioPort(threads=2, seed=0), names_server(tmp_path / "metadata")
    options = {"path": tmp_path / "pages", "metadata": server.url, "capacity_bytes": 1 << 20}
    backend = open_backend({**options, "metadata_seconds": 60}, port)
    with server:
        binding = SlotBinding(slab_of("kv", 5000, 64), fingerprint_of("w1"))
        bench = PoolUnderTest(await backend.open_pool(binding), binding)
        await bench.put(bench.keys(1), [0])
    await use(bench)
    await backend.aclose()
    await port.aclose()

    assert 1 <= len(lines(caplog)) <= 6, lines(caplog)
