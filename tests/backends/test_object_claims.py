"""Who sends which pages of an object store: claims are objects beside the pages, and end with the put or in
time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from obstore.exceptions import PreconditionError

from asynchicache.backends.object.claims import PageClaim
from asynchicache.backends.object.inventory import open_inventory
from asynchicache.backends.object.objects import claim_name
from asynchicache.hashing import ObjectKey, page_digests, placed_pages
from asynchicache.ports import AsyncioPort
from asynchicache.storage.labels import Inventory
from asynchicache.storage.protocol import has_verb
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome, token_array
from soaking import first
from storage.object_servers import FRAME_BYTES, SERVERS, ObjectServer, bench_at

pytestmark = [pytest.mark.engine("object"), pytest.mark.asyncio]

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CLAIMED = Outcome.CLAIMED


@pytest.fixture(scope="module", params=SERVERS, ids=lambda kind: kind.scheme)
def server(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    with request.param() as running:
        yield running


ON_ONE_SERVER = pytest.mark.parametrize("server", first(1, SERVERS), indirect=True, scope="module")


def path_keys(bench: PoolUnderTest, tokens: list[int]) -> list[ObjectKey]:
    """The keys of a path with one token a page."""
    digests = page_digests(token_array(tokens), 1)
    return list(map(bench.binding.placed_key, placed_pages(digests, range(len(digests)))))


def claims_in(server: ObjectServer, prefix: str) -> set[str]:
    return {name for name in server.names(prefix) if "/.claim/" in name}


async def all_at_once(pages: int) -> int:
    return 1 << 62


@asynccontextmanager
async def inventory_of(place: dict[str, Any]) -> AsyncIterator[Inventory]:
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=2, seed=0)
        stack.push_async_callback(port.aclose)
        inventory = open_inventory(place, port, writes=True)
        stack.push_async_callback(inventory.aclose)
        yield inventory


def claims_below(folder: Path) -> list[Path]:
    return list(folder.rglob(".claim/*"))


def objects_below(folder: Path) -> list[Path]:
    claims = set(claims_below(folder))
    return [path for path in folder.rglob("0*") if path.is_file() and path not in claims]


def claim_of_another(
    server: ObjectServer,
    prefix: str,
    bench: PoolUnderTest,
    keys: list[ObjectKey],
    content: bytes | None = None,
    seconds: float = 60.0,
) -> str:
    """What somebody else has claimed, for a minute."""
    folder = bench.engine._finder.folder
    names = [claim_name(folder, key) for key in keys]
    claim = PageClaim("another", seconds, [name.rpartition("/")[2] for name in names])
    server.upload(prefix, names[0], msgspec.json.encode(claim) if content is None else content)
    return names[0]


async def test_a_claim_is_for_the_pages_of_a_group_and_ends_with_their_put(
    server: ObjectServer, tmp_path: Path
) -> None:
    prefix = f"ends/{tmp_path.name}"
    async with (
        bench_at(server.options(prefix), slots=128) as bench,
        bench_at(server.options(prefix)) as other,
    ):
        keys = path_keys(bench, list(range(120)))
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 120
        assert len(claims_in(server, prefix)) == 2
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 120, "they are ours"
        assert await other.engine.claim(keys[50:], 60.0) == [CLAIMED] * 70
        assert await bench.put(keys[:30], range(30)) == [STORED] * 30
        assert len(claims_in(server, prefix)) == 1
        assert await bench.put(keys[30:], range(90)) == [STORED] * 90
        assert claims_in(server, prefix) == set()
        assert await other.engine.claim(keys, 60.0) == [EXISTS] * 120


async def test_a_claim_of_a_process_that_died_is_taken_over(server: ObjectServer, tmp_path: Path) -> None:
    prefix = f"dead/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench, bench_at(server.options(prefix)) as other:
        keys = path_keys(bench, list(range(20)))
        assert await bench.engine.claim(keys, 0.0) == [MISS] * 20
        assert await other.engine.claim(keys, 60.0) == [MISS] * 20
        assert len(claims_in(server, prefix)) == 1
        assert await bench.engine.claim([*keys, *path_keys(bench, [7])], 60.0) == [MISS] * 21, (
            "it knows no better"
        )
        async with bench_at(server.options(prefix)) as third:
            assert await third.engine.claim(keys, 60.0) == [CLAIMED] * 20
        assert await other.put(keys, range(20)) == [STORED] * 20


@ON_ONE_SERVER
@pytest.mark.parametrize("quicker", [True, False])
async def test_a_claim_that_could_not_be_taken_over_is_removed_only_if_it_has_ended(
    server: ObjectServer, tmp_path: Path, quicker: bool
) -> None:
    """Another writer was quicker, or the store refuses to replace what is still the same."""
    prefix = f"over/{tmp_path.name}/{quicker}"
    async with bench_at(server.options(prefix)) as bench:
        keys = path_keys(bench, list(range(20)))
        name = claim_of_another(server, prefix, bench, keys, seconds=0.0)
        write = bench.engine._claims._write

        async def late(path: str, content: bytes, old: Any) -> None:
            if not quicker:
                raise PreconditionError("the store says so")
            claim_of_another(server, prefix, bench, keys)
            await write(path, content, old)

        bench.engine._claims._write = late
        assert await bench.engine.claim(keys, 60.0) == [CLAIMED] * 20
        assert claims_in(server, prefix) == ({name} if quicker else set())
        bench.engine._claims._write = write
        assert await bench.engine.claim(keys, 60.0) == [CLAIMED if quicker else MISS] * 20


def set_clocks(bench: PoolUnderTest, machine: float = 0.0, store: float = 0.0) -> list[float]:
    """Let this machine's clock, and the server's, be so many seconds ahead; returns what
    the server will have said."""
    clock, told = bench.engine._claims._clock, list[float]()
    ask = clock._ask

    async def say() -> float:
        told.append(await ask() + store)
        return told[-1]

    clock._wall, clock._ask = lambda: time.time() + machine, say
    return told


@ON_ONE_SERVER
async def test_who_sees_an_old_claim_for_the_first_time_does_not_wait(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = f"old/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        keys = path_keys(bench, list(range(20)))
        name = claim_of_another(server, prefix, bench, keys[:10])
        assert await bench.engine.claim(keys[5:], 60.0) == [CLAIMED] * 5 + [MISS] * 10
        await bench.put(keys[10:], range(10))
        assert claims_in(server, prefix) == {name}

        told = set_clocks(bench, machine=130, store=130)
        assert await bench.engine.claim(keys[5:], 60.0) == [MISS] * 5 + [EXISTS] * 10
        assert name not in claims_in(server, prefix), "it is removed, though ours has another name"
        assert await bench.put(keys[5:10], range(5)) == [STORED] * 5
        assert claims_in(server, prefix) == set()
        assert len(told) == 1
        assert not caplog.text


@ON_ONE_SERVER
@pytest.mark.parametrize("marked", [True, False])
async def test_a_machine_whose_clock_is_ahead_believes_the_stores(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, marked: bool
) -> None:
    """Also where a rule that expires objects has deleted the mark of the format."""
    prefix = f"ahead/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench, bench_at(server.options(prefix)) as other:
        told, keys = set_clocks(bench, machine=300), path_keys(bench, list(range(60)))
        assert await bench.engine.claim(keys[:5], 60.0) == [MISS] * 5
        assert not told, "there was no claim of others"
        assert await other.engine.claim(keys[5:], 60.0) == [MISS] * 55
        if not marked:
            obstore.delete(server.store(prefix), "FORMAT")
        for _ in range(2):
            assert await bench.engine.claim(keys[5:], 60.0) == [CLAIMED] * 55
        assert len(told) == 1
        assert caplog.text.count("s ahead of the store's") == 1
        assert await other.put(keys[5:], range(55)) == [STORED] * 55


@ON_ONE_SERVER
async def test_what_the_store_said_counts_for_an_hour(server: ObjectServer, tmp_path: Path) -> None:
    prefix = f"hour/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        clock, passed = bench.engine._claims._clock, 0.0
        now = clock._now
        clock._now = lambda: now() + passed
        made = time.time()
        told = set_clocks(bench, machine=300)
        assert not await clock.is_past(made + 200)
        passed = 250.0
        assert await clock.is_past(made + 200)
        assert len(told) == 1
        passed = 3600.0
        assert not await clock.is_past(made + 310), "this machine does not say so: nobody is asked"
        assert len(told) == 1
        assert not await clock.is_past(made + 200)
        assert len(told) == 2


@ON_ONE_SERVER
async def test_a_store_that_does_not_say_the_time_is_asked_once_a_minute(
    server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefix is another version's now, whose mark stays."""
    prefix = f"silent/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        clock, keys, asked = bench.engine._claims._clock, path_keys(bench, list(range(20))), 0
        now, ask = clock._now, clock._ask

        async def counted() -> float:
            nonlocal asked
            asked += 1
            return await ask()

        clock._ask, clock._wall = counted, lambda: time.time() + 300
        claim_of_another(server, prefix, bench, keys)
        server.upload(prefix, "FORMAT", b"asynchicache object store 9\n")
        for _ in range(2):
            assert await bench.engine.claim(keys, 60.0) == [CLAIMED] * 20
        assert asked == 1
        assert "has format 9" in caplog.text
        assert bytes(obstore.get(server.store(prefix), "FORMAT").bytes()).endswith(b"9\n")
        clock._now = lambda: now() + 60
        assert await bench.engine.claim(keys, 60.0) == [CLAIMED] * 20
        assert asked == 2


