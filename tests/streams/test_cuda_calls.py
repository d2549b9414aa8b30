"""What the CUDA driver of streams asks of torch, against a `torch.cuda` that keeps to the runtime's rules.

Work runs at once here, so that nothing is said of order; that needs a GPU. What is looked at is who is asked
for what, on which thread and device: this cannot be seen on a machine with one GPU either.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from asynchicache.errors import DeviceError, RequestStateError, UsageError
from asynchicache.streams.cuda import CudaDevice

PATIENCE = 30.0


class _Runtime:
    """Two GPUs. A call makes a context on the thread's current device, 0 at first, as the runtime's do."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.broken = False
        self._thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._thread.device = index

    def call(self) -> None:
        self.contexts.add(self.current)
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before  # as `_maybe_exchange_device`, without a context

    def current_stream(self) -> _Stream | None:
        return getattr(self._thread, "streams", {}).get(self.current)

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        streams = self._thread.__dict__.setdefault("streams", {})
        device, before = self.current, streams.get(stream.device.index)
        if device != stream.device.index:  # torch sets the device, there and back
            self.contexts.add(device)
        self.current = stream.device.index
        streams[self.current] = stream
        try:
            yield
        finally:
            streams[self.current], self.current = before, device

    def is_current_stream_capturing(self) -> bool:
        self.call()
        stream = self.current_stream()
        return stream is not None and stream.captured

    @contextmanager
    def graph(self, graph: object, stream: _Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.call()  # synchronizes the current device
        with self.stream(stream):
            stream.captured = True
            yield
            stream.captured = False
            if stream.invalidated:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class _Stream:
    """`torch.cuda.Stream`."""

    runtime: _Runtime
    handles = 0

    def __init__(self, index: int) -> None:
        with self.runtime.device(index):
            self.runtime.call()
        _Stream.handles += 1
        self.device, self.cuda_stream = SimpleNamespace(index=index), _Stream.handles
        self.captured = self.invalidated = False

    def synchronize(self) -> None:
        with self.runtime.device(self.device.index):
            self.runtime.call()

    def wait_event(self, event: _Event) -> None:
        event.wait(self)


class _Event:
    """`torch.cuda.Event`, as `c10/cuda/CUDAEvent.h` has it: its first record makes it."""

    runtime: _Runtime

    def __init__(self, *, blocking: bool, external: bool = False) -> None:
        assert blocking
        self._external = external
        self._device: int | None = None

    def record(self, stream: _Stream) -> None:
        assert self._device in (None, stream.device.index), "an event stays on its device"
        with self.runtime.device(stream.device.index):
            self.runtime.call()
        self._device = stream.device.index

    def wait(self, stream: _Stream) -> None:
        if self._device is None:
            return
        with self.runtime.device(stream.device.index):
            self.runtime.call()
        if stream.captured and not self._external:
            stream.invalidated = True
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")

    def query(self) -> bool:
        if self._device is not None:
            self.runtime.call()
        return True

    def synchronize(self) -> None:
        if self._device is not None:
            self.runtime.call()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    made = _Stream.runtime = _Event.runtime = _Runtime()
    replaced = {name: getattr(made, name) for name in ("device", "stream", "current_stream", "graph")}
    replaced["is_current_stream_capturing"] = made.is_current_stream_capturing
    replaced |= {"is_available": lambda: True, "device_count": lambda: 2, "Stream": _Stream, "Event": _Event}
    replaced["CUDAGraph"] = lambda: SimpleNamespace(replay=made.call)
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def _notified(device: CudaDevice, stream: object) -> BaseException | None:
    told, errors = threading.Event(), []
    device.notify(stream, lambda error: (errors.append(error), told.set()))
    assert told.wait(PATIENCE)
    return errors[0]


def test_a_second_gpu_makes_no_context_on_the_first(runtime: _Runtime) -> None:
    """Not on the caller's thread, whose current device is 0, and not on the threads that wait."""
    device = CudaDevice(1)
    stream, theirs, event, ran = device.stream("a"), device.wrap(_Stream(1)), device.event(), []
    stream.launch(lambda: ran.append(runtime.current))
    stream.record(event)
    theirs.wait_event(event)
    assert event.query()
    event.synchronize()
    assert [_notified(device, one) for one in (stream, theirs)] == [None, None]
    with device.capture(stream) as graph:
        stream.wait_event(device.event(external=True))
    graph.waits.clear()
    graph.replay()
    device.close()

    assert ran == [1]
    assert (runtime.contexts, runtime.current) == ({1}, 0)


def test_a_streams_work_has_it_as_the_current_stream(runtime: _Runtime) -> None:
    device, seen = CudaDevice(0), []
    stream = device.stream("a")
    stream.launch(lambda: seen.append(runtime.current_stream()))
    device.close()

    assert seen == [stream.torch_stream]
    assert runtime.current_stream() is None


def test_an_engines_capture_takes_external_events_only_and_survives_others(runtime: _Runtime) -> None:
    device, theirs = CudaDevice(0), _Stream(0)
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


def test_an_error_of_the_runtime_stays_and_is_told(runtime: _Runtime) -> None:
    device = CudaDevice(0)
    stream, event, late = device.stream("a"), device.event(), []
    stream.record(event)
    runtime.broken = True

    with pytest.raises(DeviceError, match="cuda:0 failed: RuntimeError: CUDA error: an illegal memory"):
        event.query()
    runtime.broken = False  # the runtime itself would not recover

    stream.launch(lambda: late.append("ran"))
    assert isinstance(_notified(device, stream), DeviceError)
    assert late == []
    device.close()


def test_a_graph_that_torch_cannot_capture_leaves_the_stream_usable(runtime: _Runtime) -> None:
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


def test_streams_of_another_gpu_are_refused(runtime: _Runtime) -> None:
    first, second = CudaDevice(0), CudaDevice(1)
    with pytest.raises(UsageError, match="is not a stream of cuda:0"):
        first.wrap(_Stream(1))
    event = second.event()
    with pytest.raises(UsageError, match="is not an event of the device"):
        first.stream("a").record(event)
    first.close()
    second.close()
