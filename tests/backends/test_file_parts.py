"""A large batch is moved in parts side by side, and answers as if it were one; long calls take turns."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from asynchicache.backends.file import engine, segments
from asynchicache.backends.file.segments import Segments
from asynchicache.storage.binding import HEADER_BYTES
from asynchicache.types import Outcome
from storage.file_stores import FRAME_BYTES, bench_at, capacity_for

HIT, MISS, STORED, EXISTS, FAILED = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.EXISTS,
    Outcome.FAILED,
)

SLOT_BYTES = FRAME_BYTES - HEADER_BYTES


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_HOP_BYTES", 3 * SLOT_BYTES)
    monkeypatch.setattr(engine, "_FINE_BYTES", 2 * SLOT_BYTES)


@pytest.mark.asyncio
async def test_each_page_has_its_own_answer(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await bench.put(bench.keys(4), [0])
        keys = bench.keys(*range(8), 0, 7, 9)

        answers = await bench.put(keys, range(11))

        for first, again in ((0, 8), (7, 9)):  # in two parts, of which either may come first
            assert {answers[first], answers[again]} == {STORED, EXISTS}
        assert answers[1:7] == [STORED] * 3 + [EXISTS] + [STORED] * 2
        assert answers[10] is STORED
        wanted = bench.keys(*range(11))
        assert await bench.get(wanted, range(20, 31)) == [HIT] * 8 + [MISS, HIT, MISS]
    async with bench_at(tmp_path) as bench:
        assert await bench.get(wanted, range(20, 31)) == [HIT] * 8 + [MISS, HIT, MISS]


@pytest.mark.asyncio
async def test_a_part_and_its_entries_are_synced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fdatasync = os.fdatasync

    def counting(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fdatasync(descriptor)

    async with bench_at(tmp_path) as bench:
        monkeypatch.setattr(os, "fdatasync", counting)
        await bench.put(bench.keys(*range(3)), range(3))
        assert synced == ["00000.pages"]


@pytest.mark.asyncio
async def test_a_part_that_cannot_be_written_costs_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def refuse_the_second_part(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views) > 1 and any(key.digest in bytes(views[0]) for key in keys[3:6]):
            raise OSError(5, "bad sectors")
        return pwritev(descriptor, views, offset)

    async with bench_at(tmp_path, capacity_bytes=capacity_for(9)) as bench:
        keys = bench.keys(*range(9))
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwritev", refuse_the_second_part)
            assert await bench.put(keys, range(9)) == [STORED] * 3 + [FAILED] * 3 + [STORED] * 3
        assert await bench.put(keys, range(9)) == [EXISTS] * 3 + [STORED] * 3 + [EXISTS] * 3
        assert await bench.get(keys, range(9, 18)) == [HIT] * 9


@pytest.mark.asyncio
async def test_a_cancelled_caller_leaves_no_slot_behind(tmp_path: Path) -> None:
    async with bench_at(tmp_path, capacity_bytes=capacity_for(12)) as bench:
        keys = bench.keys(*range(12))
        putting = asyncio.create_task(bench.put(keys, range(12)))
        await asyncio.sleep(0)
        putting.cancel()
        await asyncio.wait([putting])
        await bench.engine.aclose()
    async with bench_at(tmp_path, capacity_bytes=capacity_for(12)) as bench:
        assert await bench.get(keys, range(12, 24)) == [HIT] * 12


@pytest.mark.asyncio
async def test_a_lone_read_is_cut_finer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        sizes.append(len(views) // 2)
        return preadv(descriptor, views, offset)

    async with bench_at(tmp_path) as bench:
        keys = bench.keys(*range(12))
        await bench.put(keys, range(12))
        monkeypatch.setattr(os, "preadv", counting)
        assert await bench.get(keys[:3], range(12, 15)) == [HIT] * 3
        assert sorted(sizes) == [1, 2]
        sizes.clear()
        assert await bench.get(keys, range(12, 24)) == [HIT] * 12
        assert sizes == [3] * 4


def test_long_writes_take_turns_and_nothing_else_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_LONG_BYTES", 2 * FRAME_BYTES)
    slots = Segments(tmp_path, FRAME_BYTES, read_only=False, direct=True)
    slots.grow(8, 8)
    memory = memoryview(mmap.mmap(-1, FRAME_BYTES))
    frame = [memory[:HEADER_BYTES], memory[HEADER_BYTES:]]
    under_way, go_on = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def slow_where_long(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views) > 2:
            under_way.set()
            go_on.wait()
        return pwritev(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", slow_where_long)
    ended: list[int] = []
    long_ones = [
        threading.Thread(target=lambda slot=slot: ended.append(slots.write(slot, frame * 2)))
        for slot in (0, 2)
    ]
    for thread in long_ones:
        thread.start()
    assert under_way.wait(10)

    assert slots.write(4, frame) == 1
    assert slots.read(4, frame) == 1
    assert slots.read(4, frame * 2) == 2
    assert slots._write_turn.locked()
    assert ended == []

    go_on.set()
    for thread in long_ones:
        thread.join(10)
    assert ended == [2, 2]
    assert not slots._write_turn.locked()
    slots.close()
