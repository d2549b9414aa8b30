"""How much a store takes, who gives way, what a restart keeps, and what `clear` removes."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from asynchicache.backends.file import segments, store
from asynchicache.backends.file.clear import clear_store
from asynchicache.backends.file.folder import Manifest
from asynchicache.errors import StorageError, StorageFormatError, StorageLockedError, UsageError
from asynchicache.testing.backends import fingerprint_of
from asynchicache.types import Outcome
from storage.file_stores import (
    SLOT_BYTES,
    SLOTS_AT,
    backend_at,
    bench_at,
    capacity_for,
    fill,
    open_bench,
    pages_file,
    pool_bytes,
    size_of,
    there,
)

HIT, MISS, STORED, FAILED = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.FAILED
REJECTED = Outcome.REJECTED


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 64 slots, so that a few pages need several; their entries are one block."""
    monkeypatch.setattr(segments, "_MAX_SLOTS", 64)
    monkeypatch.setattr(segments, "_CACHE_PAGE", 4096)


def names_below(folder: Path) -> list[str]:
    """Files in the folders of pools."""
    return sorted(path.name for path in folder.glob("*/*"))


def file_of(folder: Path, name: str) -> Path:
    """The one file of that name in a pool's folder."""
    (found,) = folder.glob(f"*/{name}")
    return found


@pytest.mark.asyncio
async def test_pages_lie_in_several_segments(tmp_path: Path, small_segments: None) -> None:
    numbers = range(150)
    async with bench_at(tmp_path) as bench:
        await fill(bench, numbers)
    async with bench_at(tmp_path, slots=150) as bench:
        assert await bench.get(bench.keys(*numbers), numbers) == [HIT] * 150
        assert await bench.get(bench.keys(*reversed(numbers)), numbers) == [HIT] * 150

    assert names_below(tmp_path) == [f"0000{n}.pages" for n in range(4)] + ["pool.json"]  # 128 slots ahead


@pytest.mark.asyncio
async def test_a_segment_that_is_gone_costs_its_pages_only(tmp_path: Path, small_segments: None) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(150))
    file_of(tmp_path, "00001.pages").unlink()
    left = [*range(64), *range(128, 150)]
    async with bench_at(tmp_path, read_only=True) as bench:
        assert await there(bench, range(150)) == left
    async with bench_at(tmp_path) as bench:
        assert await there(bench, range(150)) == left
        await fill(bench, range(64, 128))
    async with bench_at(tmp_path, slots=150) as bench:
        assert await bench.get(bench.keys(*range(150)), range(150)) == [HIT] * 150


@pytest.mark.asyncio
async def test_a_restart_keeps_the_order_of_use(tmp_path: Path) -> None:
    capacity = capacity_for(4)
    async with bench_at(tmp_path, capacity_bytes=capacity) as bench:
        await bench.put(bench.keys(1, 2, 3, 4), range(4))
        await bench.get(bench.keys(1), [0])
        await bench.get(bench.keys(3), [0])
    async with bench_at(tmp_path, capacity_bytes=capacity) as bench:
        await bench.put(bench.keys(5, 6), range(2))
        assert await there(bench, range(1, 7)) == [1, 3, 5, 6]


@pytest.mark.asyncio
async def test_a_deleted_page_stays_deleted(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1, 2), range(2))
        await bench.engine.delete(bench.keys(1))
    async with bench_at(tmp_path) as bench:
        assert await there(bench, [1, 2]) == [2]


@pytest.mark.asyncio
async def test_entries_that_cannot_be_written_stop_writing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def refuse_entries(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset < SLOTS_AT:
            raise OSError(5, "bad sector")
        return pwritev(descriptor, views, offset)

    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1, 2), [0, 1])
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwritev", refuse_entries)
            assert await bench.put(bench.keys(3), [2]) == [FAILED]
        assert await bench.put(bench.keys(4), [3]) == [REJECTED]
        assert await bench.engine.delete(bench.keys(1)) == [REJECTED]
        assert await bench.get(bench.keys(1, 2, 3), [4, 5, 6]) == [HIT, HIT, MISS]
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(1, 2, 3), [4, 5, 6]) == [HIT, HIT, MISS]
        assert await bench.put(bench.keys(3), [2]) == [STORED]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_the_files_of_all_pools_stay_within_the_bound(
    tmp_path: Path, small_segments: None, seed: int
) -> None:
    chance = random.Random(seed)
    capacity = capacity_for(60)
    for weights in ("w1", "w2"):
        async with backend_at(tmp_path, capacity_bytes=capacity) as backend:
            benches = [await open_bench(backend, pool, weights=weights) for pool in ("kv", "mamba", "swa")]
            for _ in range(20):
                bench = chance.choice(benches)
                numbers = chance.sample(range(200), chance.randint(1, 12))
                await bench.put(bench.keys(*numbers), range(len(numbers)))
                assert size_of(tmp_path) <= capacity


