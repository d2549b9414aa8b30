"""What every driver of streams must do; the rules are those of `streams/base.py`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from asynchicache.errors import DeviceError, RequestStateError, UsageError
from asynchicache.streams.base import Event, Stream
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.seeded import SeededWorld, run_seeded
from streams.conftest import Rig, notify

CHAIN = 5_000


def chained(value: int, factor: int, addend: int) -> int:
    """What `x.mul_(factor).add_(addend)` makes of an int64, wrapping around as torch does."""
    wrapped = (value * factor + addend) % 2**64
    return wrapped - 2**64 if wrapped >= 2**63 else wrapped


@pytest.mark.asyncio
async def test_names_and_protocols(rig) -> None:
    stream, event = rig.device.stream("h2d"), rig.device.event()
    assert stream.name == "h2d"
    assert isinstance(stream, Stream)
    assert isinstance(event, Event)
    assert rig.device.error is None


@pytest.mark.asyncio
async def test_a_stream_runs_in_order(rig) -> None:
    stream, state, expected = rig.device.stream("s"), rig.tensor(1), 1

    def build() -> None:
        for i in range(200):
            stream.launch(lambda i=i: state.mul_(31).add_(i))

    rig.enqueue([stream], build)
    for i in range(200):
        expected = chained(expected, 31, i)
    assert await rig.finished(stream) == [None]
    assert state.item() == expected


@pytest.mark.asyncio
async def test_an_event_joins_two_streams(rig) -> None:
    producer, consumer, event = rig.device.stream("a"), rig.device.stream("b"), rig.device.event()
    source, target = rig.tensor(0), rig.tensor(0)

    def build() -> None:
        for _ in range(100):
            producer.launch(lambda: source.add_(1))
        producer.record(event)
        consumer.wait_event(event)
        consumer.launch(lambda: target.copy_(source))

    rig.enqueue([producer, consumer], build)
    await rig.finished(consumer)
    assert target.item() == 100


@pytest.mark.asyncio
async def test_a_copy_reads_its_source_when_it_runs(rig) -> None:
    stream, source, target = rig.device.stream("s"), rig.tensor(1), rig.tensor(0)

    def build() -> None:
        stream.launch(lambda: source.fill_(2))
        stream.launch(lambda: target.copy_(source))
        stream.launch(lambda: source.fill_(3))

    rig.enqueue([stream], build)
    await rig.finished(stream)
    assert (source.item(), target.item()) == (3, 2)


@pytest.mark.asyncio
async def test_a_wait_binds_when_it_is_called(rig) -> None:
    """`a` records again only behind `b`: were `b`'s wait to move along, both would wait for ever."""
    a, b = rig.device.stream("a"), rig.device.stream("b")
    first, second, state = rig.device.event(), rig.device.event(), rig.tensor(0)

    def build() -> None:
        a.launch(lambda: state.fill_(1))
        a.record(first)
        b.wait_event(first)
        b.launch(lambda: state.mul_(10))
        b.record(second)
        a.wait_event(second)
        a.launch(lambda: state.add_(5))
        a.record(first)

    rig.enqueue([a, b], build)
    assert await rig.finished(a, b) == [None, None]
    assert state.item() == 15


@pytest.mark.asyncio
async def test_waiting_for_an_event_never_recorded_raises(rig) -> None:
    stream, event = rig.device.stream("h2d"), rig.device.event()
    assert not event.recorded
    assert event.query()
    event.synchronize()
    with pytest.raises(RequestStateError, match="h2d waits for an event that was never recorded"):
        stream.wait_event(event)
    stream.record(event)
    assert event.recorded
    stream.wait_event(event)
    assert await rig.finished(stream) == [None]


@pytest.mark.asyncio
async def test_synchronize_blocks_its_thread_until_the_event_is_reached(rig) -> None:
    stream, event, state = rig.device.stream("s"), rig.device.event(), rig.tensor(0)

    def build() -> None:
        stream.launch(lambda: state.fill_(1))
        stream.record(event)

    rig.enqueue([stream], build)
    await asyncio.to_thread(event.synchronize)
    assert event.query()
    assert state.item() == 1


def fail(words: str) -> None:
    """As a driver's call that finds the context broken."""
    raise DeviceError(words)


