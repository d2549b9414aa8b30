"""A disk that refuses a file store room is asked again: after a while, or once something was given back."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asynchicache.backends.file import FileBackend, open_backend
from asynchicache.backends.file.segments import ASK_AGAIN_SECONDS
from asynchicache.ports import AsyncioPort
from asynchicache.storage.guard import GuardedPool
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome
from storage.file_stores import bench_at, capacity_for, fill, open_bench, there

STORED, REJECTED = Outcome.STORED, Outcome.REJECTED


class ManualPort(AsyncioPort):
    """The real port, but for a clock that stands still until it is moved."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


class Disk:
    """Refuses to preallocate for the files of one pool, while it is full; counts how often it is asked."""

    def __init__(self, pool: str) -> None:
        self.full = True
        self.asked = 0
        self._pool = pool
        self._fallocate = os.posix_fallocate
        self._statvfs = os.statvfs

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        if f"/{self._pool}-" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            self.asked += 1
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
        self._fallocate(descriptor, offset, length)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """What a disk says that refuses for want of room, and not for a quota."""
        found = list(self._statvfs(path))
        found[4] = 0 if self.full else found[4]
        return os.statvfs_result(found)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk("kv")
    monkeypatch.setattr(os, "posix_fallocate", disk.fallocate)
    return disk


@asynccontextmanager
async def opened(path: Path, **options: object) -> AsyncIterator[tuple[FileBackend, ManualPort]]:
    async with AsyncExitStack() as stack:
        port = ManualPort(threads=4, seed=0)
        stack.push_async_callback(port.aclose)
        backend = open_backend({"path": path, **options}, port)
        stack.push_async_callback(backend.aclose)
        yield backend, port


async def asks(disk: Disk, bench: PoolUnderTest, number: int) -> bool:
    """Whether the disk is asked when a page is put."""
    before = disk.asked
    await bench.put(bench.keys(number), [0])
    return disk.asked > before


@pytest.mark.asyncio
async def test_an_empty_pool_is_written_again_once_the_disk_has_room(tmp_path: Path, disk: Disk) -> None:
    async with opened(tmp_path) as (backend, port):
        bench = await open_bench(backend)
        guard = GuardedPool(bench.engine, bench.binding, port)
        assert not guard.statistics().full
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]
        assert guard.statistics().full

        disk.full = False
        port.seconds += ASK_AGAIN_SECONDS / 2
        asked = disk.asked
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]
        assert disk.asked == asked
        port.seconds += ASK_AGAIN_SECONDS / 2

        assert await bench.put(bench.keys(1), [0]) == [STORED]
        assert not guard.statistics().full


@pytest.mark.asyncio
async def test_a_full_disk_is_asked_as_soon_as_it_has_room(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    async with opened(tmp_path, keep_free=0) as (backend, _):
        bench = await open_bench(backend)
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]
        disk.full = False

        assert await bench.put(bench.keys(1), [0]) == [STORED]


@pytest.mark.asyncio
async def test_an_empty_pool_says_that_it_rejects_where_the_rest_of_the_disk_is_to_stay_free(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    async with opened(tmp_path, keep_free=0.1) as (backend, port):
        bench = await open_bench(backend)
        guard = GuardedPool(bench.engine, bench.binding, port)
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]
        assert guard.statistics().full

        disk.full = False
        assert await bench.put(bench.keys(1), [0]) == [STORED]
        assert not guard.statistics().full


@pytest.mark.asyncio
async def test_a_disk_that_stays_full_is_asked_at_a_bounded_rate(tmp_path: Path, disk: Disk) -> None:
    async with opened(tmp_path) as (backend, port):
        bench = await open_bench(backend)
        asked = []
        for number in range(20):
            asked.append(await asks(disk, bench, number))
            port.seconds += ASK_AGAIN_SECONDS / 4

        assert asked == [True, False, False, False] * 5


@pytest.mark.asyncio
async def test_a_pool_that_holds_pages_grows_again_too(tmp_path: Path, disk: Disk) -> None:
    async with opened(tmp_path) as (backend, port):
        bench = await open_bench(backend)
        disk.full = False
        await fill(bench, range(120))
        slots = 128
        disk.full = True
        await fill(bench, range(120, 160))
        assert len(await there(bench, range(160))) == slots
        disk.full = False
        port.seconds += ASK_AGAIN_SECONDS
        await fill(bench, range(160, 192))

        assert len(await there(bench, range(192))) == slots + 32


@pytest.mark.asyncio
async def test_it_is_asked_at_once_where_another_pool_gave_something_back(tmp_path: Path, disk: Disk) -> None:
    disk.full = False
    async with bench_at(tmp_path, capacity_bytes=capacity_for(64)) as old:
        await fill(old, range(64))
    disk.full = True
    async with opened(tmp_path, capacity_bytes=capacity_for(200)) as (backend, _):
        pages, states = await open_bench(backend, weights="w2"), await open_bench(backend, "mamba")
        assert await asks(disk, pages, 1)
        assert not await asks(disk, pages, 1)
        await fill(states, range(150))  # more than was free: the old pages give way

        assert await asks(disk, pages, 1)


@pytest.mark.asyncio
async def test_nobody_gives_way_for_a_pool_that_the_disk_refuses(tmp_path: Path, disk: Disk) -> None:
    async with opened(tmp_path, capacity_bytes=capacity_for(64)) as (backend, _):
        pages, states = await open_bench(backend), await open_bench(backend, "mamba")
        await pages.put(pages.keys(1), [0])
        await fill(states, range(64))
        kept = len(await there(states, range(64)))
        for number in range(10):
            await pages.put(pages.keys(number), [0])

        assert len(await there(states, range(64))) == kept
