"""Redis as fleets run it: a cluster, Sentinels, a master that becomes a replica. Real servers fail over while
clients work: hits come back, no byte is wrong, and pages are stored again.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from asynchicache.backends.hf3fs.metadata.namespace import MetadataNamespace
from asynchicache.backends.hf3fs.metadata.shared import open_names
from asynchicache.backends.hf3fs.metadata.words import Claim
from asynchicache.errors import StorageError
from asynchicache.ports import AsyncioPort
from asynchicache.storage.protocol import OptionalVerbs
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome
from engines import free_port, module
from storage.redis_servers import (
    RedisCluster,
    RedisServer,
    Sentinels,
    backend_at,
    bench_at,
    impatient,
    open_bench,
    redis_at,
    until,
)

pytestmark = [pytest.mark.engine("redis"), pytest.mark.asyncio]

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
FAILED = Outcome.FAILED
MIXED = [
    ("redis-server", "redis-server"),
    ("redis-server", "valkey-server"),
    ("redis-server", "redis-server"),
]
"""One replica is of another version, and becomes the master of its slots when ours is killed."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster that tests leave whole."""
    with RedisCluster(tmp_path_factory.mktemp("cluster"), MIXED, timeout_ms=5000) as made:
        yield made


async def in_time(condition: Callable[[], Any]) -> None:
    """Wait for what comes of itself, however long the machine needs."""
    async with asyncio.timeout(120):
        while not await condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)


def keys_by_node(cluster: RedisCluster) -> dict[int, set[bytes]]:
    return {node.port: set(redis_at(node).keys()) for node in cluster.masters if node.running}


async def test_claims_are_known_on_all_nodes_and_end_with_the_put(cluster: RedisCluster) -> None:
    namespace = {"namespace": "claims"}
    async with bench_at(cluster.url, **namespace) as bench, bench_at(cluster.url, **namespace) as other:
        keys = bench.keys(*range(40))
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 40
        assert await other.engine.claim(keys, 60.0) == [Outcome.CLAIMED] * 40
        assert await bench.put(keys, range(40)) == [STORED] * 40
        assert await other.engine.claim(keys, 60.0) == [EXISTS] * 40
        claims = [key for found in keys_by_node(cluster).values() for key in found if b"claim" in key[-5:]]
        assert claims == []
        assert await bench.engine.clear() == 40


async def test_one_node_is_enough_to_find_the_cluster_and_every_key_is_in_its_slot(
    cluster: RedisCluster,
) -> None:
    async with bench_at(cluster.url, namespace="slots") as bench:
        keys = bench.keys(*range(40))
        assert await bench.put(keys, range(40)) == [STORED] * 40
        assert await bench.put(keys[:3], range(3)) == [EXISTS] * 3
        assert await bench.get(keys, range(20, 60)) == [HIT] * 40
        assert await bench.engine.exists([*keys, *bench.keys(99)]) == bytes([1] * 40 + [0])
        await bench.engine.touch(keys)

        held = keys_by_node(cluster)
        assert all(held.values())
        assert sum(map(len, held.values())) >= 41  # with the marker
        assert await bench.engine.delete(keys[:2]) == [HIT] * 2
        assert await bench.engine.clear() == 38
    assert not any(
        b"slots:" in key and b"FORMAT" not in key for keys in keys_by_node(cluster).values() for key in keys
    )


async def test_keys_that_move_to_another_node_are_followed(cluster: RedisCluster) -> None:
    """First it has a part of a slot's keys (ASK), then the slot (MOVED)."""
    async with bench_at(cluster.url, namespace="moves") as bench:
        names = {number: f"moves:{key.text()}" for number, key in enumerate(bench.keys(*range(40)))}
        old, new = (redis_at(node) for node in cluster.masters[:2])
        slots = {number: old.execute_command("CLUSTER", "KEYSLOT", name) for number, name in names.items()}
        number, slot = next((number, slot) for number, slot in slots.items() if slot < 5000)
        (key,) = bench.keys(number)
        ids = [one.execute_command("CLUSTER", "MYID") for one in (old, new)]

        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        others = bench.keys(*(one for one in range(40) if one != number))
        assert await bench.put([key, *others], range(40)) == [STORED] * 40
        assert await bench.get([key, *others], range(20, 60)) == [HIT] * 40
        assert await bench.engine.exists([key, *others]) == b"\1" * 40
        assert names[number].encode() in set(new.scan_iter())

        for one in (new, old, redis_at(cluster.masters[2])):
            one.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        assert await bench.get([key, *others], range(20, 60)) == [HIT] * 40
        assert await bench.put([key], [0]) == [EXISTS]
        assert await bench.engine.delete([key]) == [HIT]
        assert await bench.put([key], [0]) == [STORED]


