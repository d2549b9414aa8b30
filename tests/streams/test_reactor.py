"""Completions reach the loop once each, in order, also when notifications are lost or work fails."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from contextvars import ContextVar

import pytest

from asynchicache.errors import ClosedError, ConfigError, DeviceError
from asynchicache.ports import AsyncioPort
from asynchicache.streams.base import Device, Stream
from asynchicache.streams.drivers import InlineDriver, SeededDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.testing.seeded import SeededWorld, run_seeded

PATIENCE = 30.0
NEVER = 3600.0
SOON = 0.002


@pytest.mark.asyncio
async def test_releases_follow_the_work_of_every_driver(rig, releases) -> None:
    reactor = CompletionReactor(AsyncioPort())
    streams = [rig.device.stream(f"s{i}") for i in range(3)]
    states = [rig.tensor(0) for _ in streams]

    def build() -> None:
        for step in range(1, 21):
            for stream, state in zip(streams, states, strict=True):
                stream.launch(lambda state=state, step=step: state.fill_(step))
                reactor.track(rig.device, stream, releases.hook((stream.name, step)))

    rig.enqueue(streams, build)
    await releases.wait(60)
    for stream in streams:
        own = [step for name, step in releases.labels if name == stream.name]
        assert own == list(range(1, 21))
    assert [state.item() for state in states] == [20] * 3
    assert releases.errors == {None}
    assert await reactor.aclose(0) == 0
    assert reactor.statistics().completed == 60


@pytest.mark.asyncio
async def test_many_completions_wake_the_loop_once(stuck, releases) -> None:
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)
    for i in range(64):
        reactor.track(stuck.device, stuck.stream, releases.hook(i))
    stuck.free()  # blocks the loop until all 64 are told of
    assert releases.calls == []
    await releases.wait(64)
    assert releases.labels == list(range(64))
    statistics = reactor.statistics()
    assert (statistics.tracked, statistics.completed) == (64, 64)
    assert (statistics.wakes, statistics.swept, statistics.in_flight) == (1, 0, 0)
    assert await reactor.aclose(PATIENCE) == 0


@pytest.mark.asyncio
async def test_an_instant_completion_is_released_later_on_the_loop(releases) -> None:
    device = EmulatedDevice(InlineDriver())
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)
    for i in range(64):
        reactor.track(device, device.stream("s"), releases.hook(i))
    assert releases.calls == []
    assert reactor.statistics().in_flight == 64
    await releases.wait(64)
    assert reactor.statistics().wakes == 1


@pytest.mark.asyncio
async def test_what_is_asked_for_late_is_told_before_what_was_recorded_after_it(releases) -> None:
    device, gate = EmulatedDevice(ThreadDriver()), threading.Event()
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)
    stream, early, last = device.stream("s"), device.event(), device.event()
    stream.record(early)
    stream.launch(lambda: gate.wait(PATIENCE))
    stream.record(last)
    reactor.track(device, stream, releases.hook("last"), event=last)
    reactor.track(device, stream, releases.hook("early"), event=early, late=True)

    await releases.wait(1)
    assert releases.labels == ["early"]
    assert reactor.statistics().in_flight == 1
    gate.set()
    assert await reactor.aclose(PATIENCE) == 0
    assert releases.labels == ["early", "last"]
    device.close()


@pytest.mark.asyncio
async def test_what_is_asked_for_late_is_swept_too(lossy, releases) -> None:
    device = lossy(EmulatedDevice(InlineDriver()))
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=SOON)
    stream, event = device.stream("s"), device.event()
    stream.record(event)
    reactor.track(device, stream, releases.hook(0), event=event, late=True)

    await releases.wait(1)
    assert reactor.statistics().swept == 1


@pytest.mark.asyncio
async def test_a_release_runs_in_no_waiters_context() -> None:
    device, found = EmulatedDevice(InlineDriver()), []
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)

    async def wait() -> None:
        tenant.set("B")
        reactor.track(device, device.stream("s"), lambda _: found.append(tenant.get()))
        await reactor.aclose(PATIENCE)

    await asyncio.create_task(wait())
    assert found == ["nobody"]


@pytest.mark.asyncio
async def test_a_release_may_track_again() -> None:
    device, count = EmulatedDevice(InlineDriver()), 200
    stream, reactor = device.stream("s"), CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)
    left, done = [count], asyncio.Event()

    def release(error: BaseException | None) -> None:
        left[0] -= 1
        if left[0]:
            reactor.track(device, stream, release)
        else:
            done.set()

    reactor.track(device, stream, release)
    await done.wait()
    assert reactor.statistics().completed == count


@pytest.mark.asyncio
async def test_tracking_from_another_thread_releases_on_the_loop(releases) -> None:
    device = EmulatedDevice(ThreadDriver())
    reactor, threads = CompletionReactor(AsyncioPort()), set()

    def submit(stream: Stream) -> None:
        for i in range(300):
            stream.launch(lambda: None)
            hook = releases.hook((stream.name, i))
            reactor.track(
                device, stream, lambda error, hook=hook: (threads.add(threading.get_ident()), hook(error))
            )

    streams = [device.stream(name) for name in "abc"]
    await asyncio.gather(*(asyncio.to_thread(submit, stream) for stream in streams))
    await releases.wait(900)
    for stream in streams:
        assert [i for name, i in releases.labels if name == stream.name] == list(range(300))
    assert threads == {threading.get_ident()}
    assert await reactor.aclose(PATIENCE) == 0
    device.close()


# Lost notifications.


@pytest.mark.asyncio
async def test_the_sweeper_alone_finds_everything(rig, releases, lossy) -> None:
    device = lossy(rig.device)
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=SOON)
    streams = [device.stream(name) for name in "ab"]
    for i in range(32):
        for stream in streams:
            stream.launch(lambda: None)
            reactor.track(device, stream, releases.hook((stream.name, i)))
    await releases.wait(64)
    for name in "ab":
        assert [i for of, i in releases.labels if of == name] == list(range(32))
    assert reactor.statistics().wakes == 0
    assert reactor.statistics().swept == 64
    assert releases.errors == {None}


@pytest.mark.asyncio
async def test_a_later_notification_tells_of_the_earlier_ones_too(releases, lossy) -> None:
    lost = iter([True] * 9 + [False])
    device = lossy(EmulatedDevice(InlineDriver()), lambda: next(lost))
    reactor, stream = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER), device.stream("s")
    for i in range(10):
        reactor.track(device, stream, releases.hook(i))
    await releases.wait(10)
    assert releases.labels == list(range(10))
    assert (reactor.statistics().wakes, reactor.statistics().swept) == (1, 0)
    assert await reactor.aclose(0) == 0


@pytest.mark.asyncio
async def test_many_rounds_lose_half_of_the_notifications_and_release_once_each(releases, lossy) -> None:
    rng, loop = random.Random(5), asyncio.get_running_loop()
    inner = EmulatedDevice(SeededDriver(loop, rng, mean_seconds=1e-5))
    device = lossy(inner, lambda: rng.random() < 0.5)
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=SOON)
    streams = [device.stream(f"s{i}") for i in range(3)]
    for i in range(300):
        stream = streams[i % 3]
        stream.launch(lambda: None)
        reactor.track(device, stream, releases.hook(i))
        if rng.random() < 0.1:
            await asyncio.sleep(0)
    await releases.wait(300)
    assert sorted(releases.labels) == list(range(300))
    assert await reactor.aclose(0) == 0


@pytest.mark.asyncio
async def test_a_notification_after_the_sweep_changes_nothing(
    caplog: pytest.LogCaptureFixture, releases, lossy
) -> None:
    device = lossy(EmulatedDevice(InlineDriver()))
    reactor, stream = CompletionReactor(AsyncioPort(), sweep_seconds=SOON), device.stream("s")
    for i in range(2):
        reactor.track(device, stream, releases.hook(i))
    await releases.wait(2)
    reactor.track(device, stream, releases.hook(2))
    for tell in device.withheld:
        tell()
    await releases.wait(3)
    assert releases.labels == [0, 1, 2]
    device.withheld[0]()
    assert await reactor.aclose(0) == 0
    assert releases.labels == [0, 1, 2]
    assert caplog.records == []


class RecordingLoop(asyncio.SelectorEventLoop):
    """Writes down its timers."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[asyncio.TimerHandle] = []

    def call_later(self, *args, **kwargs) -> asyncio.TimerHandle:
        self.timers.append(super().call_later(*args, **kwargs))
        return self.timers[-1]


