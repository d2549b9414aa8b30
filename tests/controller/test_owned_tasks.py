"""Work that is not cut short, and what becomes of it where nothing can run any more."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache.controller.tasks import OwnedTasks, shielded


@pytest.mark.asyncio
async def test_shielded_work_ends_though_its_caller_is_cancelled() -> None:
    gate, ended = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        ended.append(True)

    caller = asyncio.create_task(shielded(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    gate.set()

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]


def test_without_a_loop_none_is_made() -> None:
    async def work() -> None:
        raise AssertionError("begun")

    waiting = work()

    with pytest.raises(RuntimeError, match="no running event loop"):
        shielded(waiting).send(None)
    assert waiting.cr_frame is None  # closed, so nobody warns of it


@pytest.mark.asyncio
async def test_a_task_that_fails_does_so_alone(caplog: pytest.LogCaptureFixture) -> None:
    tasks, gate = OwnedTasks(), asyncio.Event()
    await tasks.ready()

    async def fail() -> None:
        raise RuntimeError("mine")

    async def wait() -> None:
        await gate.wait()

    waiting = tasks.spawn(wait())
    await asyncio.wait([tasks.spawn(fail())])
    gate.set()
    await asyncio.wait([waiting, tasks.spawn(wait())])

    assert not waiting.cancelled()
    assert "mine" in caplog.text
    await tasks.aclose()


@pytest.mark.asyncio
async def test_work_that_is_cancelled_before_it_begins_is_closed() -> None:
    tasks = OwnedTasks()
    await tasks.ready()

    async def work() -> None:
        raise AssertionError("begun")

    waiting = work()
    task = tasks.spawn(waiting)
    task.cancel()
    await tasks.aclose()

    assert task.cancelled()
    assert waiting.cr_frame is None  # so nobody warns of it