@pytest.mark.asyncio
async def test_the_first_error_stays(rig) -> None:
    stream, other = rig.device.stream("s"), rig.device.stream("other")
    before, after, late = rig.device.event(), rig.device.event(), []

    def build() -> None:
        stream.record(before)
        stream.launch(partial(fail, "the first"))
        stream.launch(lambda: late.append("same stream"))
        stream.record(after)
        other.wait_event(after)
        other.launch(lambda: late.append("other stream"))
        other.launch(partial(fail, "the second"))

    rig.enqueue([stream, other], build)
    error, error_of_other = await rig.finished(stream, other)
    assert isinstance(rig.device.error, DeviceError)
    assert str(rig.device.error.__cause__) == "the first"
    assert str(error) == str(error_of_other) == str(rig.device.error)
    assert late == []
    for event in (before, after):
        with pytest.raises(DeviceError, match="the first"):
            event.query()
        with pytest.raises(DeviceError, match="the first"):
            event.synchronize()


@pytest.mark.asyncio
async def test_notify_tells_once_of_each_call(rig) -> None:
    stream, told = rig.device.stream("s"), []

    def build() -> None:
        for i in range(50):
            stream.launch(lambda: None)
            notify(rig.device, stream, lambda error, i=i: told.append((i, error)))

    rig.enqueue([stream], build)
    await rig.finished(stream, stream)
    assert told == [(i, None) for i in range(50)]


@pytest.mark.asyncio
async def test_notify_wants_a_recorded_event(rig) -> None:
    with pytest.raises(RequestStateError, match="s is to tell of an event that was never recorded"):
        rig.device.notify(rig.device.stream("s"), rig.device.event(), lambda error: None)


@pytest.mark.asyncio
async def test_launches_in_a_row_are_launches(rig) -> None:
    stream, other = rig.device.stream("s"), rig.device.stream("other")
    state, beside = rig.tensor(0), rig.tensor(0)

    def build() -> None:
        with stream.current():
            for _ in range(3):
                stream.launch(lambda: state.mul_(3).add_(1))
                other.launch(lambda: beside.add_(1))

    rig.enqueue([stream, other], build)
    assert await rig.finished(stream, other) == [None, None]
    assert (state.item(), beside.item()) == (13, 3)


