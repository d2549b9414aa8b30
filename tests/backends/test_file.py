"""What is particular to the file engine: what survives, what damage does, what happens when it is full.

More than 400 lines: one store is built once and damaged in every way, and the cases share its parts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from asynchicache.backends.file.writer import PageMove, SlotRun, contiguous_moves, merge_runs
from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.types import Outcome
from storage.file_stores import (
    PAGE_BYTES,
    SLOT_BYTES,
    SLOTS_AT,
    backend_at,
    bench_at,
    capacity_for,
    open_bench,
    pages_file,
    pool_bytes,
)

HIT, MISS, STORED, CORRUPT, REJECTED, FAILED = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.CORRUPT,
    Outcome.REJECTED,
    Outcome.FAILED,
)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def open_files_below(folder: Path) -> list[Path]:
    links = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [link for link in links if link.is_relative_to(folder)]


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [True, False])
async def test_pages_are_there_after_a_restart(tmp_path: Path, direct: bool) -> None:
    async with bench_at(tmp_path, direct=direct) as bench:
        await bench.put(bench.keys(*range(50)), range(50))
    async with bench_at(tmp_path, direct=not direct) as bench:
        assert await bench.engine.exists(bench.keys(*range(60))) == bytes([1] * 50 + [0] * 10)
        assert await bench.get(bench.keys(*range(60)), range(60)) == [HIT] * 50 + [MISS] * 10
        assert repr(bench.engine) == "<FileEngine kv: 50 pages, 128 slots, 0 evicted, 0 corrupt>"


@pytest.mark.asyncio
async def test_the_folder_is_as_documented(tmp_path: Path) -> None:
    async with bench_at(tmp_path / "new" / "store") as bench:
        await bench.put(bench.keys(1), [0])
        names = names_below(tmp_path)
        fingerprint = bench.binding.fingerprint.hex()[:32]

    pages = f"new/store/kv-{fingerprint}"
    files = [f"{pages}/{name}" for name in ("00000.pages", "pool.json")]
    assert names == ["new", "new/store", "new/store/FORMAT", "new/store/LOCK", pages, *files]


@pytest.mark.asyncio
async def test_other_files_are_left_alone(tmp_path: Path) -> None:
    async with bench_at(tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])

    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.asyncio
async def test_other_weights_find_nothing_and_disturb_nothing(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        old = await open_bench(backend)
        await old.put(old.keys(1), [0])
        new = await open_bench(backend, weights="w2")
        assert await new.get(new.keys(1), [1]) == [MISS]
        assert await new.put(new.keys(1), [0]) == [STORED]
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(1), [1]) == [HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize("offset", [0, 4096, PAGE_BYTES - 1])
async def test_a_byte_flipped_on_disk_is_corrupt_then_a_miss(tmp_path: Path, offset: int) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2, 3)
        await bench.put(keys, [0, 1, 2])
        flip(pages_file(tmp_path), SLOTS_AT + SLOT_BYTES + offset)

        assert await bench.get(keys, [3, 4, 5]) == [HIT, CORRUPT, HIT]
        assert await bench.engine.exists(keys) == bytes([1, 0, 1])
        assert await bench.get(keys, [3, 4, 5]) == [HIT, MISS, HIT]
        assert await bench.put(keys[1:2], [1]) == [STORED]
        assert await bench.get(keys, [3, 4, 5]) == [HIT] * 3


@pytest.mark.asyncio
async def test_damage_while_closed(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2, 3)
        await bench.put(keys, [0, 1, 2])
    flip(pages_file(tmp_path), SLOTS_AT + 20)  # the first
    flip(pages_file(tmp_path), SLOTS_AT + 2 * SLOT_BYTES + 7)  # the last
    async with bench_at(tmp_path) as bench:
        assert await bench.get(keys, [3, 4, 5]) == [CORRUPT, HIT, CORRUPT]
        assert await bench.engine.exists(keys) == bytes([0, 1, 0])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("left", "whole"),
    [
        (0, 0),
        (100, 0),
        (SLOTS_AT, 0),
        (SLOTS_AT + SLOT_BYTES, 1),
        (SLOTS_AT + 2 * SLOT_BYTES - 1, 1),
        (SLOTS_AT + 3 * SLOT_BYTES - 1, 2),
    ],
)
async def test_a_file_that_was_cut_while_closed(tmp_path: Path, left: int, whole: int) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2, 3)
        await bench.put(keys, [0, 1, 2])
    os.truncate(pages_file(tmp_path), left)
    async with bench_at(tmp_path) as bench:
        assert await bench.get(keys, [3, 4, 5]) == [HIT] * whole + [MISS] * (3 - whole)
        assert await bench.put(keys[2:], [2]) == [STORED]
        assert await bench.get(keys[2:], [6]) == [HIT]


@pytest.mark.asyncio
async def test_a_file_that_is_cut_while_open(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2, 3)
        await bench.put(keys, [0, 1, 2])
        os.truncate(pages_file(tmp_path), SLOTS_AT + SLOT_BYTES + 4096)

        assert await bench.get(keys, [3, 4, 5]) == [HIT, CORRUPT, CORRUPT]
        assert await bench.get(keys, [3, 4, 5]) == [HIT, MISS, MISS]


@pytest.mark.asyncio
async def test_a_full_file_evicts_what_was_not_used_for_longest(tmp_path: Path) -> None:
    async with bench_at(tmp_path, capacity_bytes=capacity_for(4)) as bench:
        await bench.put(bench.keys(1, 2, 3, 4), [0, 1, 2, 3])
        await bench.get(bench.keys(1), [4])
        assert await bench.put(bench.keys(5, 6), [0, 1]) == [STORED] * 2

        assert await bench.engine.exists(bench.keys(1, 2, 3, 4, 5, 6)) == bytes([1, 1, 0, 0, 1, 1])
        assert await bench.get(bench.keys(5, 6, 1, 2), [4, 5, 6, 7]) == [HIT] * 4
        assert pages_file(tmp_path).stat().st_size == pool_bytes(4)
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(1, 2, 3, 4, 5, 6), range(6)) == [HIT, HIT, MISS, MISS, HIT, HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize("written", [slice(0, 4096), slice(4096, 8192)], ids=["begin", "end"])
async def test_a_slot_used_again_and_torn_serves_neither_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: slice
) -> None:
    pwritev = os.pwritev

    def torn(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset < SLOTS_AT:  # entries, not pages
            return pwritev(descriptor, views, offset)
        pwritev(descriptor, [views[0][written]], offset + written.start)
        raise OSError(errno.EIO, "the power failed")

    async with bench_at(tmp_path, capacity_bytes=capacity_for(1)) as bench:
        await bench.put(bench.keys(1), [0])
        monkeypatch.setattr(os, "pwritev", torn)
        await bench.put(bench.keys(2), [1])
    async with bench_at(tmp_path) as bench:
        outcomes = await bench.get(bench.keys(1, 2), [2, 3])

    assert outcomes == [MISS, MISS]


@pytest.mark.asyncio
@pytest.mark.parametrize(("damaged", "outcome"), [(False, HIT), (True, MISS)])
async def test_a_page_that_is_deleted_while_it_is_read_is_not_called_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool, outcome: Outcome
) -> None:
    preadv = os.preadv
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1)
        await bench.put(keys, [0])
        if damaged:
            flip(pages_file(tmp_path), SLOTS_AT)
        reading, deleted = threading.Event(), threading.Event()

        def wait_for_delete(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
            reading.set()
            assert deleted.wait(30)
            return preadv(descriptor, views, offset)

        monkeypatch.setattr(os, "preadv", wait_for_delete)
        getting = asyncio.create_task(bench.get(keys, [1]))
        await asyncio.to_thread(reading.wait, 30)
        assert await bench.engine.delete(keys) == [HIT]
        deleted.set()

        assert await getting == [outcome]
        assert await bench.engine.exists(keys) == b"\0"
        assert repr(bench.engine).endswith("0 corrupt>")


@pytest.mark.asyncio
async def test_a_batch_larger_than_the_file(tmp_path: Path) -> None:
    async with bench_at(tmp_path, capacity_bytes={"kv": pool_bytes(2)}) as bench:
        keys = bench.keys(1, 2, 3)

        assert await bench.put(keys, [0, 1, 2]) == [STORED, STORED, REJECTED]
        assert await bench.get(keys, [3, 4, 5]) == [HIT, HIT, MISS]


@pytest.mark.asyncio
async def test_a_file_with_no_room_for_one_page_is_refused_and_a_reader_of_it_is_not(tmp_path: Path) -> None:
    least = capacity_for(1)
    for bound in (1, least - 1):
        with pytest.raises(StorageError, match=f"capacity_bytes {bound} has no room .* one needs {least}"):
            async with bench_at(tmp_path, capacity_bytes=bound):
                pass
    async with bench_at(tmp_path, capacity_bytes=least) as bench:
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [STORED, REJECTED]
    async with bench_at(tmp_path, capacity_bytes=1, read_only=True) as bench:
        assert await bench.get(bench.keys(1), [3]) == [HIT]


@pytest.mark.asyncio
async def test_a_pools_own_bound_needs_room_for_one_page_too(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="capacity_bytes 5000 has no room for a page of pool 'kv'"):
        async with bench_at(tmp_path, capacity_bytes={"kv": 5000}):
            pass


@pytest.mark.asyncio
async def test_readers_and_writers_of_a_full_file_never_see_other_bytes(tmp_path: Path) -> None:
    """More pages than slots, read while they are evicted: `PoolUnderTest.get` compares each HIT."""
    async with bench_at(tmp_path, slots=128, capacity_bytes=capacity_for(16)) as bench:
        for start in range(0, 120, 8):
            numbers = range(start, start + 8)
            calls = [
                bench.put(bench.keys(*numbers), range(8)),
                bench.get(bench.keys(*range(start - 8, start + 8)), range(16, 32)),
                bench.get(bench.keys(*range(start - 16, start)), range(32, 48)),
                bench.put(bench.keys(*numbers), range(48, 56)),
                bench.engine.delete(bench.keys(start - 3)),
            ]
            answers = await asyncio.gather(*calls)
            assert CORRUPT not in answers[1] + answers[2]
        assert "16 slots" in repr(bench.engine)


@pytest.mark.asyncio
async def test_a_read_only_store_serves_and_takes_nothing(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])
    before = pages_file(tmp_path).read_bytes()
    async with bench_at(tmp_path, read_only=True) as bench, bench_at(tmp_path, read_only=True) as other:
        assert await bench.get(bench.keys(1, 2), [1, 2]) == [HIT, MISS]
        assert await other.get(bench.keys(1), [1]) == [HIT]
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [REJECTED] * 2
        assert await bench.engine.delete(bench.keys(1)) == [REJECTED]
        assert await bench.engine.exists(bench.keys(1)) == b"\1"

    assert pages_file(tmp_path).read_bytes() == before


@pytest.mark.asyncio
async def test_a_read_only_store_without_the_pool_is_empty(tmp_path: Path) -> None:
    async with backend_at(tmp_path):
        pass
    async with bench_at(tmp_path, read_only=True) as bench:
        assert await bench.get(bench.keys(1), [0]) == [MISS]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.ENOSPC, REJECTED), (errno.EDQUOT, REJECTED), (errno.EROFS, REJECTED), (errno.EIO, FAILED)],
)
async def test_a_disk_that_refuses_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Outcome
) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2)
        await bench.put(keys[:1], [0])

        def refuse(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as broken:
            broken.setattr(os, "pwritev", refuse)
            assert await bench.put(keys, [1, 2]) == [Outcome.EXISTS, outcome]

        assert await bench.put(keys, [1, 2]) == [Outcome.EXISTS, STORED]
        assert await bench.get(keys, [3, 4]) == [HIT] * 2


@pytest.mark.asyncio
async def test_one_bad_sector_costs_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2, 3, 4)
        await bench.put(keys, [0, 1, 2, 3])
        preadv = os.preadv

        def bad(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
            if offset <= SLOTS_AT + 2 * SLOT_BYTES < offset + sum(map(len, views)):
                raise OSError(errno.EIO, "bad sector")
            return preadv(descriptor, views, offset)

        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", bad)
            assert await bench.get(keys, [4, 5, 6, 7]) == [HIT, HIT, FAILED, HIT]

        assert await bench.get(keys, [4, 5, 6, 7]) == [HIT] * 4


@pytest.mark.asyncio
async def test_nothing_is_acknowledged_after_a_sync_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, "lost")

        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", fail)
            assert await bench.put(bench.keys(2, 3), [1, 2]) == [FAILED] * 2

        assert await bench.engine.exists(bench.keys(1, 2, 3)) == bytes([1, 0, 0])
        assert await bench.put(bench.keys(4), [3]) == [REJECTED]
        assert await bench.get(bench.keys(1), [4]) == [HIT]


@pytest.mark.asyncio
async def test_what_one_barrier_is_told_of_the_one_beside_it_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux tells an open file of a lost write once (errseq_t): a deletion is told while a put waits."""
    told: set[int] = set()
    erasing, put_ended = threading.Event(), threading.Event()

    def losing(descriptor: int) -> None:
        if threading.current_thread().name == "asynchicache-file":  # the put's
            erasing.wait(60)
            if descriptor in told:
                return
        else:
            told.add(descriptor)
            erasing.set()
            put_ended.wait(60)
        raise OSError(errno.EIO, "lost")

    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(1), [0])
        monkeypatch.setattr(os, "fdatasync", losing)
        deletion = asyncio.create_task(bench.engine.delete(bench.keys(1)))
        put = await bench.put(bench.keys(2), [1])
        put_ended.set()
        assert (put, await deletion) == ([FAILED], [FAILED])


