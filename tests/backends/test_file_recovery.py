"""What a store trusts after a crash, what it looks at, and what it forgets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from struct import Struct

import pytest
from xxhash import xxh3_64_digest

from asynchicache.backends.file import segments
from asynchicache.backends.file.folder import Manifest
from asynchicache.backends.file.segments import SegmentShape
from asynchicache.backends.file.verify import StoreReport, verify_store
from asynchicache.errors import StorageFormatError, UsageError
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of
from asynchicache.types import Outcome
from storage.file_stores import SLOT_BYTES, SLOTS_AT, backend_at, bench_at, open_bench, pages_file
from storage.power_cuts import DiskLog

HIT, MISS, STORED, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.CORRUPT


async def crashed(path: Path) -> Path:
    """A store whose writer never closed it: pages 0 to 3, and 4 and 5 in a last write."""
    async with bench_at(path / "open") as bench:
        await bench.put(bench.keys(0, 1, 2, 3), range(4))
        await bench.put(bench.keys(4, 5), range(2))
        shutil.copytree(path / "open", path / "crashed")
    return path / "crashed"


def tear(path: Path, slot: int) -> None:
    """The second half of a slot was never written."""
    with pages_file(path).open("r+b") as file:
        file.seek(SLOTS_AT + slot * SLOT_BYTES + SLOT_BYTES // 2)
        file.write(bytes(SLOT_BYTES // 2))


def slots_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots that are read from now on."""
    slots: list[int] = []
    preadv = os.preadv

    def recording(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        slots.extend([(offset - SLOTS_AT) // SLOT_BYTES] if offset >= SLOTS_AT else [])
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", recording)
    return slots


async def hits(bench: PoolUnderTest, count: int = 6) -> list[bool]:
    return [outcome is HIT for outcome in await bench.get(bench.keys(*range(count)), range(count))]


def verified(path: Path, *, repair: bool = False) -> StoreReport:
    return verify_store(path, repair=repair)


@pytest.mark.asyncio
async def test_only_the_last_writes_are_looked_at_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await crashed(tmp_path)
    read = slots_read(monkeypatch)
    async with bench_at(store):
        assert sorted(read) == [4, 5]
        read.clear()
        shutil.copytree(store, tmp_path / "again")
    async with bench_at(store), bench_at(tmp_path / "again"):
        assert read == []
    async with bench_at(store) as bench:
        assert await hits(bench) == [True] * 6


@pytest.mark.asyncio
async def test_a_page_of_the_last_writes_that_is_torn_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await crashed(tmp_path)
    tear(store, 4)
    report = verified(store)
    assert (report.ok, report.pages, report.unfinished, report.corrupt) == (True, 5, 1, 0)
    async with bench_at(store, read_only=True) as bench:
        assert await hits(bench) == [True, True, True, True, False, True]
    assert verified(store).unfinished == 1  # a reader changes nothing
    async with bench_at(store) as bench:
        assert await bench.get(bench.keys(4), [0]) == [MISS]
        assert await bench.put(bench.keys(4), [4]) == [STORED]
        assert await hits(bench) == [True] * 6
    assert "1 pages of the last writes are not whole" in caplog.text
    assert verified(store).unfinished == 0


@pytest.mark.asyncio
async def test_a_repair_forgets_what_is_unfinished(tmp_path: Path) -> None:
    store = await crashed(tmp_path)
    tear(store, 5)
    assert verified(store, repair=True).unfinished == 1
    report = verified(store)
    assert (report.pages, report.unfinished, report.corrupt) == (5, 0, 0)


@pytest.mark.asyncio
async def test_a_page_that_was_durable_before_is_damaged_not_unfinished(tmp_path: Path) -> None:
    store = await crashed(tmp_path)
    tear(store, 2)
    report = verified(store)
    assert (report.ok, report.pages, report.unfinished, report.corrupt) == (False, 5, 0, 1)
    async with bench_at(store) as bench:
        assert await bench.get(bench.keys(2), [0]) == [CORRUPT]


@pytest.mark.asyncio
async def test_no_mark_vouches_for_what_is_written_later(tmp_path: Path) -> None:
    """The pages with the highest stamps are gone; the mark that was set at the store's end is not."""
    store, copy = tmp_path / "open", tmp_path / "crashed"
    async with bench_at(store) as bench:
        await bench.put(bench.keys(0, 1, 2, 3), range(4))
    async with bench_at(store) as bench:
        await bench.engine.delete(bench.keys(1, 2, 3))
        shutil.copytree(store, copy)
    async with bench_at(copy) as bench:
        await bench.put(bench.keys(4), [4])
        shutil.copytree(copy, tmp_path / "again")
    tear(tmp_path / "again", 1)
    report = verified(tmp_path / "again")
    assert (report.pages, report.unfinished, report.corrupt) == (1, 1, 0)
    async with bench_at(tmp_path / "again") as bench:
        assert await bench.get(bench.keys(0, 4), range(2)) == [HIT, MISS]


@pytest.mark.asyncio
async def test_a_writer_syncs_what_a_killed_one_has_left_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(0), [0])
    log = DiskLog(tmp_path)
    with log.recording(monkeypatch):
        async with bench_at(tmp_path):
            began = [(request.path.name, request.kind) for request in log.requests]
    assert ("00000.pages", "sync") in began
    assert "write" not in [kind for _, kind in began]


@pytest.mark.asyncio
async def test_a_stamp_that_no_writer_reaches_is_damage(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(0, 1), range(2))
        identity = Manifest.of(bench.binding).identity
    with pages_file(tmp_path).open("r+b") as file:
        entry = file.read(40) + Struct("<QQ").pack(2**64 - 1, 0) + bytes(64)
        file.seek(0)
        file.write(entry + xxh3_64_digest(entry + identity, seed=0))
    assert verified(tmp_path).problems == ["kv: the name of slot 0 is damaged"]
    async with bench_at(tmp_path) as bench:
        assert await hits(bench, 2) == [False, True]
        assert await bench.put(bench.keys(0), [0]) == [STORED]


@pytest.mark.asyncio
async def test_the_name_of_a_file_far_behind_all_others_is_refused(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(0), [0])
    pages_file(tmp_path).with_name("99999.pages").touch()
    with pytest.raises(StorageFormatError, match=r"99999\.pages is no file of ours: 99998 .* remove it"):
        async with bench_at(tmp_path):
            pass


@pytest.mark.parametrize("frame_bytes", [8192, SLOT_BYTES, 4 << 20, 1 << 33])
def test_bytes_and_slots_of_a_pool_agree(frame_bytes: int) -> None:
    sizes = SegmentShape.of(frame_bytes)

    assert sizes.slots % 64 == 0
    assert sizes.entries_bytes % segments._CACHE_PAGE == 0
    assert sizes.entries_bytes >= segments.ENTRY_BYTES * sizes.slots
    for slots in (0, 1, 2, sizes.slots - 1, sizes.slots, sizes.slots + 1, 3 * sizes.slots):
        nbytes = sizes.pool_bytes(slots)
        assert sizes.pool_slots(nbytes) == slots
        assert sizes.pool_slots(nbytes - 1) == max(slots - 1, 0)


@pytest.mark.asyncio
async def test_pages_that_changed_places_are_damaged(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(0, 1, 2), range(3))
    data = bytearray(pages_file(tmp_path).read_bytes())
    first, second = (slice(SLOTS_AT + n * SLOT_BYTES, SLOTS_AT + (n + 1) * SLOT_BYTES) for n in (0, 1))
    data[first], data[second] = data[second], data[first]
    pages_file(tmp_path).write_bytes(data)
    assert (verified(tmp_path).pages, verified(tmp_path).corrupt) == (1, 2)
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(0, 1, 2), range(3)) == [CORRUPT, CORRUPT, HIT]


@pytest.mark.asyncio
async def test_a_file_of_another_pool_holds_no_page_of_this_one(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        for weights in ("w1", "w2"):
            bench = await open_bench(backend, weights=weights)
            await bench.put(bench.keys(0, 1), range(2))
    ours, theirs = (tmp_path / f"kv-{fingerprint_of(name).hex()[:32]}/00000.pages" for name in ("w1", "w2"))
    shutil.copy(theirs, ours)
    assert verified(tmp_path).problems == [f"kv: the name of slot {slot} is damaged" for slot in range(2)]
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(0, 1), range(2)) == [MISS] * 2
        assert await bench.put(bench.keys(0), [0]) == [STORED]


@pytest.mark.asyncio
async def test_the_manifest_of_another_pool_costs_no_page(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        for weights in ("w1", "w2"):
            bench = await open_bench(backend, weights=weights)
            await bench.put(bench.keys(0), [0])
    ours, theirs = (tmp_path / f"kv-{fingerprint_of(name).hex()[:32]}/pool.json" for name in ("w1", "w2"))
    shutil.copy(theirs, ours)
    (problem,) = verified(tmp_path).problems
    assert problem == f"{ours} is damaged: it is that of {theirs.parent}"
    with pytest.raises(StorageFormatError, match="remove it, or give another folder"):
        async with bench_at(tmp_path):
            pass
    assert verified(tmp_path, repair=True).repaired == 1
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(0), [0]) == [HIT]
    assert (verified(tmp_path).pages, verified(tmp_path).problems) == (2, [])


@pytest.mark.asyncio
async def test_a_put_that_was_refused_does_not_stop_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_at(tmp_path / "open") as bench:
        with pytest.raises(UsageError, match="is no page of pool"):
            await bench.engine.put([bench.keys(9)[0]._replace(fingerprint=b"f" * 32)], [0])
        for number in range(4):
            await bench.put(bench.keys(number), [0])
        shutil.copytree(tmp_path / "open", tmp_path / "crashed")
    read = slots_read(monkeypatch)
    async with bench_at(tmp_path / "crashed") as bench:
        assert len(read) == 1
        assert await hits(bench, 4) == [True] * 4
