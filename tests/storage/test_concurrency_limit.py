"""Turns at an engine, and how long a call waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asynchicache.storage.deadlines import ConcurrencyLimit, SlidingDeadline
from asynchicache.testing.seeded import SeededWorld, run_seeded


def in_virtual_time(main: Callable[[SeededWorld], Coroutine[Any, Any, None]]) -> None:
    for seed in range(5):
        run_seeded(seed, main)


def test_patience_ends_so_long_after_the_last_answer() -> None:
    async def life(world: SeededWorld) -> None:
        limit, deadline = ConcurrencyLimit(1), SlidingDeadline(2.0)
        await limit.acquire(deadline, put=False)
        world.loop.call_later(1.5, deadline.renew)
        with pytest.raises(TimeoutError):
            await limit.acquire(deadline, put=False)
        assert world.loop.time() == pytest.approx(3.5, abs=0.01)

    in_virtual_time(life)


@pytest.mark.asyncio
async def test_an_answer_that_comes_as_patience_ends_comes_too_late() -> None:
    limit, deadline = ConcurrencyLimit(1), SlidingDeadline(0.0)
    turn = await limit.acquire(deadline, put=False)
    waiting = asyncio.create_task(limit.acquire(deadline, put=False))
    for _ in range(2):  # it has begun to wait; its time is up, and it has not been told yet
        await asyncio.sleep(0)
    deadline.renew()
    turn.close()
    with pytest.raises(TimeoutError):
        await waiting
    await limit.acquire(SlidingDeadline(None), put=False)


def test_a_put_that_waits_for_others_than_puts_keeps_no_turn_of_puts_when_it_gives_up() -> None:
    async def life(world: SeededWorld) -> None:
        limit, deadline = ConcurrencyLimit(2), SlidingDeadline(None)
        taken = [await limit.acquire(deadline, put=False) for _ in range(2)]
        with pytest.raises(TimeoutError):
            await limit.acquire(SlidingDeadline(1.0), put=True)
        for turn in (*taken, taken[0]):
            turn.close()  # twice is harmless
        await limit.acquire(SlidingDeadline(1.0), put=True)
        await limit.acquire(SlidingDeadline(1.0), put=False)
        with pytest.raises(TimeoutError):
            await limit.acquire(SlidingDeadline(1.0), put=False)

    in_virtual_time(life)


def test_of_the_puts_that_wait_one_stands_before_a_read() -> None:
    async def life(world: SeededWorld) -> None:
        limit, deadline, order = ConcurrencyLimit(4), SlidingDeadline(None), list[str]()

        async def call(name: str, *, put: bool) -> None:
            with await limit.acquire(deadline, put=put):
                order.append(name)
                await asyncio.sleep(1.0)

        taken = [await limit.acquire(deadline, put=False) for _ in range(4)]
        async with asyncio.TaskGroup() as group:
            for name in ("put 1", "put 2", "put 3", "read 1", "read 2"):
                group.create_task(call(name, put=name.startswith("put")))
                await asyncio.sleep(0.01)
            taken[0].close()
            await asyncio.sleep(10.0)
            for turn in taken[1:]:
                turn.close()
        assert order == ["put 1", "read 1", "read 2", "put 2", "put 3"]

    in_virtual_time(life)