@pytest.mark.asyncio
async def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: pwritev(fd, views[:4], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, views[:6], offset))
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(*range(7))

        assert await bench.put(keys, range(7)) == [STORED] * 7
        assert await bench.get(keys, range(10, 17)) == [HIT] * 7


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
async def test_a_file_system_that_takes_o_direct_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """EINVAL for O_DIRECT, as some file systems answer only when a file is used."""
    real = getattr(os, call)
    direct = 0

    def picky(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal direct
        if os.O_DIRECT & int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[3], 8):
            direct += 1
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, call, picky)
    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2)
        assert await bench.put(keys, [0, 1]) == [STORED] * 2
        assert await bench.get(keys, [2, 3]) == [HIT] * 2
    assert direct <= 2  # once for each file


@pytest.mark.asyncio
async def test_o_direct_is_refused_to_two_threads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = os.preadv, iter(range(2))
    refused, tried_again = threading.Event(), threading.Event()

    def picky(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        call = next(refusals, None)
        if call is None:
            tried_again.set()
            return real(descriptor, views, offset)
        if call == 0:
            refused.wait(60)  # the other is on its way
        else:
            refused.set()
            tried_again.wait(60)  # the first has found out by now
        raise OSError(errno.EINVAL, "no O_DIRECT")

    async with bench_at(tmp_path) as bench:
        keys = bench.keys(1, 2)
        assert await bench.put(keys, [0, 1]) == [STORED] * 2
        monkeypatch.setattr(os, "preadv", picky)
        answers = await asyncio.gather(bench.get(keys[:1], [2]), bench.get(keys[1:], [3]))
        assert answers == [[HIT], [HIT]]


@pytest.mark.asyncio
async def test_a_file_system_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    async with bench_at(tmp_path) as bench:
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [STORED] * 2
        assert await bench.get(bench.keys(1, 2), [2, 3]) == [HIT] * 2


@pytest.mark.asyncio
async def test_each_pool_is_open_once(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        bench = await open_bench(backend)
        with pytest.raises(StorageError, match="open already"):
            await open_bench(backend)
        await bench.engine.aclose()
        await open_bench(backend)
        with pytest.raises(ClosedError, match="'kv' is closed"):
            await bench.engine.get(bench.keys(1), [0])
        await backend.aclose()
        with pytest.raises(ClosedError, match="is closed"):
            await open_bench(backend, "mamba")


@pytest.mark.asyncio
async def test_a_cancelled_open_still_closes_its_file(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        opening = asyncio.create_task(open_bench(backend))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await backend.aclose()

        assert open_files_below(tmp_path) == []


@pytest.mark.asyncio
async def test_closing_waits_for_threads_whose_callers_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev
    writing, go_on = threading.Event(), threading.Event()

    def slowly(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        writing.set()
        assert go_on.wait(30)
        return pwritev(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", slowly)
    async with bench_at(tmp_path) as bench:
        putting = asyncio.create_task(bench.put(bench.keys(1), [0]))
        await asyncio.to_thread(writing.wait, 30)
        putting.cancel()
        closing = asyncio.create_task(bench.engine.aclose())
        done, _ = await asyncio.wait([putting, closing], return_when=asyncio.FIRST_COMPLETED)
        assert done == {putting}
        go_on.set()
        await closing
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(1), [1]) == [HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": ""}, "path='' must name a folder"),
        ({"path": None, "pth": "pages"}, "has no option 'pth'; did you mean 'path'"),
        ({"path": 3}, "path=3 must name a folder"),
        ({"path": "x", "capacity_bytes": -1}, "capacity_bytes=-1 must be a whole number above 0"),
        (
            {"path": "x", "capacity_bytes": {"kv": 0}},
            "{'kv': 0} must be a whole number above 0 or a table",
        ),
        ({"path": "x", "read_only": "yes"}, "read_only='yes' must be true or false"),
        (
            {"path": "x", "size": 1, "age": 2},
            "has no option 'size'; the options are capacity_bytes",
        ),
    ],
)
async def test_options_are_checked(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with backend_at(**options):  # type: ignore[arg-type]
            pass


def test_runs_are_cut_at_gaps_and_after_the_most() -> None:
    moves = [PageMove(slot, place) for place, slot in enumerate([2, 3, 4, 5, 7, 7, 8])]

    assert [[move.slot for move in run] for run in contiguous_moves(moves, 3)] == [
        [2, 3, 4],
        [5],
        [7],
        [7, 8],
    ]
    assert list(contiguous_moves([], 3)) == []


def test_runs_of_several_calls_are_joined_up_to_the_most() -> None:
    runs = [
        SlotRun([PageMove(slot, 0) for slot in slots], [])
        for slots in ((7, 8), (2, 3), (4, 5, 6), (11,), (9,))
    ]
    assert [[run.slot for run in group] for group in merge_runs(runs, 6)] == [[2, 4], [7, 9], [11]]
    assert [[run.slot for run in group] for group in merge_runs(runs, 1)] == [[2], [4], [7], [9], [11]]
    assert list(merge_runs([], 6)) == []
