"""The metadata service over real HTTP: what it refuses, what it survives, and what its clients say then.

More than 400 lines: one process that is killed and started again serves all of it.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from asynchicache.backends.hf3fs.metadata import messages as m
from asynchicache.backends.hf3fs.metadata.__main__ import main
from asynchicache.backends.hf3fs.metadata.client import MetadataClient, MetadataNamespace
from asynchicache.backends.hf3fs.metadata.database import FILE
from asynchicache.backends.hf3fs.metadata.service import MAX_BODY_BYTES
from asynchicache.backends.hf3fs.metadata.store import MetadataStore
from asynchicache.errors import (
    ConfigError,
    StorageError,
    StorageFormatError,
    StorageLockedError,
)
from asynchicache.ports import AsyncioPort
from engines import free_port
from storage.hf3fs_services import Clock, service_here, service_over, service_process

KEYS = [f"{number:080x}" for number in range(8)]
TOKEN = "0" * 32


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def url(tmp_path: Path, clock: Clock) -> Iterator[str]:
    with service_here(tmp_path / "metadata", clock) as url:
        yield url


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service that only gets requests which it refuses."""
    with service_here(tmp_path_factory.mktemp("metadata"), Clock()) as url:
        yield url


async def client_of(url: str, **options: float) -> AsyncIterator[MetadataClient]:
    port = AsyncioPort(threads=1, seed=0)
    client = MetadataClient(url, port, **{"seconds": 60.0, **options})  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.aclose()
        await port.aclose()


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[MetadataClient]:
    async for client in client_of(url):
        yield client


async def namespace_of(client: MetadataClient, slots: int = 4, name: str = "kv") -> MetadataNamespace:
    return MetadataNamespace(client, await client.open(name, slots, 4096), name, 4096)


async def put(namespace: MetadataNamespace, keys: list[str], token: str = TOKEN) -> list[m.Verdict]:
    places = (await namespace.reserve(token, keys)).places
    pairs = zip(keys, places, strict=True)
    return await namespace.confirm([m.Claim(key, at.slot, at.generation) for key, at in pairs if at])


def post(url: str, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, trust_env=False)


@pytest.mark.asyncio
async def test_the_whole_life_of_a_page(client: MetadataClient) -> None:
    namespace = await namespace_of(client)

    assert await put(namespace, KEYS[:2]) == ["stored", "stored"]
    located = await namespace.locate(KEYS[:3])
    assert [place is not None for place in located.places] == [True, True, False]
    namespace.end_read(located)
    assert await namespace.exists(KEYS[:3]) == [True, True, False]
    assert await namespace.delete(KEYS[1:3]) == [True, False]
    assert await namespace.clear() == 1
    assert await namespace.exists(KEYS[:3]) == [False] * 3


@pytest.mark.asyncio
async def test_an_ended_read_is_said_with_the_next_call(client: MetadataClient) -> None:
    namespace = await namespace_of(client)
    await put(namespace, KEYS[:4])
    located = await namespace.locate(KEYS[:4])
    assert (await namespace.reserve("1" * 32, KEYS[4:5])).places == [None]

    namespace.end_read(located)

    assert (await namespace.reserve("2" * 32, KEYS[4:5])).places != [None]


@pytest.mark.asyncio
async def test_a_client_learns_that_another_made_the_namespace_larger(client: MetadataClient) -> None:
    namespace = await namespace_of(client, slots=1)
    await client.open("kv", 3, 4096)

    assert await put(namespace, KEYS[:3]) == ["stored"] * 3
    assert namespace.slots == 3


