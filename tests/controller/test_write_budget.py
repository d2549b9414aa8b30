"""Bytes of writes that may be in flight at once, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from asynchicache.controller.write_budget import WriteBudget


def at_once(waiting: Coroutine[object, object, None]) -> bool:
    """Whether a coroutine ends without having to wait."""
    try:
        waiting.send(None)
    except StopIteration:
        return True
    waiting.close()
    return False


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_writes_that_nobody_waits_for_begin_up_to_the_limit() -> None:
    budget = WriteBudget(10)

    assert [budget.take(6), budget.take(5), budget.take(4), budget.take(1)] == [True, False, True, False]
    assert budget.used == 10
    budget.end(6)
    assert (budget.used, budget.take(7), budget.take(6)) == (4, False, True)


def test_a_single_write_may_be_larger_than_the_limit() -> None:
    budget = WriteBudget(10)

    assert budget.take(25)
    assert not budget.take(1)
    budget.end(25)
    assert budget.used == 0
    assert budget.take(1)


@pytest.mark.asyncio
async def test_writes_that_somebody_waits_for_begin_in_order_as_there_is_room() -> None:
    budget = WriteBudget(10)
    assert budget.take(8)
    begun: list[int] = []

    async def write(size: int) -> None:
        await budget.wait(size)
        begun.append(size)

    waiting = [asyncio.create_task(write(size)) for size in (9, 1, 5)]
    await turns()
    assert begun == [], "the small one does not go before the large one"
    assert not budget.take(1), "nor does one that nobody waits for"
    budget.end(8)
    await turns()
    assert (begun, budget.used) == ([9, 1], 10)
    budget.end(1)
    await turns()
    assert (begun, budget.used) == ([9, 1], 9)
    budget.end(9)
    await asyncio.gather(*waiting)
    assert (begun, budget.used) == ([9, 1, 5], 5)
    budget.end(5)
    assert (budget.used, budget.take(10)) == (0, True)


@pytest.mark.asyncio
async def test_who_finds_room_begins_at_once() -> None:
    budget = WriteBudget(10)

    assert at_once(budget.wait(4))
    assert at_once(budget.wait(6))
    assert budget.used == 10
    waiting = asyncio.create_task(budget.wait(1))
    await turns()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    budget.end(4)
    assert (budget.used, budget.take(4)) == (6, True), "who gave up takes no room"


@pytest.mark.asyncio
async def test_who_gives_up_just_as_its_turn_comes_passes_it_on() -> None:
    budget = WriteBudget(10)
    assert budget.take(10)
    first, second = (asyncio.create_task(budget.wait(10)) for _ in range(2))
    await turns()
    budget.end(10)  # it is the first one's turn
    first.cancel()  # before it has heard
    await turns()

    assert first.cancelled()
    assert second.done()
    assert budget.used == 10
    budget.end(10)
    assert (budget.used, budget.take(1)) == (0, True)


@pytest.mark.asyncio
async def test_bytes_that_an_engine_reads_after_its_deadline_count_but_are_not_waited_for() -> None:
    budget = WriteBudget(10)
    assert budget.take(6)
    budget.end(6, late=4)
    assert budget.used == 4
    assert not budget.take(7), "what nobody waits for keeps to the limit"

    assert at_once(budget.wait(9)), "it might read them for ever"
    assert budget.used == 13
    waiting = asyncio.create_task(budget.wait(3))
    await turns()
    assert not waiting.done(), "a write is in flight that will be answered"
    budget.end_late(4)
    await turns()
    assert not waiting.done()
    budget.end(9)
    await waiting
    assert budget.used == 3


@pytest.mark.asyncio
async def test_room_that_a_late_engine_gives_back_goes_to_who_waits() -> None:
    budget = WriteBudget(10)
    assert budget.take(5)
    assert budget.take(5)
    budget.end(5, late=5)
    waiting = asyncio.create_task(budget.wait(5))
    await turns()
    assert not waiting.done()
    budget.end_late(5)
    await turns()
    assert waiting.done()
    assert budget.used == 10