async def track_one(device: Device) -> None:
    reactor, released = CompletionReactor(AsyncioPort(), sweep_seconds=SOON), asyncio.Event()
    reactor.track(device, device.stream("s"), lambda error: released.set())
    await released.wait()


def test_the_sweeper_is_armed_only_while_something_is_in_flight(lossy) -> None:
    with asyncio.Runner(loop_factory=RecordingLoop) as runner:
        loop = runner.get_loop()
        runner.run(track_one(EmulatedDevice(InlineDriver())))
        assert loop.timers == []
        runner.run(track_one(lossy(EmulatedDevice(InlineDriver()))))
        assert len(loop.timers) == 1  # the sweep that found it armed no other


# Errors.


@pytest.mark.asyncio
async def test_a_device_error_reaches_everything_in_flight(stuck, releases) -> None:
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=SOON)
    failing = stuck.device.stream("failing")
    reactor.track(stuck.device, stuck.stream, releases.hook("stuck"))
    failing.launch(lambda: 1 // 0)
    for i in range(5):
        reactor.track(stuck.device, failing, releases.hook(i))
    await releases.wait(6)  # the stuck stream too: what it writes is quarantined, not awaited
    assert [label for label in releases.labels if label != "stuck"] == list(range(5))
    assert releases.errors == {stuck.device.error}
    assert isinstance(stuck.device.error, DeviceError)
    reactor.track(stuck.device, stuck.device.stream("late"), releases.hook("late"))
    await releases.wait(7)
    assert releases.calls[-1] == ("late", stuck.device.error)
    assert await reactor.aclose(0) == 0


@pytest.mark.asyncio
async def test_the_sweeper_passes_the_error_on_when_notifications_are_lost(releases, lossy) -> None:
    device = lossy(EmulatedDevice(ThreadDriver()))
    reactor, stream = CompletionReactor(AsyncioPort(), sweep_seconds=SOON), device.stream("s")
    stream.launch(lambda: 1 // 0)
    for i in range(5):
        reactor.track(device, stream, releases.hook(i))
    await releases.wait(5)
    assert releases.labels == list(range(5))
    assert releases.errors == {device.error}
    assert device.error is not None
    device.close()


@pytest.mark.asyncio
async def test_a_failing_hook_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture, releases) -> None:
    device = EmulatedDevice(InlineDriver())
    reactor, stream = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER), device.stream("s")

    def broken(error: BaseException | None) -> None:
        raise ValueError("broken hook")

    for i in range(3):
        reactor.track(device, stream, broken)
        reactor.track(device, stream, releases.hook(i))
    await releases.wait(3)
    assert releases.labels == [0, 1, 2]
    assert [record.message for record in caplog.records] == ["a release hook failed; the others go on"] * 3
    assert "broken hook" in caplog.text
    assert await reactor.aclose(0) == 0


