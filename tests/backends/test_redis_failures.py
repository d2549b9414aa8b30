"""A real server, Redis or Valkey, that is killed, stopped, full, a replica, or holds damaged pages: a miss
with the right reason, and service again without a new client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asynchicache.backends.redis import calls
from asynchicache.errors import StorageError
from asynchicache.ports import AsyncioPort
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import OptionalVerbs
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome
from engines import module
from storage.redis_servers import FRAME_BYTES, RedisServer, bench_at, impatient

pytestmark = pytest.mark.engine("redis")

STORED, HIT, MISS = Outcome.STORED, Outcome.HIT, Outcome.MISS
CORRUPT, FAILED, REJECTED = Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED


@pytest.fixture
def server(tmp_path: Path, redis_program: str) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    with RedisServer(tmp_path, program=redis_program) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    with module("redis").Redis.from_url(server.url) as connected:
        yield connected


@asynccontextmanager
async def guarded(bench: PoolUnderTest, **limits: float) -> AsyncIterator[GuardedPool]:
    """The pool as the core has it, with its breaker out of the way."""
    port = AsyncioPort(threads=2)
    guard = GuardedPool(bench.engine, bench.binding, port, PoolLimits(failures=10**6, **limits))
    try:
        yield guard
    finally:
        await guard.aclose()
        await port.aclose()


def damage(client: Any, bench: PoolUnderTest, number: int, value: bytes) -> None:
    """Replace what lies under a key."""
    (key,) = bench.keys(number)
    assert client.set(f"asynchicache:{key.text()}", value, xx=True)


def stored(client: Any, bench: PoolUnderTest, number: int) -> bytes:
    (key,) = bench.keys(number)
    value: bytes = client.get(f"asynchicache:{key.text()}")
    return value


@pytest.mark.asyncio
async def test_a_killed_server_is_a_miss_and_comes_back(server: RedisServer) -> None:
    async with bench_at(server.url) as bench, guarded(bench) as guard:
        keys = bench.keys(*range(8))
        assert await bench.put(keys, range(8)) == [STORED] * 8

        server.kill()

        assert (await guard.exists(keys)).outcomes == [FAILED] * 8
        assert (await guard.get(keys, range(8, 16))).outcomes == [FAILED] * 8
        assert (await guard.put(keys, range(8))).outcomes == [FAILED] * 8
        assert (await guard.delete(keys)).outcomes == [FAILED] * 8
        assert await bench.get(keys, range(8, 16)) == [FAILED] * 8
        with pytest.raises(StorageError):
            await bench.engine.exists(keys)

        server.start()

        assert await bench.get(keys, range(8, 16)) == [MISS] * 8  # it keeps nothing on disk
        assert await bench.put(keys, range(8)) == [STORED] * 8
        assert await bench.get(keys, range(8, 16)) == [HIT] * 8


@pytest.mark.asyncio
async def test_connections_from_before_a_restart_are_not_used(server: RedisServer) -> None:
    async with bench_at(server.url, page_bytes=1 << 20, slots=16) as bench:
        keys = bench.keys(*range(8))
        assert await bench.put(keys, range(8)) == [STORED] * 8  # on several connections

        server.kill()
        server.start()

        assert await bench.get(keys, range(8, 16)) == [MISS] * 8
        assert await bench.put(keys, range(8)) == [STORED] * 8


@pytest.mark.asyncio
async def test_a_server_killed_in_the_middle_of_transfers(server: RedisServer) -> None:
    async with bench_at(server.url, page_bytes=1 << 20, slots=64) as bench:
        keys = bench.keys(*range(32))
        assert await bench.put(keys, range(32)) == [STORED] * 32
        for pause in (3, 30, 100):
            bench.poison(range(32, 64))
            getting = asyncio.create_task(bench.get(keys, range(32, 64)))
            putting = asyncio.create_task(bench.put(bench.keys(*range(100, 116)), range(16)))
            for _ in range(pause):
                await asyncio.sleep(0)
            server.kill()

            assert set(await getting) <= {HIT, FAILED}  # bytes of hits are compared
            assert set(await putting) <= {STORED, FAILED}

            server.start()
            bench.fill(keys, range(32))
            assert await bench.engine.put(keys, range(32)) == [STORED] * 32


@pytest.mark.asyncio
async def test_a_server_that_stands_still_costs_the_deadline(server: RedisServer) -> None:
    async with bench_at(server.url) as bench:
        keys = bench.keys(*range(8))
        await bench.put(keys, range(8))
        server.pause()

        with impatient(bench, 0.3):
            assert await bench.get(keys, range(8, 16)) == [FAILED] * 8
            with pytest.raises(StorageError, match="no answer in time"):
                await bench.engine.exists(keys)

        server.resume()
        assert await bench.get(keys, range(8, 16)) == [HIT] * 8


@pytest.mark.asyncio
async def test_the_cores_deadline_holds_slots_until_the_call_ends(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_at(server.url) as bench, guarded(bench, deadline=0.1) as guard:
        keys = bench.keys(1)
        await bench.put(keys, [0])
        server.pause()
        own = asyncio.timeout(None)  # the engine's deadline, which passes when the test says so
        monkeypatch.setattr(calls, "_deadline", lambda until: own)

        batch = await guard.get(keys, [1])
        assert batch.outcomes == [Outcome.TIMEOUT]
        assert batch.lingering is not None
        assert not batch.lingering.done()
        own.reschedule(0.0)
        await batch.lingering  # though the server still stands

        monkeypatch.undo()
        server.resume()
        assert await bench.get(keys, [1]) == [HIT]


@pytest.mark.asyncio
async def test_a_full_server_refuses(tmp_path: Path, redis_program: str) -> None:
    limits = ["--maxmemory", "5mb", "--maxmemory-policy", "noeviction"]
    with RedisServer(tmp_path, *limits, program=redis_program) as server:
        async with bench_at(server.url, page_bytes=300_000, slots=32) as bench:
            keys = bench.keys(*range(32))
            outcomes = await bench.put(keys, range(32))

            assert set(outcomes) == {STORED, REJECTED}
            got = await bench.get(keys, range(32))
            assert [found is HIT for found in got] == [put is STORED for put in outcomes]
            assert OptionalVerbs(bench.engine).full
            assert set(await bench.engine.delete(keys)) == {HIT, MISS}
            assert await bench.put(keys[:1], [0]) == [STORED]
            assert not OptionalVerbs(bench.engine).full


@pytest.mark.asyncio
async def test_a_full_server_that_evicts_goes_on(tmp_path: Path, redis_program: str) -> None:
    limits = ["--maxmemory", "5mb", "--maxmemory-policy", "allkeys-lru"]
    with RedisServer(tmp_path, *limits, program=redis_program) as server:
        async with bench_at(server.url, page_bytes=300_000, slots=32) as bench:
            keys = bench.keys(*range(32))

            assert await bench.put(keys, range(32)) == [STORED] * 32
            assert set(await bench.get(keys, range(32))) == {HIT, MISS}


@pytest.mark.asyncio
async def test_a_server_without_any_room_opens_and_refuses(tmp_path: Path, redis_program: str) -> None:
    limits = ["--maxmemory", "1", "--maxmemory-policy", "noeviction"]
    with RedisServer(tmp_path, *limits, program=redis_program) as server:
        async with bench_at(server.url) as bench:
            assert await bench.put(bench.keys(1), [0]) == [REJECTED]
            assert await bench.get(bench.keys(1), [0]) == [MISS]


@pytest.mark.asyncio
async def test_a_replica_serves_and_refuses_writes(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        keys = bench.keys(1, 2)
        await bench.put(keys[:1], [0])
        client.replicaof("127.0.0.1", 1)  # nobody there: it keeps what it has

        assert await bench.put(keys, [0, 1]) == [Outcome.EXISTS, REJECTED]
        assert await bench.get(keys, [2, 3]) == [HIT, MISS]
    async with bench_at(server.url, namespace="fresh") as bench:
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]


@pytest.mark.asyncio
async def test_a_damaged_page_is_dropped_and_may_come_again(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        keys = bench.keys(*range(5))
        await bench.put(keys, range(5))
        whole = stored(client, bench, 0)
        flipped = bytearray(stored(client, bench, 1))
        flipped[-1] ^= 1
        damage(client, bench, 0, whole[:-1])
        damage(client, bench, 1, bytes(flipped))
        damage(client, bench, 2, whole)  # another page's bytes
        damage(client, bench, 3, whole * 3)

        outcomes = await bench.get(keys, range(8, 13))

        assert outcomes[:4] == [CORRUPT] * 4
        assert await bench.engine.exists(keys) == bytes([0, 0, 0, 0, 1])
        assert await bench.put(keys, range(5)) == [STORED] * 4 + [Outcome.EXISTS]
        assert await bench.get(keys, range(8, 13)) == [HIT] * 5


@pytest.mark.asyncio
async def test_a_value_of_another_type_is_dropped(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        (key,) = bench.keys(1)
        client.rpush(f"asynchicache:{key.text()}", b"a", b"b")

        assert await bench.get([key], [0]) == [CORRUPT]
        assert await bench.put([key], [0]) == [STORED]


@pytest.mark.asyncio
async def test_a_reader_leaves_damaged_pages_where_they_are(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url) as bench:
        await bench.put(bench.keys(1), [0])
        damage(client, bench, 1, b"x" * FRAME_BYTES)
    async with bench_at(server.url, read_only=True) as bench:
        assert await bench.get(bench.keys(1), [0]) == [CORRUPT]
        assert stored(client, bench, 1) == b"x" * FRAME_BYTES


@pytest.mark.asyncio
async def test_connections_that_the_server_cuts_are_made_anew(server: RedisServer, client: Any) -> None:
    async with bench_at(server.url, page_bytes=1 << 20, slots=32) as bench:
        keys = bench.keys(*range(16))
        await bench.put(keys, range(16))
        for _ in range(5):
            client.client_kill_filter(_type="normal", skipme=True)

            assert await bench.get(keys, range(16, 32)) == [HIT] * 16


def test_uvloop_serves_and_forgets_cancelled_calls_as_well(server: RedisServer) -> None:
    async def play() -> None:
        async with bench_at(server.url, page_bytes=300_000, slots=64) as bench:
            keys = bench.keys(*range(32))
            assert await bench.put(keys, range(32)) == [STORED] * 32
            for turns in range(0, 40, 5):
                call = asyncio.create_task(bench.engine.get(keys, range(32, 64)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.wait([call])
            assert await bench.get(keys, range(32, 64)) == [HIT] * 32

    with asyncio.Runner(loop_factory=module("uvloop").new_event_loop) as runner:
        runner.run(play())
