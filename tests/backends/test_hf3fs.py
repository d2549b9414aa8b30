"""The 3FS engine by system calls: evictions under a reader, dead services, damaged files, who writes what.

More than 400 lines: each case meets the same engine and service with one more thing that goes wrong.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asynchicache.backends.hf3fs.backend import open_backend
from asynchicache.backends.hf3fs.datafile import Frame
from asynchicache.backends.hf3fs.posix import PosixPath, adjacent
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.types import Outcome
from engines import Server
from storage.hf3fs_names import (
    FRAME_BYTES,
    PAGE_BYTES,
    Clock,
    backend_at,
    bench_at,
    names_here,
    names_server,
    open_bench,
)
from storage.short_reads import Cuts

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CORRUPT, FAILED, REJECTED = Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[str]:
    """One folder of names for all: every test has weights of its own."""
    with names_here(tmp_path_factory.mktemp("metadata"), clock) as url:
        yield url


def open_files() -> set[str]:
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()}


def pages_file(path: Path) -> Path:
    """The one file of pages in a folder."""
    (found,) = path.glob("*.pages")
    return found


class Gate:
    """A data path that stops before it moves bytes, until a test lets it go on."""

    def __init__(self, bench: PoolUnderTest, method: str) -> None:
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._data: PosixPath = bench.engine._data  # type: ignore[attr-defined]
        self._move: Callable[[Sequence[Frame]], list[Outcome]] = getattr(self._data, method)
        self._method = method
        setattr(self._data, method, self._wait_and_move)
        self._goes_on = asyncio.Event()

    def open(self) -> None:
        setattr(self._data, self._method, self._move)
        self._goes_on.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def _wait_and_move(self, frames: Sequence[Frame]) -> list[Outcome]:
        asyncio.run_coroutine_threadsafe(self._pass(), self._loop).result()
        return self._move(frames)

    async def _pass(self) -> None:
        self.reached.set()
        await self._goes_on.wait()


@pytest.mark.asyncio
async def test_neighbours_in_the_file_move_in_one_call(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(name: str, call: Callable[..., int]) -> Callable[..., int]:
        return lambda *given: calls.append(name) or call(*given)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    async with bench_at(tmp_path / "pages", url) as bench:
        keys = bench.keys(*range(16))
        assert await bench.put(keys, range(16)) == [STORED] * 16
        assert await bench.get(keys[::-1], range(16, 32)) == [HIT] * 16

    assert calls == ["pwritev", "preadv"]


@pytest.mark.asyncio
async def test_the_file_is_preallocated_and_stays_in_its_bound(tmp_path: Path, url: str) -> None:
    async with bench_at(tmp_path / "pages", url, capacity_bytes=10 * FRAME_BYTES) as bench:
        size = pages_file(tmp_path / "pages").stat().st_size
        for start in range(0, 60, 6):
            names = range(start, start + 6)
            assert await bench.put(bench.keys(*names), range(6)) == [STORED] * 6
            assert await bench.get(bench.keys(*names), range(6, 12)) == [HIT] * 6

        assert size == 10 * FRAME_BYTES
        assert pages_file(tmp_path / "pages").stat().st_size == size
        assert sum(await bench.engine.exists(bench.keys(*range(60)))) == 10


@pytest.mark.asyncio
async def test_a_pool_has_its_share_of_the_capacity_and_one_page_at_least(tmp_path: Path, url: str) -> None:
    options = {"capacity_bytes": 10 * FRAME_BYTES, "fractions": {"mamba": 0.5, "swa": 0.001}}
    async with backend_at(tmp_path / "pages", url, **options) as backend:
        for pool in ("kv", "mamba", "swa"):
            await open_bench(backend, pool)

    sizes = {path.suffixes[-2]: path.stat().st_size for path in (tmp_path / "pages").glob("*.pages")}
    assert sizes == {".kv": 10 * FRAME_BYTES, ".mamba": 5 * FRAME_BYTES, ".swa": FRAME_BYTES}


@pytest.mark.asyncio
async def test_a_page_that_is_read_is_not_evicted(tmp_path: Path, url: str) -> None:
    async with bench_at(tmp_path / "pages", url, capacity_bytes=2 * FRAME_BYTES) as bench:
        await bench.put(bench.keys(1, 2), [0, 1])
        with Gate(bench, "read") as gate:
            reading = asyncio.create_task(bench.get(bench.keys(1), [5]))
            await gate.reached.wait()

            assert await bench.put(bench.keys(3, 4), [2, 3]) == [STORED, REJECTED]

        assert await reading == [HIT]
        assert await bench.get(bench.keys(1, 2, 3), [6, 7, 8]) == [HIT, MISS, HIT]


@pytest.mark.asyncio
async def test_a_reader_whose_lease_ended_gets_a_miss_and_harms_nobody(
    tmp_path: Path, url: str, clock: Clock
) -> None:
    async with bench_at(tmp_path / "pages", url, capacity_bytes=2 * FRAME_BYTES) as bench:
        await bench.put(bench.keys(1, 2), [0, 1])
        with Gate(bench, "read") as gate:
            reading = asyncio.create_task(bench.get(bench.keys(1, 2), [5, 6]))
            await gate.reached.wait()
            clock.time += 60
            assert await bench.put(bench.keys(3, 4), [2, 3]) == [STORED] * 2  # into both slots

        assert await reading == [MISS, MISS]
        assert await bench.get(bench.keys(3, 4), [7, 8]) == [HIT, HIT]
        assert bench.engine.corrupt == 0  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_a_writer_whose_lease_ended_makes_nothing_visible_and_no_wrong_bytes(
    tmp_path: Path, url: str, clock: Clock
) -> None:
    async with bench_at(tmp_path / "pages", url, capacity_bytes=FRAME_BYTES) as bench:
        with Gate(bench, "write") as gate:
            late = asyncio.create_task(bench.put(bench.keys(1), [0]))
            await gate.reached.wait()
            gate.reached.clear()
            clock.time += 60
            taken = asyncio.create_task(bench.put(bench.keys(2), [1]))
            await gate.reached.wait()  # both write to one slot

        assert sorted([*await late, *await taken], key=str) in ([FAILED, STORED], [FAILED, FAILED])
        assert set(await bench.get(bench.keys(1, 2), [5, 6])) <= {HIT, MISS, CORRUPT}
        assert await bench.put(bench.keys(3), [0]) == [STORED]
        assert await bench.get(bench.keys(3), [6]) == [HIT]


@pytest.mark.asyncio
async def test_a_damaged_page_is_dropped_once(tmp_path: Path, url: str) -> None:
    async with bench_at(tmp_path / "pages", url) as bench:
        await bench.put(bench.keys(1, 2, 3), [0, 1, 2])
        with pages_file(tmp_path / "pages").open("r+b") as file:
            file.seek(FRAME_BYTES + HEADER_BYTES + 77)
            file.write(b"!")

        assert await bench.get(bench.keys(1, 2, 3), [4, 5, 6]) == [HIT, CORRUPT, HIT]
        assert await bench.get(bench.keys(1, 2, 3), [4, 5, 6]) == [HIT, MISS, HIT]
        assert await bench.put(bench.keys(2), [0]) == [STORED]
        assert bench.engine.corrupt == 1  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_holes_and_a_file_that_was_cut_are_misses(tmp_path: Path, url: str) -> None:
    async with bench_at(tmp_path / "pages", url) as bench:
        await bench.put(bench.keys(*range(6)), range(6))
        file = pages_file(tmp_path / "pages")
        content = file.read_bytes()[: 6 * FRAME_BYTES]
        file.write_bytes(content[:FRAME_BYTES])  # cut, and
        os.truncate(file, 3 * FRAME_BYTES + 100)  # grown again: zeros, then the end inside a page

        assert await bench.get(bench.keys(*range(6)), range(6, 12)) == [HIT] + [MISS] * 5
        assert list(await bench.engine.exists(bench.keys(*range(6)))) == [1, 0, 0, 0, 0, 0]
        assert await bench.put(bench.keys(5), [5]) == [STORED]


@pytest.mark.asyncio
async def test_ranks_share_what_is_replicated_and_one_of_them_writes_it(tmp_path: Path, url: str) -> None:
    pages = tmp_path / "pages"
    async with backend_at(pages, url) as writer, backend_at(pages, url, replicated_writer=False) as other:
        ranks = list(enumerate((writer, other)))
        weights = str(tmp_path)
        benches = [await open_bench(rank, "kv", weights=weights) for _, rank in ranks]
        states = [
            await open_bench(rank, "mamba", weights=weights, shard=f"{number}/2") for number, rank in ranks
        ]
        keys = benches[0].keys(1, 2)
        await benches[0].put(keys[:1], [0])

        assert await benches[1].put(keys, [0, 1]) == [EXISTS, REJECTED]
        assert await benches[1].get(keys, [4, 5]) == [HIT, MISS]
        for bench in states:
            assert await bench.put(bench.keys(1), [0]) == [STORED]
        for bench in states:
            assert await bench.get(bench.keys(1), [5]) == [HIT]

    names = sorted(path.name.partition(".")[2] for path in pages.glob("*.pages"))
    assert names == ["kv.pages", "mamba.0_2.pages", "mamba.1_2.pages"]


@pytest.mark.asyncio
async def test_shards_that_read_alike_have_files_of_their_own(tmp_path: Path, url: str) -> None:
    async with backend_at(tmp_path / "pages", url) as backend:
        benches = [await open_bench(backend, weights="w1", shard=shard) for shard in ("1/2", "1-2")]
        await benches[0].put(benches[0].keys(1), [0])

        assert await benches[1].get(benches[1].keys(1), [0]) == [MISS]


@pytest.mark.asyncio
async def test_clear_stays_in_its_pool(tmp_path: Path, url: str) -> None:
    async with backend_at(tmp_path / "pages", url) as backend:
        kv, mamba = await open_bench(backend), await open_bench(backend, "mamba")
        await kv.put(kv.keys(1, 2), [0, 1])
        await mamba.put(mamba.keys(1), [0])

        assert await kv.engine.clear() == 2  # type: ignore[attr-defined]

        assert await kv.get(kv.keys(1, 2), [4, 5]) == [MISS, MISS]
        assert await mamba.get(mamba.keys(1), [4]) == [HIT]


@pytest.mark.asyncio
async def test_writes_that_fail_give_back_their_slots_and_no_others(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = str(tmp_path)
    async with bench_at(tmp_path / "pages", url, weights=weights, capacity_bytes=4 * FRAME_BYTES) as bench:
        await bench.put(bench.keys(1), [0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", partial(_no_space, os.pwritev))
            assert await bench.put(bench.keys(1, 2, 3), [0, 1, 2]) == [EXISTS, REJECTED, REJECTED]
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", _broken)
            assert await bench.put(bench.keys(2, 3), [1, 2]) == [FAILED] * 2

        assert await bench.get(bench.keys(1, 2, 3), [4, 5, 6]) == [HIT, MISS, MISS]
        assert await bench.put(bench.keys(2), [1]) == [FAILED]  # until it is opened again
    async with bench_at(tmp_path / "pages", url, weights=weights) as bench:
        assert await bench.put(bench.keys(2, 3, 4), [1, 2, 3]) == [STORED] * 3
        assert await bench.get(bench.keys(1), [4]) == [HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize(("lost", "outcome", "syncs"), [(True, FAILED, 1), (False, STORED, 2)])
async def test_who_writes_while_the_disk_is_waited_for_learns_what_is_lost_and_waits_too(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, lost: bool, outcome: Outcome, syncs: int
) -> None:
    """Linux tells an open file of a lost write once: a call that ends beside that one is told nothing."""
    real, writes, synced = os.pwritev, count(), []
    syncing, both_written = threading.Event(), threading.Event()

    def write(*given: Any) -> int:
        second = next(writes) == 1
        if second:
            syncing.wait(60)
        done = real(*given)
        if second:
            both_written.set()
        return done

    def sync(descriptor: int) -> None:
        synced.append(descriptor)
        syncing.set()
        both_written.wait(60)
        if lost and len(synced) == 1:
            raise OSError(5, os.strerror(5))

    weights = str(tmp_path)
    async with bench_at(tmp_path / "pages", url, weights=weights, capacity_bytes=4 * FRAME_BYTES) as bench:
        monkeypatch.setattr(os, "pwritev", write)
        monkeypatch.setattr(os, "fdatasync", sync)
        puts = [bench.put(bench.keys(page), [page]) for page in (1, 2)]
        assert await asyncio.gather(*puts) == [[outcome], [outcome]]
    assert len(synced) == syncs


@pytest.mark.asyncio
async def test_o_direct_is_refused_to_two_threads_at_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = os.preadv, iter(range(2))
    refused, tried_again = threading.Event(), threading.Event()

    def picky(*given: Any) -> int:
        call = next(refusals, None)
        if call is None:
            tried_again.set()
            return real(*given)
        if call == 0:
            refused.wait(60)  # the other is on its way
        else:
            refused.set()
            tried_again.wait(60)  # the first has found out by now
        raise OSError(22, "no O_DIRECT")

    async with bench_at(tmp_path / "pages", url, weights=str(tmp_path)) as bench:
        keys = bench.keys(1, 2)
        assert await bench.put(keys, [0, 1]) == [STORED] * 2
        monkeypatch.setattr(os, "preadv", picky)
        answers = await asyncio.gather(bench.get(keys[:1], [2]), bench.get(keys[1:], [3]))
        assert answers == [[HIT], [HIT]]


@pytest.mark.asyncio
@pytest.mark.parametrize("most", [4096, FRAME_BYTES - 4096])
async def test_a_read_that_is_cut_short_is_read_on(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    async with bench_at(tmp_path / "pages", url, weights=f"{tmp_path}") as bench:
        keys = bench.keys(*range(4))
        await bench.put(keys, range(4))
        with monkeypatch.context() as cutting:
            cuts = Cuts(most)
            cutting.setattr(os, "preadv", cuts)
            assert await bench.get(keys, range(4, 8)) == [HIT] * 4
        assert cuts.cut > 0
        assert await bench.get(keys, range(4, 8)) == [HIT] * 4


@pytest.mark.asyncio
async def test_a_page_that_does_not_come_is_not_forgotten(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_at(tmp_path / "pages", url, weights=str(tmp_path)) as bench:
        await bench.put(bench.keys(1), [0])
        with monkeypatch.context() as cutting:
            cutting.setattr(os, "preadv", Cuts(0))
            assert await bench.get(bench.keys(1), [1]) == [FAILED]
        assert await bench.get(bench.keys(1), [1]) == [HIT]


def _no_space(write: Callable[..., int], *given: object) -> int:
    raise OSError(28, os.strerror(28))


def _broken(descriptor: int) -> None:
    raise OSError(5, os.strerror(5))


@pytest.mark.asyncio
async def test_memory_that_is_not_aligned_goes_through_the_kernels_cache(tmp_path: Path, url: str) -> None:
    class Crooked(SlotBinding):
        def __init__(self) -> None:
            slab = slab_of("kv", PAGE_BYTES, 8)
            super().__init__(slab, fingerprint_of("w1"))
            room = memoryview(bytearray(8 * 8192 + 1))[1:]
            self.page = lambda slot: room[slot * 8192 : (slot + 1) * 8192]

    async with backend_at(tmp_path / "pages", url) as backend:
        binding = Crooked()
        bench = PoolUnderTest(await backend.open_pool(binding), binding)

        assert await bench.put(bench.keys(1, 2), [0, 1]) == [STORED] * 2
        assert await bench.get(bench.keys(1, 2), [2, 3]) == [HIT] * 2


def test_runs_are_cut_where_a_slot_does_not_follow() -> None:
    frames = [Frame(slot, 0) for slot in (5, 3, 4, 9, 10, 11)]

    assert list(adjacent(frames, 2)) == [[1, 2], [0], [3, 4], [5]]


# A server of names that dies, and comes back.


@asynccontextmanager
async def served(tmp_path: Path, **options: object) -> AsyncIterator[tuple[PoolUnderTest, Server]]:
    with names_server(tmp_path / "metadata") as server:
        async with bench_at(tmp_path / "pages", server.url, **options) as bench:
            yield bench, server


@pytest.mark.asyncio
async def test_without_its_names_every_call_fails_and_after_it_works_again(tmp_path: Path) -> None:
    async with served(tmp_path) as (bench, server):
        keys = bench.keys(1, 2)
        await bench.put(keys[:1], [0])
        server.kill()

        assert await bench.get(keys, [4, 5]) == [FAILED] * 2
        assert await bench.put(keys, [0, 1]) == [FAILED] * 2
        assert await bench.engine.delete(keys) == [FAILED] * 2
        with pytest.raises(OSError, match="exists"):
            await bench.engine.exists(keys)
        server.start()

        assert await bench.get(keys, [4, 5]) == [HIT, MISS]
        assert await bench.put(keys, [0, 1]) == [EXISTS, STORED]


@pytest.mark.asyncio
async def test_a_server_of_names_that_dies_during_a_write_makes_it_fail_or_be_stored(tmp_path: Path) -> None:
    async with served(tmp_path) as (bench, server):
        with Gate(bench, "write") as gate:
            putting = asyncio.create_task(bench.put(bench.keys(1, 2), [0, 1]))
            await gate.reached.wait()
            server.kill()
        assert await putting == [FAILED] * 2
        server.start()

        assert await bench.get(bench.keys(1, 2), [4, 5]) == [MISS] * 2
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [STORED] * 2


@pytest.mark.asyncio
async def test_files_are_closed_though_the_threads_are_gone(tmp_path: Path, url: str) -> None:
    port = AsyncioPort(threads=1, seed=0)
    backend = open_backend({"path": tmp_path, "metadata": str(url), "capacity_bytes": 1 << 20}, port)
    await open_bench(backend)
    assert str(pages_file(tmp_path)) in open_files()
    await port.aclose()

    await backend.aclose()
    assert str(pages_file(tmp_path)) not in open_files()


@pytest.mark.asyncio
async def test_killed_again_and_again_it_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    chance = random.Random(7)
    acknowledged: set[int] = set()
    enough = asyncio.Event()

    async def write(bench: PoolUnderTest, first: int, goal: int) -> None:
        for start in range(first, first + 100, 4):
            names = list(range(start, start + 4))
            slots = [name % 32 for name in names]
            outcomes = await bench.put(bench.keys(*names), slots)
            acknowledged.update(n for n, outcome in zip(names, outcomes, strict=True) if outcome is STORED)
            if start - first >= goal:
                enough.set()

    async with served(tmp_path, capacity_bytes=1000 * FRAME_BYTES) as (bench, server):
        for first in range(0, 300, 100):
            enough.clear()
            writing = asyncio.create_task(write(bench, first, chance.randrange(10, 80)))
            await enough.wait()
            server.kill()
            await asyncio.to_thread(server.start)
            await writing

        names = sorted(acknowledged)
        assert len(names) > 30
        for start in range(0, len(names), 32):
            part = names[start : start + 32]
            assert await bench.get(bench.keys(*part), range(len(part))) == [HIT] * len(part)
