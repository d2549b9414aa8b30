"""What a put that is refused leaves behind in a file store: no slot is lost, and no page in doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynchicache.backends.file import segments, store
from asynchicache.errors import UsageError
from asynchicache.types import Outcome
from storage.file_stores import bench_at, capacity_for, fill, there

STORED, FAILED = Outcome.STORED, Outcome.FAILED


@pytest.mark.asyncio
async def test_memory_that_cannot_be_had_costs_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(slot: int) -> memoryview:
        raise UsageError(f"slot {slot} is not there")

    async with bench_at(tmp_path, capacity_bytes=capacity_for(8)) as bench:
        for _ in range(8):
            with monkeypatch.context() as broken:
                broken.setattr(bench.binding, "page", refuse)
                with pytest.raises(UsageError, match="is not there"):
                    await bench.engine.put(bench.keys(20, 21), [0, 1])
        await fill(bench, range(8))
        assert await there(bench, range(8)) == [*range(8)]


@pytest.mark.asyncio
async def test_a_file_whose_name_is_not_durable_takes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(24, "too many open files")

    async with bench_at(tmp_path) as bench:
        with monkeypatch.context() as broken:
            broken.setattr(segments, "sync_folder", refuse)
            for _ in range(2):
                assert await bench.put(bench.keys(1), [0]) == [FAILED]
        assert await bench.put(bench.keys(1), [0]) == [STORED]


@pytest.mark.asyncio
async def test_slots_freed_ahead_come_back_when_a_put_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_AHEAD", 4)
    async with bench_at(tmp_path, capacity_bytes=capacity_for(8)) as bench:
        await fill(bench, range(12))  # full, and evicting
        foreign = [key._replace(fingerprint=b"f" * 32) for key in bench.keys(20, 21)]
        for _ in range(8):
            with pytest.raises(UsageError, match="is no page of pool"):
                await bench.engine.put(foreign, [0, 1])
        await fill(bench, range(30, 38))
        assert await there(bench, range(30, 38)) == [*range(30, 38)]
