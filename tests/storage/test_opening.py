"""What becomes of an engine that a backend opens when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asynchicache.backends.file.folder import StoreFolder
from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.errors import ClosedError, StorageError
from asynchicache.ports import AsyncioPort
from asynchicache.storage import deadlines
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.guard import GuardedPool, open_guarded
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import PoolBinding, StorageBackend
from asynchicache.testing.backends import fingerprint_of, slab_of
from storage.file_stores import backend_at

SOON = 0.02
"""A limit for what never ends."""


def binding_of() -> SlotBinding:
    return SlotBinding(slab_of("kv", 5000, 8), fingerprint_of("w"))


@pytest_asyncio.fixture
async def port() -> AsyncIterator[AsyncioPort]:
    port = AsyncioPort(threads=1)
    yield port
    await port.aclose()


def opening(backend: StorageBackend, port: AsyncioPort, **limits: float) -> Coroutine[Any, Any, GuardedPool]:
    """Open the pool, with slots of its own."""
    return open_guarded(backend, binding_of(), port, PoolLimits(**limits))  # type: ignore[arg-type]


class LateBackend(MemoryBackend):
    """It opens when it may, whether it is cancelled or not."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.go = asyncio.Event()
        self.came = asyncio.Event()
        self.coming: Callable[[], object] = lambda: None
        self.cancelled: Callable[[], object] = lambda: None
        self.engines: list[MemoryEngine] = []

    async def open_pool(self, binding: PoolBinding) -> MemoryEngine:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled()
        await self.go.wait()
        self.engines.append(await super().open_pool(binding))
        self.came.set()
        self.coming()
        return self.engines[-1]


@pytest.mark.asyncio
async def test_an_engine_that_comes_during_the_grace_is_closed(
    port: AsyncioPort, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", 60.0)
    backend = LateBackend()
    backend.cancelled = backend.go.set
    with pytest.raises(StorageError, match="took longer than"):
        await opening(backend, port, opening=SOON)
    assert [engine.closed for engine in backend.engines] == [True]
    await (await opening(backend, port)).aclose()


@pytest.mark.asyncio
async def test_an_engine_that_comes_after_the_grace_is_closed(
    port: AsyncioPort, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", SOON)
    backend = LateBackend()
    with pytest.raises(StorageError, match="took longer than"):
        await opening(backend, port, opening=SOON)
    backend.go.set()
    await backend.came.wait()
    while not backend.engines[0].closed:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    await (await opening(backend, port)).aclose()


@pytest.mark.asyncio
async def test_an_engine_that_comes_as_its_caller_is_cancelled_is_closed(port: AsyncioPort):
    backend = LateBackend()
    caller = asyncio.create_task(opening(backend, port))
    backend.coming = caller.cancel
    backend.go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert [engine.closed for engine in backend.engines] == [True]


class VagueBackend(LateBackend):
    """Its first engine does not say what it can."""

    async def open_pool(self, binding: PoolBinding) -> MemoryEngine:
        self.go.set()
        engine = await super().open_pool(binding)
        if len(self.engines) == 1:
            del engine.capabilities
        return engine


@pytest.mark.asyncio
async def test_an_engine_that_cannot_be_used_is_closed(port: AsyncioPort):
    backend = VagueBackend()
    with pytest.raises(StorageError, match="no attribute 'capabilities'"):
        await opening(backend, port)
    assert backend.engines[0].closed
    await (await opening(backend, port)).aclose()


class SlowFolder:
    """Holds up the thread that makes a pool's folder, until `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make = StoreFolder.make
        self.started, self.go_on = threading.Event(), threading.Event()

        def slowly(folder: StoreFolder, pool: Path) -> None:
            self.started.set()
            assert self.go_on.wait(30)
            make(folder, pool)

        monkeypatch.setattr(StoreFolder, "make", slowly)


@pytest.mark.asyncio
async def test_a_pool_whose_opening_took_too_long_can_be_opened_again(
    port: AsyncioPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = SlowFolder(monkeypatch)
    async with backend_at(tmp_path) as backend:
        with pytest.raises(StorageError, match="took longer than"):
            await opening(backend, port, opening=SOON)
        again = asyncio.create_task(opening(backend, port))  # while the first is still being opened
        await asyncio.sleep(0)
        folder.go_on.set()
        guard = await again
        assert await guard.clear() == 0
        await guard.aclose()
        await (await opening(backend, port)).aclose()


@pytest.mark.asyncio
async def test_a_caller_that_is_cancelled_leaves_the_engine_to_those_who_wait_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, binding = SlowFolder(monkeypatch), binding_of()
    async with backend_at(tmp_path) as backend:
        first, second = (asyncio.create_task(backend.open_pool(binding)) for _ in range(2))
        await asyncio.to_thread(folder.started.wait, 30)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        folder.go_on.set()
        engine = await second
        assert not engine.closed
        assert await backend.open_pool(binding) is engine


@pytest.mark.asyncio
async def test_nothing_is_opened_in_a_backend_that_is_closed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = SlowFolder(monkeypatch)
    async with backend_at(tmp_path) as backend:
        first = asyncio.create_task(backend.open_pool(binding_of()))
        await asyncio.to_thread(folder.started.wait, 30)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(backend.open_pool(binding_of()))
        await asyncio.sleep(0)
        closing = asyncio.create_task(backend.aclose())
        await asyncio.sleep(0)
        folder.go_on.set()
        with pytest.raises(ClosedError, match="closed while pool 'kv' was opened"):
            await again
        await closing
