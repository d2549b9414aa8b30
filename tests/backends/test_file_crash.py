"""Writers that are killed, and disks that fill up, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynchicache.types import Outcome
from storage.file_stores import bench_at, capacity_for, other_process

HIT, MISS, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.CORRUPT

WRITE_FOREVER = """
import asyncio, sys
from storage.file_stores import bench_at

async def worker(bench, lane):
    for batch in range(lane, 1_000_000, 4):
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
from storage.file_stores import FRAME_BYTES, bench_at

async def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * FRAME_BYTES + 77,) * 2)
    async with bench_at(sys.argv[1]) as bench:
        for first in range(0, 24, 4):
            keys = bench.keys(*range(first, first + 4))
            print(*(outcome.name for outcome in await bench.put(keys, range(4))))
        print(*await bench.engine.exists(bench.keys(*range(24))))
        print(*(outcome.name for outcome in await bench.get(bench.keys(*range(14, 24)), range(10))))

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


def acknowledged_before_kill(path: Path, lines: int, options: str = "{}") -> list[int]:
    """Pages that a writer was told are stored, in order; it is killed after some lines."""
    with other_process(WRITE_FOREVER, path, options) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        told += writer.stdout.read().splitlines(keepends=True)
    return [int(word) for line in told if line.endswith("\n") for word in line.split()]


@pytest.mark.asyncio
@pytest.mark.parametrize("lines", [1, 7, 40])
async def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, lines: int) -> None:
    stored = acknowledged_before_kill(tmp_path, lines)
    assert len(stored) >= lines
    async with bench_at(tmp_path) as bench:
        for first in range(0, len(stored), 32):
            some = stored[first : first + 32]
            assert await bench.get(bench.keys(*some), range(len(some))) == [HIT] * len(some)

        # What was under way is whole, or it is not served; `Bench.get` compares the bytes.
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
    assert exists == " ".join(["0"] * 14 + ["1"] * 10)
    assert got == " ".join(["HIT"] * 10)
    assert "cannot grow: File too large" in errors
    async with bench_at(tmp_path) as bench:
        assert await bench.get(bench.keys(*range(14, 24)), range(10)) == [HIT] * 10


@pytest.mark.asyncio
async def test_a_disk_without_room_for_a_page_rejects(tmp_path: Path) -> None:
    with other_process(NO_ROOM, tmp_path) as process:
        output, _ = process.communicate()

    assert output == "REJECTED REJECTED\n"