async def test_names_of_3fs_live_in_a_cluster(cluster: RedisCluster) -> None:
    port = AsyncioPort(threads=1, seed=0)
    names = open_names({"url": cluster.url, "timeout_seconds": 60}, port)
    for name in ("kv", "mamba", "swa", "dsa"):  # of several slots
        namespace = MetadataNamespace(names, await names.open(name, 4, 4096), name, 4096)
        keys = [f"{number:080x}" for number in range(4)]
        places = (await namespace.reserve("0" * 32, keys)).places
        claims = [Claim(key, *at) for key, at in zip(keys, places, strict=True) if at]
        assert await namespace.confirm(claims) == ["stored"] * 4
        assert await namespace.exists(keys) == [True] * 4
    await names.aclose()
    await port.aclose()


async def test_a_user_of_a_cluster_needs_two_more_rights(cluster: RedisCluster) -> None:
    rights = ["~*", "+get", "+set", "+exists", "+unlink", "+touch", "+scan"]
    for node in cluster.nodes:
        for user, more in (("kv", ["+cluster|slots", "+command"]), ("blind", [])):
            redis_at(node).execute_command("ACL", "SETUSER", user, "reset", "on", ">pw", *rights, *more)

    async with bench_at(cluster.url, username="kv", password="pw", namespace="acl") as bench:
        assert await bench.put(bench.keys(*range(9)), range(9)) == [STORED] * 9
        assert await bench.engine.clear() == 9
    async with backend_at(cluster.url, username="blind", password="pw") as backend:
        with pytest.raises(StorageError, match=r"NOPERM.*'cluster\|slots'"):
            await open_bench(backend)


async def test_a_master_is_killed_under_16_clients(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, MIXED) as cluster:
        async with AsyncExitStack() as stack:
            benches = [
                await stack.enter_async_context(bench_at(cluster.url, connections=1, timeout_seconds=5))
                for _ in range(16)
            ]
            keys = benches[0].keys(*range(24))
            assert await benches[0].put(keys, range(24)) == [STORED] * 24
            assert all(redis_at(node).wait(1, 60_000) == 1 for node in cluster.masters)

            async def back(bench: PoolUnderTest) -> bool:
                """All hits again; bytes of hits are compared."""
                outcomes = await bench.get(keys, range(24, 48))
                assert set(outcomes) <= {HIT, Outcome.FAILED}
                return outcomes == [HIT] * 24

            assert all([await back(bench) for bench in benches])
            cluster.masters[1].kill()
            assert not all([await back(bench) for bench in benches])
            async with asyncio.TaskGroup() as group:
                for bench in benches:
                    group.create_task(in_time(lambda bench=bench: back(bench)))
            for number, bench in enumerate(benches):
                fresh = bench.keys(*range(100 * number + 100, 100 * number + 120))
                assert await bench.put(fresh, range(20)) == [STORED] * 20


