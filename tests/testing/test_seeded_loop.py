"""The loop in virtual time: one seed, one run; many seeds, many orders; and an end to every run."""

# ruff: noqa: ASYNC110  spinning and polling are what is tested here
from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import permutations
from typing import Any

import pytest
import torch

from asynchicache.errors import ConfigError, DeadlockError, UsageError
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.testing.seeded import SeededWorld, run_seeded

WAY_ON = "runs no other thread .*asyncio.to_thread.*world.port.run_blocking.*world.port.worker"
"""What messages about threads tell."""

Main = Callable[[SeededWorld], Coroutine[Any, Any, Any]]


async def order_of_three(world: SeededWorld) -> tuple[int, ...]:
    order: list[int] = []

    async def step(name: int) -> None:
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name in range(3):
            group.create_task(step(name))
    return tuple(order)


# Time and order.


def test_time_jumps_and_nobody_waits() -> None:
    async def main(world: SeededWorld) -> float:
        await asyncio.sleep(1e9)  # thirty years; the test's own deadline is two minutes
        return world.port.now()

    assert run_seeded(0, main) == pytest.approx(1e9)


def test_time_that_is_skipped_makes_timers_due() -> None:
    async def main(world: SeededWorld) -> float:
        due = asyncio.Event()
        world.loop.call_later(60, due.set)
        world.loop.skip(100)
        await due.wait()
        with pytest.raises(ConfigError, match="skip\\(-1\\)"):
            world.loop.skip(-1)
        return world.port.now()

    assert run_seeded(0, main) == pytest.approx(100, abs=0.01)


def test_ready_tasks_run_in_every_order() -> None:
    assert {run_seeded(seed, order_of_three) for seed in range(100)} == set(permutations(range(3)))


def test_a_seed_replays_its_run() -> None:
    async def main(world: SeededWorld) -> tuple[object, ...]:
        orders = [await order_of_three(world) for _ in range(5)]
        await asyncio.to_thread(time.monotonic)
        return (*orders, world.port.now(), world.loop.steps, world.loop.fingerprint)

    runs = [run_seeded(seed, main) for seed in range(20)]

    assert [run_seeded(seed, main) for seed in range(20)] == runs
    assert len(set(runs)) == len(runs)


def test_what_the_scenario_draws_does_not_change_the_order_of_tasks() -> None:
    async def main(world: SeededWorld, draws: int) -> int:
        for _ in range(draws):
            world.random.random()
        await order_of_three(world)
        return world.loop.fingerprint

    assert run_seeded(3, lambda world: main(world, 0)) == run_seeded(3, lambda world: main(world, 9))


def test_timers_and_timeouts_work() -> None:
    async def main(world: SeededWorld) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_future()
        return world.port.now()

    assert run_seeded(0, main) == pytest.approx(5, abs=1e-3)


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main(world: SeededWorld) -> float:
        world.loop.call_later(1000, lambda: None).cancel()
        await asyncio.sleep(1)
        return world.port.now()

    assert run_seeded(0, main) == pytest.approx(1, abs=1e-3)


def test_tasks_that_spin_do_not_stop_time() -> None:
    async def main(world: SeededWorld) -> None:
        timer = asyncio.create_task(asyncio.sleep(0.001))
        while not timer.done():
            await asyncio.sleep(0)

    run_seeded(0, main)


# Ends.


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def test_a_deadlock_lists_the_tasks_that_wait_and_the_seed() -> None:
    async def main(world: SeededWorld) -> None:
        other = asyncio.create_task(wait_for_ever(), name="other")
        await asyncio.wait([other])

    with pytest.raises(DeadlockError) as caught:
        run_seeded(17, main)
    text = str(caught.value)
    assert text.startswith("seed 17: nothing can ever happen again")
    assert "other: wait_for_ever (test_seeded_loop.py:" in text
    assert "> Event.wait (locks.py:" in text
    assert "main (test_seeded_loop.py:" in text
    assert re.search(f"if one of them waits for a thread: .*{WAY_ON}", text)
    assert caught.value.__notes__ == ["seed 17 replays this run"]


def test_a_run_that_never_ends_is_stopped() -> None:
    async def main(world: SeededWorld) -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(DeadlockError, match="no end after 500 steps"):
        run_seeded(0, main, max_steps=500)


def test_an_error_of_the_scenario_names_the_seed() -> None:
    async def main(world: SeededWorld) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run_seeded(23, main)
    assert caught.value.__notes__ == ["seed 23 replays this run"]


def test_tasks_left_behind_are_cancelled() -> None:
    tasks = []

    async def main(world: SeededWorld) -> None:
        tasks.append(asyncio.create_task(wait_for_ever()))

    run_seeded(0, main)
    assert tasks[0].cancelled()


