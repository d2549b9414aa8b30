"""What the 3FS backend says of options, folders and names that it cannot use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asynchicache.backends.hf3fs import open_backend
from asynchicache.backends.hf3fs.inventory import open_inventory
from asynchicache.backends.hf3fs.options import Hf3fsOptions
from asynchicache.config import open_backend as open_by_name
from asynchicache.errors import ClosedError, ConfigError, StorageError, StorageFormatError
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.types import Outcome
from engines import free_port
from storage.hf3fs_names import FRAME_BYTES, Clock, backend_at, bench_at, names_here, open_bench


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with names_here(tmp_path_factory.mktemp("metadata"), Clock()) as url:
        yield url


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": ""}, "path='' must name a folder"),
        ({"path": 7}, "path=7 must name a folder"),
        ({"path": "a\0b"}, "must not contain a NUL"),
        ({"capacity_bytes": 0}, "capacity_bytes=0 must be a whole number above 0"),
        ({"capacity_bytes": "1G"}, "capacity_bytes='1G' must be a whole number above 0"),
        ({"fractions": {"kv": 0}}, "{'kv': 0} must be a table with, for each name, a number above 0"),
        ({"fractions": {"kv": 1.5}}, "at most 1"),
        ({"fractions": {"kv": True}}, "at most 1"),
        ({"fractions": {3: 0.5}}, "at most 1"),
        ({"fractions": 0.5}, "fractions=0.5 must be a table"),
        ({"io": "rdma"}, "io='rdma' must be one of 'posix', 'usrbio'"),
        ({"io_seconds": 0}, "io_seconds=0 must be a number above 0"),
        ({"io_seconds": float("inf")}, "io_seconds=inf must be a number above 0 and at most 86400"),
        ({"metadata_seconds": -1}, "metadata_seconds=-1 must be a number above 0"),
        ({"workers": 0}, "workers=0 must be a whole number above 0"),
        ({"entries": -4}, "entries=-4 must be a whole number above 0"),
        ({"zero_copy": True}, "zero_copy=True needs io='usrbio'"),
        ({"replicated_writer": 1}, "replicated_writer=1 must be true or false"),
        ({"rank": 0}, "no option 'rank'"),
    ],
)
def test_options_outside_their_rule_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Hf3fsOptions.of({"path": "/3fs/pages", "metadata": "/var/names", **options})

    assert words in str(caught.value)


@pytest.mark.asyncio
async def test_it_is_found_by_its_name(tmp_path: Path, url: str) -> None:
    port = AsyncioPort(threads=1)
    backend = open_by_name("hf3fs", {"path": str(tmp_path / "pages"), "metadata": str(url)}, port)
    await backend.aclose()
    await port.aclose()

    assert backend.name == "hf3fs"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metadata": "http://here:18000"}, r"option metadata: .*url='http://here:18000' must be redis://"),
        ({"metadata": "redis://here", "metadata_options": {"services": "m"}}, "no option 'services'"),
        ({"metadata": "here", "metadata_options": {"service": "m"}}, "needs the URL of a server"),
        ({}, "metadata is missing; it names a folder on a local disk, or redis://host:port"),
    ],
)
async def test_metadata_that_is_none(tmp_path: Path, options: dict[str, object], words: str) -> None:
    port = AsyncioPort(threads=1)
    with pytest.raises(ConfigError, match=words):
        open_backend({"path": tmp_path, **options}, port)
    await port.aclose()


@pytest.mark.asyncio
async def test_a_closed_port_is_an_error_when_a_pool_is_opened(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(StorageError, match=f"127.0.0.1:{port}: open: Connection refused"):
        async with bench_at(tmp_path / "pages", f"redis://127.0.0.1:{port}"):
            pass

    assert not (tmp_path / "pages").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("holiday.jpg", b"\xff\xd8", "holds 'holiday.jpg' and no store"),
        ("STORE", b"\xff\xfe\x00", "no marker of hf3fs"),
        ("STORE", b"", "no marker of hf3fs"),
        ("STORE", b"asynchicache file store 1\n", "no marker of hf3fs"),
        ("STORE", b"asynchicache hf3fs store " + b"9" * 5000 + b" abc\n", "no marker of hf3fs"),
        ("STORE", b"asynchicache hf3fs store 9 abc\n", "has format 9; this version reads format 3: update"),
        ("STORE", b"asynchicache hf3fs store 3 abc\n", "belongs to the names of state abc"),
    ],
)
async def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, url: str, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(StorageFormatError, match=words):
        async with bench_at(tmp_path, url):
            pass

    assert names_in(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.asyncio
async def test_a_folder_that_is_a_file(tmp_path: Path, url: str) -> None:
    (tmp_path / "pages").touch()

    with pytest.raises(StorageError, match="cannot be used: File exists"):
        async with bench_at(tmp_path / "pages", url):
            pass


@pytest.mark.asyncio
async def test_names_of_another_state_are_refused(tmp_path: Path, url: str) -> None:
    with names_here(tmp_path / "other", Clock()) as other:
        async with bench_at(tmp_path / "pages", other) as bench:
            await bench.put(bench.keys(1), [0])

    with pytest.raises(StorageFormatError, match="give the metadata that it was used with"):
        async with bench_at(tmp_path / "pages", url):
            pass


@pytest.mark.asyncio
async def test_pages_of_another_size_are_refused(tmp_path: Path, url: str) -> None:
    fingerprint = fingerprint_of(str(tmp_path))
    async with backend_at(tmp_path / "pages", url) as backend:
        await backend.open_pool(SlotBinding(slab_of("kv", 5000, 4), fingerprint))
    async with backend_at(tmp_path / "pages", url) as backend:
        with pytest.raises(StorageFormatError, match=r"frames of 12288 bytes, 16384 were asked for"):
            await backend.open_pool(SlotBinding(slab_of("kv", 9000, 4), fingerprint))
        await backend.open_pool(SlotBinding(slab_of("kv", 5000, 4), fingerprint))


@pytest.mark.asyncio
async def test_no_room_for_the_file(tmp_path: Path, url: str) -> None:
    weights = str(tmp_path)
    with pytest.raises(StorageError, match="give it a smaller capacity_bytes"):
        async with bench_at(tmp_path / "pages", url, weights=weights, capacity_bytes=1 << 52):
            pass

    async with bench_at(tmp_path / "pages", url, weights=weights, capacity_bytes=4 * FRAME_BYTES) as bench:
        assert (await bench.put(bench.keys(*range(5)), range(5))).count(Outcome.STORED) == 4


@pytest.mark.asyncio
async def test_a_file_that_is_there_is_never_made_shorter(tmp_path: Path, url: str) -> None:
    weights = str(tmp_path)
    async with bench_at(tmp_path / "pages", url, weights=weights, capacity_bytes=6 * FRAME_BYTES) as bench:
        await bench.put(bench.keys(*range(6)), range(6))
    async with bench_at(tmp_path / "pages", url, weights=weights, capacity_bytes=FRAME_BYTES) as bench:
        assert await bench.get(bench.keys(*range(6)), range(6)) == [Outcome.HIT] * 6


@pytest.mark.asyncio
async def test_a_capacity_below_one_page_is_one_page(tmp_path: Path, url: str) -> None:
    async with bench_at(tmp_path / "pages", url, capacity_bytes=1) as bench:
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [Outcome.STORED, Outcome.REJECTED]
        assert next((tmp_path / "pages").glob("*.pages")).stat().st_size == FRAME_BYTES


@pytest.mark.asyncio
async def test_a_pool_is_opened_once(tmp_path: Path, url: str) -> None:
    async with backend_at(tmp_path / "pages", url) as backend:
        bench = await open_bench(backend, weights=str(tmp_path))
        with pytest.raises(StorageError, match="open already"):
            await open_bench(backend, weights=str(tmp_path))
        await bench.engine.aclose()
        with pytest.raises(ClosedError):
            await bench.engine.exists(bench.keys(1))
        await open_bench(backend, weights=str(tmp_path))
    with pytest.raises(ClosedError):
        await open_bench(backend)


@pytest.mark.asyncio
@pytest.mark.parametrize(("pool", "shard"), [("../kv", ""), ("kv", "../../0"), ("kv", "a\n"), ("KV", "")])
async def test_names_that_are_no_names_never_reach_a_path(
    tmp_path: Path, url: str, pool: str, shard: str
) -> None:
    class Hostile(SlotBinding):
        """What a binding of somebody else might say."""

        def __init__(self) -> None:
            super().__init__(slab_of("kv", 5000, 4), fingerprint_of(str(tmp_path)))
            self.pool, self.shard = pool, shard

    binding = Hostile()
    async with backend_at(tmp_path / "pages", url) as backend:
        with pytest.raises(StorageError):
            PoolUnderTest(await backend.open_pool(binding), binding)

    assert names_in(tmp_path) == []


@pytest.mark.asyncio
async def test_a_folder_without_a_store_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of somebody else")
    words = {"path": str(tmp_path), "metadata": f"redis://127.0.0.1:{free_port()}"}
    with pytest.raises(StorageError, match="holds no store of hf3fs: it has no file STORE"):
        open_inventory(words, AsyncioPort(), writes=False)

    (tmp_path / "STORE").write_text("asynchicache hf3fs store 9 names")
    with pytest.raises(StorageFormatError, match="format 9"):
        open_inventory(words, AsyncioPort(), writes=False)

    (tmp_path / "STORE").write_text("asynchicache hf3fs store 3 names")
    inventory = open_inventory(words, AsyncioPort(), writes=False)
    with pytest.raises(StorageError, match="refused"):
        await inventory.pools()
    await inventory.aclose()
