"""What the CUDA driver of streams asks of torch: on two GPUs, in captures of others, after errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import CallRefusedError, DeviceError, RequestStateError, UsageError
from asynchicache.streams.cuda import CudaDevice
from asynchicache.transfer.graph_fences import GraphFences
from streams.conftest import Rig, notify
from streams.played_cuda import PlayedCuda, PlayedStream
from streams.test_streams_conformance import CONFORMANCE

PATIENCE = 30.0
GLOBAL, RELAXED = 0, 2


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    made = PlayedCuda()
    made.install(monkeypatch)
    return made


def _notified(device: CudaDevice, stream: object) -> BaseException | None:
    told, errors = threading.Event(), []
    notify(device, stream, lambda error: (errors.append(error), told.set()))
    assert told.wait(PATIENCE)
    return errors[0]


def test_a_second_gpu_makes_no_context_on_the_first(runtime: PlayedCuda) -> None:
    """Not on the caller's thread, whose current device is 0, and not on the threads that wait."""
    device = CudaDevice(1)
    stream, theirs, event, ran = device.stream("a"), device.wrap(PlayedStream(1)), device.event(), []
    stream.launch(lambda: ran.append(runtime.current))
    stream.record(event)
    theirs.wait_event(event)
    assert event.query()
    event.synchronize()
    assert [_notified(device, one) for one in (stream, theirs)] == [None, None]
    external = device.event(external=True)
    with device.capture(stream) as graph:
        stream.wait_event(external)
    graph.waits.clear()
    graph.replay()
    device.close()

    assert ran == [1]
    assert (runtime.contexts, runtime.current) == ({1}, 0)


def test_a_streams_work_has_it_as_the_current_stream(runtime: PlayedCuda) -> None:
    device, seen = CudaDevice(0), []
    stream = device.stream("a")
    stream.launch(lambda: seen.append(runtime.current_stream()))
    device.close()

    assert seen == [stream.torch_stream]
    assert runtime.current_stream() is None


@pytest.mark.parametrize("error", [CallRefusedError("error 1"), RuntimeError("Failed to find C compiler")])
def test_work_that_is_refused_is_an_error_of_its_own(runtime: PlayedCuda, error: Exception) -> None:
    device, ran = CudaDevice(0), []
    stream = device.stream("a")

    def refused() -> None:
        raise error

    with pytest.raises(CallRefusedError, match=str(error)):
        stream.launch(refused)
    assert device.error is None
    with stream.current(), pytest.raises(CallRefusedError):
        stream.launch(refused)
    stream.launch(lambda: ran.append(stream))
    device.close()

    assert (ran, device.error) == ([stream], None)


def test_where_the_driver_answers_with_an_error_the_device_has_failed(runtime: PlayedCuda) -> None:
    """Whatever was raised: the context is broken, as by a kernel that reads where there is no memory."""
    for broken, calls_left in ((CallRefusedError("error 1"), 0), (DeviceError("error 700"), 9)):
        runtime.calls_left = sys.maxsize
        device = CudaDevice(0)
        stream = device.stream("a")

        def launch(error: Exception = broken, calls: int = calls_left) -> None:
            runtime.calls_left = calls
            raise error

        stream.launch(launch)
        assert isinstance(device.error, DeviceError)
        assert not isinstance(device.error, CallRefusedError)


def test_for_launches_in_a_row_the_stream_becomes_current_once(runtime: PlayedCuda) -> None:
    device, seen = CudaDevice(1), []
    stream, other = device.stream("a"), device.stream("b")
    before = runtime.counted["stream"]

    def look() -> None:
        seen.append((runtime.current, runtime.current_stream()))

    with stream.current():
        for one in (stream, stream, other, stream):
            one.launch(look)
        assert runtime.counted["stream"] == before + 2  # once for each of the two
    stream.launch(look)
    device.close()

    assert seen == [(1, one.torch_stream) for one in (stream, stream, other, stream, stream)]
    assert (runtime.current, runtime.current_stream()) == (0, None)
    assert runtime.counted["stream"] == before + 3