# Events, and the end.


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [False, True])
async def test_what_the_caller_has_recorded_is_tracked_as_it_is(stuck, releases, lossy, lost: bool) -> None:
    device = lossy(stuck.device, lambda: lost)
    reactor, ahead = CompletionReactor(AsyncioPort(), sweep_seconds=SOON), device.stream("ahead")
    event, never = device.event(), device.event()
    ahead.record(event)
    stuck.stream.record(never)
    ahead.wait_event(never)
    reactor.track(device, ahead, releases.hook(0), event=event)
    await releases.wait(1)  # a record of its own would never be reached
    assert releases.calls == [(0, None)]
    assert await reactor.aclose(PATIENCE) == 0


@pytest.mark.asyncio
async def test_aclose_waits_for_what_is_in_flight(rig, releases) -> None:
    reactor = CompletionReactor(AsyncioPort())
    stream = rig.device.stream("s")

    def build() -> None:
        for i in range(20):
            stream.launch(lambda: None)
            reactor.track(rig.device, stream, releases.hook(i))

    rig.enqueue([stream], build)
    assert await reactor.aclose(PATIENCE) == 0
    assert releases.labels == list(range(20))
    with pytest.raises(ClosedError, match="the reactor is closed"):
        reactor.track(rig.device, stream, releases.hook("late"))
    assert await reactor.aclose(0) == 0