RESERVE_AND_DIE = """
import asyncio, os, signal, sys
from asynchicache.backends.hf3fs.metadata.__main__ import main
from asynchicache.backends.hf3fs.metadata.client import MetadataClient, MetadataNamespace
from asynchicache.ports import AsyncioPort

async def main():
    client = MetadataClient(sys.argv[1], AsyncioPort())
    namespace = MetadataNamespace(client, await client.open("kv", 4, 4096), "kv", 4096)
    reserved = await namespace.reserve("f" * 32, [f"{number:080x}" for number in range(100, 104)])
    assert None not in reserved.places
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.asyncio
async def test_what_a_killed_client_had_reserved_returns(
    url: str, client: MetadataClient, clock: Clock
) -> None:
    namespace = await namespace_of(client)
    died = await asyncio.create_subprocess_exec(sys.executable, "-c", RESERVE_AND_DIE, url)
    assert await died.wait() == -9
    assert (await namespace.reserve(TOKEN, KEYS[:1])).places == [None]

    clock.time += 60

    assert await put(namespace, KEYS[:4], "1" * 32) == ["stored"] * 4


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/open", {"name": "../../etc", "slots": 1, "frame_bytes": 4096}, 400, "name"),
        ("/v1/open", {"name": "kv\n", "slots": 1, "frame_bytes": 4096}, 400, "name"),
        ("/v1/open", {"name": "x" * 300, "slots": 1, "frame_bytes": 4096}, 400, "name"),
        ("/v1/open", {"name": "kv", "slots": 0, "frame_bytes": 4096}, 400, "slots"),
        ("/v1/open", {"name": "kv", "slots": 1 << 50, "frame_bytes": 4096}, 400, "slots"),
        ("/v1/open", {"name": "kv", "slots": 1, "frame_bytes": -1}, 400, "frame_bytes"),
        ("/v1/open", {"name": "kv", "slots": "many", "frame_bytes": 4096}, 400, "slots"),
        ("/v1/open", {"name": "kv"}, 400, "slots"),
        ("/v1/open", {"name": "kv", "slots": 4, "frame_bytes": 8192}, 409, "4096 bytes, 8192 were asked"),
        ("/v1/open", {"name": "kv", "slots": 4, "frame_bytes": 4096, "rank": 1}, 400, "rank"),
        ("/v1/namespaces/nobody.1/exists", {"keys": []}, 404, "nobody.1"),
        ("{kv}/dance", {"keys": []}, 400, "dance"),
        ("{kv}/exists", {"keys": ["short"]}, 400, "keys"),
        ("{kv}/exists", {"keys": "0" * 80}, 400, "keys"),
        ("{kv}/exists", {"keys": ["0" * 80] * (m.MAX_KEYS + 1)}, 400, "keys"),
        ("{kv}/exists", [], 400, "object"),
        ("{kv}/reserve", {"keys": ["0" * 80], "token": "me"}, 400, "token"),
        ("{kv}/reserve", {"keys": ["0" * 80, "0" * 80], "token": TOKEN}, 400, "twice"),
        ("{kv}/confirm", {"claims": [["0" * 80, -1, 1]]}, 400, "claims"),
        ("{kv}/confirm", {"claims": [["0" * 80, 0, 0]]}, 400, "claims"),
        ("{kv}/confirm", {"claims": [["0" * 80, 0, 1 << 63]]}, 400, "claims"),
        ("{kv}/release", {"places": [[0]]}, 400, "places"),
        ("{kv}/release", {"places": [[0, 1 << 70]]}, 400, "places"),
        ("{kv}/forget", {"claims": [["0" * 80, "0", 1]]}, 400, "claims"),
        ("/v1/nowhere", {}, 404, "Not Found"),
    ],
)
def test_bad_input_is_refused_and_named(
    standing: str, path: str, body: object, status: int, words: str
) -> None:
    opened = post(standing, "/v1/open", {"name": "kv", "slots": 4, "frame_bytes": 4096}).json()
    kv = f"/v1/namespaces/{opened['handle']}"

    answer = post(standing, path.format(kv=kv), body)

    assert answer.status_code == status
    assert words in answer.text
    assert post(standing, f"{kv}/exists", {"keys": ["0" * 80]}).json() == {"present": [False]}


def test_bodies_that_are_too_long_or_no_json_are_refused(standing: str) -> None:
    long = httpx.post(f"{standing}/v1/open", content=b" " * (MAX_BODY_BYTES + 1), trust_env=False)
    garbage = httpx.post(f"{standing}/v1/open", content=b"\xff\x00{", trust_env=False)
    no_text = httpx.post(f"{standing}/v1/open", content=b'{"name": "\xff"}', trust_env=False)

    assert (long.status_code, garbage.status_code, no_text.status_code) == (400, 400, 400)
    assert str(MAX_BODY_BYTES) in long.text


def test_the_status_names_what_is_held(url: str) -> None:
    post(url, "/v1/open", {"name": "kv", "slots": 4, "frame_bytes": 4096})

    status = httpx.get(f"{url}/v1/status", trust_env=False).json()

    assert status["namespaces"] == [{"name": "kv", "slots": 4, "held": 0, "reserved": 0, "evicted": 0}]


@pytest.mark.asyncio
async def test_a_full_disk_is_a_failed_call_and_no_more(tmp_path: Path) -> None:
    store = MetadataStore(tmp_path)
    with service_over(store) as url:
        async for client in client_of(url):
            namespace = await namespace_of(client, slots=4000)
            await put(namespace, KEYS[:1])
            pages = store._database.execute("PRAGMA page_count").fetchone()[0]
            store._database.execute(f"PRAGMA max_page_count = {pages}")
            with pytest.raises(StorageError, match="full"):
                await namespace.reserve("1" * 32, [f"{number:080x}" for number in range(100, 2000)])
            store._database.execute("PRAGMA max_page_count = 100000")

            assert await namespace.exists(KEYS[:2]) == [True, False]
            assert await put(namespace, KEYS[1:2], "2" * 32) == ["stored"]


@pytest.mark.asyncio
async def test_killed_and_restarted_it_goes_on(tmp_path: Path) -> None:
    port = free_port()
    with service_process(tmp_path, port) as server:
        async for client in client_of(f"http://127.0.0.1:{port}"):
            namespace = await namespace_of(client)
            await put(namespace, KEYS[:1])
            reserved = await namespace.reserve("1" * 32, KEYS[1:2])
            server.kill()
            with pytest.raises(StorageError, match="ConnectError"):
                await namespace.exists(KEYS[:1])
            server.start()

            (place,) = reserved.places
            assert place is not None
            claim = m.Claim(KEYS[1], place.slot, place.generation)
            assert await namespace.exists(KEYS[:2]) == [True, False]
            assert await namespace.confirm([claim]) == ["stored"]


@pytest.mark.asyncio
async def test_a_call_that_may_be_repeated_survives_a_restart_in_between(tmp_path: Path) -> None:
    port = free_port()
    with service_process(tmp_path, port) as server:
        async for client in client_of(f"http://127.0.0.1:{port}", attempts=50, seconds=60):
            namespace = await namespace_of(client)
            server.kill()
            asking = asyncio.create_task(namespace.exists(KEYS[:1]))
            await asyncio.to_thread(server.start)

            assert await asking == [False]


@pytest.mark.asyncio
async def test_with_another_folder_the_service_does_not_know_us(tmp_path: Path) -> None:
    port = free_port()
    async for client in client_of(f"http://127.0.0.1:{port}"):
        with service_process(tmp_path / "one", port):
            namespace = await namespace_of(client)
        with service_process(tmp_path / "two", port):
            await namespace_of(client)
            with pytest.raises(StorageError, match="open it first"):
                await namespace.exists(KEYS)


@pytest.mark.asyncio
async def test_a_service_that_hangs_costs_a_deadline(tmp_path: Path) -> None:
    port = free_port()
    with service_process(tmp_path, port) as server:
        async for client in client_of(f"http://127.0.0.1:{port}"):
            namespace = await namespace_of(client)
            server.pause()
            client._seconds = 0.2
            with pytest.raises(StorageError, match=r"no answer in 0.2 s"):
                await namespace.exists(KEYS)
            server.resume()


@pytest.mark.asyncio
async def test_a_closed_port_is_named_and_how_to_start_a_service() -> None:
    port = free_port()
    async for client in client_of(f"http://127.0.0.1:{port}"):
        with pytest.raises(StorageError, match=rf"127.0.0.1:{port}.*python -m asynchicache\.backends\.hf3fs"):
            await client.open("kv", 4, 4096)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"present": null}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{"present": [true]} ',
        b'HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{"present":',
        b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops",
        b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"\x00\xff garbage",
        b'HTTP/1.1 500 No\r\nContent-Length: 14\r\n\r\n{"error": "\xff"}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"present": "\xff"}',
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\noops",
    ],
)
async def test_a_stranger_on_the_port_is_an_error_and_never_an_answer(answer: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as stranger:
        url = "http://127.0.0.1:{1}".format(*stranger.sockets[0].getsockname())
        async for client in client_of(url):
            opened = m.Opened("x.1", "x", 4, 60.0)
            with pytest.raises(StorageError):
                await MetadataNamespace(client, opened, "kv", 4096).exists(KEYS[:2])


@pytest.mark.asyncio
@pytest.mark.parametrize("places", ["[[0,1],[0,2]]", "[[9,1],null]", "[[0,1]]", "[[-1,1],null]"])
async def test_slots_that_cannot_be_are_refused(places: str) -> None:
    reserved = f'{{"existed":[false,false],"places":{places}}}'
    opened = '{"handle":"x.1","store":"x","slots":4,"lease_seconds":60}'

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = opened if b"/v1/open" in await reader.readuntil(b"}") else reserved
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as liar:
        url = "http://127.0.0.1:{1}".format(*liar.sockets[0].getsockname())
        async for client in client_of(url):
            with pytest.raises(StorageError):
                await MetadataNamespace(client, m.Opened("x.1", "x", 4, 60.0), "kv", 4096).reserve(
                    TOKEN, KEYS[:2]
                )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:18000", "ftp://here:1", "http://here", "http://here:no", "http://here:1/path"]
)
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    port = AsyncioPort(threads=1)
    with pytest.raises(ConfigError, match="must be http://host:port"):
        MetadataClient(url, port)
    await port.aclose()


def test_two_services_over_one_folder(tmp_path: Path) -> None:
    with service_process(tmp_path, free_port()), pytest.raises(StorageLockedError, match="another metadata"):
        MetadataStore(tmp_path)


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
def test_a_damaged_database_is_said_to_be_so_when_the_service_starts(tmp_path: Path, page: int) -> None:
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
        StorageFormatError, match="format 9; this version reads format 2: update asynchicache"
    ):
        MetadataStore(tmp_path)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "here").touch()

    with pytest.raises(StorageError, match="cannot hold the metadata"):
        MetadataStore(tmp_path / "here")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lease-seconds", "0"], "lease_seconds=0.0 must be above 0"),
        (["--lease-seconds", "inf"], "lease_seconds=inf must be above 0, and finite"),
        (["--dir", "/dev/null/x"], "cannot hold the metadata"),
        (["--port", "99999"], "port=99999 must be 0 to 65535"),
        (["--host", "203.0.113.1"], "Cannot assign"),
    ],
)
def test_a_service_that_cannot_start_says_why(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dir", str(tmp_path), "--port", "0", *flags]) == 1
    assert words in capsys.readouterr().err


def test_it_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    with service_process(tmp_path, free_port()) as server:
        server.stop()

    assert "Traceback" not in server.output
    MetadataStore(tmp_path).close()