@ON_ONE_SERVER
async def test_a_claim_that_was_lost_costs_bytes_and_no_page(server: ObjectServer, tmp_path: Path) -> None:
    prefix = f"lost/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench, bench_at(server.options(prefix)) as other:
        keys = path_keys(bench, list(range(20)))
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 20
        obstore.delete(server.store(prefix), list(claims_in(server, prefix)))
        assert await other.engine.claim(keys, 60.0) == [MISS] * 20
        assert await bench.put(keys, range(20)) == [STORED] * 20
        assert await other.put(keys, range(20)) == [EXISTS] * 20
        assert await other.get(keys, range(20)) == [HIT] * 20
        assert claims_in(server, prefix) == set()


@ON_ONE_SERVER
async def test_a_claim_of_ours_whose_answer_was_lost_delays_nobody(
    server: ObjectServer, tmp_path: Path
) -> None:
    prefix = f"answer/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        keys = path_keys(bench, list(range(20)))
        assert await bench.engine.claim(keys[:10], 60.0) == [MISS] * 10
        bench.engine._claims._mine.clear()
        assert await bench.engine.claim(keys[5:], 60.0) == [MISS] * 15
        assert await bench.put(keys, range(20)) == [STORED] * 20
        assert claims_in(server, prefix) == set()
        assert bench.engine._claims._mine == {}