async def test_a_cache_is_opened_while_a_share_of_the_cluster_is_down(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, MIXED) as cluster:
        async with bench_at(cluster.url) as bench:
            keys = bench.keys(*range(24))
            assert await bench.put(keys, range(24)) == [STORED] * 24
        for node in cluster.nodes:
            redis_at(node).config_set("cluster-require-full-coverage", "no")
        marked = redis_at(cluster.masters[0]).execute_command("CLUSTER", "KEYSLOT", "asynchicache:FORMAT")
        gone = next(share for share in (1, 2) if share != marked * 3 // 16384)
        cluster.replicas[gone].kill()
        cluster.masters[gone].kill()

        async with bench_at(cluster.url) as bench:
            outcomes = await bench.get(keys, range(24))
            assert set(outcomes) == {HIT, Outcome.FAILED}, "it costs its share of the pages"


async def test_a_master_that_hangs_is_left_for_the_one_that_takes_its_place(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, MIXED) as cluster:
        async with bench_at(cluster.url, timeout_seconds=5) as bench:
            keys = bench.keys(*range(12))
            assert await bench.put(keys, range(12)) == [STORED] * 12
            assert all(redis_at(node).wait(1, 60_000) == 1 for node in cluster.masters)
            cluster.masters[1].pause()

            async def back() -> bool:
                with impatient(bench, 1):
                    return await bench.get(keys, range(12, 24)) == [HIT] * 12

            assert not await back()
            await in_time(back)
            cluster.masters[1].resume()
            assert await bench.put(bench.keys(*range(100, 112)), range(12)) == [STORED] * 12


async def test_a_node_that_hangs_costs_its_share_and_is_left_alone_until_it_answers(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, MIXED, timeout_ms=600_000) as cluster:  # nobody takes its place
        async with bench_at(cluster.url) as bench:
            keys = bench.keys(*range(24))
            assert await bench.put(keys, range(24)) == [STORED] * 24
            hung = cluster.masters[1]
            names = {name.rpartition(b".")[2] for name in keys_by_node(cluster)[hung.port]}
            theirs = [key.digest.hex().encode() in names for key in keys]
            before = calls_of(hung)
            hung.pause()
            with impatient(bench, 1):
                assert await bench.engine.exists(keys) == bytes(2 if one else 1 for one in theirs)
            assert OptionalVerbs(bench.engine).degraded
            shared = [FAILED if one else HIT for one in theirs]
            assert await bench.get(keys, range(24, 48)) == shared
            assert await bench.engine.exists(keys) == bytes(2 if one else 1 for one in theirs)
            assert await bench.put(keys, range(24)) == [FAILED if one else EXISTS for one in theirs]
            assert await bench.put(keys[:5], range(5)) == [FAILED if one else EXISTS for one in theirs[:5]]
            assert await bench.engine.claim(keys, 60.0) == [MISS if one else EXISTS for one in theirs]
            await bench.engine.touch(keys)
            assert await bench.engine.delete(keys[:4]) == shared[:4]
            hung.resume()

            async def back() -> bool:
                return 2 not in await bench.engine.exists(keys)

            await in_time(back)
            assert not OptionalVerbs(bench.engine).degraded
            asked = calls_of(hung) - before
            assert asked["exists"] == 2 * sum(theirs), "when it hung, and when it was back"
            assert not asked.keys() & {"get", "set", "touch", "unlink"}
            assert await bench.get(keys[4:], range(24, 44)) == [HIT] * 20


def calls_of(server: RedisServer) -> Counter[str]:
    """The commands that a server has done."""
    told = redis_at(server).info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): facts["calls"] for name, facts in told.items()})


async def test_a_whole_cluster_that_comes_back_empty_is_found_again(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path, [("redis-server", "redis-server")] * 1)
    with cluster:
        async with bench_at(cluster.url, timeout_seconds=5) as bench:
            keys = bench.keys(*range(4))
            assert await bench.put(keys, range(4)) == [STORED] * 4
            for node in cluster.nodes:
                node.kill()
            assert await bench.get(keys, range(4)) == [Outcome.FAILED] * 4
            for node in cluster.nodes:
                node.start()

            async def stored() -> bool:
                return set(await bench.put(keys, range(4))) <= {STORED, EXISTS}

            await in_time(stored)
            assert await bench.get(keys, range(4)) == [HIT] * 4


# One master, and who takes its place.


