"""What a put that is refused leaves behind in a file store: no slot is lost, and no page in doubt."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asynchicache.backends.file import segments, store
from asynchicache.backends.file.verify import verify_store
from asynchicache.errors import UsageError
from asynchicache.types import Outcome
from storage.file_stores import (
    backend_at,
    bench_at,
    capacity_for,
    fill,
    open_bench,
    pool_bytes,
    size_of,
    there,
)

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
    monkeypatch.setattr(store, "_LEAST_AHEAD", 0)
    async with bench_at(tmp_path, capacity_bytes=capacity_for(8)) as bench:
        await fill(bench, range(12))  # full, and evicting
        foreign = [key._replace(fingerprint=b"f" * 32) for key in bench.keys(20, 21)]
        for _ in range(8):
            with pytest.raises(UsageError, match="is no page of pool"):
                await bench.engine.put(foreign, [0, 1])
        await fill(bench, range(30, 38))
        assert await there(bench, range(30, 38)) == [*range(30, 38)]


def refusing(call: Callable[..., Any], after: int) -> Callable[..., Any]:
    """A call of the system that is made so many times, and refused from then on."""
    left = iter(range(after))

    def sometimes(*arguments: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise OSError(errno.EPERM, "not permitted")
        return call(*arguments, **options)

    return sometimes


@pytest.mark.asyncio
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize(("owner", "call"), [(Path, "unlink"), (os, "ftruncate")])
async def test_a_pool_whose_files_cannot_be_cut_keeps_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, after: int
) -> None:
    """Another pool wants room, and the system lets this one give back but a part of what it could."""
    monkeypatch.setattr(segments, "_MAX_SLOTS", 64)
    limit = capacity_for(320)
    async with backend_at(tmp_path, capacity_bytes=limit) as backend:
        rich, poor = await open_bench(backend), await open_bench(backend, "mamba")
        await fill(rich, range(320))
        with monkeypatch.context() as broken:
            broken.setattr(owner, call, refusing(getattr(owner, call), after))
            await fill(poor, range(150))
        for round_ in range(1, 4):  # all slots that either has are used
            await fill(rich, range(1000 * round_, 1000 * round_ + 320))
            await fill(poor, range(1000 * round_, 1000 * round_ + 320))
        kept = [await there(bench, range(3000, 3320)) for bench in (rich, poor)]
        assert kept[0]
        for bench, pages in zip((rich, poor), kept, strict=True):
            for start in range(0, len(pages), 64):
                some = pages[start : start + 64]
                assert set(await bench.get(bench.keys(*some), range(len(some)))) == {Outcome.HIT}
        assert pool_bytes(len(kept[0])) + pool_bytes(len(kept[1])) <= size_of(tmp_path) <= limit

    report = verify_store(tmp_path)
    assert (report.ok, report.pages) == (True, sum(map(len, kept)))
    async with backend_at(tmp_path, capacity_bytes=limit) as backend:
        for pool, pages in zip(("kv", "mamba"), kept, strict=True):
            assert await there(await open_bench(backend, pool), range(3000, 3320)) == pages
