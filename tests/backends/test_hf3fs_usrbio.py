"""The 3FS engine by rings, against a stand-in of `hf3fs_fuse.io` that does all that the real one may do.

More than 400 lines: each case sets the same rings, slots and stand-in against one more thing that goes wrong.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from uuid import uuid4

import pytest

from asynchicache.backends.hf3fs import open_backend, rings
from asynchicache.backends.hf3fs.usrbio import UsrbioPath
from asynchicache.errors import StorageError
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import AsyncioPort, Port
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import (
    BackendConformance,
    PoolUnderTest,
    TearingBinding,
    fingerprint_of,
    slab_of,
)
from asynchicache.types import Outcome
from storage.hf3fs_names import FRAME_BYTES, PAGE_BYTES, Clock, backend_at, bench_at, names_here
from storage.usrbio_standin import Behaviour, Usrbio

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
FAILED, REJECTED = Outcome.FAILED, Outcome.REJECTED


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[str]:
    """One folder of names for all: every test has weights of its own."""
    with names_here(tmp_path_factory.mktemp("metadata"), clock) as url:
        yield url


@pytest.fixture
def usrbio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Usrbio]:
    (tmp_path / "mount").mkdir()
    usrbio = Usrbio(tmp_path / "mount", seed=1)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", usrbio.module())
    yield usrbio
    usrbio.finish_late()
    assert usrbio.faults == []


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    """No test waits for `io_seconds`: the stand-in's time is up at once."""
    return {"path": tmp_path / "mount" / "pages", "io": "usrbio", "entries": 4}


def path_of(bench: PoolUnderTest) -> UsrbioPath:
    data: UsrbioPath = bench.engine._data  # type: ignore[attr-defined]
    return data


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_results_in_any_order_come_to_their_own_pages(
    usrbio: Usrbio, options: dict[str, object], url: str, seed: int
) -> None:
    usrbio.behaviour.early = seed / 2  # I/O before it is submitted: never, sometimes, always
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(20))

        assert await bench.put(keys, range(20)) == [STORED] * 20
        assert await bench.get(keys, range(40, 60)) == [HIT] * 20
        assert await bench.get(keys[::-3], range(20, 27)) == [HIT] * 7


@pytest.mark.asyncio
async def test_an_io_that_fails_is_one_page_that_failed(
    usrbio: Usrbio, options: dict[str, object], url: str
) -> None:
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(30))
        usrbio.behaviour.fails = 0.3
        stored = await bench.put(keys, range(30))
        assert set(stored) == {STORED, FAILED}
        found = await bench.get(keys, range(30, 60))
        assert set(found) == {HIT, MISS, FAILED}
        usrbio.behaviour.fails = 0

        again = [HIT if outcome is STORED else MISS for outcome in stored]
        assert await bench.get(keys, range(30, 60)) == again
        assert set(await bench.put(keys, range(30))) == {STORED, EXISTS}
        assert path_of(bench).quarantined == 0


@pytest.mark.asyncio
async def test_short_reads_and_holes_are_misses(usrbio: Usrbio, options: dict[str, object], url: str) -> None:
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(12))
        await bench.put(keys, range(12))
        with path_of(bench)._file.path.open("r+b") as pages:
            pages.write(bytes(FRAME_BYTES))  # a hole reads as zeros
        usrbio.behaviour.short = 0.5

        found = await bench.get(keys, range(20, 32))
        usrbio.behaviour.short = 0

        assert found[0] is MISS
        assert set(found[1:]) == {HIT, MISS}
        assert await bench.get(keys, range(20, 32)) == found


@pytest.mark.asyncio
async def test_late_reads_meet_memory_that_nobody_uses(
    usrbio: Usrbio, options: dict[str, object], url: str
) -> None:
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(8))
        await bench.put(keys, range(8))
        usrbio.behaviour.stalls = 0.5
        found = await bench.get(keys, range(20, 28))
        assert set(found) == {HIT, FAILED}
        usrbio.behaviour.stalls = 0
        assert path_of(bench).quarantined > 0

        getting = asyncio.create_task(bench.get(keys, range(30, 38)))
        usrbio.finish_late()  # into the quarantined memory
        assert await getting == [HIT] * 8
        assert await bench.get(keys, range(20, 28)) == [HIT] * 8
        assert path_of(bench).quarantined == 0  # their results have come