@ON_ONE_SERVER
async def test_calls_of_one_process_do_not_take_each_others_claims_for_dead(
    server: ObjectServer, tmp_path: Path
) -> None:
    prefix = f"own/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        one, two, three = (path_keys(bench, [0, last, *range(20)])[1:] for last in (1, 2, 3))
        claims = bench.engine._claims
        written, answered, ending, ended = (asyncio.Event() for _ in range(4))
        write, remove = claims._write, claims._remove

        async def slow_write(*call: Any) -> None:
            await write(*call)
            written.set()
            await answered.wait()

        async def slow_remove(paths: Any) -> None:
            ending.set()
            await ended.wait()
            await remove(paths)

        claims._write = slow_write
        claiming = asyncio.create_task(bench.engine.claim(one, 60.0))
        await written.wait()
        claims._write = write
        assert await bench.engine.claim(two, 60.0) == [MISS] * 21
        assert len(claims_in(server, prefix)) == 2
        answered.set()
        assert await claiming == [MISS] * 21

        claims._remove = slow_remove
        putting = asyncio.create_task(bench.put(one, range(21)))
        await ending.wait()
        claims._remove = remove
        assert await bench.engine.claim(three, 60.0) == [MISS] * 21
        ended.set()
        assert await putting == [STORED] * 21
        assert len(claims_in(server, prefix)) == 2
        for path in (two, three):
            await bench.put(path, range(21))
        assert claims_in(server, prefix) == set()
        assert claims._mine == {}


@ON_ONE_SERVER
async def test_paths_that_part_in_a_group_do_not_wait_for_each_other(
    server: ObjectServer, tmp_path: Path
) -> None:
    prefix = f"part/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench, bench_at(server.options(prefix)) as other:
        one, two = (path_keys(bench, [*range(20), last, *range(20)]) for last in (7, 8))
        assert await bench.engine.claim(one, 60.0) == [MISS] * 41
        assert await other.engine.claim(two, 60.0) == [CLAIMED] * 20 + [MISS] * 21
        assert await other.put(two[20:], range(21)) == [STORED] * 21
        assert await bench.put(one, range(41)) == [STORED] * 41
        assert await other.engine.claim(two, 60.0) == [EXISTS] * 41


JUNK = {
    "no JSON": b"\xff{",
    "no UTF-8": b'{"owner": "\xff", "seconds": 60, "pages": []}',
    "nested": b'{"newer": ' + b"[" * 100_000,
}


