"""What sets the drivers apart: overlap, immediacy, seeds, threads and how they end."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import weakref

import pytest
import torch

from asynchicache.errors import ClosedError, ConfigError, DeviceError, InternalError
from asynchicache.streams.drivers import InlineDriver, SeededDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from streams.conftest import notify

PATIENCE = 30.0


def stream_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stream-")]


class FrozenLoop(asyncio.SelectorEventLoop):
    """Time stands still: the drawn durations alone decide an order."""

    def time(self) -> float:
        return 0.0


@pytest.fixture
def frozen_loop():
    loop = FrozenLoop()
    yield loop
    loop.close()


# Threads.


def test_who_gives_way_lets_a_stream_begin() -> None:
    device, order = EmulatedDevice(ThreadDriver()), []
    stream, event = device.stream("load"), device.event()
    stream.record(event)
    event.synchronize()  # its thread is there, and asleep
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)  # as long as nothing blocks, this thread keeps the interpreter
    try:
        stream.launch(lambda: order.append("copy"))
        for _ in range(20_000):
            if not order:
                device.yield_to_streams()
        order.append("next")
    finally:
        sys.setswitchinterval(interval)
        device.close()
    assert order == ["copy", "next"]


def test_threads_let_streams_overlap() -> None:
    device = EmulatedDevice(ThreadDriver())
    a, b, gate, passed = device.stream("a"), device.stream("b"), threading.Event(), []
    a.launch(lambda: passed.append(gate.wait(PATIENCE)))
    b.launch(gate.set)
    device.close()
    assert passed == [True]


def test_threads_wait_only_for_the_record_of_the_call() -> None:
    device = EmulatedDevice(ThreadDriver())
    a, b, event, gate = device.stream("a"), device.stream("b"), device.event(), threading.Event()
    a.record(event)
    b.wait_event(event)
    a.launch(lambda: gate.wait(PATIENCE))
    a.record(event)
    reached = device.event()
    b.record(reached)
    reached.synchronize()  # would never return if `b` waited for the second record
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()
    device.close()


def test_threads_tell_of_the_record_and_not_of_what_is_behind_it() -> None:
    device = EmulatedDevice(ThreadDriver())
    stream, event, gate, told = device.stream("s"), device.event(), threading.Event(), threading.Event()
    stream.launch(lambda: None)
    stream.record(event)
    stream.launch(gate.wait)
    device.notify(stream, event, lambda error: told.set())
    assert told.wait(PATIENCE)
    gate.set()
    device.close()


def test_threads_start_with_the_first_work_and_end_with_close() -> None:
    device = EmulatedDevice(ThreadDriver())
    stream, event, ran = device.stream("late"), device.event(), []
    stream.record(event)
    assert stream_threads() == []
    for i in range(100):
        stream.launch(lambda i=i: ran.append(i))
    assert stream_threads() == ["stream-late"]
    device.close()
    assert stream_threads() == []
    assert ran == list(range(100))
    with pytest.raises(ClosedError, match="device cpu is closed"):
        stream.launch(lambda: None)
    with pytest.raises(ClosedError, match="device cpu is closed"):
        device.notify(stream, event, lambda error: None)
    assert ran == list(range(100))


def test_threads_let_go_of_what_they_ran() -> None:
    device = EmulatedDevice(ThreadDriver())
    stream, event, freed = device.stream("s"), device.event(), threading.Event()
    page = torch.zeros(8)
    weakref.finalize(page, freed.set)
    stream.launch(page.zero_)
    del page
    stream.record(event)
    event.synchronize()
    assert freed.wait(PATIENCE)
    device.close()


def test_threads_close_after_an_error() -> None:
    device = EmulatedDevice(ThreadDriver())
    a, b = device.stream("a"), device.stream("b")
    a.launch(lambda: 1 // 0)
    a.launch(lambda: None)
    b.launch(lambda: None)
    device.close()
    assert isinstance(device.error, DeviceError)
    assert stream_threads() == []


# Inline.


def test_inline_runs_in_the_caller_at_once() -> None:
    device = EmulatedDevice(InlineDriver())
    stream, event, ran_in = device.stream("s"), device.event(), []
    stream.launch(lambda: ran_in.append(threading.get_ident()))
    stream.record(event)
    assert event.query()
    assert ran_in == [threading.get_ident()]


def test_inline_work_never_runs_inside_other_work() -> None:
    device = EmulatedDevice(InlineDriver())
    a, b, order = device.stream("a"), device.stream("b"), []

    def outer() -> None:
        b.launch(lambda: order.append("inner"))
        order.append("outer")

    a.launch(outer)
    assert order == ["outer", "inner"]


def test_inline_loses_no_work_of_many_threads() -> None:
    device = EmulatedDevice(InlineDriver())
    totals = [0] * 4

    def work(i: int) -> None:
        totals[i] += 1

    def enqueue(i: int) -> None:
        stream = device.stream(str(i))
        for _ in range(500):
            stream.launch(lambda: work(i))

    threads = [threading.Thread(target=enqueue, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [500] * 4


def test_an_interrupt_of_inline_work_reaches_the_caller_and_fails_the_device() -> None:
    device = EmulatedDevice(InlineDriver())
    stream, ran = device.stream("s"), []

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream.launch(interrupted)
    assert isinstance(device.error, DeviceError)
    stream.launch(lambda: ran.append(1))
    assert ran == []
    device.close()


# Seeded.


def seeded_order(loop: asyncio.AbstractEventLoop, seed: int) -> list[int]:
    device = EmulatedDevice(SeededDriver(loop, random.Random(seed)))
    order: list[int] = []
    for i in range(4):
        device.stream(f"s{i}").launch(lambda i=i: order.append(i))
    assert order == []
    device.close()
    return order


def test_a_seed_decides_the_order(frozen_loop: FrozenLoop) -> None:
    orders = [seeded_order(frozen_loop, seed) for seed in range(20)]
    for seed, order in enumerate(orders):
        rng = random.Random(seed)
        drawn = [rng.expovariate(1000) for _ in range(4)]
        assert order == sorted(range(4), key=drawn.__getitem__)
    assert len({tuple(order) for order in orders}) > 5


@pytest.mark.asyncio
async def test_seeded_work_runs_on_the_loop_also_when_another_thread_enqueues_it() -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)  # so that it checks from which thread it is called
    device = EmulatedDevice(SeededDriver(loop, random.Random(1), mean_seconds=1e-6))
    stream, ran_in, told = device.stream("s"), [], loop.create_future()

    def enqueue() -> None:
        for _ in range(10):
            stream.launch(lambda: ran_in.append(threading.get_ident()))
        notify(device, stream, told.set_result)  # the work runs on the loop, so this does too

    await asyncio.to_thread(enqueue)
    assert await told is None
    assert ran_in == [threading.get_ident()] * 10


def test_seeded_synchronize_on_the_loop_runs_work_ahead_of_time(frozen_loop: FrozenLoop) -> None:
    device = EmulatedDevice(SeededDriver(frozen_loop, random.Random(1)))
    stream, event, ran = device.stream("s"), device.event(), []
    for i in range(10):
        stream.launch(lambda i=i: ran.append(i))
    stream.record(event)
    event.synchronize()
    assert ran == list(range(10))


def test_seeded_synchronize_that_could_never_return_raises(frozen_loop: FrozenLoop) -> None:
    driver = SeededDriver(frozen_loop, random.Random(1))
    with pytest.raises(InternalError, match="only the loop could run"):
        driver.wait(threading.Event())


@pytest.mark.parametrize("mean", [0.0, -1.0, float("nan")])
def test_seeded_durations_are_checked(frozen_loop: FrozenLoop, mean: float) -> None:
    with pytest.raises(ConfigError, match=r"mean_seconds is .*; it must be above 0"):
        SeededDriver(frozen_loop, random.Random(1), mean_seconds=mean)


def test_where_a_stream_gets_no_thread_the_device_fails_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device, ran, told = EmulatedDevice(ThreadDriver()), [], []
    first, second = device.stream("first"), device.stream("second")
    gate, end, both = threading.Event(), device.event(), device.event()
    first.launch(lambda: gate.wait(PATIENCE))
    first.record(end)
    second.wait_event(end)
    for number in range(3):
        second.launch(lambda number=number: ran.append(number))
    second.record(both)
    device.notify(second, both, told.append)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        gate.set()
        device.close()  # once all has run

    assert ran == []
    assert [str(error) for error in told] == [str(device.error)]
    assert "no thread for stream 'second': can't start new thread" in str(device.error)