@pytest.mark.asyncio
async def test_long_chains_across_streams_do_not_nest(rig) -> None:
    a, b, state, expected = rig.device.stream("a"), rig.device.stream("b"), rig.tensor(1), 1

    def build() -> None:
        there, back = rig.device.event(), rig.device.event()
        for _ in range(CHAIN // 2):
            a.launch(lambda: state.mul_(3).add_(1))
            a.record(there)
            b.wait_event(there)
            b.launch(lambda: state.mul_(5).add_(7))
            b.record(back)
            a.wait_event(back)

    rig.enqueue([a, b], build)
    for _ in range(CHAIN // 2):
        expected = chained(chained(expected, 3, 1), 5, 7)
    assert await rig.finished(a, b) == [None, None]
    assert state.item() == expected


@pytest.mark.asyncio
async def test_things_of_another_device_are_refused(rig) -> None:
    other = EmulatedDevice(InlineDriver())
    stream, event = other.stream("other"), other.event()
    stream.record(event)
    for misuse in (rig.device.stream("s").record, rig.device.stream("s").wait_event):
        with pytest.raises(UsageError, match="is not an event of the device"):
            misuse(event)
    ours, recorded = rig.device.stream("ours"), rig.device.event()
    ours.record(recorded)
    with pytest.raises(UsageError, match="is not a stream of"):
        rig.device.notify(stream, recorded, lambda error: None)
    with pytest.raises(UsageError, match="is not an event of the device"):
        rig.device.notify(ours, event, lambda error: None)


@pytest.mark.asyncio
async def test_close_runs_what_is_enqueued_and_may_be_called_twice(rig) -> None:
    a, b, event, state = rig.device.stream("a"), rig.device.stream("b"), rig.device.event(), rig.tensor(0)

    def build() -> None:
        a.launch(lambda: state.add_(1))
        a.record(event)
        b.wait_event(event)
        b.launch(lambda: state.mul_(4))

    rig.enqueue([a, b], build)
    rig.device.close()
    rig.device.close()
    assert state.item() == 4


# Graphs: captured once, replayed with what their external events stand for then.


@pytest.mark.asyncio
async def test_a_graph_runs_at_its_replays_only(rig) -> None:
    stream, state = rig.device.stream("compute"), rig.tensor(1)
    with rig.device.capture(stream) as graph:
        stream.launch(lambda: state.mul_(3))
        stream.launch(lambda: state.add_(1))
    assert await rig.finished(stream) == [None]
    assert state.item() == 1
    for expected in (4, 13):
        graph.replay()
        await rig.finished(stream)
        assert state.item() == expected


@pytest.mark.asyncio
async def test_a_captured_wait_binds_when_the_graph_is_replayed(rig) -> None:
    load, compute, arrived = rig.device.stream("load"), rig.device.stream("compute"), []
    loaded, source, target = rig.device.event(external=True), rig.tensor(0), rig.tensor(0)
    with rig.device.capture(compute) as graph:
        compute.wait_event(loaded)  # never recorded yet: it is the replay that needs a record
        compute.launch(lambda: target.copy_(source))
    for round_ in (1, 2, 3):

        def build(round_: int = round_) -> None:
            for _ in range(50):
                load.launch(lambda: source.add_(1))
            load.record(loaded)
            graph.replay()

        rig.enqueue([load, compute], build)
        await rig.finished(compute)
        arrived.append(target.item())
    assert arrived == [50, 100, 150]


@pytest.mark.asyncio
async def test_a_graph_records_at_its_replays_only(rig) -> None:
    stream, other, event = rig.device.stream("a"), rig.device.stream("b"), rig.device.event(external=True)
    source, target = rig.tensor(0), rig.tensor(0)
    with rig.device.capture(stream) as graph:
        stream.launch(lambda: source.fill_(7))
        stream.record(event)
    with pytest.raises(RequestStateError, match="b waits for an event that was never recorded"):
        other.wait_event(event)

    def build() -> None:
        graph.replay()
        other.wait_event(event)
        other.launch(lambda: target.copy_(source))

    rig.enqueue([stream, other], build)
    assert await rig.finished(other) == [None]
    assert target.item() == 7


@pytest.mark.asyncio
async def test_a_replay_that_waits_for_nothing_recorded_is_refused(rig) -> None:
    stream, event, ran = rig.device.stream("compute"), rig.device.event(external=True), rig.tensor(0)
    with rig.device.capture(stream) as graph:
        stream.wait_event(event)
        stream.launch(lambda: ran.fill_(1))
    with pytest.raises(RequestStateError, match="compute waits for an event that was never recorded"):
        graph.replay()
    with pytest.raises(RequestStateError, match="compute waits for an event that was never recorded"):
        stream.wait_event(event)  # outside of a capture it is an event like any other
    await rig.finished(stream)
    assert ran.item() == 0


@pytest.mark.asyncio
async def test_only_external_events_cross_the_border_of_a_graph(rig) -> None:
    stream, other, event = rig.device.stream("compute"), rig.device.stream("other"), rig.device.event()
    state = rig.tensor(1)
    other.record(event)
    with rig.device.capture(stream):
        stream.launch(lambda: state.mul_(2))  # torch warns of a graph that is empty
        for crossing in (stream.wait_event, stream.record):
            with pytest.raises(RequestStateError, match=r"compute is captured: events .* must be external"):
                crossing(event)
        with pytest.raises(RequestStateError, match="compute is being captured already"):
            with rig.device.capture(stream):
                pass
    foreign = EmulatedDevice(InlineDriver()).stream("foreign")
    with pytest.raises(UsageError, match="is not a stream of"):
        with rig.device.capture(foreign):
            pass
    stream.wait_event(event)
    assert await rig.finished(stream) == [None]


@pytest.mark.asyncio
async def test_external_events_of_other_streams_wait_until_a_capture_has_ended(rig) -> None:
    stream, other, event = (
        rig.device.stream("compute"),
        rig.device.stream("other"),
        rig.device.event(external=True),
    )
    state = rig.tensor(1)
    other.record(event)
    with rig.device.capture(stream):
        stream.launch(lambda: state.mul_(2))
        stream.wait_event(event)
        for early in (other.record, other.wait_event):
            with pytest.raises(RequestStateError, match="captures another stream than other"):
                early(event)
        with pytest.raises(RequestStateError, match="make external events before that"):
            rig.device.event(external=True)
    other.record(event)
    other.wait_event(event)
    assert await rig.finished(other) == [None]


@pytest.mark.asyncio
async def test_a_capture_is_of_its_thread_and_others_use_external_events(rig) -> None:
    stream, other, event = (
        rig.device.stream("compute"),
        rig.device.stream("other"),
        rig.device.event(external=True),
    )
    state = rig.tensor(1)
    with rig.device.capture(stream):
        stream.launch(lambda: state.mul_(2))
        with ThreadPoolExecutor(1) as threads:
            threads.submit(other.record, event).result()
    assert await rig.finished(other) == [None]
    assert event.recorded


# All of this in virtual time too.

CONFORMANCE = [test for name, test in list(globals().items()) if name.startswith("test_")]


@pytest.mark.parametrize("test", CONFORMANCE, ids=lambda test: test.__name__)
def test_in_virtual_time(test) -> None:
    async def main(world: SeededWorld) -> None:
        rig = Rig("virtual", world.device())
        await test(rig)
        rig.device.close()

    for seed in range(3):
        run_seeded(seed, main)