@pytest.mark.asyncio
async def test_late_writes_meet_slots_that_nobody_has(
    usrbio: Usrbio, options: dict[str, object], url: str, clock: Clock
) -> None:
    async with bench_at(url=url, **options, capacity_bytes=12 * FRAME_BYTES) as bench:  # type: ignore[arg-type]
        usrbio.behaviour.stalls = 0.5
        first = await bench.put(bench.keys(*range(8)), range(8))
        usrbio.behaviour.stalls = 0
        lost = first.count(FAILED)
        assert lost
        # The slots of late writes are not given away: there is room for the others only.
        keys = bench.keys(*range(10, 22))
        assert (await bench.put(keys, range(12))).count(STORED) == 12 - lost
        there = [outcome is HIT for outcome in await bench.get(keys, range(20, 32))]
        usrbio.finish_late()

        assert [outcome is HIT for outcome in await bench.get(keys, range(20, 32))] == there
        clock.time += 60  # the leases end, and the slots return
        assert await bench.put(bench.keys(*range(30, 42)), range(12)) == [STORED] * 12
        assert await bench.get(bench.keys(*range(30, 42)), range(20, 32)) == [HIT] * 12


@pytest.mark.asyncio
async def test_too_much_quarantine_fails_at_once_and_ends(
    usrbio: Usrbio, options: dict[str, object], url: str
) -> None:
    async with bench_at(url=url, **options, workers=1) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(4))
        await bench.put(keys, range(4))
        usrbio.behaviour.stalls = 1
        for _ in range(5):
            assert await bench.get(keys, range(4)) == [FAILED] * 4
        rings = len(usrbio.rings)
        assert path_of(bench).quarantined == 2

        usrbio.behaviour.stalls = 0
        usrbio.finish_late()

        assert await bench.get(keys, range(4)) == [HIT] * 4
        assert len(usrbio.rings) == rings


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [errno.EBADF, errno.EACCES, errno.EINVAL, errno.EAGAIN])
async def test_what_prepare_refuses_fails_and_the_others_go_on(
    usrbio: Usrbio, options: dict[str, object], url: str, number: int
) -> None:
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(4))
        usrbio.behaviour.refuse = [0, number]
        full = number == errno.EAGAIN  # it is tried again when the ring has room
        assert await bench.put(keys, range(4)) == [STORED, STORED if full else FAILED, STORED, STORED]
        usrbio.behaviour.refuse = [number]
        again = await bench.get(keys, range(10, 14))

        assert again[0] is FAILED
        assert again[2:] == [HIT, HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["submit_fails", "wait_fails"])
async def test_a_ring_that_breaks_is_set_aside(
    usrbio: Usrbio, options: dict[str, object], url: str, call: str
) -> None:
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        keys = bench.keys(*range(4))
        setattr(usrbio.behaviour, call, [errno.EIO])
        outcomes = await bench.put(keys, range(4))
        assert outcomes == ([STORED] * 4 if call == "submit_fails" else [FAILED] * 4)

        assert set(await bench.put(bench.keys(*range(10, 14)), range(4))) == {STORED}
        assert await bench.get(bench.keys(*range(10, 14)), range(10, 14)) == [HIT] * 4


@pytest.mark.asyncio
async def test_calls_side_by_side_have_rings_of_their_own(
    usrbio: Usrbio, options: dict[str, object], url: str
) -> None:
    async with bench_at(url=url, **options, workers=3) as bench:  # type: ignore[arg-type]
        groups = [range(start, start + 6) for start in range(0, 36, 6)]
        await asyncio.gather(*(bench.put(bench.keys(*group), group) for group in groups))

        answers = await asyncio.gather(*(bench.get(bench.keys(*group), group) for group in groups))

        assert answers == [[HIT] * 6] * 6
        assert len(usrbio.rings) <= 6


@pytest.mark.asyncio
async def test_closing_with_io_under_way_leaves_its_memory_alone(
    usrbio: Usrbio, options: dict[str, object], url: str
) -> None:
    async with bench_at(url=url, **options) as bench:  # type: ignore[arg-type]
        await bench.put(bench.keys(*range(4)), range(4))
        usrbio.behaviour.stalls = 1
        assert await bench.get(bench.keys(*range(4)), range(4)) == [FAILED] * 4
    usrbio.behaviour.stalls = 0
    gc.collect()

    assert usrbio.registered  # the file stays open too: another's number would be written to
    usrbio.finish_late()


