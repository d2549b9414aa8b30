"""Objects of many pages: pages are found, checked, dropped and stored again one by one, in few requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from random import Random

import obstore
import pytest

from asynchicache import HybridCache
from asynchicache.backends.object import engine as object_engine
from asynchicache.backends.object import finder
from asynchicache.backends.object.objects import LABEL, StoredObject
from asynchicache.hashing import ObjectKey, page_digests, placed_pages
from asynchicache.storage.protocol import OptionalVerbs
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import Outcome, token_array
from cache.engine import LONG, LONG_SPEC, PAGE, Engine, config, long_turn
from storage.file_stores import other_process
from storage.object_servers import FRAME_BYTES, S3Server, bench_at

pytestmark = [pytest.mark.engine("object"), pytest.mark.asyncio]

STORED, EXISTS, HIT, MISS, CORRUPT = (
    Outcome.STORED,
    Outcome.EXISTS,
    Outcome.HIT,
    Outcome.MISS,
    Outcome.CORRUPT,
)


def objects_in(folder: Path) -> list[Path]:
    beside = ("FORMAT", LABEL)
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in beside)


def path_keys(bench: PoolUnderTest, tokens: list[int]) -> list[ObjectKey]:
    """The keys of a path with one token a page."""
    digests = page_digests(token_array(tokens), 1)
    return list(map(bench.binding.placed_key, placed_pages(digests, range(len(digests)))))


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `put` asks the store what is there."""
    monkeypatch.setattr(object_engine, "_FRESH_SECONDS", -1)


# Requests.


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as running:
        yield running


def requests_of(server: S3Server) -> int:
    """How many requests the server has answered, by its own log, where some lines have a colour."""
    return len(re.findall(r'["m](GET|PUT|HEAD|POST|DELETE) /pages', server.output))


async def test_a_long_prompt_of_a_hybrid_model_takes_few_requests(server: S3Server) -> None:
    prompt, options = list(range(32_769)), server.options("long")
    chosen = config(storage="object", storage_options=options, **LONG)
    counts = []
    for tokens, hit in ((prompt, 0), (prompt, 32_768), ([7] * 32_769, 0)):
        before = requests_of(server)
        async with HybridCache.open(LONG_SPEC, chosen) as cache:
            assert await long_turn(cache, tokens) == (hit, True)
        counts.append(requests_of(server) - before)

    cold, warm, other = counts
    assert (cold <= 70, other <= 70, warm <= 90) == (True, True, True), counts


async def test_a_prefix_that_ends_inside_an_object_is_restored(tmp_path: Path) -> None:
    options = {"url": f"file://{tmp_path}"}
    stored = list(range(30 * PAGE + 1))
    for tokens, hit in ((stored, 0), (stored[: 21 * PAGE] + [9] * 10 * PAGE, 21 * PAGE)):
        async with HybridCache.open(
            synthetic_spec(PAGE, ("kv",)),
            config(storage="object", storage_options=options, device_slots={"kv": 64}),
        ) as cache:
            assert (await Engine(cache).serve(tokens)).tokens == hit
    assert len(objects_in(tmp_path)) == 2, "the pages that the second prompt shares were not stored twice"


@pytest.mark.parametrize("index", [False, True])
async def test_states_far_apart_are_found_by_one_list(tmp_path: Path, index: bool) -> None:
    async with bench_at({"url": f"file://{tmp_path}"}) as bench:
        keys = bench.keys(*range(64))
        sparse = [keys[0], keys[17], keys[63]]
        assert await bench.put(sparse, [0, 1, 2]) == [STORED] * 3
        assert len(objects_in(tmp_path)) == 3
        async with bench_at({"url": f"file://{tmp_path}", "index": index}) as other:
            assert [n for n, there in enumerate(await other.engine.exists(keys)) if there] == [0, 17, 63]
            assert await other.get(sparse, [3, 4, 5]) == [HIT] * 3


@pytest.mark.parametrize("piece", [1000, FRAME_BYTES, 3 * FRAME_BYTES + 1])
async def test_a_file_is_read_in_pieces_that_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(object_engine, "_PIECE_BYTES", piece)
    async with bench_at({"url": f"file://{tmp_path}"}) as bench:
        keys = bench.keys(*range(1, 11))
        assert await bench.put(keys, range(10)) == [STORED] * 10
        assert await bench.get(keys, range(10, 20)) == [HIT] * 10
        assert await bench.get(keys[3:8], range(20, 25)) == [HIT] * 5