@pytest.mark.asyncio
async def test_the_first_pool_to_write_does_not_shut_out_the_second(
    tmp_path: Path, small_segments: None
) -> None:
    async with backend_at(tmp_path, capacity_bytes=capacity_for(40)) as backend:
        first, second = await open_bench(backend), await open_bench(backend, "mamba")
        await fill(first, range(60))
        assert len(await there(first, range(60))) == 40

        await fill(second, range(60))

        kept = [len(await there(bench, range(60))) for bench in (first, second)]
        assert kept[1] >= 18
        assert 18 <= kept[0] <= 22
        for bench, count in zip((first, second), kept, strict=True):
            assert (await bench.get(bench.keys(*range(60)), range(60))).count(HIT) == count


@pytest.mark.asyncio
async def test_pools_of_other_weights_give_way(tmp_path: Path) -> None:
    capacity = capacity_for(40)
    async with bench_at(tmp_path, capacity_bytes=capacity) as bench:
        await fill(bench, range(40))
    async with backend_at(tmp_path, capacity_bytes=capacity) as backend:
        bench = await open_bench(backend, weights="w2")
        await fill(bench, range(30))
        assert await there(bench, range(30)) == [*range(30)]
        old = await open_bench(backend)
        assert await there(old, range(40)) == []


@pytest.mark.asyncio
async def test_a_full_store_frees_the_next_slots_with_the_barrier_of_this_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LEAST_AHEAD", 128)
    synced: list[int] = []
    fdatasync, barriers = os.fdatasync, []
    monkeypatch.setattr(
        os, "fdatasync", lambda descriptor: (synced.append(descriptor), fdatasync(descriptor))
    )
    async with bench_at(tmp_path, capacity_bytes=capacity_for(128)) as bench:
        await fill(bench, range(128))
        assert await there(bench, range(128)) == [*range(128)]
        for first in (128, 130, 132):
            synced.clear()
            assert await bench.put(bench.keys(first, first + 1), range(2)) == [STORED] * 2
            barriers.append(len(synced))

        assert barriers == [2, 1, 1]
        left = [*range(24), *range(32, 134)]  # the end of the first path went first
        assert await there(bench, range(134)) == left
    async with bench_at(tmp_path) as bench:
        assert await there(bench, range(134)) == left


@pytest.mark.asyncio
async def test_a_small_store_that_is_full_keeps_no_slot_free(tmp_path: Path) -> None:
    async with bench_at(tmp_path, capacity_bytes=capacity_for(128)) as bench:
        await fill(bench, range(130))
        assert len(await there(bench, range(130))) == 128
        await bench.put(bench.keys(130), [0])
        assert len(await there(bench, range(131))) == 128


@pytest.mark.asyncio
async def test_a_bound_that_was_lowered_holds_after_reopening(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(40))
    limit = pool_bytes(10)
    async with bench_at(tmp_path, capacity_bytes={"kv": limit}) as bench:
        kept = await there(bench, range(40))
        assert kept == [*range(10)]
        assert await bench.get(bench.keys(*kept), range(10)) == [HIT] * 10
        await fill(bench, range(50, 60))

    assert pages_file(tmp_path).stat().st_size <= limit


@pytest.mark.asyncio
async def test_clear_forgets_the_pools_that_are_open_and_no_others(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(3))
    async with backend_at(tmp_path) as backend:
        benches = [await open_bench(backend, pool, weights="w2") for pool in ("kv", "mamba")]
        for bench in benches:
            await fill(bench, range(5))
        assert await backend.clear() == 10
        assert [await there(bench, range(5)) for bench in benches] == [[], []]
        assert await benches[0].put(benches[0].keys(1), [0]) == [STORED]
    async with backend_at(tmp_path) as backend:
        old, new = await open_bench(backend), await open_bench(backend, weights="w2")
        assert (await there(old, range(5)), await there(new, range(5))) == ([0, 1, 2], [1])
    async with bench_at(tmp_path, read_only=True) as bench:
        with pytest.raises(UsageError, match="for reading only"):
            await bench.engine.clear()