@pytest.mark.asyncio
async def test_no_room_for_shared_memory_is_said_when_the_pool_is_opened(
    usrbio: Usrbio, options: dict[str, object], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    names: list[str] = []

    class Recorded(SharedMemory):
        def __init__(self, *, create: bool, size: int) -> None:
            super().__init__(create=create, size=size)
            names.append(self.name)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(rings, "SharedMemory", Recorded)

    with pytest.raises(StorageError, match=r"no USRBIO rings at .*: .*No space left"):
        async with bench_at(url=url, **options):  # type: ignore[arg-type]
            pass

    (name,) = names
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)
    assert usrbio.registered == {}


# Without a copy.


class SharedSlab:
    """Slots of one pool in one shared memory: pages, then headers."""

    def __init__(self, slots: int, pool: str = "kv") -> None:
        self.layout = slab_of(pool, PAGE_BYTES, 1).layout
        self.shared_memory = SharedMemory(create=True, size=slots * FRAME_BYTES)
        self._headers = slots * self.layout.slot_bytes

    def page_offset(self, slot: int) -> int:
        return slot * self.layout.slot_bytes

    def header_offset(self, slot: int) -> int:
        return self._headers + slot * HEADER_BYTES

    def page(self, slot: int) -> memoryview:
        return self._view(self.page_offset(slot), self.layout.slot_bytes)

    def header(self, slot: int) -> memoryview:
        return self._view(self.header_offset(slot), HEADER_BYTES)

    def regions(self) -> tuple[memoryview, memoryview]:
        headers = self.shared_memory.size - self._headers
        return self._view(self._headers, headers), self._view(0, self._headers)

    def close(self) -> None:
        self.shared_memory.unlink()

    def _view(self, start: int, size: int) -> memoryview:
        assert self.shared_memory.buf is not None
        return self.shared_memory.buf[start : start + size]


class SharedBinding(TearingBinding):
    """A `backends.hf3fs.usrbio.SharedSlots`."""

    def __init__(self, slab: SharedSlab, weights: str, shard: str = "") -> None:
        super().__init__(slab, fingerprint_of(weights), shard)
        self.shared_memory = slab.shared_memory
        self.header_offset = slab.header_offset
        self.page_offset = slab.page_offset


@pytest.fixture
def shared() -> Iterator[SharedSlab]:
    slab = SharedSlab(64)
    yield slab
    slab.close()


@pytest.mark.asyncio
async def test_without_a_copy_3fs_moves_the_slots_themselves(
    usrbio: Usrbio, options: dict[str, object], url: str, shared: SharedSlab
) -> None:
    async with backend_at(url=url, **options, zero_copy=True) as backend:  # type: ignore[arg-type]
        binding = SharedBinding(shared, uuid4().hex)
        bench = PoolUnderTest(await backend.open_pool(binding), binding)
        keys = bench.keys(*range(10))

        assert await bench.put(keys, range(10)) == [STORED] * 10
        assert await bench.get(keys, range(20, 30)) == [HIT] * 10
        usrbio.behaviour.fails = 0.2
        assert {HIT, FAILED} == set(await bench.get(keys, range(20, 30)))