# Against a model that knows each page alone.


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("pages", [2, 16, 32, 64])
@pytest.mark.parametrize("seed", range(4))
async def test_pages_come_and_go_as_if_each_were_alone(tmp_path: Path, pages: int, seed: int) -> None:
    chance = Random(f"{seed} {pages}")
    place = {"url": f"file://{tmp_path}", "object_pages": pages}
    paths = [[chance.randrange(1000) for _ in range(150)]]
    for _ in range(5):
        begin = chance.choice(paths)[: chance.choice([0, 1, 3, 63, 64, 65, 66, 100])]
        paths.append(begin + [chance.randrange(1000) for _ in range(150 - len(begin))])
    model: set[bytes] = set()
    async with (
        bench_at(place, slots=300, page_bytes=8) as one,
        bench_at(place, slots=300, page_bytes=8) as two,
    ):
        for _ in range(40):
            bench = chance.choice([one, two])
            path = path_keys(bench, chance.choice(paths))
            first = chance.randrange(150)
            some = path[first : first + chance.choice([1, 2, 10, 150])]
            if chance.random() < 0.3:
                some = [key for key in some if chance.random() < 0.5]
            there = [key.digest in model for key in some]
            match chance.randrange(4):
                case 0:
                    wanted = [EXISTS if one else STORED for one in there]
                    assert await bench.put(some, range(len(some))) == wanted
                    model |= {key.digest for key in some}
                case 1:
                    few = [key for key in some if chance.random() < 0.3]
                    wanted = [HIT if key.digest in model else MISS for key in few]
                    assert await bench.engine.delete(few) == wanted
                    model -= {key.digest for key in few}
                case 2:
                    assert await bench.engine.exists(some) == bytes(there)
                case 3:
                    slots = range(150, 150 + len(some))
                    assert await bench.get(some, slots) == [HIT if one else MISS for one in there]
        assert await one.engine.clear() == len(model)
    assert objects_in(tmp_path) == []


@pytest.mark.usefixtures("no_memory")
async def test_two_writers_of_one_group_lose_nothing(tmp_path: Path) -> None:
    place = {"url": f"file://{tmp_path}"}
    async with bench_at(place) as one, bench_at(place) as two, bench_at(place) as reader:
        keys = one.keys(*range(40))
        answers = await asyncio.gather(
            one.put(keys[:33], range(33)), two.put(keys[10:], range(30)), one.put(keys[5:20], range(5, 20))
        )
        assert {outcome for answer in answers for outcome in answer} <= {STORED, EXISTS}
        assert await reader.get(keys, range(40)) == [HIT] * 40
        assert await reader.engine.delete(keys[12:13]) == [HIT]
        assert await one.get(keys, range(40)) == [HIT] * 12 + [MISS] + [HIT] * 27
        assert await reader.engine.clear() == 39


async def test_pages_whose_object_was_divided_by_others_are_found(tmp_path: Path) -> None:
    place = {"url": f"file://{tmp_path}"}
    async with bench_at(place) as bench, bench_at(place) as other:
        keys = bench.keys(*range(8))
        await bench.put(keys, range(8))
        assert await other.engine.delete(keys[3:4]) == [HIT]
        assert await bench.get(keys, range(8, 16)) == [HIT] * 3 + [MISS] + [HIT] * 4


@pytest.mark.parametrize("index", [False, True])
async def test_pages_of_which_nobody_knows_the_path_are_alone(tmp_path: Path, index: bool) -> None:
    """As of the tier of an engine, which names pages by hashes of its own."""
    place = {"url": f"file://{tmp_path}"}
    async with bench_at({**place, "object_pages": 1}) as old:
        keys = old.keys(*range(4))
        await old.put(keys[:1], [0])
    bare = [ObjectKey(*key) for key in keys]
    async with bench_at({**place, "index": index}) as bench:
        assert await bench.put(bare[:3], range(3)) == [EXISTS, STORED, STORED]
        assert {path.name for path in objects_in(tmp_path)} == {key.digest.hex() for key in keys[:3]}
        assert await bench.put(keys[1:2], [1]) == [STORED], "it lies on a path here"
        assert await bench.engine.exists([*bare, *keys]) == bytes([1, 1, 1, 0, int(index), 1, 0, 0])
        assert await bench.get([*bare, keys[1]], range(8, 13)) == [HIT] * 3 + [MISS, HIT]
        assert await bench.engine.delete(bare) == [HIT] * 3 + [MISS]
        assert await bench.get([bare[1], keys[1]], [8, 9]) == [MISS, HIT]
        assert await bench.engine.clear() == 1