def test_a_device_or_stream_that_cannot_be_made_current_has_failed(
    runtime: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    for name in ("device", "stream"):
        device, ran = CudaDevice(0), []
        stream, event = device.stream("a"), device.event()
        stream.record(event)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, name, refuse)
            with stream.current():
                stream.launch(partial(ran.append, "ran"))
            with pytest.raises(DeviceError, match="out of memory"):
                event.query()
            assert isinstance(_notified(device, stream), DeviceError)  # the waiter's thread cannot either
        assert ran == []
        device.close()


def test_an_event_is_used_again_when_nobody_refers_to_it(
    runtime: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, told = threading.Event(), []
    monkeypatch.setattr(CudaDriver, "query", lambda driver, event: False)
    monkeypatch.setattr(CudaDriver, "synchronize", lambda driver, event: gate.wait(PATIENCE))
    device = CudaDevice(0)
    stream, event = device.stream("a"), device.event()
    held = event.handle
    stream.record(event)
    device.notify(stream, event, told.append)
    del event
    assert device.event().handle != held, "the waiter's thread asks it"
    gate.set()
    device.close()
    assert told == [None]

    made = runtime.made
    again = [device.event() for _ in range(2)]
    assert held in [event.handle for event in again]
    assert not any(event.recorded for event in again)
    assert runtime.made == made


def test_an_event_that_is_asked_for_late_is_told_while_a_thread_blocks_on_a_later_one(
    runtime: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, gate, told = CudaDevice(0), threading.Event(), threading.Event()
    stream, early, last, ended = device.stream("a"), device.event(), device.event(), []
    monkeypatch.setattr(CudaDriver, "query", lambda driver, event: event == early.handle)
    monkeypatch.setattr(CudaDriver, "synchronize", lambda driver, event: gate.wait(PATIENCE))
    stream.record(early)
    stream.record(last)

    device.notify(stream, last, ended.append)
    device.notify(stream, early, lambda error: told.set(), late=True)

    assert told.wait(PATIENCE)
    assert ended == []
    gate.set()
    device.close()
    assert ended == [None]


def test_an_engines_capture_takes_external_events_only_and_survives_others(runtime: PlayedCuda) -> None:
    device, theirs = CudaDevice(0), PlayedStream(0)
    stream, event, external = device.wrap(theirs), device.event(), device.event(external=True)
    device.stream("copy").record(event)

    with torch.cuda.graph(torch.cuda.CUDAGraph(), theirs, capture_error_mode="thread_local"):
        for crossing in (stream.wait_event, stream.record):
            with pytest.raises(RequestStateError, match="is captured: events in and out must be external"):
                crossing(event)
        stream.wait_event(external)  # its record is the business of each replay
    with pytest.raises(RequestStateError, match="was never recorded"):
        stream.wait_event(external)
    stream.wait_event(event)

    assert device.error is None
    device.close()


def test_external_events_of_other_streams_wait_until_a_capture_has_ended(runtime: PlayedCuda) -> None:
    """CUDA would refuse them, and the device would have failed for good."""
    device = CudaDevice(0)
    compute, other, external = device.stream("compute"), device.stream("other"), device.event(external=True)
    other.record(external)

    with device.capture(compute):
        compute.wait_event(external)
        for early in (other.record, other.wait_event):
            with pytest.raises(RequestStateError, match="captures another stream than other"):
                early(external)
        with pytest.raises(RequestStateError, match="make external events before that"):
            GraphFences(device, 1)
    other.record(external)

    assert device.error is None
    device.close()


def test_streams_of_ours_are_none_of_torchs(runtime: PlayedCuda) -> None:
    """Torch hands 32 out in turns; a stream that somebody computes on is none that pages are copied on."""
    for _ in range(2):
        device = CudaDevice(0)
        ours = [device.stream(name, urgent=name != "backup") for name in ("load", "fork", "backup")]
        GraphFences(device, 2)
        theirs = {PlayedStream(0).cuda_stream for _ in range(PlayedStream.POOL)}
        assert not {stream.handle for stream in ours} & theirs
        assert [runtime.priorities[stream.handle] for stream in ours] == [-5, -5, 0]
        device.close()

    assert len(runtime.priorities) == 5, "those of a closed device are used again"


def test_threads_that_wait_break_no_capture_of_others(
    runtime: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query(*_: object) -> bool:
        seen.append(runtime.mode)
        return False

    seen: list[int] = []
    monkeypatch.setattr(CudaDriver, "query", query)
    monkeypatch.setattr(CudaDriver, "synchronize", query)
    device = CudaDevice(0)
    stream, event = device.stream("a"), device.event()
    stream.record(event)

    assert not event.query()
    event.synchronize()
    assert _notified(device, stream) is None

    assert seen == [RELAXED] * 4  # here twice, on the waiter's thread twice
    stream.launch(query)  # which may allocate, or load a kernel
    with stream.current():
        stream.launch(query)
    assert seen[4:] == [RELAXED] * 2
    with device.capture(stream):
        stream.launch(query)
    assert seen[6:] == [GLOBAL], "of a capture of ours, CUDA shall tell what breaks it"
    assert runtime.mode == GLOBAL
    device.close()


def test_a_thread_of_the_devices_own_is_set_up_once(runtime: PlayedCuda) -> None:
    device = CudaDevice(1)
    stream, event, seen = device.stream("a"), device.event(), []

    def work() -> None:
        device.own_thread()
        before = runtime.counted
        for _ in range(3):
            with stream.current():
                stream.launch(lambda: seen.append((runtime.current, runtime.mode)))
            stream.record(event)
            assert event.query()
        device.own_thread()
        seen.append(runtime.counted - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [(1, RELAXED)] * 3 + [{"stream": 3, "record": 3, "query": 3}]
    assert runtime.contexts == {1}
    assert runtime.released == []
    device.close()


def test_an_error_of_the_runtime_stays_and_is_told(runtime: PlayedCuda) -> None:
    device = CudaDevice(0)
    stream, event, late = device.stream("a"), device.event(), []
    stream.record(event)
    runtime.calls_left = 0

    with pytest.raises(DeviceError, match="cuda:0 failed: DeviceError: cuEventQuery returned error 700"):
        event.query()
    for make in (lambda: device.stream("late"), lambda: device.event(external=True)):
        with pytest.raises(DeviceError, match="error 700"):
            make()
    stream.launch(lambda: late.append("ran"))
    assert isinstance(_notified(device, stream), DeviceError)
    assert late == []
    device.close()


def test_a_graph_that_torch_cannot_capture_leaves_the_stream_usable(runtime: PlayedCuda) -> None:
    device = CudaDevice(0)
    stream = device.stream("a")
    with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
        with device.capture(stream):
            stream.torch_stream.invalidated = True
    stream.torch_stream.invalidated = False

    with device.capture(stream) as graph:
        pass
    graph.replay()

    assert device.error is None
    device.close()


def test_streams_of_another_gpu_are_refused(runtime: PlayedCuda) -> None:
    first, second = CudaDevice(0), CudaDevice(1)
    with pytest.raises(UsageError, match="is not a stream of cuda:0"):
        first.wrap(PlayedStream(1))
    event = second.event()
    with pytest.raises(UsageError, match="is not an event of the device"):
        first.stream("a").record(event)
    first.close()
    second.close()


# What all drivers must do, as far as it can be seen where work runs at once: graphs need a GPU.

RULES = [test for test in CONFORMANCE if "capture" not in test.__code__.co_names]


@pytest.mark.asyncio
@pytest.mark.parametrize("test", RULES, ids=lambda test: test.__name__)
async def test_rules_of_all_drivers(
    test: Callable[[Rig], Awaitable[None]], runtime: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "name", "cpu")  # where the bytes are
    rig = Rig("cuda", CudaDevice(0))
    await test(rig)
    rig.device.close()