@ON_ONE_SERVER
@pytest.mark.parametrize("content", JUNK.values(), ids=JUNK)
async def test_what_no_version_understands_is_no_claim(
    server: ObjectServer, tmp_path: Path, content: bytes
) -> None:
    prefix = f"junk/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        keys = path_keys(bench, list(range(20)))
        claim_of_another(server, prefix, bench, keys, content)
        assert await bench.engine.claim(keys, 60.0) == [MISS] * 20
        assert await bench.put(keys, range(20)) == [STORED] * 20
        assert claims_in(server, prefix) == set()


@ON_ONE_SERVER
async def test_a_claim_may_say_any_number_of_seconds(server: ObjectServer, tmp_path: Path) -> None:
    async with bench_at(server.options(f"long/{tmp_path.name}")) as bench:
        for seconds, answer in ((1e300, CLAIMED), (-1e300, MISS)):
            keys = path_keys(bench, [int(seconds > 0), *range(20)])
            claim_of_another(server, f"long/{tmp_path.name}", bench, keys, seconds=seconds)
            assert await bench.engine.claim(keys, 60.0) == [answer] * 21


@ON_ONE_SERVER
async def test_claims_are_no_pages_and_clear_removes_them(server: ObjectServer, tmp_path: Path) -> None:
    prefix = f"clear/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        keys = path_keys(bench, list(range(20)))
        await bench.put(keys[:5], range(5))
        claim_of_another(server, prefix, bench, keys[5:])
        assert await bench.engine.exists(keys) == bytes([1] * 5 + [0] * 15)
        assert await bench.get(keys, range(20)) == [HIT] * 5 + [MISS] * 15
        assert await bench.engine.clear() == 5
        assert server.names(prefix) == {"FORMAT"}


@ON_ONE_SERVER
@pytest.mark.parametrize("options", [{"object_pages": 1}, {"index": True}, {"read_only": True}], ids=str)
async def test_there_are_no_claims_where_they_cost_more_than_they_save(
    server: ObjectServer, tmp_path: Path, options: dict[str, object]
) -> None:
    async with bench_at(server.options(f"none/{tmp_path.name}", **options)) as bench:
        assert not has_verb(bench.engine, "claim")


@ON_ONE_SERVER
async def test_pages_of_which_nobody_knows_the_path_are_not_claimed(
    server: ObjectServer, tmp_path: Path
) -> None:
    prefix = f"bare/{tmp_path.name}"
    async with bench_at(server.options(prefix)) as bench:
        bare = [ObjectKey(*key) for key in bench.keys(1, 2)]
        assert await bench.engine.claim(bare, 60.0) == [MISS] * 2
        assert claims_in(server, prefix) == set()


async def test_inventories_count_no_claims_and_remove_them(tmp_path: Path) -> None:
    place = {"url": f"file://{tmp_path}"}
    async with bench_at(place) as bench:
        keys = bench.keys(*range(20))
        await bench.put(keys[:5], range(5))
        assert await bench.engine.claim(keys, 60.0) == [EXISTS] * 5 + [MISS] * 15
    (claim,) = claims_below(tmp_path)
    async with inventory_of(place) as inventory:
        (pool,) = await inventory.pools()
        assert (pool.pages, pool.nbytes) == ({keys[0].namespace: 5}, 5 * FRAME_BYTES)
        assert [some.pages async for some in inventory.check(pool)] == [5]
        assert await inventory.remove(pool, b"\1" * 8, all_at_once) == 0
        assert claim.exists()
        assert await inventory.remove(pool, keys[0].namespace, all_at_once) == 5
        assert not claim.exists()


async def test_what_others_remove_meanwhile_ends_no_removal(tmp_path: Path) -> None:
    """Pages, and the claims that `gc` and a writer's end remove."""
    place = {"url": f"file://{tmp_path}", "object_pages": 2}
    async with bench_at(place) as bench:
        keys = bench.keys(*range(12))
        await bench.put(keys[:10], range(10))
        assert await bench.engine.claim(keys, 60.0) == [EXISTS] * 10 + [MISS] * 2
    async with inventory_of(place) as inventory:
        (pool,) = await inventory.pools()
        objects = objects_below(tmp_path)
        assert len(objects) > 3

        async def first_goes(_: int) -> int:
            if all(path.exists() for path in objects):
                objects[0].unlink()
            return 10

        assert await inventory.remove(pool, None, first_goes) == 10
    assert objects_below(tmp_path) == claims_below(tmp_path) == []
