"""Whose folder it is: formats, locks, permissions; what the user is told."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from asynchicache.backends.file.clear import clear_store
from asynchicache.backends.file.folder import StoreFolder
from asynchicache.backends.file.verify import verify_store
from asynchicache.errors import ConfigError, StorageError, StorageFormatError, StorageLockedError
from asynchicache.types import Outcome
from storage.file_stores import backend_at, bench_at, open_bench, other_process, pages_file

HOLD = """
import asyncio, sys
from storage.file_stores import backend_at

async def main():
    async with backend_at(sys.argv[1], read_only=sys.argv[2] == "True"):
        print("open", flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""

AS_NOBODY = """
import asyncio, os, sys
from storage.file_stores import bench_at
from asynchicache.errors import StorageError

async def main():
    async with bench_at(".", read_only=True) as bench:
        print((await bench.get(bench.keys(1), [1]))[0].name)
    try:
        async with bench_at("."):
            print("open")
    except StorageError as error:
        print(type(error).__name__, error)

os.chdir(sys.argv[1])  # and no look above it, where nobody may not go
if os.getuid() == 0:
    os.setuid(65534)
asyncio.run(main())
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def remove_files(folder: Path) -> None:
    """As `find FOLDER -type f -delete` does it."""
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        file.unlink()


@pytest.mark.asyncio
async def test_a_second_opener_in_this_process_is_refused(tmp_path: Path) -> None:
    async with backend_at(tmp_path):
        with pytest.raises(StorageLockedError, match=f"{tmp_path} is open already"):
            async with backend_at(tmp_path):
                pass
        with pytest.raises(StorageLockedError):
            async with backend_at(tmp_path, read_only=True):
                pass
    async with backend_at(tmp_path):
        pass


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("theirs", "ours", "refused"),
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
    ids=["writer-writer", "writer-reader", "reader-writer", "reader-reader"],
)
async def test_a_second_opener_in_another_process(
    tmp_path: Path, theirs: bool, ours: bool, refused: bool
) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])
    with other_process(HOLD, tmp_path, theirs) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StorageLockedError, match=str(tmp_path)) if refused else nullcontext():
            async with bench_at(tmp_path, read_only=ours) as bench:
                assert await bench.get(bench.keys(1), [1]) == [Outcome.HIT]
        _, errors = other.communicate("go\n")
    assert errors == ""
    async with backend_at(tmp_path):
        pass


@pytest.mark.asyncio
async def test_the_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    with other_process(HOLD, tmp_path, False) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
    async with backend_at(tmp_path):
        pass


@pytest.mark.asyncio
async def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StorageFormatError, match=r"not empty .* empty or new folder; it holds 'thesis\.tex'"):
        async with backend_at(tmp_path):
            pass

    assert names_in(tmp_path) == ["thesis.tex"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"asynchicache file store 6\n", "format 6; this version reads format 5: update asynchicache"),
        (b"asynchicache file store 4\n", "format 5: open it with an older asynchicache, or remove it"),
        (b"asynchicache file store x\n", "holds no file store"),
        (b"asynchicache file store " + b"9" * 5000, "holds no file store"),
        (b"something else 1\n", "holds no file store"),
        (b"", "holds no file store"),
        (b"\xff\xfe", "holds no file store"),
    ],
)
async def test_another_format_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "FORMAT").write_bytes(text)
    with pytest.raises(StorageFormatError, match=words):
        async with backend_at(tmp_path):
            pass

    assert names_in(tmp_path) == ["FORMAT"]


@pytest.mark.asyncio
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["FORMAT", "LOCK", "FORMAT.new"])
async def test_what_is_no_file_is_not_opened(tmp_path: Path, name: str, read_only: bool) -> None:
    (tmp_path / name).symlink_to(os.devnull)  # a pipe, say, would be waited for, perhaps for ever
    with pytest.raises(StorageError, match=f"{name} cannot be opened: it is no file"):
        async with backend_at(tmp_path, read_only=read_only):
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["pool.json", "pool.json.new"])
async def test_a_manifest_that_is_no_file_is_not_opened(tmp_path: Path, name: str) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [1])
    folder = pages_file(tmp_path).parent
    (folder / "pool.json").unlink()
    (folder / name).symlink_to(os.devnull)
    with pytest.raises(StorageError, match=rf"{name} cannot be opened: it is no file"):
        async with bench_at(tmp_path):
            pass
    with pytest.raises(StorageError, match="it is no file") if name == "pool.json" else nullcontext():
        verify_store(tmp_path)
    with pytest.raises(StorageError, match="it is no file") if name == "pool.json" else nullcontext():
        clear_store(tmp_path, "kv")


@pytest.mark.asyncio
async def test_a_crash_between_lock_and_format_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "LOCK").touch()
    (tmp_path / "FORMAT.new").write_text("asynchic")
    async with backend_at(tmp_path):
        pass

    assert (tmp_path / "FORMAT").read_text() == "asynchicache file store 5\n"


@pytest.mark.asyncio
async def test_a_folder_that_was_cleaned_is_begun_afresh(tmp_path: Path) -> None:
    """Somebody removed all files, and left our folders."""
    async with backend_at(tmp_path) as backend:
        for pool in ("kv", "mamba"):
            bench = await open_bench(backend, pool)
            await bench.put(bench.keys(1), [0])
    remove_files(tmp_path)
    with pytest.raises(StorageFormatError, match="no file store yet"):
        async with backend_at(tmp_path, read_only=True):
            pass
    with pytest.raises(StorageFormatError, match="holds no file store"):
        clear_store(tmp_path)
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(1), [0]) == [Outcome.MISS]
        assert await bench.put(bench.keys(1), [0]) == [Outcome.STORED]
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(1), [0]) == [Outcome.HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize("left", ["00000.pages", "pool.json", "notes", "sub/"])
async def test_a_cleaned_folder_in_which_something_is_left_is_refused(tmp_path: Path, left: str) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])
    (tmp_path / "FORMAT").unlink()
    folder = pages_file(tmp_path).parent
    for file in folder.iterdir():
        file.unlink()
    if left == "sub/":
        (folder / left).mkdir()
    else:
        (folder / left).write_text("mine")
    with pytest.raises(
        StorageFormatError, match=f"holds no file store.*it holds '{folder.name}'.*remove {folder} "
    ):
        async with backend_at(tmp_path):
            pass
    assert (folder / left).exists()


@pytest.mark.asyncio
async def test_nobody_is_told_to_remove_what_is_not_ours(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])
    (tmp_path / "FORMAT").unlink()
    (tmp_path / "letters").mkdir()
    with pytest.raises(StorageFormatError) as refusal:
        async with backend_at(tmp_path):
            pass
    assert "afresh" not in str(refusal.value)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["folder", "link"])
async def test_an_empty_folder_that_is_not_ours_is_somebodys(tmp_path: Path, kind: str) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store.mkdir()
    elsewhere.mkdir()
    if kind == "folder":
        (store / "letters").mkdir()
    else:
        (store / f"kv-{'0' * 32}").symlink_to(elsewhere)
    with pytest.raises(StorageFormatError, match="holds no file store"):
        async with backend_at(store):
            pass


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["FORMAT", "pool.json"])
async def test_a_file_of_any_size_is_not_read_whole(tmp_path: Path, name: str) -> None:
    """They have some hundred bytes; 64 GiB of zeros, in a file with holes, would fill the memory."""
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])
    path = tmp_path / name if name == "FORMAT" else pages_file(tmp_path).parent / name
    os.truncate(path, 64 << 30)
    with pytest.raises(StorageFormatError, match="holds no file store" if name == "FORMAT" else "is damaged"):
        async with bench_at(tmp_path):
            pass
    if name == "FORMAT":
        with pytest.raises(StorageFormatError, match="holds no file store"):
            verify_store(tmp_path)
    else:
        assert verify_store(tmp_path).corrupt == 1
        with pytest.raises(StorageFormatError, match="is damaged"):
            clear_store(tmp_path, "kv")


@pytest.mark.asyncio
async def test_a_reader_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(StorageFormatError, match="no file store yet"):
        async with backend_at(tmp_path, read_only=True):
            pass
    with pytest.raises(StorageError, match=r"nowhere cannot be read: No such file"):
        async with backend_at(tmp_path / "nowhere", read_only=True):
            pass
    assert names_in(tmp_path) == []


@pytest.mark.asyncio
async def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is no folder, or lies in none"):
        async with backend_at(tmp_path / "file"):
            pass


@pytest.mark.asyncio
async def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with bench_at(store) as bench:
        await bench.put(bench.keys(1), [0])
    for path in [store, *store.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    with other_process(AS_NOBODY, store) as other:
        output, errors = other.communicate()

    assert errors == ""
    assert output.splitlines() == [
        "HIT",
        "StorageError . cannot be written: Permission denied; "
        "make it writable, or open it with read_only=true",
    ]


@pytest.mark.parametrize(
    ("pool", "shard"), [("../kv", ""), ("", ""), ("kv", "../.."), ("kv", "a.b"), ("KV", "")]
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, pool: str, shard: str) -> None:
    folder = StoreFolder(tmp_path, read_only=False)
    try:
        with pytest.raises(StorageError, match="a-z, 0-9, _"):
            folder.pool_path(pool, shard, bytes(32))
    finally:
        folder.close()


def test_shards_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path, read_only=False)
    try:
        paths = {folder.pool_path("kv", shard, bytes(32)) for shard in ("", "0/2", "1/2", "1-2")}
    finally:
        folder.close()

    assert sorted(path.name for path in paths) == [
        "kv-0-2-" + "0" * 32,
        "kv-" + "0" * 32,
        "kv-1-2-" + "0" * 32,
        "kv-1_2-" + "0" * 32,
    ]


@pytest.mark.asyncio
async def test_a_path_that_no_folder_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not contain a NUL"):
        async with backend_at("a\0b"):
            pass