@pytest.mark.asyncio
async def test_aclose_gives_up_on_a_stuck_stream_at_its_deadline(stuck, releases) -> None:
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=SOON)
    lively = stuck.device.stream("lively")
    for i in range(3):
        reactor.track(stuck.device, stuck.stream, releases.hook(("stuck", i)))
        reactor.track(stuck.device, lively, releases.hook(("lively", i)))
    async with asyncio.timeout(PATIENCE):
        assert await reactor.aclose(0.01) == 3
    assert releases.labels == [("lively", i) for i in range(3)]
    stuck.free()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(releases.calls) == 3, "pages leaked on purpose must not come back"
    assert reactor.statistics().in_flight == 3


@pytest.mark.asyncio
async def test_aclose_finds_lost_completions_at_once(releases, lossy) -> None:
    device = lossy(EmulatedDevice(InlineDriver()))
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)
    reactor.track(device, device.stream("s"), releases.hook(0))
    assert await reactor.aclose(NEVER) == 0
    assert releases.calls == [(0, None)]


@pytest.mark.asyncio
async def test_aclose_looks_once_more_at_its_deadline(stuck, releases, lossy) -> None:
    reactor = CompletionReactor(AsyncioPort(), sweep_seconds=NEVER)
    reactor.track(lossy(stuck.device), stuck.stream, releases.hook(0))
    closing = asyncio.ensure_future(reactor.aclose(0.01))
    await asyncio.sleep(0)
    stuck.free()
    assert await closing == 0
    assert releases.calls == [(0, None)]


@pytest.mark.asyncio
async def test_a_cancelled_aclose_stops_waiting_and_can_be_called_again(stuck, releases) -> None:
    reactor = CompletionReactor(AsyncioPort())
    reactor.track(stuck.device, stuck.stream, releases.hook(0))
    closing = asyncio.ensure_future(reactor.aclose(NEVER))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    stuck.free()
    assert await reactor.aclose(PATIENCE) == 0
    assert releases.calls == [(0, None)]


@pytest.mark.asyncio
async def test_statistics_are_a_frozen_copy() -> None:
    statistics = CompletionReactor(AsyncioPort()).statistics()
    assert dataclasses.astuple(statistics) == (0, 0, 0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.tracked = 1


def test_work_that_does_not_end_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: SeededWorld) -> None:
        device, finished = world.device(mean_seconds=1e3), asyncio.Event()
        stream, reactor = device.stream("slow"), CompletionReactor(world.port, warn_seconds=2)
        for _ in range(2):
            stream.launch(lambda: None)
            reactor.track(device, stream, lambda error: finished.set())
        await finished.wait()
        await reactor.aclose(NEVER)

    run_seeded(1, main)
    first, *others = [record.message for record in caplog.records]
    assert first == "stream slow of cpu has not got further for 2 s"
    assert len(others) <= 1  # of the second piece, once it was ahead


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [0.0, -0.05, float("nan")])
async def test_the_sweep_interval_is_checked(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"sweep_seconds is .*; it must be above 0"):
        CompletionReactor(AsyncioPort(), sweep_seconds=seconds)
