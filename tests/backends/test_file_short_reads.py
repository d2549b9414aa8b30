"""A read that the kernel cuts short is read on; only where the file ends is anything missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asynchicache.backends.file.verify import verify_store
from asynchicache.types import Outcome
from storage.file_stores import SLOT_BYTES, SLOTS_AT, bench_at, fill, pages_file, there
from storage.short_reads import Cuts

HIT, MISS, CORRUPT, FAILED = Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [4096, 4096 + 512, SLOT_BYTES, SLOT_BYTES + 4096, 3 * SLOT_BYTES - 4096])
async def test_pages_that_come_in_parts_are_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, most: int
) -> None:
    cuts = Cuts(most, first=SLOTS_AT)
    async with bench_at(tmp_path, direct=direct) as bench:
        await fill(bench, range(8))
        with monkeypatch.context() as cutting:
            cutting.setattr(os, "preadv", cuts)
            assert await bench.get(bench.keys(*range(8)), range(8)) == [HIT] * 8
        assert cuts.cut > 0
        assert await there(bench, range(8)) == [*range(8)]
    assert verify_store(tmp_path).pages == 8


@pytest.mark.asyncio
@pytest.mark.parametrize("most", [0, 100])
async def test_a_read_that_brings_less_than_a_block_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(4))
        with monkeypatch.context() as cutting:
            cutting.setattr(os, "preadv", Cuts(most, first=SLOTS_AT, times=2))
            assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT] * 4


@pytest.mark.asyncio
async def test_a_page_that_does_not_come_is_a_failure_and_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(4))
        second = SLOTS_AT + SLOT_BYTES
        with monkeypatch.context() as cutting:
            cutting.setattr(os, "preadv", Cuts(0, first=second, last=second + SLOT_BYTES))
            for number in (1, 2):
                outcome = FAILED if number == 1 else HIT
                assert await bench.get(bench.keys(number), [0]) == [outcome]
        assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT] * 4
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT] * 4


@pytest.mark.asyncio
async def test_what_lies_behind_the_end_of_a_file_is_damaged_all_the_same(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(4))
        os.truncate(pages_file(tmp_path), SLOTS_AT + 2 * SLOT_BYTES + 4096)
        assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT, HIT, CORRUPT, CORRUPT]


@pytest.mark.asyncio
@pytest.mark.parametrize("most", [1, 64, 100, 4096])
async def test_entries_that_come_in_parts_are_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(40))
    cuts = Cuts(most, last=SLOTS_AT, times=50)
    with monkeypatch.context() as cutting:
        cutting.setattr(os, "preadv", cuts)
        async with bench_at(tmp_path) as bench:
            assert await there(bench, range(40)) == [*range(40)]
    assert cuts.cut > 0
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(*range(40)), range(40)) == [HIT] * 40
