"""How pools share the bytes of a folder: who gives way, and when nobody does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from asynchicache.backends.file.budget import FIXED_BYTES, Budget
from storage.file_stores import backend_at, capacity_for, fill, open_bench, size_of, there


class _Held:
    """A pool of a folder, which cuts its files to the byte."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> int:
        self.nbytes -= nbytes
        return nbytes


def test_nobody_loses_pages_for_a_pool_that_would_have_no_page_by_it() -> None:
    budget, rich, poor = Budget(FIXED_BYTES + 100), _Held(100), _Held(1)
    for holder in (rich, poor, _Held(0)):
        budget.pool_opened(Path(str(id(holder))), holder)
    share = (FIXED_BYTES + 100) // 3

    assert budget.grant(poor, 2 * share, 2 * share) == 0
    assert rich.nbytes == 100


def test_a_page_larger_than_an_equal_share_has_its_room_once() -> None:
    budget, rich, poor = Budget(FIXED_BYTES + 12_000), _Held(12_000), _Held(0)
    for number in range(4):
        budget.pool_opened(Path(str(number)), _Held(0))
    budget.pool_opened(Path("rich"), rich)
    budget.pool_opened(Path("poor"), poor)

    assert budget.grant(poor, 4 * 5000, 5000) == 5000
    assert rich.nbytes == 7000
    poor.nbytes = 5000
    assert budget.grant(poor, 5000, 5000) == 0


@pytest.mark.parametrize("bound", [{}, {"capacity_bytes": 1 << 30}, {"capacity_bytes": {"kv": 1 << 30}}])
@pytest.mark.asyncio
async def test_files_do_not_grow_into_the_share_that_the_disk_keeps(
    tmp_path: Path,
    bound: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 10 MB, 2 MB stay free; others have taken 6.9. Then pages replace the oldest, which is said once."""
    taken = 6_900_000

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_frsize=1, f_blocks=10_000_000, f_bavail=10_000_000 - taken - size_of(path))

    monkeypatch.setattr(os, "statvfs", statvfs)
    async with backend_at(tmp_path, keep_free=0.2, **bound) as backend:
        kv, mamba = await open_bench(backend, "kv"), await open_bench(backend, "mamba")
        await fill(kv, range(200))
        assert (await there(kv, range(200)))[-1] == 199
        await fill(mamba, range(200))  # takes its share of the room from the other pool
        assert statvfs(tmp_path).f_bavail >= 2_000_000
        for bench in (kv, mamba):
            assert 0 < len(await there(bench, range(200))) < 200
        assert caplog.text.count("0.2 of the disk is to stay free") == 1
        taken = 0
        await fill(kv, range(200))
        assert await there(kv, range(200)) == [*range(200)]


@pytest.mark.asyncio
async def test_a_folders_bound_that_was_lowered_holds_after_reopening(tmp_path: Path) -> None:
    """Pools that are not open give way first; a bound that is kept costs nobody a page."""
    async with backend_at(tmp_path) as backend:
        for pool, count in (("kv", 40), ("mamba", 3)):
            await fill(await open_bench(backend, pool), range(count))
    limit = size_of(tmp_path)
    for _ in range(2):
        async with backend_at(tmp_path, capacity_bytes=limit) as backend:
            for pool, count in (("mamba", 3), ("kv", 40)):
                assert await there(await open_bench(backend, pool), range(count)) == [*range(count)]

    limit = capacity_for(10)
    async with backend_at(tmp_path, capacity_bytes=limit) as backend:
        bench = await open_bench(backend, "kv")
        kept = await there(bench, range(40))
        assert kept == [*range(len(kept))]
        assert len(kept) in (9, 10)
        await fill(bench, range(50, 60))
        assert size_of(tmp_path) <= limit
        assert await there(await open_bench(backend, "mamba"), range(3)) == []