@pytest.mark.parametrize("options", [{"blocking_seconds": 0.0}, {"max_steps": 0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        run_seeded(0, order_of_three, **options)


# Blocking calls, and threads.


def test_blocking_calls_run_on_the_loop_in_virtual_time() -> None:
    async def main(world: SeededWorld) -> list[int]:
        begun: list[int] = []
        started = world.port.now()
        threads = await asyncio.gather(
            *(world.port.run_blocking(lambda i=i: (begun.append(i), threading.get_ident())) for i in range(3))
        )
        assert {thread for _, thread in threads} == {threading.get_ident()}
        assert world.port.now() > started
        return begun

    assert len({tuple(run_seeded(seed, main)) for seed in range(50)}) == 6


def test_a_blocking_call_has_its_effect_before_its_waiter_knows() -> None:
    async def main(world: SeededWorld) -> bool:
        done: list[int] = []
        call = asyncio.ensure_future(world.port.run_blocking(lambda: done.append(1)))
        while not done:
            await asyncio.sleep(1e-5)
        return call.done()

    assert not any(run_seeded(seed, main) for seed in range(20))


def test_what_a_blocking_call_raises_reaches_its_waiter() -> None:
    async def main(world: SeededWorld) -> None:
        with pytest.raises(ZeroDivisionError):
            await world.port.run_blocking(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    run_seeded(0, main)


def test_a_blocking_call_of_the_port_outlives_its_waiter() -> None:
    async def main(world: SeededWorld) -> None:
        done: list[int] = []
        call = asyncio.ensure_future(world.port.run_blocking(lambda: done.append(1)))
        await asyncio.sleep(1e-5)  # until it has asked for the call
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await world.port.aclose()
        assert done == [1]

    for seed in range(20):
        run_seeded(seed, main)


def test_workers_keep_their_order() -> None:
    async def main(world: SeededWorld) -> None:
        worker, done, finished = world.port.worker("w"), [], asyncio.Event()
        for i in range(20):
            worker.submit(lambda i=i: done.append(i))
        assert done == []
        worker.submit(finished.set)
        await finished.wait()
        assert done == list(range(20))
        worker.submit(lambda: done.append(20))
        worker.close()
        assert done[-1] == 20
        worker.submit(lambda: done.append(21))
        worker.abandon()
        await asyncio.sleep(1)
        assert done[-1] == 20

    run_seeded(0, main)


def test_a_thread_that_calls_the_loop_ends_the_run_whatever_it_does_with_its_error() -> None:
    async def main(world: SeededWorld) -> None:
        answer = world.loop.create_future()

        def intrude() -> None:
            with suppress(UsageError):
                world.loop.call_soon_threadsafe(answer.set_result, None)

        thread = threading.Thread(target=intrude, name="mine")
        thread.start()
        thread.join()
        await answer

    with pytest.raises(UsageError, match=f"seed 3: thread 'mine' called the loop; .*{WAY_ON}"):
        run_seeded(3, main)


async def of_an_executor(world: SeededWorld) -> None:
    with ThreadPoolExecutor(1) as threads:
        await asyncio.wrap_future(threads.submit(time.monotonic))


async def of_a_model(world: SeededWorld) -> None:
    with ModelThread(torch.device("cpu")) as thread:
        await thread.run(time.monotonic)


async def of_a_model_that_nobody_awaits(world: SeededWorld) -> None:
    with ModelThread(torch.device("cpu")) as thread:
        thread.submit(time.monotonic)


@pytest.mark.parametrize("thread", [of_an_executor, of_a_model, of_a_model_that_nobody_awaits])
@pytest.mark.filterwarnings("error")
def test_a_thread_that_is_waited_for_is_refused_in_words(thread: Main) -> None:
    with pytest.raises(UsageError, match=f"seed 5: .*{WAY_ON}"):
        run_seeded(5, thread)


def test_an_executor_of_ones_own_goes_through_the_loop() -> None:
    async def main(world: SeededWorld) -> int:
        with ThreadPoolExecutor(1) as threads:
            return await world.loop.run_in_executor(threads, threading.get_ident)

    assert run_seeded(0, main) == threading.get_ident()


# A planted bug: slots are given back when the waiter is cancelled, while the copy still writes to them.


async def copy_and_cancel(world: SeededWorld, *, correct: bool) -> bool:
    """Whether a slot was ever handed out while a copy could still write to it."""
    device, slots, stolen = world.device(), SlotAllocator(2), []
    stream, writing = device.stream("copy"), set()

    async def transfer() -> None:
        (slot,) = slots.allocate(1)
        if slot in writing:
            stolen.append(slot)
        writing.add(slot)
        stream.launch(lambda: writing.discard(slot))
        landed = world.loop.create_future()
        landed.add_done_callback(lambda _: correct and slots.release([slot]))
        event = device.event()
        stream.record(event)
        device.notify(stream, event, lambda _: landed.done() or landed.set_result(None))
        try:
            await asyncio.shield(landed)
        finally:
            if not correct:
                slots.release([slot])

    for _ in range(4):
        try:
            async with asyncio.timeout(world.random.expovariate(1e4)):
                await transfer()
        except TimeoutError:
            await world.sleep(1e-4)
        while not slots.available:
            await world.sleep(1e-4)
    return bool(stolen)


def test_seeds_find_a_planted_bug_and_no_other() -> None:
    found = [run_seeded(seed, lambda world: copy_and_cancel(world, correct=False)) for seed in range(200)]
    fixed = [run_seeded(seed, lambda world: copy_and_cancel(world, correct=True)) for seed in range(200)]

    assert 10 < sum(found) < 200
    assert not any(fixed)
