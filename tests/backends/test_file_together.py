"""Openers, closers and processes that come together: no page that was acknowledged is lost by it."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.file import engine as engine_module
from asynchicache.backends.file import open_backend
from asynchicache.backends.file import store as store_module
from asynchicache.backends.file.entries import PageReader, RecoveredPages
from asynchicache.backends.file.segments import Segments
from asynchicache.backends.file.store import PoolStore
from asynchicache.errors import StorageLockedError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import fingerprint_of, slab_of
from asynchicache.types import Outcome
from storage.file_stores import backend_at, capacity_for, open_bench, other_process, pages_file
from turns import turns

STORED, HIT = Outcome.STORED, Outcome.HIT
T = TypeVar("T")

FORKED = """
import os, sys
from pathlib import Path
from asynchicache.backends.file.folder import StoreFolder
from asynchicache.errors import StorageLockedError

def folder():
    return StoreFolder(Path(sys.argv[1]), read_only=False)

hold, go_on = os.pipe()
first = folder()
if not os.fork():
    os.read(hold, 1)
    os._exit(0)
first.close()
second = folder()
print("open again beside a child")
if not os.fork():
    second.close()
    os._exit(0)
os.wait()
try:
    folder()
except StorageLockedError:
    print("a child unlocks nothing")
os.write(go_on, b"x")
os.wait()
"""


class Gate:
    """Where a thread of the store waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self._reached.set()
        self._open.wait()

    async def reached(self) -> None:
        await asyncio.to_thread(self._reached.wait)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def slow_close(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The files of a pool are closed when the gate is opened."""
    gate, close = Gate(), PoolStore.close

    def slow(store: PoolStore) -> None:
        gate.pass_through()
        close(store)

    monkeypatch.setattr(PoolStore, "close", slow)
    return gate


@pytest.mark.asyncio
async def test_a_pool_that_is_being_opened_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with backend_at(tmp_path) as backend:
        bench = await open_bench(backend, weights="w2")
        await bench.put(bench.keys(*range(8)), range(8))
    gate, recover = Gate(), store_module.recover

    def slow(segments: Segments, reader: PageReader) -> RecoveredPages:
        found = recover(segments, reader)
        if segments.slots:
            gate.pass_through()
        return found

    monkeypatch.setattr(store_module, "recover", slow)
    capacity = pages_file(tmp_path).stat().st_size + capacity_for(8)
    async with backend_at(tmp_path, capacity_bytes=capacity) as backend:
        other = await open_bench(backend)
        opening = asyncio.create_task(open_bench(backend, weights="w2"))
        await gate.reached()
        for start in range(0, 96, 8):  # many times what there is room for
            await other.put(other.keys(*range(start, start + 8)), range(8))
        gate.open()
        bench = await opening
        assert await bench.put(bench.keys(8), [0]) == [STORED]

    async with backend_at(tmp_path) as backend:
        bench = await open_bench(backend, weights="w2")
        assert await bench.get(bench.keys(*range(9)), range(9)) == [HIT] * 9


@pytest.mark.asyncio
async def test_a_pool_that_was_removed_by_hand_takes_no_room(tmp_path: Path) -> None:
    async with backend_at(tmp_path) as backend:
        old = await open_bench(backend, weights="old")
        await old.put(old.keys(1), [0])
    folder = pages_file(tmp_path).parent
    async with backend_at(tmp_path, capacity_bytes=capacity_for(8)) as backend:
        bench = await open_bench(backend)
        shutil.rmtree(folder)
        assert await bench.put(bench.keys(*range(8)), range(8)) == [STORED] * 8
        assert await bench.put(bench.keys(*range(8, 16)), range(8)) == [STORED] * 8


@pytest.mark.asyncio
async def test_a_pool_that_may_not_be_removed_takes_its_room_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with backend_at(tmp_path) as backend:
        old = await open_bench(backend, weights="old")
        await old.put(old.keys(1), [0])
    theirs = pages_file(tmp_path)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == theirs:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    capacity = sum(path.stat().st_size for path in theirs.parent.iterdir()) + capacity_for(8)
    async with backend_at(tmp_path, capacity_bytes=capacity) as backend:
        bench = await open_bench(backend)
        for start in range(0, 32, 8):
            assert await bench.put(bench.keys(*range(start, start + 8)), range(8)) == [STORED] * 8
    assert theirs.exists()
    assert caplog.text.count("cannot be removed") == 1


@pytest.mark.asyncio
async def test_a_folder_stays_locked_until_the_last_write_though_nobody_waits(
    tmp_path: Path, slow_close: Gate
) -> None:
    async with backend_at(tmp_path) as backend:
        bench = await open_bench(backend)
        impatient = asyncio.create_task(bench.engine.aclose())
        await slow_close.reached()
        impatient.cancel()
        with suppress(asyncio.CancelledError):
            await impatient
        closing = asyncio.create_task(backend.aclose())
        await turns()
        closing.cancel()
        with pytest.raises(StorageLockedError):
            async with backend_at(tmp_path):
                pass
        slow_close.open()
        await backend.aclose()
        async with backend_at(tmp_path):
            pass


async def until_shut(port: AsyncioPort) -> None:
    """The port takes no more calls; those that run may go on."""
    with suppress(RuntimeError):
        while True:
            await port.run_blocking(lambda: None)


@pytest.mark.asyncio
async def test_a_folder_is_free_when_the_last_call_has_ended_though_the_threads_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, gate = AsyncioPort(threads=4, seed=0), Gate()
    backend = open_backend({"path": tmp_path}, port)
    bench = await open_bench(backend)
    await bench.put(bench.keys(1), [0])
    monkeypatch.setattr(bench.binding, "restore", lambda slot, key, checksum: gate.pass_through() or HIT)
    call = asyncio.create_task(bench.engine.get(bench.keys(1), [0]))
    await gate.reached()
    closing = asyncio.create_task(backend.aclose())
    await turns()
    closing.cancel()
    shutting = asyncio.create_task(port.aclose())
    await until_shut(port)
    gate.open()

    assert await call == [HIT]
    await shutting
    await turns()
    async with backend_at(tmp_path):
        pass


class SlowEngine:
    """Takes as long to close as the test likes."""

    def __init__(self) -> None:
        self.closed = False
        self.may_close = asyncio.Event()

    async def aclose(self) -> None:
        self.closed = True
        await self.may_close.wait()


@pytest.mark.asyncio
async def test_a_pool_is_opened_again_when_it_has_been_closed() -> None:
    made: list[SlowEngine] = []

    async def make() -> SlowEngine:
        made.append(SlowEngine())
        return made[-1]

    binding = SlotBinding(slab_of("kv", 4096, 1), fingerprint_of("w1"))
    engines: EngineRegistry[SlowEngine] = EngineRegistry()
    first = await engines.open(binding, make)
    closing = asyncio.create_task(first.aclose())
    await asyncio.sleep(0)
    opening = asyncio.create_task(engines.open(binding, make))
    await turns()
    assert made == [first]

    first.may_close.set()
    second = await opening
    assert made == [first, second]
    second.may_close.set()
    await closing
    await engines.aclose()


class QuickEngine:
    """Is closed at once."""

    closed = False

    async def aclose(self) -> None:
        self.closed = True


async def open_quickly() -> QuickEngine:
    return QuickEngine()


def use_on_two_loops(logged: list[object]) -> None:
    binding = SlotBinding(slab_of("kv", 4096, 1), fingerprint_of("w1"))
    engines: EngineRegistry[QuickEngine] = EngineRegistry()

    async def use() -> QuickEngine:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
        return await engines.open(binding, open_quickly)

    first = asyncio.run(use())
    asyncio.run(first.aclose())
    second = asyncio.run(use())
    assert second is not first
    asyncio.run(engines.aclose())
    assert second.closed


def test_pools_are_opened_again_on_another_loop() -> None:
    logged: list[object] = []
    use_on_two_loops(logged)
    gc.collect()  # a task whose error nobody has seen says so when it is gone
    assert not logged


class FailingPort(AsyncioPort):
    """Has no thread for the call with that number."""

    failing: int | None = None

    async def run_blocking(self, call: Callable[[], T]) -> T:
        if self.failing is not None:
            self.failing -= 1
            if self.failing == 0:
                raise RuntimeError("can't start new thread")
        return await super().run_blocking(call)


@pytest.mark.asyncio
async def test_a_call_ends_when_nothing_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_FINE_BYTES", 1)  # a hop for each page
    port, gate = FailingPort(threads=4, seed=0), Gate()
    backend = open_backend({"path": tmp_path}, port)
    bench = await open_bench(backend)
    await bench.put(bench.keys(1, 2), [0, 1])
    restore = bench.binding.restore

    def slow(slot: int, key: ObjectKey, checksum: bytes) -> Outcome:
        gate.pass_through()
        return restore(slot, key, checksum)

    monkeypatch.setattr(bench.binding, "restore", slow)
    port.failing = 1
    call = asyncio.create_task(bench.engine.get(bench.keys(1, 2), [0, 1]))
    await gate.reached()
    await turns()
    assert not call.done()
    gate.open()
    with pytest.raises(RuntimeError, match="start new thread"):
        await call
    await backend.aclose()
    await port.aclose()


@pytest.mark.asyncio
async def test_a_read_finds_a_thread_while_pages_of_all_pools_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_HOP_BYTES", 1)  # a hop for each page
    port, gate, pwritev = AsyncioPort(threads=5, seed=0), threading.Event(), os.pwritev
    backend = open_backend({"path": tmp_path}, port)
    pools = [await open_bench(backend, pool) for pool in ("kv", "mamba")]
    for pool in pools:
        await pool.put(pool.keys(0), [0])

    def slow(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        assert gate.wait(60)  # puts fail then, and the gets before them were not served
        return pwritev(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    puts = [asyncio.create_task(pool.put(pool.keys(*range(1, 9)), range(1, 9))) for pool in pools]
    await turns()
    for pool in pools:
        assert await pool.get(pool.keys(0), [20]) == [HIT]
    gate.set()

    assert await asyncio.gather(*puts) == [[STORED] * 8] * 2
    await backend.aclose()
    await port.aclose()


def test_a_lock_does_not_outlive_its_store_in_children(tmp_path: Path) -> None:
    with other_process(FORKED, tmp_path) as other:
        output, errors = other.communicate()
    assert output.splitlines() == ["open again beside a child", "a child unlocks nothing"], errors
