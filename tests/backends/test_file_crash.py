"""Writers that are killed, and disks that fill up, in processes of their own."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from asynchicache.backends.file.verify import verify_store
from asynchicache.types import Outcome
from storage.file_stores import bench_at, capacity_for, other_process, size_of

HIT, MISS, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.CORRUPT

WRITE_FOREVER = """
import asyncio, sys
from asynchicache.backends.file import segments
from storage.file_stores import SLOT_BYTES, bench_at

segments._LONG_BYTES = 4 * SLOT_BYTES

async def worker(bench, lane):
    for batch in range(int(sys.argv[3]) + lane, 100_000_000, 4):
        numbers = range(batch * 4, batch * 4 + 4)
        slots = range(lane * 4, lane * 4 + 4)
        outcomes = await bench.put(bench.keys(*numbers), slots)
        stored = [n for n, outcome in zip(numbers, outcomes) if outcome.name == "STORED"]
        print(*stored, flush=True)

async def main():
    async with bench_at(sys.argv[1], **eval(sys.argv[2])) as bench:
        await asyncio.gather(*(worker(bench, lane) for lane in range(4)))

asyncio.run(main())
"""

FILL = """
import asyncio, resource, sys
from storage.file_stores import bench_at, pool_bytes

async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (pool_bytes(10) + 77,) * 2)
    async with bench_at(sys.argv[1]) as bench:
        for first in range(0, 24, 4):
            keys = bench.keys(*range(first, first + 4))
            print(*(outcome.name for outcome in await bench.put(keys, range(4))))
        print(*await bench.engine.exists(bench.keys(*range(24))))
        print(*(outcome.name for outcome in await bench.get(bench.keys(12, 13, *range(16, 24)), range(10))))

asyncio.run(main())
"""

NO_ROOM = """
import asyncio, resource, sys
from storage.file_stores import bench_at

async def main():
    async with bench_at(sys.argv[1]) as bench:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        print(*(outcome.name for outcome in await bench.put(bench.keys(1, 2), [0, 1])))

asyncio.run(main())
"""


def acknowledged_before_kill(
    path: Path, lines: int, options: str = "{}", first: int = 0, delay: float = 0.0
) -> list[int]:
    """Pages that a writer was told are stored, in order; it is killed after some lines.

    Args:
        path: of the store.
        lines: how many.
        options: of the store, as code.
        first: number of its first batch of 4 pages.
        delay: seconds from the last of the lines to the kill, so that it may come anywhere in a write.
    """
    with other_process(WRITE_FOREVER, path, options, first) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(lines)]
        time.sleep(delay)
        writer.kill()
        told += writer.stdout.read().splitlines(keepends=True)
    return [int(word) for line in told if line.endswith("\n") for word in line.split()]


async def check_killed_again_and_again(path: Path, kills: int, seed: int) -> None:
    """A writer that fills a bounded store, killed at random instants, and started again on what is there."""
    chance = random.Random(seed)
    capacity = capacity_for(60)
    batch = 0
    for _ in range(kills):
        lines, delay = chance.randint(1, 60), chance.uniform(0, 0.003)
        options = f"{{'capacity_bytes': {capacity}}}"
        stored = acknowledged_before_kill(path, lines, options, batch, delay)
        report = verify_store(path)
        assert (report.corrupt, report.problems) == (0, [])
        assert size_of(path) <= capacity
        async with bench_at(path) as bench:
            # 60 slots; each of the 16 pages under way may have cost one of the oldest.
            last = stored[-40:]
            for start in range(0, len(last), 20):
                some = last[start : start + 20]
                assert await bench.get(bench.keys(*some), range(len(some))) == [HIT] * len(some)
        batch = max(stored) // 4 // 4 * 4 + 100  # further than anything that was under way


@pytest.mark.asyncio
async def test_a_writer_that_is_killed_again_and_again(tmp_path: Path) -> None:
    await check_killed_again_and_again(tmp_path, kills=4, seed=1)


@pytest.mark.soak
@pytest.mark.asyncio
async def test_a_writer_that_is_killed_at_200_instants(tmp_path: Path) -> None:
    await check_killed_again_and_again(tmp_path, kills=200, seed=2)


@pytest.mark.asyncio
@pytest.mark.parametrize("lines", [1, 7, 40])
async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, lines: int) -> None:
    stored = acknowledged_before_kill(tmp_path, lines)
    assert len(stored) >= lines
    async with bench_at(tmp_path) as bench:
        for first in range(0, len(stored), 32):
            some = stored[first : first + 32]
            assert await bench.get(bench.keys(*some), range(len(some))) == [HIT] * len(some)

        # What was under way is whole, or it is not served; `PoolUnderTest.get` compares the bytes.
        for first in range(0, max(stored) + 64, 32):
            outcomes = await bench.get(bench.keys(*range(first, first + 32)), range(32))
            assert set(outcomes) <= {HIT, MISS, CORRUPT}


@pytest.mark.asyncio
async def test_a_kill_while_slots_are_used_again_serves_no_torn_page(tmp_path: Path) -> None:
    options = f"{{'capacity_bytes': {capacity_for(40)}}}"
    stored = acknowledged_before_kill(tmp_path, 60, options)
    async with bench_at(tmp_path) as bench:
        known = list(range(max(stored) + 64))
        served: list[int] = []
        for first in range(0, len(known), 32):
            some = known[first : first + 32]
            outcomes = await bench.get(bench.keys(*some), range(len(some)))
            served += [number for number, outcome in zip(some, outcomes, strict=True) if outcome is HIT]

    # 40 slots; the 16 pages under way may each have cost one of the last that were stored.
    assert len(served) <= 40
    assert set(stored[-8:]) <= set(served)


@pytest.mark.asyncio
async def test_a_disk_that_fills_up_makes_the_store_evict(tmp_path: Path) -> None:
    with other_process(FILL, tmp_path) as process:
        output, errors = process.communicate()
    *puts, exists, got = output.splitlines()

    assert puts == ["STORED STORED STORED STORED"] * 6
    left = [12, 13, *range(16, 24)]  # of the path 12 to 15 the end went first
    assert exists == " ".join("1" if number in left else "0" for number in range(24))
    assert got == " ".join(["HIT"] * 10)
    assert "cannot grow: File too large" in errors
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(*left), range(10)) == [HIT] * 10


@pytest.mark.asyncio
async def test_a_disk_without_room_for_a_page_rejects(tmp_path: Path) -> None:
    with other_process(NO_ROOM, tmp_path) as process:
        output, _ = process.communicate()

    assert output == "REJECTED REJECTED\n"
