"""Cancelled at each suspension of each public coroutine, and closed there: nothing is lost, all goes on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from asynchicache import HybridCache, Request, StorageLockedError, TransferError
from asynchicache import cache as front_door
from asynchicache.backends.file import FileBackend
from asynchicache.errors import LeaseWarning, UsageError
from asynchicache.testing.interrupts import Interrupted, cancel_this_task
from asynchicache.testing.seeded import SeededWorld, run_seeded
from cache.engine import SPEC, Engine, config
from cache.interruptions import (
    CASES,
    SCENARIOS,
    STORED,
    Case,
    Scenario,
    clear_what_is_written_to,
    detach_what_is_read_from,
    durable,
    enter,
    leave,
    open_and_close,
    prefetch,
    public_coroutines,
    staged,
    verify_ranks,
)

HYBRID = Case("full+mamba", stored=True)
WINDOWED = Case("full+mamba+swa+dsa", stored=True)


class How(Enum):
    CANCELLED = "as it begins to wait"
    CANCELLED_LATE = "when what it waits for has come"
    CLOSED = "by the end of the cache"


@dataclass
class Run:
    """One scenario, interrupted at one suspension.

    Attributes:
        hangs: storage calls that never end, by name.
    """

    case: Case
    scenario: Scenario
    at: int
    how: How
    hangs: str = ""
    work: Interrupted[Any] | None = field(default=None, init=False)

    @property
    def struck(self) -> bool:
        return self.work is not None and self.work.struck

    async def main(self, world: SeededWorld) -> None:
        reached = asyncio.Event()
        act = reached.set if self.how is How.CLOSED else cancel_this_task
        async with staged(self.case, world, self.hangs) as stage:
            task = asyncio.create_task(self.scenario(stage, partial(self._interrupt, act)))
            await _either(task, reached)
            if not (self.struck and self.how is How.CLOSED):
                await stage.check()
        await asyncio.wait([task])
        self._judge(task)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [other for other in left if not other.done()], "closing leaves no task behind"

    def _interrupt(self, act: Callable[[], object], work: Awaitable[Any]) -> Interrupted[Any]:
        self.work = Interrupted(work, self.at, act, answered=self.how is How.CANCELLED_LATE)
        return self.work

    def _judge(self, task: asyncio.Task[None]) -> None:
        """Whoever was in the middle of something may be told that the cache is closed, no more."""
        error = None if task.cancelled() else task.exception()
        closed = self.struck and self.how is How.CLOSED
        if error is not None and not (closed and isinstance(error, UsageError | TransferError)):
            raise error


async def _either(task: asyncio.Task[None], reached: asyncio.Event) -> None:
    """Until one of them has come."""
    reaching = asyncio.create_task(reached.wait())
    await asyncio.wait([task, reaching], return_when=asyncio.FIRST_COMPLETED)
    reaching.cancel()
    await asyncio.wait([reaching])


def interrupt_everywhere(case: Case, scenario: Scenario, how: How, seed: int = 0) -> int:
    """Interrupt a scenario at each of its suspensions in turn; how many there were."""
    for at in count(1):
        run = Run(case, scenario, at, how)
        run_seeded(seed, run.main)
        if not run.struck:
            return at - 1
    raise AssertionError("unreachable")


def scenarios(case: Case) -> list[Scenario]:
    """Those that a cache with or without storage can play."""
    return [
        scenario
        for name, group in SCENARIOS.items()
        if case.stored or not name.endswith("_storage")
        for scenario in group
    ]


def test_every_public_coroutine_has_a_scenario() -> None:
    assert public_coroutines() == set(SCENARIOS)


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (WINDOWED, How.CANCELLED),
        (Case("full", stored=False), How.CANCELLED),
        (Case("full", stored=True), How.CANCELLED_LATE),
        (HYBRID, How.CLOSED),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, How) else str(value),
)
def test_interrupted_anywhere_it_is_clean_and_serves(case: Case, how: How, record_property) -> None:
    points = {scenario: interrupt_everywhere(case, scenario, how) for scenario in scenarios(case)}

    assert {scenario for scenario, count in points.items() if not count} == {enter, leave, verify_ranks}, (
        "they never wait"
    )
    record_property("suspensions", sum(points.values()))


@pytest.mark.soak
@pytest.mark.parametrize("how", How, ids=lambda how: how.name.lower())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interrupted_anywhere_in_other_orders(case: Case, how: How, record_property) -> None:
    points = [
        interrupt_everywhere(case, scenario, how, seed) for scenario in scenarios(case) for seed in range(20)
    ]
    record_property("suspensions", sum(points))


# What a waiter does not see: tasks of the cache in the midst of their own work.


async def closed_after(case: Case, scenario: Scenario, seconds: float, world: SeededWorld) -> float:
    """Close the cache so long after a scenario began; how long that takes if it is left alone."""
    async with staged(case, world) as stage:
        began = world.loop.time()
        task = asyncio.create_task(scenario(stage, _as_it_is))
        await asyncio.wait([task], timeout=seconds)
        lasted = world.loop.time() - began
    await asyncio.wait([task])
    error = task.exception()
    if error is not None and not isinstance(error, UsageError | TransferError):
        raise error
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return lasted


def close_at_any_time(case: Case, scenario: Scenario, parts: int, seed: int = 0) -> None:
    """Close the cache at `parts` moments of a scenario."""
    lasts = run_seeded(seed, partial(closed_after, case, scenario, 60.0))
    for part in range(parts):
        run_seeded(seed, partial(closed_after, case, scenario, lasts * part / parts))


async def _as_it_is(work: Awaitable[Any]) -> Any:
    return await work


@pytest.mark.parametrize("scenario", [prefetch, durable], ids=lambda scenario: scenario.__name__)
def test_closed_in_the_midst_of_its_own_work_nothing_is_left(scenario: Scenario) -> None:
    close_at_any_time(WINDOWED, scenario, 16)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_scenario_closed_at_any_time(case: Case) -> None:
    for scenario in scenarios(case):
        for seed in range(4):
            close_at_any_time(case, scenario, 100, seed)


@pytest.mark.parametrize(
    ("scenario", "hangs"),
    [
        (prefetch, "exists"),
        (prefetch, "get"),
        (durable, "put"),
        (detach_what_is_read_from, "get"),
        (clear_what_is_written_to, "clear"),
        (open_and_close, "put"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_storage_that_hangs_for_ever_keeps_no_cache_open(scenario: Scenario, hangs: str) -> None:
    run = Run(HYBRID, scenario, 1, How.CLOSED, hangs)
    run_seeded(0, run.main)

    assert run.struck


# In real time


async def opened_and_interrupted(folder: Path, at: int) -> bool:
    """Open, serve and close a cache on files, cancelled at a suspension, then another one."""
    options = config(inline=True, storage="file", storage_options={"path": str(folder)})

    async def live() -> None:
        async with HybridCache.open(SPEC, options) as cache:
            await Engine(cache).serve([*STORED, at], prefetch=False)

    work = Interrupted(live(), at, cancel_this_task)
    await asyncio.wait([asyncio.ensure_future(_as_it_is(work))])
    async with HybridCache.open(SPEC, options) as cache:
        engine = Engine(cache)
        await engine.serve(STORED)
        assert (await engine.serve([*STORED, 1])).tokens == 20
    return work.struck


@pytest.mark.asyncio
async def test_a_folder_is_free_again_wherever_opening_and_closing_ended(tmp_path: Path) -> None:
    for at in count(1):
        if not await opened_and_interrupted(tmp_path, at):
            break
    assert at > 5
    assert len(asyncio.all_tasks()) == 1


# These tests can fail.


@pytest.mark.asyncio
async def test_a_close_that_can_be_cancelled_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exposed(closing: Awaitable[Any]) -> Any:
        return await closing

    async def close_later(backend: FileBackend) -> None:
        await asyncio.sleep(0)
        await backend._close()  # which goes on by itself otherwise

    monkeypatch.setattr(front_door, "shielded", exposed)
    monkeypatch.setattr(FileBackend, "aclose", close_later)

    with pytest.raises(StorageLockedError):  # noqa: PT012  one of them is enough
        for at in range(8, 20):
            await opened_and_interrupted(tmp_path, at)


def test_a_request_that_is_not_closed_when_it_is_cancelled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(request: Request, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            request.close()

    monkeypatch.setattr(Request, "__aexit__", leave)

    with pytest.warns(LeaseWarning):  # noqa: PT031  what is lost here is collected here
        with pytest.raises(AssertionError, match="a request of 21 tokens is open"):
            interrupt_everywhere(HYBRID, prefetch, How.CANCELLED)
        gc.collect()