async def test_a_name_is_looked_up_anew_when_a_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, addresses = socket.getaddrinfo, {"pages.test": "127.0.0.1"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *given, **more: real(addresses.get(host, host), *given, **more)
    )
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with RedisServer(tmp_path / "one") as first:
        there = ["--bind", "127.0.0.2", "--port", str(first.port)]
        with RedisServer(tmp_path / "two", *there):
            async with bench_at(f"redis://pages.test:{first.port}") as bench:
                assert await bench.put(bench.keys(1), [0]) == [STORED]
                addresses["pages.test"] = "127.0.0.2"
                assert await bench.put(bench.keys(1), [0]) == [EXISTS]  # a connection that is whole is kept
                first.kill()

                assert await bench.put(bench.keys(1), [0]) == [STORED]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    """A master, and its replica."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with RedisServer(tmp_path / "one") as master:
        follows = ["--replicaof", f"127.0.0.1 {master.port}"]
        with RedisServer(tmp_path / "two", *follows) as replica:
            until(lambda: redis_at(replica).info("replication")["master_link_status"] == "up")
            yield master, replica


async def test_a_master_that_becomes_a_replica_sends_us_to_its_master(
    pair: tuple[RedisServer, RedisServer],
) -> None:
    old, new = pair
    async with bench_at(old.url) as bench, bench_at(old.url) as other:
        assert await bench.put(bench.keys(*range(4)), range(4)) == [STORED] * 4
        assert redis_at(old).wait(1, 60_000) == 1
        redis_at(new).replicaof("NO", "ONE")
        redis_at(new).config_set("repl-diskless-sync-delay", 600)  # the old one stays without its new pages
        redis_at(old).replicaof("127.0.0.1", new.port)

        for number, count in ((100, 2), (200, 20)):
            fresh = bench.keys(*range(number, number + count))
            assert await bench.put(fresh, range(count)) == [STORED] * count
        assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT] * 4
        assert await other.engine.delete(other.keys(0)) == [HIT]
        assert redis_at(new).dbsize() == 1 + 3 + 22

        new.kill()  # what the URL names is asked again
        assert await bench.get(bench.keys(1), [0]) == [HIT]


@pytest.mark.parametrize("kill", [False, True])
async def test_sentinels_name_the_master(
    tmp_path: Path, pair: tuple[RedisServer, RedisServer], kill: bool
) -> None:
    old, new = pair
    with Sentinels(tmp_path, old) as sentinel:
        until(lambda: len(redis_at(sentinel).sentinel_slaves("pages")) == 1)
        async with bench_at(sentinel.url, service="pages", timeout_seconds=10) as bench:
            keys = bench.keys(*range(8))
            assert await bench.put(keys, range(8)) == [STORED] * 8
            assert redis_at(old).wait(1, 60_000) == 1

            if kill:
                old.kill()
            else:
                until(lambda: _begun(redis_at(sentinel)))

            async def stored() -> bool:
                done = await bench.put(bench.keys(50, 51), [0, 1])
                roles = [redis_at(one).info("replication")["role"] for one in (old, new) if one.running]
                return set(done) <= {STORED, EXISTS} and roles == ["slave", "master"][kill:]

            await in_time(stored)
            assert await bench.put(bench.keys(60), [0]) == [STORED]
            assert await bench.get([*keys, *bench.keys(60)], range(8, 17)) == [HIT] * 9
            assert redis_at(new).exists(f"asynchicache:{bench.keys(60)[0].text()}")


def _begun(sentinel: Any) -> bool:
    """Whether it began a fail-over; it refuses as long as it does not know the replica well."""
    with suppress(module("redis").ResponseError):
        return bool(sentinel.execute_command("SENTINEL FAILOVER", "pages"))
    return False


async def test_sentinels_may_ask_for_a_password_of_their_own(
    tmp_path: Path, pair: tuple[RedisServer, RedisServer]
) -> None:
    with Sentinels(tmp_path, pair[0], "pages", "requirepass watch") as sentinel:
        url = f"redis://127.0.0.1:{sentinel.port}"
        async with bench_at(url, service="pages", sentinel_password="watch") as bench:
            assert await bench.put(bench.keys(1), [0]) == [STORED]
        async with backend_at(url, service="pages") as backend:
            with pytest.raises(StorageError, match="does not let us in: NOAUTH"):
                await open_bench(backend)


# What a URL does not name.


async def test_what_is_something_else_is_said_with_the_option_to_use(
    tmp_path: Path, pair: tuple[RedisServer, RedisServer], cluster: RedisCluster
) -> None:
    master, replica = pair
    with Sentinels(tmp_path, master) as sentinel:
        for url, options, message in [
            (sentinel.url, {}, r"is a Sentinel: option service says .*\(it watches pages\)"),
            (sentinel.url, {"service": "other"}, "Sentinels know no master 'other'"),
            (master.url, {"service": "pages"}, "is no Sentinel, so option service='pages'"),
            (f"{master.url},127.0.0.1:{replica.port}", {}, "these are single servers"),
            (f"{cluster.url}/1", {}, "is a node of a cluster: give its host and port, and database 0"),
            (f"unix://{cluster.masters[0].socket}", {}, "is a node of a cluster: give its host and port"),
        ]:
            async with backend_at(url, **options) as backend:
                with pytest.raises(StorageError, match=message):
                    await open_bench(backend)


async def test_a_cluster_without_slots_is_said(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        async with backend_at(node.url) as backend:
            with pytest.raises(StorageError, match="of a cluster that has no slots yet"):
                await open_bench(backend)
