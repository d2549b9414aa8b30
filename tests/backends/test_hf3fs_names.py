"""Names of the 3FS engine in SQLite and in Redis: both say the same, of all that clients may do."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asynchicache.backends.hf3fs.metadata.database import FILE
from asynchicache.backends.hf3fs.metadata.local import LocalNames
from asynchicache.backends.hf3fs.metadata.namespace import MetadataNamespace
from asynchicache.backends.hf3fs.metadata.shared import SharedNames, open_names
from asynchicache.backends.hf3fs.metadata.store import MetadataStore
from asynchicache.backends.hf3fs.metadata.words import Claim, NameStore, SlotVersion, Verdict
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.ports import AsyncioPort
from storage.hf3fs_names import names_server
from storage.hostile_redis import bulk, hostile_server
from storage.redis_servers import RedisServer, redis_at

redis_only = pytest.mark.engine("redis")
KEYS = [f"{number:080x}" for number in range(40)]
TOKEN = "0" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with names_server(tmp_path_factory.mktemp("names")) as running:
        yield running


@asynccontextmanager
async def names_at(place: str | Path, **options: object) -> AsyncIterator[NameStore]:
    port = AsyncioPort(threads=1, seed=0)
    local = isinstance(place, Path)
    words = {"timeout_seconds": 60, **options, "url": str(place)}
    names: NameStore = LocalNames(place, port, 60) if local else open_names(words, port)
    try:
        yield names
    finally:
        await names.aclose()
        await port.aclose()


async def namespace_of(names: NameStore, slots: int = 4, name: str = "kv") -> MetadataNamespace:
    return MetadataNamespace(names, await names.open(name, slots, 4096), name, 4096)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=redis_only)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "sqlite":
        return tmp_path
    running: RedisServer = request.getfixturevalue("server")
    redis_at(running).flushall()
    return running.url


async def put(namespace: MetadataNamespace, keys: list[str], token: str = TOKEN) -> list[Verdict]:
    places = (await namespace.reserve(token, keys)).places
    pairs = zip(keys, places, strict=True)
    return await namespace.confirm([Claim(key, at.slot, at.generation) for key, at in pairs if at])


@pytest.mark.asyncio
async def test_the_whole_life_of_a_page(place: str | Path) -> None:
    async with names_at(place) as names:
        namespace = await namespace_of(names)

        assert await put(namespace, KEYS[:2]) == ["stored", "stored"]
        located = await namespace.locate(KEYS[:3])
        assert [at is not None for at in located.places] == [True, True, False]
        namespace.end_read(located)
        assert await namespace.exists(KEYS[:3]) == [True, True, False]
        assert await namespace.touch(KEYS[:3]) == 2
        assert await namespace.delete([*KEYS[1:3], KEYS[1]]) == [True, False, False]
        assert await namespace.clear() == 1
        assert await namespace.exists(KEYS[:3]) == [False] * 3
        assert await namespace.exists([]) == []


@pytest.mark.asyncio
async def test_an_ended_read_is_said_with_the_next_call(place: str | Path) -> None:
    async with names_at(place) as names:
        namespace = await namespace_of(names)
        await put(namespace, KEYS[:4])
        located = await namespace.locate(KEYS[:4])
        assert (await namespace.reserve("1" * 32, KEYS[4:5])).places == [None]

        namespace.end_read(located)

        assert (await namespace.reserve("2" * 32, KEYS[4:5])).places != [None]


@pytest.mark.asyncio
async def test_a_client_learns_that_another_made_the_namespace_larger(place: str | Path) -> None:
    async with names_at(place) as names, names_at(place) as others:
        namespace = await namespace_of(names, slots=1)
        opened = await others.open("kv", 3, 4096)
        assert opened.store == (await names.open("kv", 1, 4096)).store

        assert await put(namespace, KEYS[:3]) == ["stored"] * 3
        assert namespace.slots == 3
        with pytest.raises(StorageFormatError, match="4096 bytes, 8192 were asked for"):
            await others.open("kv", 100, 8192)


@pytest.mark.asyncio
async def test_what_nobody_opened_is_unknown(place: str | Path) -> None:
    async with names_at(place) as names:
        await names.open("kv", 1, 4096)
        with pytest.raises(StorageError, match="open it first"):
            await names.call("nobody.7", "exists", (), KEYS)


@redis_only
@pytest.mark.asyncio
async def test_leases_end_by_the_clock_of_the_server(server: RedisServer) -> None:
    redis_at(server).flushall()
    port = AsyncioPort(threads=1, seed=0)
    names = SharedNames(RedisOptions.of({"url": server.url, "timeout_seconds": 60}), port, lease_seconds=0.3)
    namespace = await namespace_of(names)
    try:
        dead = await namespace.reserve("1" * 32, KEYS[:2])
        async with asyncio.timeout(60):
            while None in (await namespace.reserve(TOKEN, KEYS[2:6])).places:  # noqa: ASYNC110 - time must pass
                await asyncio.sleep(0.02)
        claims = [Claim(key, *at) for key, at in zip(KEYS, dead.places, strict=False) if at]
        assert await namespace.confirm(claims) == ["lost"] * 2
        assert await put(namespace, KEYS[2:6]) == ["stored"] * 4
        await namespace.locate(KEYS[2:6])  # by who dies
        async with asyncio.timeout(60):
            while None in (await namespace.reserve("3" * 32, KEYS[6:10])).places:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        await names.aclose()
        await port.aclose()


class Twin:
    """One namespace in both stores; each call goes to both, and both must say the same."""

    def __init__(self, spaces: list[MetadataNamespace], slots: int) -> None:
        self.spaces = spaces
        self.slots = slots
        self.reserved: list[list[Claim]] = []
        self.reads: list[list[object]] = []
        self.tokens = 0

    async def alike(self, verb: str, *given: object) -> object:
        one, other = [await getattr(space, verb)(*given) for space in self.spaces]
        assert one == other, (verb, given)
        return one

    async def reserve(self, keys: list[str]) -> None:
        self.tokens += 1
        answers = [await space.reserve(f"{self.tokens:032x}", keys) for space in self.spaces]
        slots = [[at and at.slot for at in answer.places] for answer in answers]
        assert slots[0] == slots[1]
        assert list(answers[0].existed) == list(answers[1].existed)
        for places in zip(*(answer.places for answer in answers), strict=True):
            if places[0]:
                key = keys[list(answers[0].places).index(places[0])]
                self.reserved.append([Claim(key, *at) for at in places if at])

    async def finish(self, verb: str, claims: list[Claim]) -> None:
        given = (
            claims if verb == "confirm" else [SlotVersion(claim.slot, claim.generation) for claim in claims]
        )
        one, other = [
            await getattr(space, verb)([each]) for space, each in zip(self.spaces, given, strict=True)
        ]
        assert one == other

    async def forget(self, key: str) -> None:
        for space in self.spaces:
            located = await space.locate([key])
            space.end_read(located)
            claims = [Claim(key, *at) for at in located.places if at]
            stale = [Claim(key, claim.slot, claim.generation + 1) for claim in claims]
            assert await space.forget([*stale, *claims, *claims]) == [False, True, False][: 3 * len(claims)]

    async def read(self, keys: list[str]) -> None:
        found = [await space.locate(keys) for space in self.spaces]
        slots = [[at and at.slot for at in one.places] for one in found]
        assert slots[0] == slots[1]
        assert slots[0] == [
            slot if there else None
            for slot, there in zip(slots[0], await self.spaces[0].exists(keys), strict=True)
        ]
        self.reads.append([*found])

    def end_read(self, one: list[object]) -> None:
        for space, located in zip(self.spaces, one, strict=True):
            space.end_read(located)  # type: ignore[arg-type]


VERBS = ["reserve", "confirm", "confirm", "release", "read", "end", "delete", "touch", "forget", "clear"]


@redis_only
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(4))
async def test_both_stores_say_the_same_of_random_calls(
    tmp_path: Path, server: RedisServer, seed: int
) -> None:
    chance = random.Random(seed)
    redis_at(server).flushall()
    async with names_at(tmp_path) as local, names_at(server.url) as shared:
        twin = Twin([await namespace_of(each, slots=12) for each in (local, shared)], 12)
        for _ in range(250):
            keys = chance.sample(KEYS[:20], chance.randint(1, 4))
            verb = chance.choice(VERBS)
            if verb == "reserve":
                await twin.reserve(keys)
            elif verb in ("confirm", "release") and twin.reserved:
                await twin.finish(verb, twin.reserved.pop(chance.randrange(len(twin.reserved))))
            elif verb == "read":
                await twin.read(keys)
            elif verb == "end" and twin.reads:
                twin.end_read(twin.reads.pop(chance.randrange(len(twin.reads))))
            elif verb in ("delete", "touch", "exists"):
                await twin.alike(verb, keys)
            elif verb == "forget":
                await twin.forget(keys[0])
            elif verb == "clear" and chance.random() < 0.1:
                await twin.alike(verb)
            await twin.alike("exists", KEYS[:20])
            await twin.alike("leaving", chance.randrange(6))


# A server that is not what it should be.


@redis_only
@pytest.mark.asyncio
async def test_a_server_that_evicts_names_is_refused(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server:
        async with names_at(server.url) as names:
            with pytest.raises(StorageError, match=r"evicts any key once it is full .*noeviction"):
                await names.open("kv", 4, 4096)


@redis_only
@pytest.mark.asyncio
async def test_the_rights_on_the_page_are_enough(server: RedisServer) -> None:
    rights = ["~asynchicache-hf3fs:*", "+get", "+set", "+eval", "+evalsha", "+time", "+@hash", "+@sortedset"]
    redis_at(server).execute_command("ACL", "SETUSER", "names", "reset", "on", ">pw", *rights)
    async with names_at(server.url, username="names", password="pw") as names:
        assert await put(await namespace_of(names, name="acl"), KEYS[:2]) == ["stored"] * 2
    redis_at(server).execute_command("ACL", "SETUSER", "names", "-evalsha")
    async with names_at(server.url, username="names", password="pw") as names:
        with pytest.raises(StorageError, match=r"NOPERM.*evalsha"):
            await names.open("acl", 4, 4096)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n:1\r\n",
        b"*2\r\n:1\r\n+x\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"-ERR no\r\n",
        b"?\r\n",
    ],
)
async def test_a_server_that_lies_is_an_error_and_never_an_answer(answer: bytes) -> None:
    async with hostile_server() as server, names_at(server.url) as names:
        server.say(b"GET", bulk(b"0" * 32))
        server.say(b"EVALSHA", b"*1\r\n:4\r\n")
        namespace = await namespace_of(names)
        server.say(b"EVALSHA", answer)
        for call in (namespace.exists, namespace.locate, namespace.delete):
            with pytest.raises(StorageError):
                await call(KEYS[:2])
        with pytest.raises(StorageError):
            await namespace.reserve(TOKEN, KEYS[:2])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "places", [[0, 0, 1, 0, 0, 2], [0, 9, 1, 0, -1, 0], [0, -2, 1, 0, -1, 0], [0, 0, 1]], ids=str
)
async def test_slots_that_cannot_be_are_refused(places: list[int]) -> None:
    async with hostile_server() as server, names_at(server.url) as names:
        server.say(b"GET", bulk(b"0" * 32))
        server.say(b"EVALSHA", b"*1\r\n:4\r\n")
        namespace = await namespace_of(names)
        words = b"".join(b":%d\r\n" % one for one in places)
        answers = [b"*%d\r\n" % len(places) + words]

        async def lie(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            writer.write(answers.pop(0) if answers else b"*1\r\n:4\r\n")

        server.lies[b"EVALSHA"] = lie
        with pytest.raises(StorageError):
            await namespace.reserve(TOKEN, KEYS[:2])


@redis_only
@pytest.mark.asyncio
async def test_a_server_that_hangs_costs_a_deadline(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        async with names_at(server.url) as patient, names_at(server.url, timeout_seconds=0.3) as names:
            await namespace_of(patient)
            namespace = MetadataNamespace(names, await patient.open("kv", 4, 4096), "kv", 4096)
            await names._caller.open()  # type: ignore[attr-defined]
            server.pause()
            with pytest.raises(StorageError, match=r"exists: .*(no answer in 0.3 s|Timeout)"):
                await namespace.exists(KEYS)
            server.resume()


# The database on a disk.


@pytest.mark.asyncio
async def test_a_full_disk_is_a_failed_call_and_no_more(tmp_path: Path) -> None:
    async with names_at(tmp_path) as names:
        namespace = await namespace_of(names, slots=4000)
        await put(namespace, KEYS[:1])
        database = names._store._database  # type: ignore[attr-defined]
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StorageError, match="full"):
            await namespace.reserve("1" * 32, [f"{number:080x}" for number in range(100, 2000)])
        database.execute("PRAGMA max_page_count = 100000")

        assert await namespace.exists(KEYS[:2]) == [True, False]
        assert await put(namespace, KEYS[1:2], "2" * 32) == ["stored"]


@pytest.mark.asyncio
async def test_another_process_that_keeps_the_database_costs_a_deadline(tmp_path: Path) -> None:
    port = AsyncioPort(threads=1, seed=0)
    names = LocalNames(tmp_path, port, 0.3)
    async with names_at(tmp_path) as patient:
        namespace = MetadataNamespace(names, await patient.open("kv", 4, 4096), "kv", 4096)
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match=r"no answer in 0.3 s|locked"):
            await namespace.reserve(TOKEN, KEYS[:1])
        other.close()
    await names.aclose()
    await port.aclose()


def test_a_database_of_something_else(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("CREATE TABLE cats (name TEXT)")
    other.commit()
    other.close()

    with pytest.raises(StorageFormatError, match="something else"):
        MetadataStore(tmp_path)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database" * 100)

    with pytest.raises(StorageFormatError, match="no metadata of hf3fs"):
        MetadataStore(tmp_path)


@pytest.mark.parametrize("page", range(1, 8))
def test_a_damaged_database_is_said_to_be_so_when_it_is_opened(tmp_path: Path, page: int) -> None:
    """Some pages were found out by the first call that met them, others by a traceback."""
    store = MetadataStore(tmp_path)
    store.open("kv", 100, 4096)
    store.close()
    with (tmp_path / FILE).open("r+b") as file:
        file.seek(page * 4096)
        file.write(random.Random(page).randbytes(4096))

    with pytest.raises(StorageFormatError, match=r"is damaged: .*start anew"):
        MetadataStore(tmp_path)


def test_a_database_of_a_newer_format(tmp_path: Path) -> None:
    MetadataStore(tmp_path).close()
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("PRAGMA user_version = 9")
    database.close()

    with pytest.raises(
        StorageFormatError, match="format 9; this version reads format 3: update asynchicache"
    ):
        MetadataStore(tmp_path)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "here").touch()

    with pytest.raises(StorageError, match="cannot hold the metadata"):
        MetadataStore(tmp_path / "here")