async def until_late(caplog: pytest.LogCaptureFixture) -> None:
    """Until the deadline of an I/O has passed."""
    while "I/Os take long" not in caplog.text:  # noqa: ASYNC110 - the thread tells nobody else
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_without_a_copy_a_call_keeps_its_slots_until_late_io_has_ended(
    usrbio: Usrbio,
    options: dict[str, object],
    url: str,
    shared: SharedSlab,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with backend_at(url=url, **options, zero_copy=True, io_seconds=0.01) as backend:  # type: ignore[arg-type]
        binding = SharedBinding(shared, uuid4().hex)
        bench = PoolUnderTest(await backend.open_pool(binding), binding)
        keys = bench.keys(*range(4))
        await bench.put(keys, range(4))
        usrbio.behaviour.stalls = 0.5
        reading = asyncio.create_task(bench.get(keys, range(20, 24)))
        await until_late(caplog)
        assert not reading.done()
        usrbio.behaviour.stalls = 0
        usrbio.finish_late()

        assert await reading == [HIT] * 4


@pytest.mark.asyncio
async def test_without_a_copy_closing_ends_a_call_that_would_wait_for_ever(
    usrbio: Usrbio,
    options: dict[str, object],
    url: str,
    shared: SharedSlab,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with backend_at(url=url, **options, zero_copy=True, io_seconds=0.01) as backend:  # type: ignore[arg-type]
        binding = SharedBinding(shared, uuid4().hex)
        bench = PoolUnderTest(await backend.open_pool(binding), binding)
        await bench.put(bench.keys(1), [0])
        usrbio.behaviour.stalls = 1
        reading = asyncio.create_task(bench.get(bench.keys(1), [20]))
        await until_late(caplog)
    usrbio.behaviour.stalls = 0

    assert await reading == [FAILED]


@pytest.mark.asyncio
class TestZeroCopy(BackendConformance):
    @pytest.fixture(autouse=True)
    def _ready(self, usrbio: Usrbio, options: dict[str, object], url: str) -> Iterator[None]:
        self.options = {**options, "metadata": str(url), "capacity_bytes": 1 << 20, "zero_copy": True}
        self.slabs: list[SharedSlab] = []
        self.salt = uuid4().hex
        yield
        for slab in self.slabs:
            slab.close()

    async def make_backend(self, port: Port, tmp_path: Path) -> StorageBackend:
        return open_backend(self.options, port)

    async def open(
        self, backend: StorageBackend, pool: str = "kv", *, weights: str = "w1", shard: str = ""
    ) -> PoolUnderTest:
        self.slabs.append(SharedSlab(self.slots, pool))
        binding = SharedBinding(self.slabs[-1], f"{weights} {self.salt}", shard)
        return PoolUnderTest(await backend.open_pool(binding), binding)


# What is said when it cannot be opened.


@pytest.mark.asyncio
async def test_memory_that_is_not_shared_is_refused(
    usrbio: Usrbio, options: dict[str, object], url: str
) -> None:
    with pytest.raises(StorageError, match="zero_copy needs host slots in shared memory"):
        async with bench_at(url=url, **options, zero_copy=True):  # type: ignore[arg-type]
            pass


@pytest.mark.asyncio
async def test_a_folder_that_is_not_on_3fs_is_refused(
    usrbio: Usrbio, options: dict[str, object], url: str, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match="not on a mount of 3FS; io='posix' works there"):
        async with bench_at(url=url, **{**options, "path": tmp_path / "elsewhere"}):  # type: ignore[arg-type]
            pass


@pytest.mark.asyncio
async def test_without_the_module_the_error_says_what_to_do(
    options: dict[str, object], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", None)
    port = AsyncioPort(threads=1)
    with pytest.raises(StorageError, match="needs hf3fs_fuse, which is built with 3FS"):
        open_backend({**options, "metadata": url}, port)
    await port.aclose()


# The stand-in does what it says.


def test_the_stand_in_keeps_to_the_interface(tmp_path: Path) -> None:
    """The documented example: two halves of a file, crosswise."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4)
    usrbio = Usrbio(tmp_path)
    usrbio.behaviour = Behaviour(early=0)
    memory = SharedMemory(size=1024, create=True)
    iov = usrbio.make_iovec(memory, str(tmp_path))
    memory.unlink()
    ring = usrbio.make_ioring(str(tmp_path), 2)
    with (tmp_path / "file").open("rb") as file:
        usrbio.register_fd(file.fileno())
        ring.prepare(iov[:512], True, file.fileno(), 512)
        ring.prepare(iov[512:], True, file.fileno(), 0)
        with pytest.raises(BlockingIOError):
            ring.prepare(iov[512:], True, file.fileno(), 0)
        results = ring.submit().wait(min_results=2, timeout=timedelta(seconds=1))
        usrbio.deregister_fd(file.fileno())
        with pytest.raises(OSError, match="Bad file"):
            ring.prepare(iov[:512], True, file.fileno(), 0)

    assert sorted((view.base_off, view.result) for view in results) == [(0, 512), (512, 512)]
    assert bytes(memory.buf or b"") == bytes(range(256)) * 4
    memory.close()


def test_the_stand_in_does_shuffle(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    usrbio = Usrbio(tmp_path, seed=2)
    memory = SharedMemory(size=8192, create=True)
    iov = usrbio.make_iovec(memory, str(tmp_path))
    memory.unlink()
    ring = usrbio.make_ioring(str(tmp_path), 8)
    with (tmp_path / "file").open("rb") as file:
        usrbio.register_fd(file.fileno())
        for start in range(0, 8192, 1024):
            ring.prepare(iov[start : start + 1024], True, file.fileno(), start)
        order = [view.base_off for view in ring.submit().wait(min_results=8, timeout=timedelta(1))]
    memory.close()

    assert order != sorted(order)
