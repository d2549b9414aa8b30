"""What the core says to an engine about pages that are used in memory, and what that may never cost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from asynchicache.errors import ClosedError, StorageError, UsageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.backends import fingerprint_of, slab_of
from asynchicache.types import Outcome
from storage.plain_engine import PlainEngine


class TouchedEngine(PlainEngine):
    """Notes what it is told, once `gate` is open; raises what it is to raise."""

    def __init__(self, **capabilities: object) -> None:
        super().__init__(**capabilities)
        self.told: list[list[int]] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.told.append([key.digest[0] for key in keys])
        self.entered.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error


class Scene:
    def __init__(self, engine: PlainEngine, port: AsyncioPort, **limits: float) -> None:
        self.binding = SlotBinding(slab_of("kv", 5000, 8), fingerprint_of("w"))
        self.pool = GuardedPool(engine, self.binding, port, PoolLimits(**limits))

    def keys(self, *numbers: int) -> list[ObjectKey]:
        return [self.binding.key(bytes([number]) * 40) for number in numbers]


@asynccontextmanager
async def scene(engine: PlainEngine, **limits: float) -> AsyncIterator[Scene]:
    port = AsyncioPort(threads=1, seed=0)
    stage = Scene(engine, port, **limits)
    try:
        yield stage
    finally:
        await stage.pool.aclose()
        await port.aclose()


@pytest.mark.asyncio
async def test_uses_are_told_in_their_order_in_calls_that_the_engine_handles() -> None:
    engine = TouchedEngine()
    async with scene(engine) as stage:
        await stage.pool.touch(stage.keys(*range(9, -1, -1)))

        assert engine.told == [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
        counted = stage.pool.statistics().touch
        assert (counted.calls, counted.pages, counted.bytes) == (3, 10, 0)
        assert counted.outcomes == {Outcome.HIT: 10}


@pytest.mark.asyncio
async def test_one_part_of_a_touch_waits_for_the_part_before_it() -> None:
    engine = TouchedEngine()
    engine.gate.clear()
    async with scene(engine) as stage:
        touching = asyncio.create_task(stage.pool.touch(stage.keys(*range(8))))
        await engine.entered.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.told == [[0, 1, 2, 3]]
        engine.gate.set()
        await touching

        assert engine.told == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.asyncio
async def test_an_immediate_engine_is_told_at_once() -> None:
    engine = TouchedEngine(immediate=True)
    async with scene(engine) as stage:
        await stage.pool.touch(stage.keys(1))

        assert engine.told == [[1]]


@pytest.mark.asyncio
async def test_an_engine_that_cannot_be_told_is_not() -> None:
    async with scene(PlainEngine()) as stage:
        await stage.pool.touch(stage.keys(1))

        assert stage.pool.statistics().touch.pages == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("engine", [PlainEngine, TouchedEngine])
async def test_misuse_raises(engine: type[PlainEngine]) -> None:
    async with scene(engine()) as stage:
        stranger = SlotBinding(slab_of("swa", 5000, 1), fingerprint_of("w")).key(bytes(40))
        with pytest.raises(UsageError, match="no page of pool 'kv'"):
            await stage.pool.touch([stranger])
        await stage.pool.aclose()
        with pytest.raises(ClosedError):
            await stage.pool.touch(stage.keys(1))


@pytest.mark.asyncio
async def test_failures_are_counted_and_told_once_and_open_no_breaker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = TouchedEngine()
    engine.error = StorageError("no such command")
    async with scene(engine, failures=2) as stage:
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                await stage.pool.touch(stage.keys(1, 2))

        statistics = stage.pool.statistics()
        assert (statistics.touch.errors, statistics.touch.outcomes) == (5, {Outcome.FAILED: 10})
        assert statistics.breaker is BreakerState.CLOSED
        assert len(engine.told) == 5  # asked once each: a use that was not told is no loss
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert (await stage.pool.get(stage.keys(1), [0])).outcomes == [Outcome.HIT]


@pytest.mark.asyncio
async def test_a_touch_that_hangs_is_not_followed_by_others_and_keeps_nobody_out() -> None:
    engine = TouchedEngine()
    engine.gate.clear()
    async with scene(engine, failures=1, deadline=0.02, closing=1.0) as stage:
        for _ in range(4):
            await stage.pool.touch(stage.keys(1))

        assert len(engine.told) == 1
        statistics = stage.pool.statistics()
        assert statistics.touch.late == 1
        assert statistics.touch.outcomes == {Outcome.TIMEOUT: 1, Outcome.FAILED: 3}
        assert statistics.breaker is BreakerState.CLOSED
        assert (await stage.pool.get(stage.keys(1), [0])).outcomes == [Outcome.HIT]
        engine.gate.set()
        await asyncio.sleep(0)  # its end is noticed
        await asyncio.sleep(0)
        await stage.pool.touch(stage.keys(2))
        assert engine.told == [[1], [2]]


@pytest.mark.asyncio
async def test_an_open_breaker_is_left_alone() -> None:
    class Broken(TouchedEngine):
        async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
            return [Outcome.FAILED] * len(keys)

    engine = Broken()
    async with scene(engine, failures=1, cooldown=1e-9) as stage:
        await stage.pool.get(stage.keys(1), [0])
        assert stage.pool.statistics().breaker is BreakerState.OPEN

        await stage.pool.touch(stage.keys(1))

        assert engine.told == []
        assert stage.pool.statistics().breaker is BreakerState.OPEN  # a touch is no try of it
