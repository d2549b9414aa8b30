"""One thread for one model: calls in order, and nobody leaves while his call runs."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from asynchicache.integrations.transformers.thread import ModelThread

pytestmark = pytest.mark.asyncio

CPU = torch.device("cpu")


async def test_calls_run_in_order_off_the_loop() -> None:
    ran: list[int] = []
    with ModelThread(CPU) as thread:
        await asyncio.gather(*(thread.run(partial(ran.append, number)) for number in range(20)))
        assert ran == list(range(20))
        assert await thread.run(threading.get_ident) != threading.get_ident()


async def test_it_computes_with_as_many_threads_as_its_maker() -> None:
    """A new thread would start as many as there are cores."""
    matrix = torch.ones(192, 192)
    with ModelThread(CPU) as thread:
        before = await thread.run(threads)
        await thread.run(lambda: torch.mm(matrix, matrix))
        assert (torch.get_num_threads(), await thread.run(threads)) == (1, before)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


async def test_a_cancelled_waiter_leaves_when_its_call_has_ended() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        may_end.wait(30)

    with ModelThread(CPU) as thread:
        waiter = asyncio.create_task(thread.run(call))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            waiter.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiter.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiter


async def test_a_call_that_has_not_begun_is_dropped() -> None:
    begun, may_end = threading.Event(), threading.Event()
    ran: list[str] = []
    with ModelThread(CPU) as thread:
        first = asyncio.create_task(thread.run(lambda: (begun.set(), may_end.wait(30))))
        await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(thread.run(partial(ran.append, "second")))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        may_end.set()
        await first
        await thread.run(partial(ran.append, "third"))
    assert ran == ["third"]


async def test_an_error_is_the_waiters() -> None:
    with ModelThread(CPU) as thread:
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 / 0)
        assert await thread.run(lambda: 5) == 5
