"""Power cuts: whatever a disk has done of what was not yet synced, the store opens, whole.

Every write and barrier of a run is recorded. At each point the log is cut; of what no finished sync
covers, some is dropped, the rest done in any order and in part. What was acknowledged must be there.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from asynchicache.backends.file import segments
from asynchicache.backends.file import store as stores
from asynchicache.backends.file.budget import Budget
from asynchicache.backends.file.folder import MANIFEST, parse
from asynchicache.backends.file.index import PageIndex
from asynchicache.backends.file.store import PoolStore
from asynchicache.backends.file.verify import verify_store
from asynchicache.testing.backends import PoolUnderTest
from soaking import first
from storage.file_stores import SLOT_BYTES, bench_at, capacity_for
from storage.power_cuts import DiskLog

PAGES = 48


async def work(bench: PoolUnderTest, log: DiskLog, chance: random.Random, steps: int) -> None:
    """Puts side by side, deletes, pages evicted; before each step the log hears which pages are there."""
    keys = bench.keys(*range(PAGES))
    for _ in range(steps):
        batches = [chance.sample(keys, chance.randint(1, 9)) for _ in range(3)]
        found = await bench.engine.exists(keys)
        there = [key.digest for key, bit in zip(keys, found, strict=True) if bit]
        log.promise(there, [key.digest for batch in batches for key in batch])
        calls = [
            bench.put(batch, range(16 * lane, 16 * lane + len(batch))) for lane, batch in enumerate(batches)
        ]
        if chance.random() < 0.4:
            calls.append(bench.engine.delete(chance.sample(keys, 4)))
        await asyncio.gather(*calls)


def watch_index(log: DiskLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the log of every page that the index forgets."""

    def watched(name: str) -> Callable[..., object]:
        real = getattr(PageIndex, name)

        def forget(index: PageIndex, *arguments: object) -> object:
            before = {page.digest for page in index.in_order()}
            answer = real(index, *arguments)
            log.give_up(before - {page.digest for page in index.in_order()})
            return answer

        return forget

    for name in ("evict", "remove", "forget", "truncate", "clear"):
        monkeypatch.setattr(PageIndex, name, watched(name))


async def record(
    folder: Path, there: frozenset[bytes], monkeypatch: pytest.MonkeyPatch, seed: int, steps: int
) -> DiskLog:
    """Run on a store that holds these pages, and that the power may have cut before."""
    log = DiskLog(folder)
    log.promise(there, ())
    capacity = capacity_for(random.Random(seed).choice([20, 30, 64]))
    with log.recording(monkeypatch), monkeypatch.context() as watching:
        watch_index(log, watching)
        watching.setattr(stores, "_AHEAD", 4)
        watching.setattr(stores, "_LEAST_AHEAD", 0)
        watching.setattr(segments, "_LONG_BYTES", (2 + seed % 2 * 1000) * SLOT_BYTES)  # who writes pages
        async with bench_at(folder, capacity_bytes=capacity) as bench:
            await work(bench, log, random.Random(seed), steps)
    return log


def served(image: Path) -> frozenset[bytes]:
    """Pages that a store opened on the image serves, each of which was read and checked before."""
    report = verify_store(image)
    assert (report.corrupt, report.problems) == (0, [])
    (folder,) = image.glob("kv-*")
    manifest = parse((folder / MANIFEST).read_bytes(), folder)
    store = PoolStore(folder, manifest, Budget(None))
    try:
        found = frozenset(page.digest for page in store.index.in_order())
    finally:
        store.close()
    assert len(found) == report.pages
    assert store.unfinished == report.unfinished
    return found


async def try_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, steps: int, every: int
) -> int:
    """Record a run, cut it before every so many requests, and then a second run on one of the cuts.

    Returns:
        How many cuts that made.
    """
    store = tmp_path / "store"
    async with bench_at(store) as bench:
        pages = frozenset(key.digest for key in bench.keys(*range(PAGES)))
    cuts, there = 0, frozenset[bytes]()
    for run in range(2):
        before, image, again = (tmp_path / f"{name}-{run}" for name in ("before", "image", "again"))
        shutil.copytree(store, before)
        log = await record(store, there, monkeypatch, seed + 1000 * run, steps)
        points = range(seed % every, len(log.requests) + 1, every)
        go_on = points[len(points) * 2 // 3]
        for cut in points:
            shutil.copytree(before, image)
            log.image(cut, random.Random(f"{seed} {run} {cut}"), image)
            if cut == go_on:
                shutil.copytree(image, again)
            found = served(image)
            there = found if cut == go_on else there
            assert log.kept_at(cut) <= found, f"seed {seed}: lost before request {cut}"
            assert not log.gone_at(cut, pages) & found, f"seed {seed}: back before request {cut}"
            shutil.rmtree(image)
        store, cuts = again, cuts + len(points)
    return cuts


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", first(2, range(4)))
async def test_a_power_cut_loses_nothing_and_tears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    assert await try_seed(tmp_path, monkeypatch, seed, steps=8, every=4) > 30


@pytest.mark.soak
@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(100, 112))
async def test_every_power_cut_of_long_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    await try_seed(tmp_path, monkeypatch, seed, steps=40, every=1)
