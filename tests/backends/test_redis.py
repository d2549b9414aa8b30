"""The redis engine against real servers, Redis and Valkey: conformance, bare and behind wrappers; options;
clearing.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asynchicache.backends import file
from asynchicache.backends.redis import open_backend
from asynchicache.errors import ClosedError, StorageError, StorageFormatError
from asynchicache.ports import Port
from asynchicache.storage.chain import ChainStage, StorageChain
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import BackendConformance
from asynchicache.testing.faults import FaultRates, Faulty, Latency, Persistent
from asynchicache.types import Outcome
from engines import executable, module
from storage.redis_servers import FRAME_BYTES, RedisServer, backend_at, bench_at, open_bench

pytestmark = pytest.mark.engine("redis")

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
BAD = Outcome.CORRUPT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, redis_program: str) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), program=redis_program) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """Another client of the server, whose keys are gone before and afterwards."""
    with module("redis").Redis.from_url(server.url) as connected:
        connected.flushall()
        yield connected
        connected.flushall()


class RedisConformance(BackendConformance):
    """Each test has a namespace of its own."""

    @pytest.fixture(autouse=True)
    def _running(self, server: RedisServer) -> None:
        self.server = server

    def over(self, url: str, port: Port, tmp_path: Path, **options: object) -> StorageBackend:
        return open_backend({"url": url, "namespace": tmp_path.name, **options}, port)


@pytest.mark.asyncio
class TestRedis(RedisConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.over(self.server.url, port, tmp_path)


@pytest.mark.asyncio
class TestFileBeforeRedis(RedisConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        near = ChainStage("near", partial(file.open_backend, {"path": tmp_path}, port))
        return StorageChain(
            [near, ChainStage("far", partial(self.over, self.server.url, port, tmp_path))], port
        )


@pytest.mark.asyncio
class TestRedisByUnixSocket(RedisConformance):
    page_bytes = 1 << 20  # more than a buffer, and several connections

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.over(f"unix://{self.server.socket}", port, tmp_path)


@pytest.mark.asyncio
class TestRedisWithTinyPagesAndOneConnection(RedisConformance):
    page_bytes = 1

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return self.over(self.server.url, port, tmp_path, connections=1)


@pytest.mark.soak
@pytest.mark.asyncio
class TestSlowRedis(RedisConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Latency(self.over(self.server.url, port, tmp_path), 0.001)


@pytest.mark.asyncio
class TestRedisWithoutFaults(RedisConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Faulty(self.over(self.server.url, port, tmp_path), FaultRates(), Random(0))


@pytest.mark.soak
@pytest.mark.asyncio
class TestRedisInParts(RedisConformance):
    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return Persistent(
            Faulty(self.over(self.server.url, port, tmp_path), FaultRates(partial=0.3), Random(0))
        )


@pytest.mark.asyncio
async def test_uses_are_told_in_their_order(server: RedisServer, client: Any) -> None:
    client.config_set("slowlog-log-slower-than", 0)  # so that all commands are in it
    try:
        async with bench_at(server.url) as bench:
            await bench.put(bench.keys(1, 2, 3), range(3))
            await bench.engine.touch(bench.keys(3, 9, 1, 2))
            names = [key.text().encode() for key in bench.keys(3, 9, 1, 2)]
    finally:
        commands = [entry["command"] for entry in client.slowlog_get(64)][::-1]
        client.config_set("slowlog-log-slower-than", 10_000)
        client.slowlog_reset()

    # The log cuts arguments after 128 bytes.
    touched = [command.partition(b":")[2][:110] for command in commands if command.startswith(b"TOUCH ")]
    assert touched == [name[:110] for name in names]


@pytest.mark.asyncio
async def test_a_server_that_is_only_read_is_told_too(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        await bench.put(bench.keys(1), [0])
    async with bench_at(server.url, read_only=True) as bench:
        before = client.info("commandstats").get("cmdstat_touch", {}).get("calls", 0)
        await bench.engine.touch(bench.keys(1))
        assert client.info("commandstats")["cmdstat_touch"]["calls"] == before + 1


@pytest.mark.asyncio
async def test_faults_over_a_real_server_never_give_other_bytes(server: RedisServer) -> None:
    async with backend_at(server.url, namespace="faults") as backend:
        faults = Faulty(backend, FaultRates(partial=0.3, fail=0.1), Random(1))
        bench = await open_bench(faults)
        keys = bench.keys(*range(16))
        for _ in range(10):
            put = await bench.put(keys, range(16))
            assert set(put) <= {STORED, EXISTS, Outcome.FAILED}
            got = await bench.get(keys, range(16, 32))  # compares the bytes of every HIT
            assert set(got) <= {HIT, MISS, Outcome.FAILED}
        assert set(faults.injected) == {"partial", "fail"}


@pytest.mark.asyncio
async def test_large_pages_are_checked_in_a_thread(server: RedisServer) -> None:
    async with bench_at(server.url, page_bytes=3 << 20, slots=12, namespace="large") as bench:
        keys = bench.keys(*range(6))

        assert await bench.put(keys, range(6)) == [STORED] * 6
        assert await bench.get(keys, range(6, 12)) == [HIT] * 6


@pytest.mark.asyncio
@pytest.mark.parametrize("page_bytes", [100_000, 400_000, 600_000, 1_000_000])
async def test_every_page_is_asked_for_once_however_many_are_asked_for_ahead(
    server: RedisServer, client: Any, page_bytes: int
) -> None:
    async with bench_at(server.url, page_bytes=page_bytes, slots=60, connections=1) as bench:
        keys = bench.keys(*range(30))
        await bench.put(keys, range(30))
        asked = calls(client, "get")

        missing = bench.keys(30, 31)
        wanted = [*keys[:7], missing[0], *keys[7:], missing[1]]
        found = await bench.get(wanted, range(28, 60))

        assert found == [HIT] * 7 + [MISS] + [HIT] * 23 + [MISS]
        assert calls(client, "get") - asked == 32


def calls(client: Any, verb: str) -> int:
    """How often the server was told `verb`."""
    return client.info("commandstats").get(f"cmdstat_{verb}", {"calls": 0})["calls"]


@pytest.mark.asyncio
async def test_a_long_call_does_not_send_again_what_is_there(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        keys = bench.keys(*range(20))
        await bench.put(keys[:19], range(19))
        before = client.info("stats")["total_net_input_bytes"]

        assert await bench.put(keys, range(20)) == [EXISTS] * 19 + [STORED]

        assert client.info("stats")["total_net_input_bytes"] - before < 2 * FRAME_BYTES


@pytest.mark.asyncio
async def test_a_short_call_asks_nothing_first(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        keys = bench.keys(1, 2)
        asked = calls(client, "exists")

        assert await bench.put(keys[:1], [0]) == [STORED]
        assert await bench.put(keys, [0, 1]) == [EXISTS, STORED]
        assert await bench.put([keys[0], *bench.keys(3, 3)], [0, 2, 2]) == [EXISTS, STORED, EXISTS]

        assert calls(client, "exists") == asked
        assert await bench.get(bench.keys(1, 2, 3), [4, 5, 6]) == [HIT] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("count", [2, 20])
async def test_calls_that_put_the_same_pages_at_once_store_them_once(
    server: RedisServer, client: Any, count: int
) -> None:
    async with bench_at(server.url) as bench:
        keys = bench.keys(*range(count))

        ends = await asyncio.gather(*(bench.engine.put(keys, range(count)) for _ in range(3)))

        for page in zip(*ends, strict=True):
            assert Counter(page) == {STORED: 1, EXISTS: 2}


@pytest.mark.asyncio
async def test_header_and_page_are_one_value_without_padding(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url, namespace="team-a.v1") as bench:
        (key,) = bench.keys(1)
        await bench.put([key], [0])

        value = client.get(f"team-a.v1:{key.text()}")
        assert len(value) == FRAME_BYTES
        assert value[:4096] == bench.binding.header(0)
        assert value[4096:] == bench.binding.page(0)[: bench.binding.page_bytes]
        assert client.dbsize() == 2  # and the marker of the format


@pytest.mark.asyncio
async def test_connections_are_few_and_have_a_name(server: RedisServer, client: Any) -> None:
    async with backend_at(server.url, connections=3) as backend:
        benches = [await open_bench(backend, pool, page_bytes=1 << 20) for pool in ("kv", "mamba")]
        keys = [bench.keys(*range(16)) for bench in benches]
        for verb in ("put", "get"):
            calls = [
                getattr(bench, verb)(k[first : first + 4], range(first, first + 4))
                for bench, k in zip(benches, keys, strict=True)
                for first in range(0, 16, 4)
            ]
            await asyncio.gather(*calls)

        names = [one["name"] for one in client.client_list()]
        assert names.count("asynchicache") == 3
    assert [one["name"] for one in client.client_list()].count("asynchicache") == 0


@pytest.mark.asyncio
async def test_databases_are_apart(server: RedisServer, client: Any) -> None:
    async with bench_at(f"{server.url}/1") as first, bench_at(f"unix://{server.socket}?db=2") as second:
        keys = first.keys(1)
        await first.put(keys, [0])

        assert await second.get(keys, [1]) == [MISS]
        assert await first.get(keys, [1]) == [HIT]


@pytest.mark.asyncio
async def test_pages_may_expire(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url, ttl_seconds=3600) as bench:
        (key,) = bench.keys(1)
        assert await bench.put([key], [0]) == [STORED]

        assert 3500 < client.ttl(f"asynchicache:{key.text()}") <= 3600


@pytest.mark.asyncio
async def test_read_only_serves_and_changes_nothing(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url, namespace="ro") as writer:
        keys = writer.keys(1, 2)
        await writer.put(keys[:1], [0])
    before = set(client.scan_iter())
    async with bench_at(server.url, namespace="ro", read_only=True) as bench:
        assert await bench.get(keys, [1, 2]) == [HIT, MISS]
        assert await bench.put(keys, [1, 2]) == [Outcome.REJECTED] * 2
        assert await bench.engine.delete(keys) == [Outcome.REJECTED] * 2
    async with bench_at(server.url, namespace="empty", read_only=True) as bench:
        assert await bench.get(keys, [1, 2]) == [MISS] * 2
    assert set(client.scan_iter()) == before


# Clearing.


@pytest.mark.asyncio
async def test_clear_deletes_pages_of_its_namespace_only(server: RedisServer, client: Any) -> None:
    client.set("somebody's", "1")
    async with backend_at(server.url, namespace="a") as mine, backend_at(server.url, namespace="ab") as other:
        bench, others = await open_bench(mine), await open_bench(other)
        for first in range(0, 2000, 50):  # more than one step of SCAN
            await bench.put(bench.keys(*range(first, first + 50)), range(50))
        await others.put(others.keys(1), [0])

        assert await mine.clear() == 2000
        assert await mine.clear() == 0

        assert await bench.get(bench.keys(1, 1999), [0, 1]) == [MISS] * 2
        assert await others.get(others.keys(1), [0]) == [HIT]
        assert client.get("somebody's") == b"1"
        assert await bench.put(bench.keys(1), [0]) == [STORED]


@pytest.mark.asyncio
async def test_clear_leaves_what_has_another_format(server: RedisServer, client: Any) -> None:
    """With the mark of another format it refuses, no pool open; without one it takes its own names only."""
    old = f"a:{'0' * 32}.kv.{'0' * 64}"
    client.mset({old: b"page", "a:FORMAT": b"asynchicache redis store 1"})
    async with backend_at(server.url, namespace="a") as backend:
        with pytest.raises(StorageFormatError, match="format 1"):
            await backend.clear()
        client.delete("a:FORMAT")  # as a full server does
        bench = await open_bench(backend)
        await bench.put(bench.keys(1, 2), [0, 1])
        assert await backend.clear() == 2
    assert client.get(old) == b"page"


@pytest.mark.asyncio
async def test_pages_of_another_size_cost_themselves(server: RedisServer) -> None:
    """Those of an old store that had larger or smaller ones under the same names."""
    async with backend_at(server.url, namespace="sizes") as backend:
        old = await open_bench(backend, page_bytes=3 * FRAME_BYTES)
        await old.put(old.keys(1, 3), [0, 1])
        async with backend_at(server.url, namespace="sizes") as other:
            bench = await open_bench(other)
            await bench.put(bench.keys(0, 2, 4), [0, 1, 2])
            assert await bench.get(bench.keys(*range(5)), list(range(5))) == [HIT, BAD, HIT, BAD, HIT]
            assert await bench.put(bench.keys(1), [1]) == [STORED]


# Opening.


@pytest.mark.asyncio
async def test_a_closed_port_is_a_clear_error(tmp_path: Path) -> None:
    unused = RedisServer(tmp_path)  # never started
    async with backend_at(unused.url) as backend:
        with pytest.raises(StorageError, match=rf"127\.0\.0\.1:{unused.port} cannot be reached"):
            await open_bench(backend)
    async with backend_at(f"unix://{tmp_path}/no.sock") as backend:
        with pytest.raises(StorageError, match=r"no\.sock cannot be reached: No such file"):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_a_host_that_nobody_knows_is_a_clear_error() -> None:
    async with backend_at("redis://no-such-host.invalid") as backend:
        with pytest.raises(StorageError, match=r"no-such-host\.invalid:6379 cannot be reached"):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_a_failed_open_may_be_tried_again(tmp_path: Path, redis_program: str) -> None:
    server = RedisServer(tmp_path, program=redis_program)
    async with backend_at(server.url) as backend:
        with pytest.raises(StorageError, match="cannot be reached"):
            await open_bench(backend)
        with server:
            bench = await open_bench(backend)
            assert await bench.put(bench.keys(1), [0]) == [STORED]


@pytest.mark.asyncio
async def test_passwords_and_users(tmp_path: Path, redis_program: str) -> None:
    users = ["--requirepass", "s3cret", "--user", "kv", "on", ">k&y", "~*", "+@all"]
    with RedisServer(tmp_path, *users, program=redis_program) as server:
        address = f"127.0.0.1:{server.port}"
        for url, message in [
            (server.url, "NOAUTH"),
            (f"redis://:wrong@{address}", "WRONGPASS"),
            (f"redis://kv:s3cret@{address}", "WRONGPASS"),
            (f"redis://:s3cret@{address}/999", "DB index is out of range"),
        ]:
            async with backend_at(url) as backend:
                with pytest.raises(
                    StorageError, match=f"{address} does not let us in: .*{message}"
                ) as caught:
                    await open_bench(backend)
                assert "s3cret" not in f"{caught.value} {backend!r}"
        for url, options in [
            (f"redis://:s3cret@{address}", {}),
            (f"redis://kv:k%26y@{address}/3", {}),
            (server.url, {"username": "kv", "password": "k&y"}),
            (f"unix://{server.socket}", {"password": "s3cret"}),
        ]:
            async with bench_at(url, **options) as bench:
                assert await bench.engine.exists(bench.keys(1)) == b"\0"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("found", "message"),
    [
        (b"asynchicache redis store 3", "format 3; this version reads format 2: update asynchicache"),
        (b"asynchicache redis store 1", "format 2: open it with an older asynchicache, or remove it"),
        (b"somebody's", "holds something else: give another namespace"),
        ([b"a", b"list"], "holds something else: give another namespace"),
    ],
)
async def test_foreign_or_newer_data_is_refused(
    server: RedisServer, client: Any, found: bytes | list[bytes], message: str
) -> None:
    if isinstance(found, list):
        client.rpush("taken:FORMAT", *found)
    else:
        client.set("taken:FORMAT", found)
    async with backend_at(server.url, namespace="taken") as backend:
        with pytest.raises(StorageFormatError, match=message):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_a_page_larger_than_a_value_is_refused(server: RedisServer) -> None:
    async with backend_at(server.url) as backend:
        with pytest.raises(StorageError, match="536875008 bytes is above 536870912"):
            await open_bench(backend, page_bytes=512 << 20, slots=1)


@pytest.mark.asyncio
async def test_misuse_raises(server: RedisServer) -> None:
    async with backend_at(server.url) as backend:
        bench = await open_bench(backend)
        with pytest.raises(StorageError, match="pool 'kv', shard '' is open"):
            await open_bench(backend)
        await bench.engine.aclose()
        for call in (bench.engine.exists([]), bench.engine.get([], []), bench.engine.put([], [])):
            with pytest.raises(ClosedError):
                await call
    with pytest.raises(ClosedError):
        await open_bench(backend)


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1 that it signed itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "certificate.pem"
    command = [executable("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return key, made


@pytest.fixture(scope="module")
def tls_server(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path], redis_program: str
) -> Iterator[RedisServer]:
    key, made = map(str, certificate)
    files = ["--tls-cert-file", made, "--tls-key-file", key, "--tls-ca-cert-file", made]
    server = RedisServer(tmp_path_factory.mktemp("redis-tls"), program=redis_program)
    server.command += ["--port", "0", "--tls-port", str(server.port), "--tls-auth-clients", "yes", *files]
    with server:
        yield server


@pytest.mark.soak
@pytest.mark.asyncio
class TestRedisByTls(BackendConformance):
    page_bytes = 300_000

    @pytest.fixture(autouse=True)
    def _running(self, tls_server: RedisServer, certificate: tuple[Path, Path]) -> None:
        self.url = f"rediss://127.0.0.1:{tls_server.port}"
        self.files = tls_files(certificate)

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend({"url": self.url, "namespace": tmp_path.name, **self.files}, port)


def tls_files(certificate: tuple[Path, Path]) -> dict[str, str]:
    key, made = map(str, certificate)
    return {"ca_file": made, "cert_file": made, "key_file": key}


@pytest.mark.asyncio
async def test_a_server_that_wants_our_certificate_gets_it(
    tls_server: RedisServer, certificate: tuple[Path, Path]
) -> None:
    url, files = f"rediss://127.0.0.1:{tls_server.port}", tls_files(certificate)
    async with bench_at(url, page_bytes=300_000, slots=8, **files) as bench:
        assert set(await bench.put(bench.keys(*range(4)), range(4))) <= {STORED, EXISTS}
        assert await bench.get(bench.keys(*range(4)), range(4, 8)) == [HIT] * 4
    async with backend_at(url, ca_file=files["ca_file"]) as backend:
        with pytest.raises(StorageError, match="cannot be reached"):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_a_certificate_that_nobody_vouches_for_is_refused(tls_server: RedisServer) -> None:
    async with backend_at(f"rediss://127.0.0.1:{tls_server.port}") as backend:
        with pytest.raises(StorageError, match=r"cannot be reached: .*certificate"):
            await open_bench(backend)


@pytest.mark.asyncio
async def test_plain_words_to_a_tls_server_fail_at_open(tls_server: RedisServer) -> None:
    async with backend_at(f"redis://127.0.0.1:{tls_server.port}") as backend:
        with pytest.raises(StorageError):
            await open_bench(backend)


# Rights, and what the server is


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("rights", "message"),
    [
        (("~*", "+@read", "+@write", "+@connection"), None),
        (("~*", "+get", "+set", "+exists", "+unlink", "+touch"), None),
        (("~*", "+get", "+set", "+exists", "+touch"), r"use UNLINK: it needs .*\+touch \+unlink \+set \+get"),
        (("~*", "+get", "+set", "+del", "+exists"), "use TOUCH, UNLINK: it needs"),
        (("~*", "+@all", "-set"), "use SET: it needs"),
        (("~*", "+@all", "-get"), "use GET: it needs"),
        (("~*", "+@all", "-exists"), "use EXISTS: it needs"),
        (("~other:*", "+@all"), r"use these keys: it needs ~asynchicache:\*"),
    ],
)
async def test_rights_that_are_missing_are_named(
    server: RedisServer, client: Any, rights: tuple[str, ...], message: str | None
) -> None:
    client.execute_command("ACL", "SETUSER", "kv", "reset", "on", ">pw", *rights)
    async with backend_at(server.url, username="kv", password="pw") as backend:
        if message is not None:
            with pytest.raises(StorageError, match=f"does not let user 'kv' {message}"):
                await open_bench(backend)
            return
        bench = await open_bench(backend)
        keys = bench.keys(1, 2)
        assert await bench.put(keys, [0, 1]) == [STORED] * 2
        await bench.engine.touch(keys)
        assert await bench.get(keys, [2, 3]) == [HIT] * 2
        assert await bench.engine.delete(keys) == [HIT] * 2


@pytest.mark.asyncio
async def test_who_only_reads_needs_no_right_to_write(server: RedisServer, client: Any) -> None:
    client.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">pw", "~*", "+@read", "+touch")
    async with bench_at(server.url, username="reader", password="pw", read_only=True) as bench:
        assert await bench.get(bench.keys(1), [0]) == [MISS]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("policy", "size", "ttl", "said"),
    [
        ("volatile-lru", "64mb", None, "volatile-lru.* 67108864 bytes .*allkeys-lru, or option ttl_seconds"),
        ("volatile-ttl", "64mb", 60, None),
        ("noeviction", "64mb", 60, "noeviction.*allkeys-lru"),
        ("noeviction", "0", None, None),
        ("allkeys-lru", "64mb", None, None),
        ("allkeys-random", "64mb", None, "evicts at random .*allkeys-random"),
    ],
)
async def test_a_policy_that_loses_new_pages_is_said_once(
    server: RedisServer,
    client: Any,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    size: str,
    ttl: int | None,
    said: str | None,
) -> None:
    before = client.config_get("maxmemory*")
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", size)
    try:
        async with backend_at(server.url, ttl_seconds=ttl) as backend:
            for pool in ("kv", "mamba"):
                await open_bench(backend, pool)
    finally:
        for name in ("maxmemory", "maxmemory-policy"):
            client.config_set(name, before[name])
    lines = [line for line in caplog.messages if "evicts" in line]
    assert len(lines) == (said is not None)
    assert said is None or re.search(said, lines[0])
