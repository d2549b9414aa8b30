"""A large batch is moved in parts side by side, and answers as if it were one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from asynchicache.backends.file import engine, segments
from asynchicache.types import Outcome
from storage.file_stores import SLOT_BYTES, bench_at, capacity_for

HIT, MISS, STORED, EXISTS, FAILED = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.EXISTS,
    Outcome.FAILED,
)


@pytest.fixture(autouse=True, params=[2, 1000], ids=["long", "short"])
def small_parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(segments, "_LONG_BYTES", request.param * SLOT_BYTES)
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
        if any(view == bench.binding.page(slot) for slot in (3, 4, 5) for view in views):
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
        sizes.append(len(views))
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


@pytest.mark.asyncio
async def test_a_page_that_cannot_be_written_costs_no_other_of_its_barrier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def refuse_one(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if any(view == bench.binding.page(4) for view in views):
            raise OSError(5, "bad sector")
        return pwritev(descriptor, views, offset)

    async with bench_at(tmp_path, capacity_bytes=capacity_for(9)) as bench:
        keys = bench.keys(*range(9))
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwritev", refuse_one)
            assert await bench.put(keys, range(9)) == [STORED] * 4 + [FAILED] + [STORED] * 4
    async with bench_at(tmp_path, capacity_bytes=capacity_for(9)) as bench:
        assert await bench.get(keys, range(9)) == [HIT] * 4 + [MISS] + [HIT] * 4
        assert await bench.put(keys[4:5], [9]) == [STORED]
        assert await bench.get(keys, range(9)) == [HIT] * 9