@pytest.mark.asyncio
async def test_clearing_a_closed_store_removes_what_fits(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        for pool, weights in (("kv", "w1"), ("mamba", "w1"), ("kv", "w2")):
            await fill(await open_bench(backend, pool, weights=weights), range(3))
        with pytest.raises(StorageLockedError):
            clear_store(tmp_path)
    fingerprint = fingerprint_of("w1").hex()
    (tmp_path / f"mamba-{fingerprint[:32]}" / "notes").touch()

    cleared = clear_store(tmp_path, "kv", fingerprint[:8].upper())

    assert cleared.pools == [f"kv-{fingerprint[:32]}"]
    assert cleared.bytes > 3 * SLOT_BYTES
    assert len(clear_store(tmp_path).pools) == 2
    assert names_below(tmp_path) == ["notes"]
    assert clear_store(tmp_path).pools == []


def manifest(fingerprint: str = "00" * 32, page_bytes: int = 7) -> bytes:
    return msgspec.json.encode(Manifest("kv", "", fingerprint, page_bytes, 4096).sealed())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{}", "pool.json is damaged: Object missing required field"),
        (b"\xff", "pool.json is damaged"),
        (manifest(fingerprint="zz"), "pool.json is damaged: non-hexadecimal"),
        (manifest(fingerprint="00"), "damaged: it does not fit together"),
        (manifest(fingerprint="AA" * 32), "damaged: it does not fit together"),
        (manifest(page_bytes=0), "damaged: it does not fit together"),
        (manifest(page_bytes=4097), "damaged: it does not fit together"),
        (manifest(page_bytes=7), r"holds Manifest\(.*, not Manifest\(.*remove it, or give another folder"),
    ],
)
async def test_a_pool_with_another_manifest_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, [1])
    file_of(tmp_path, "pool.json").write_bytes(text)
    with pytest.raises(StorageFormatError, match=words):
        async with bench_at(tmp_path):
            pass


@pytest.mark.asyncio
async def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    """Not in a folder that lies in the store, nor where a link leads, nor beside pages."""
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    async with bench_at(store) as bench:
        await fill(bench, [1])
    (pool,) = store.glob("kv-*")
    elsewhere.mkdir()
    (store / "letters").mkdir()
    (store / f"link-{'0' * 32}").symlink_to(elsewhere)
    theirs = [store / "letters" / "00000.pages", elsewhere / "00000.pages", pool / "notes.pages"]
    for file in theirs:
        file.write_bytes(bytes(1 << 20))

    async with backend_at(store, capacity_bytes=capacity_for(8)) as backend:
        await fill(await open_bench(backend, weights="w2"), range(20))
    assert all(file.stat().st_size == 1 << 20 for file in theirs)
    clear_store(store)
    assert all(file.stat().st_size == 1 << 20 for file in theirs)


@pytest.mark.asyncio
async def test_a_link_among_the_files_of_pages_is_not_followed(tmp_path: Path, small_segments: None) -> None:
    store, outside = tmp_path / "store", tmp_path / "outside"
    async with bench_at(store) as bench:
        await fill(bench, range(10))
        (pool,) = store.glob("kv-*")
        files = len(list(pool.glob("*.pages")))
        (pool / f"{files:05}.pages").symlink_to(outside)
        numbers = range(64 * files + 10)
        await fill(bench, numbers)
        assert len(await there(bench, numbers)) == 64 * files

    assert not outside.exists()


@pytest.mark.asyncio
async def test_a_folder_where_a_file_should_be(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, [1])
    pages = file_of(tmp_path, "00000.pages")
    pages.unlink()
    pages.mkdir()
    with pytest.raises(StorageError, match=r"00000\.pages cannot be opened: it is no file"):
        async with bench_at(tmp_path):
            pass


@pytest.mark.asyncio
async def test_entries_of_other_slots_and_noise_are_no_entries(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(4))
    data = bytearray(pages_file(tmp_path).read_bytes())
    second, third = (slice(n * segments.ENTRY_BYTES, (n + 1) * segments.ENTRY_BYTES) for n in (1, 2))
    data[second], data[third] = data[third], data[second]
    data[3 * segments.ENTRY_BYTES + 5] ^= 1
    pages_file(tmp_path).write_bytes(data)
    async with bench_at(tmp_path) as bench:
        assert await there(bench, range(4)) == [0]
        await fill(bench, range(4))
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT] * 4


@pytest.mark.asyncio
async def test_the_same_page_from_many_callers_has_one_slot_in_the_end(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(*range(8))
        calls = [bench.put(keys, range(8 * lane, 8 * lane + 8)) for lane in range(6)]
        answers = await asyncio.gather(*calls)
        assert [sum(answer[n] is STORED for answer in answers) for n in range(8)] == [1] * 8
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
    async with bench_at(copy) as bench:
        assert "8 pages" in repr(bench.engine)
        assert await bench.get(keys, range(8)) == [HIT] * 8


async def bytes_read_at_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that opening a pool reads from its files."""
    preadv, sizes = os.preadv, []

    def counting(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        sizes.append(preadv(descriptor, views, offset))
        return sizes[-1]

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", counting)
        async with bench_at(path):
            pass
    return sum(sizes)


@pytest.mark.asyncio
async def test_opening_reads_entries_and_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(200))

    assert await bytes_read_at_open(tmp_path, monkeypatch) == SLOTS_AT


@pytest.mark.soak
@pytest.mark.asyncio
async def test_a_hundred_thousand_pages_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 100_000
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(count))
    assert await bytes_read_at_open(tmp_path, monkeypatch) < 80 * count
    async with bench_at(tmp_path) as bench:
        assert await there(bench, range(count)) == [*range(count)]
        some = random.Random(0).sample(range(count), 64)
        assert await bench.get(bench.keys(*some), range(64)) == [HIT] * 64
