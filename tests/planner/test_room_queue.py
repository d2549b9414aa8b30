"""Who is served next of those that wait for device slots, and who gives way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from asynchicache.planner.request_state import RequestState
from asynchicache.planner.room_queue import RoomQueue
from controller.simulation import Simulation


@pytest.fixture
def sim() -> Iterator[Simulation]:
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 0)})
    yield sim
    for request in list(sim.live):
        sim.close(request)
    sim.settle()


def new(sim: Simulation) -> RequestState:
    """A request that only matched."""
    return sim.open([len(sim.live), 1, 2, 3])


def loaded(sim: Simulation) -> RequestState:
    request = new(sim)
    sim.load(request)
    return request


def begun(sim: Simulation) -> RequestState:
    """A request with slots of its own."""
    request = loaded(sim)
    sim.planner.extend(request, 2)
    return request


def test_those_that_have_begun_go_first_and_each_kind_in_order(sim: Simulation) -> None:
    queue = RoomQueue()
    waiters = [queue.enter(make(sim)) for make in (new, loaded, begun, begun, new)]
    assert [waiter.begun for waiter in waiters] == [False, False, True, True, False]

    served = []
    while waiters:
        following = [waiter for waiter in waiters if queue.is_next(waiter)]
        assert len(following) == 1
        served.append(following[0])
        waiters.remove(following[0])
        queue.leave(following[0])

    assert [waiter.begun for waiter in served] == [True, True, False, False, False]
    ages = [sim.live.index(waiter.request) for waiter in served]
    assert ages == [2, 3, 0, 1, 4]


def test_a_prefix_that_was_restored_is_nothing_that_a_request_has_begun(sim: Simulation) -> None:
    first = begun(sim)
    sim.compute(first, 4)
    sim.close(first)
    sim.settle()
    again = sim.open([0, 1, 2, 3, 4])
    sim.load(again)
    waiter = RoomQueue().enter(again)

    assert again.hit_pages == len(again.pages) == 2
    assert not waiter.begun
    sim.planner.extend(again, 1)
    assert waiter.begun


def test_only_who_has_begun_may_pass_those_that_wait(sim: Simulation) -> None:
    queue, fresh, running = RoomQueue(), new(sim), begun(sim)

    assert not queue.blocks(fresh)
    assert not queue.blocks(running)
    waiter = queue.enter(new(sim))
    assert queue.blocks(fresh)
    assert not queue.blocks(running)
    queue.leave(waiter)
    assert not queue.blocks(fresh)


def test_all_wait_when_all_that_hold_something_do(sim: Simulation) -> None:
    queue = RoomQueue()
    first, second = begun(sim), begun(sim)
    waiter = queue.enter(first)

    assert not queue.all_wait([first, second])
    assert queue.all_wait([first])
    resting = new(sim)
    sim.planner.rest(resting)
    assert queue.all_wait([first, resting])
    other = queue.enter(second)
    assert queue.all_wait([first, second, resting])
    waiter.refused = True
    assert not queue.all_wait([first, second, resting]), "somebody gives way already"
    queue.leave(waiter)
    assert queue.all_wait([second])
    queue.leave(other)


def test_those_that_keep_a_match_without_having_loaded_it_are_holding(sim: Simulation) -> None:
    queue = RoomQueue()
    waiters = [queue.enter(make(sim)) for make in (new, loaded, begun, new)]
    sim.planner.rest(waiters[3].request)

    assert queue.holding() == [waiters[0]]


def test_the_last_one_that_holds_something_gives_way(sim: Simulation) -> None:
    queue = RoomQueue()
    waiters = [queue.enter(make(sim)) for make in (begun, begun, new, new)]

    assert queue.last() is waiters[3]
    for waiter in waiters[2:]:
        sim.planner.rest(waiter.request)
    assert queue.last() is waiters[1]
    for waiter in waiters[:2]:
        waiter.request.resting = True
    assert queue.last() is waiters[3], "where none holds anything, the last one of all"
    for waiter in waiters[:2]:
        waiter.request.resting = False