# Damage.


WRITE_FOREVER = """
import asyncio, sys
from storage.object_servers import bench_at

async def main():
    async with bench_at({"url": f"file://{sys.argv[1]}"}, page_bytes=300_000, slots=40) as bench:
        for first in range(0, 100_000, 40):
            keys = bench.keys(*range(first, first + 40))
            if {outcome.name for outcome in await bench.put(keys, range(40))} == {"STORED"}:
                print(first + 40, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 2, 3])
async def test_a_writer_that_is_killed_leaves_whole_objects(tmp_path: Path, lines: int) -> None:
    with other_process(WRITE_FOREVER, tmp_path) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
    stored = int(told[-1])
    async with bench_at({"url": f"file://{tmp_path}"}, page_bytes=300_000, slots=40) as bench:
        for first in range(0, stored + 120, 40):
            keys = bench.keys(*range(first, first + 40))
            outcomes = await bench.get(keys, range(40))
            assert set(outcomes) <= ({HIT} if first < stored else {HIT, MISS})
            assert [outcome is HIT for outcome in outcomes] == list(
                map(bool, await bench.engine.exists(keys))
            )


@asynccontextmanager
async def one_object(tmp_path: Path, *, index: bool) -> AsyncIterator[tuple[PoolUnderTest, Path]]:
    """A pool that another process has stored pages 0 to 7 of, in one object."""
    place = {"url": f"file://{tmp_path}"}
    async with bench_at(place) as bench:
        assert await bench.put(bench.keys(*range(8)), range(8)) == [STORED] * 8
    (path,) = objects_in(tmp_path)
    async with bench_at({**place, "index": index}) as bench:
        yield bench, path


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("damaged", [[0], [3], [7], [2, 3, 6], list(range(8))])
async def test_a_damaged_page_does_not_take_its_object_with_it(
    tmp_path: Path, damaged: list[int], index: bool
) -> None:
    async with one_object(tmp_path, index=index) as (bench, path):
        keys = bench.keys(*range(8))
        content = bytearray(path.read_bytes())
        for page in damaged:
            content[page * FRAME_BYTES + 5000] ^= 1
        path.write_bytes(content)
        wanted = [CORRUPT if page in damaged else HIT for page in range(8)]
        assert await bench.engine.exists(keys) == bytes([1] * 8), "no list can tell"
        assert await bench.get(keys, range(8, 16)) == wanted

        assert await bench.engine.exists(keys) == bytes(page not in damaged for page in range(8))
        after = [MISS if page in damaged else HIT for page in range(8)]
        assert await bench.get(keys, range(8, 16)) == after
        bench.fill(keys, range(8))
        again = [STORED if page in damaged else EXISTS for page in range(8)]
        assert await bench.put(keys, range(8)) == again
        assert await bench.get(keys, range(8, 16)) == [HIT] * 8
        assert not path.exists() or damaged == list(range(8))


@pytest.mark.parametrize(("size", "whole"), [(5 * FRAME_BYTES + 17, 5), (0, 0), (8 * FRAME_BYTES + 1, 0)])
async def test_an_object_of_another_size_has_the_pages_that_are_whole(
    tmp_path: Path, size: int, whole: int
) -> None:
    async with one_object(tmp_path, index=False) as (bench, path):
        keys = bench.keys(*range(8))
        path.write_bytes(path.read_bytes()[:size].ljust(size, b"x"))
        assert await bench.engine.exists(keys) == bytes([1] * whole + [0] * (8 - whole))
        assert await bench.get(keys, range(8, 16)) == [HIT] * whole + [CORRUPT] * (8 - whole)
        assert await bench.put(keys, range(8)) == [EXISTS] * whole + [STORED] * (8 - whole)
        assert await bench.get(keys, range(8, 16)) == [HIT] * 8


async def test_an_object_that_shrinks_after_it_was_seen(tmp_path: Path) -> None:
    async with one_object(tmp_path, index=True) as (bench, path):
        path.write_bytes(path.read_bytes()[: 3 * FRAME_BYTES])
        assert await bench.get(bench.keys(1, 2), [8, 9]) == [HIT] * 2
        assert await bench.get(bench.keys(6, 7), [8, 9]) == [Outcome.FAILED] * 2


async def test_pages_of_others_under_our_names_are_dropped(tmp_path: Path) -> None:
    async with one_object(tmp_path, index=False) as (bench, path):
        content = path.read_bytes()
        path.write_bytes(content[FRAME_BYTES:] + content[:FRAME_BYTES])
        assert await bench.get(bench.keys(*range(8)), range(8, 16)) == [CORRUPT] * 8
        assert objects_in(tmp_path) == []


# Names.

GROUP = f"{'0' * 48}/00AAAAAAAA"


@pytest.mark.parametrize("pages", [1, 2, 24, 25, 26, 65])
async def test_a_name_says_what_is_in_an_object(pages: int) -> None:
    ids = "".join(f"{page:08}" for page in range(pages))
    made = StoredObject.named("folder", "0" * 48, 3, ids, 7)
    assert StoredObject.of("folder", made.path, 7) == made
    assert max(map(len, made.path.split("/"))) < 250, "a folder's names have 255 letters"
    assert [made.find(3 + page, f"{page:08}") for page in range(pages)] == list(range(pages))
    assert made.find(2, ids[-8:]) is made.find(3 + pages, ids[:8]) is made.find(3, "x" * 8) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "0" * 79,
        f"{GROUP}",
        f"{GROUP}/02",
        f"{GROUP}/1.A",
        f"{GROUP}/02.AAAAAAA",
        f"{GROUP}/02.AAAA/AAAA",
        f"{GROUP}/01/old",
        f"backup/{GROUP}/01",
        f"backup/{'0' * 80}",
        f"{'G' * 48}/00AAAAAAAA/01",
    ],
)
async def test_names_that_are_not_ours(name: str) -> None:
    assert StoredObject.of("folder", f"folder/{name}", 1) is None


# Groups of more objects than one answer lists.


@pytest.mark.usefixtures("no_memory")
async def test_a_group_of_many_objects_is_asked_for_by_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = []
    real = obstore.list

    def counted(*call: object, **options: object) -> object:
        lists.append(call)
        return real(*call, **options)

    monkeypatch.setattr(finder, "_LISTED", 5)
    monkeypatch.setattr(obstore, "list", counted)
    async with bench_at({"url": "memory:///"}) as bench:
        paths = [path_keys(bench, [*range(20), branch, *range(20)]) for branch in range(100, 112)]
        for path in paths:
            assert (await bench.put(path, range(41))).count(STORED) == (41 if path is paths[0] else 21)
        new = path_keys(bench, [*range(20), 7, *range(20)])
        lists.clear()
        assert await bench.engine.exists(new) == bytes([1] * 20 + [0] * 21)
        assert len(lists) == 2, "the group, and what begins with the first page that is missing"
        for path in paths:
            assert await bench.engine.exists(path) == bytes([1] * 41)
            assert await bench.get(path, range(41)) == [HIT] * 41


# What is used stays young.


@pytest.mark.parametrize("index", [False, True])
async def test_objects_that_are_used_get_young_and_others_grow_old(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    prefix = tmp_path.name
    async with bench_at(server.options(prefix, refresh_days=10, index=index)) as bench:
        used, unused = path_keys(bench, [1, *range(40)]), path_keys(bench, [2, *range(40)])
        for path in (used, unused):
            await bench.put(path, range(41))
        before = server.names(prefix)
        assert OptionalVerbs(bench.engine).evicts
        await bench.engine.touch(used[::-1])
        assert server.names(prefix) == before, "they are young"

        class Later(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:
                return datetime.now(tz) + timedelta(days=11)

        monkeypatch.setattr(object_engine, "datetime", Later)
        bench.engine._touched.clear()  # as after a while
        await bench.engine.touch(used[::-1])
        after = server.names(prefix)
        assert (len(after), len(after - before), len(before - after)) == (len(before), 2, 2)
        sent = requests_of(server)
        await bench.engine.touch(used)
        assert requests_of(server) == sent, "it asks for each group once in a while"
        for path in (used, unused):
            assert await bench.engine.exists(path) == bytes([1] * 41)
            assert await bench.get(path, range(41)) == [HIT] * 41
        async with bench_at(server.options(prefix)) as other:
            assert not OptionalVerbs(other.engine).evicts
            assert await other.get(used, range(41)) == [HIT] * 41
            assert await other.engine.clear() == 82
