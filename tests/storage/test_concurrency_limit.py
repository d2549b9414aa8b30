"""Turns at an engine, and how long a call waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asynchicache.storage.deadlines import Patience, Turns
from asynchicache.testing.seeded import SeededWorld, run_seeded


def in_virtual_time(main: Callable[[SeededWorld], Coroutine[Any, Any, None]]) -> None:
    for seed in range(5):
        run_seeded(seed, main)


def test_patience_ends_so_long_after_the_last_answer() -> None:
    async def life(world: SeededWorld) -> None:
        turns, patience = Turns(1), Patience(2.0)
        await turns.take(patience, put=False)
        world.loop.call_later(1.5, patience.renew)
        with pytest.raises(TimeoutError):
            await turns.take(patience, put=False)
        assert world.loop.time() == pytest.approx(3.5, abs=0.01)

    in_virtual_time(life)


@pytest.mark.asyncio
async def test_an_answer_that_comes_as_patience_ends_comes_too_late() -> None:
    turns, patience = Turns(1), Patience(0.0)
    turn = await turns.take(patience, put=False)
    waiting = asyncio.create_task(turns.take(patience, put=False))
    for _ in range(2):  # it has begun to wait; its time is up, and it has not been told yet
        await asyncio.sleep(0)
    patience.renew()
    turn.close()
    with pytest.raises(TimeoutError):
        await waiting
    await turns.take(Patience(None), put=False)


def test_a_put_that_waits_for_others_than_puts_keeps_no_turn_of_puts_when_it_gives_up() -> None:
    async def life(world: SeededWorld) -> None:
        turns, patience = Turns(2), Patience(None)
        taken = [await turns.take(patience, put=False) for _ in range(2)]
        with pytest.raises(TimeoutError):
            await turns.take(Patience(1.0), put=True)
        for turn in (*taken, taken[0]):
            turn.close()  # twice is harmless
        await turns.take(Patience(1.0), put=True)
        await turns.take(Patience(1.0), put=False)
        with pytest.raises(TimeoutError):
            await turns.take(Patience(1.0), put=False)

    in_virtual_time(life)
