"""Streams and events of an NVIDIA GPU, over `torch.cuda`.

No Python function is ever a CUDA host callback: the driver's thread would need the GIL while the thread that
holds it waits inside the driver. Threads that block on events report completion instead.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from asynchicache.captures import relaxed_capture_mode
from asynchicache.errors import (
    CallRefusedError,
    ClosedError,
    ConfigError,
    DeviceError,
    RequestStateError,
    UsageError,
)
from asynchicache.streams.base import Event, Stream
from asynchicache.streams.waiter import EventWaiter, Reached

P = ParamSpec("P")
T = TypeVar("T")


_idle: dict[int, deque[torch.cuda.Stream]] = defaultdict(deque)
"""By GPU, streams of closed devices, on which nothing is enqueued."""


class _Thread(threading.local):
    """State of a device that each thread has for itself."""

    current: CudaStream | None = None  # the stream whose `current` context the thread is in
    asking = False  # whether the thread is in `asking`


class CudaDevice:
    """One GPU."""

    def __init__(self, index: int = 0) -> None:
        """
        Raises:
            DeviceError: torch sees no CUDA device.
            ConfigError: there is no device `index`.
        """
        if not torch.cuda.is_available():
            raise DeviceError(f"cuda:{index} cannot be used: torch {torch.__version__} sees no CUDA device")
        if not 0 <= index < torch.cuda.device_count():
            raise ConfigError(f"device index is {index}; it must be 0 to {torch.cuda.device_count() - 1}")
        self.index = index
        self.error: DeviceError | None = None
        self._lock = threading.Lock()
        self._streams: list[CudaStream] = []
        self._wrapped: dict[int, CudaStream] = {}
        self._waiters: dict[CudaStream, EventWaiter] = {}
        self._spare: deque[torch.cuda.Event] = deque()
        self._maker: CudaStream | None = None
        self._closed = False
        self.thread = _Thread()

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def stream(self, name: str) -> CudaStream:
        """
        Raises:
            DeviceError: the driver makes none, for instance after an error.
        """
        stream = CudaStream(self, self._torch_stream(), name)
        with self._lock:
            self._streams.append(stream)
        return stream

    def _torch_stream(self) -> torch.cuda.Stream:
        """A stream of torch's. Torch has 32 and hands them out round-robin: the 33rd is the first one again,
        even if it is in use. So those of closed devices are reused first."""
        self.check()
        with suppress(IndexError):
            return _idle[self.index].pop()
        try:
            return torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceError(f"{self.name} makes no stream: {error}") from error

    def wrap(self, torch_stream: torch.cuda.Stream) -> CudaStream:
        """Wrap a stream that an engine made, such as its compute stream; the same object each time.

        Raises:
            UsageError: the stream is of another device.
        """
        if torch_stream.device.index != self.index:
            raise UsageError(f"{torch_stream!r} is not a stream of {self.name}")
        handle = torch_stream.cuda_stream
        with self._lock:
            if handle not in self._wrapped:
                self._wrapped[handle] = CudaStream(self, torch_stream, f"wrapped-{handle:#x}", foreign=True)
            return self._wrapped[handle]

    def event(self, *, external: bool = False) -> CudaEvent:
        """
        Raises:
            DeviceError: `external`, and torch has no such events, or the device failed.
            RequestStateError: `external`, and this thread captures a stream of this device.
        """
        if not external:
            return CudaEvent(self, self._spare_event(), external)
        if self.capturing():
            raise RequestStateError("this thread captures a stream: make external events before that")
        event = CudaEvent(self, _torch_event(external), external)
        # Torch creates an event with its first record, and skips waits for events that are not created: a
        # captured wait would silently be missing.
        self._maker = self._maker or self.stream("external-events")
        self.attempt(event.torch_event.record, self._maker.torch_stream)
        self.check()
        return event

    def capturing(self) -> bool:
        """Whether this thread's current stream of this device is being captured.

        Torch decides by the current stream, not by the one it is given, whether the record of an external
        event or the wait for it belongs to a graph. CUDA refuses that on any other stream, and the error is
        sticky.
        """
        with self.here():
            return bool(self.attempt(torch.cuda.is_current_stream_capturing))

    def _spare_event(self) -> torch.cuda.Event:
        """An unused event. Making and destroying CUDA events takes the context's lock, so they are reused."""
        try:
            return self._spare.pop()
        except IndexError:
            return _torch_event(external=False)

    def reuse(self, torch_event: torch.cuda.Event) -> None:
        """Keep a torch event whose last user is gone for the next `event`; from any thread.

        Streams that still wait for its record are not affected: CUDA binds a wait at the time of the call.
        """
        self._spare.append(torch_event)

    def owns(self, part: Event | Stream) -> bool:
        return isinstance(part, CudaEvent | CudaStream) and part.device is self

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[CudaGraph]:
        """Within the context, what is enqueued on `stream` becomes a graph and does not run.

        Captures in CUDA's thread-local mode: in the global one, which is torch's default, calls of other
        threads can invalidate the capture. Engines that capture by torch alone should do the same.

        Raises:
            RequestStateError: `stream` is being captured already.
            UsageError: `stream` is of another device.
        """
        own = self._own(stream)
        if own.graph is not None:
            raise RequestStateError(f"stream {own.name} is being captured already")
        own.graph = graph = CudaGraph(own)
        try:
            # Torch synchronizes the current device first.
            with torch.cuda.device(self.index), self._torch_capture(graph, own):
                yield graph
        finally:
            own.graph = None

    @staticmethod
    def _torch_capture(graph: CudaGraph, stream: CudaStream) -> torch.cuda.graph:
        mode = "thread_local"
        return torch.cuda.graph(graph.torch_graph, stream=stream.torch_stream, capture_error_mode=mode)

    def yield_to_streams(self) -> None:
        """A GPU starts by itself."""

    def notify(self, stream: Stream, event: Event, reached: Reached) -> None:
        """Call `reached(error)` once, from the stream's waiter thread, when the latest record of `event` is
        reached. `reached` must be short and must not raise.

        Raises:
            ClosedError: the device is closed.
            RequestStateError: `event` was never recorded.
            UsageError: `stream` or `event` is of another device.
        """
        own = self._own(stream)
        if not own.own(event).recorded:
            raise RequestStateError(f"stream {own.name} is to tell of an event that was never recorded")
        self._waiter(own).put(event, reached)

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.device is not self:
            raise UsageError(f"{stream!r} is not a stream of {self.name}")
        return stream

    def _waiter(self, stream: CudaStream) -> EventWaiter:
        with self._lock:
            if self._closed:
                raise ClosedError(f"device {self.name} is closed")
            if stream not in self._waiters:
                self._waiters[stream] = EventWaiter(stream.name, self.asking)
            return self._waiters[stream]

    def check(self) -> None:
        """
        Raises:
            DeviceError: the device failed.
        """
        if self.error is not None:
            raise DeviceError(str(self.error)) from self.error

    def attempt(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call the driver, or code that does. The first exception fails the device; none is raised."""
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the boundary of foreign work and of the driver
            self._fail(error)
            return None

    def enqueue(self, work: Callable[[], object], stream: CudaStream) -> None:
        """Call the driver to enqueue work. An exception fails the device, unless it goes on without an error.

        Raises:
            CallRefusedError: it goes on; what `work` enqueued before the exception runs.
        """
        try:
            work()
        except Exception as error:
            if self._goes_on(stream, error):
                raise CallRefusedError(f"{self.name} refused work: {error}") from error
            self._fail(error)

    def _goes_on(self, stream: CudaStream, error: Exception) -> bool:
        """Whether the device does after an exception. An error of the context, as of a kernel, is the answer
        to every later call."""
        if isinstance(error, DeviceError) and not isinstance(error, CallRefusedError):
            return False
        if stream.graph is not None:
            return False  # the capture is lost, and to ask would be an error of its own
        try:
            self._beside(stream.torch_stream.query)
        except Exception as error:  # noqa: BLE001 - as in `attempt`
            self._fail(error)
        return self.error is None

    def _fail(self, error: Exception) -> None:
        failure = DeviceError(f"{self.name} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._lock:
            self.error = self.error or failure

    def ask(self, call: Callable[[], T]) -> T | None:
        """`attempt` a call that waits for an event or queries it.

        The device is the thread's current one during the call: on a new thread a runtime call would otherwise
        create a context on GPU 0, hundreds of MiB of its memory, even for an event of GPU 1. Torch takes care
        of that itself where it records an event or makes a stream wait (c10/cuda/CUDAEvent.h).
        """
        return self.attempt(call) if self.thread.asking else self.attempt(self._beside, call)

    def _beside(self, call: Callable[[], T]) -> T:
        with self.here(), relaxed_capture_mode():
            return call()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Do once what each `ask` of this thread would do first; for a thread that does nothing else."""
        with self.within(self.here, relaxed_capture_mode):
            self.thread.asking = True
            yield

    def here(self) -> torch.cuda.device:
        return torch.cuda.device(self.index)

    @contextmanager
    def within(self, *contexts: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Enter contexts of torch's. If one cannot be entered or left, the device fails."""
        stack = ExitStack()
        for make in contexts:
            self.attempt(lambda: stack.enter_context(make()))  # noqa: B023 - called immediately
        try:
            yield
        finally:
            self.attempt(stack.close)

    def close(self) -> None:
        """Wait for what is enqueued on our own streams, then join the waiters; may be called twice."""
        with self._lock:
            self._closed = True
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.synchronize()
        if self.error is None:
            _idle[self.index].extend(stream.torch_stream for stream in streams)
        for waiter in self._waiters.values():
            waiter.close()


class CudaStream:
    """A `torch.cuda.Stream` of ours or of an engine; made by `CudaDevice`."""

    def __init__(
        self, device: CudaDevice, torch_stream: torch.cuda.Stream, name: str, *, foreign: bool = False
    ) -> None:
        """
        Args:
            foreign: it belongs to an engine, which may capture it by `torch.cuda.graph`.
        """
        self.device = device
        self.name = name
        self.torch_stream = torch_stream
        self._foreign = foreign
        self.graph: CudaGraph | None = None  # while it is captured by us

    def launch(self, work: Callable[[], object]) -> None:
        """Call `work` now, with this stream as torch's current one. That is a property of the thread, so
        `work` must not yield to other coroutines.

        Raises:
            CallRefusedError: `work` raised, and the device goes on. It is not known which of its copies were
                enqueued, but they run in the order of the stream.
        """
        if self.device.error is None:
            self.device.enqueue(
                work if self.device.thread.current is self else partial(self._run, work), self
            )

    def _run(self, work: Callable[[], object]) -> None:
        with self.device.here(), self._as_torchs(), self._beside_captures():
            work()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this torch's current stream of this thread, once for many launches."""
        thread = self.device.thread
        with self.device.within(self.device.here, self._as_torchs, self._beside_captures):
            before, thread.current = thread.current, self
            try:
                yield
            finally:
                thread.current = before

    def _as_torchs(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.torch_stream)

    def _beside_captures(self) -> AbstractContextManager[None]:
        """Work may allocate, or load a kernel, which a capture of an engine's would not survive."""
        return nullcontext() if self._captured() else relaxed_capture_mode()

    def record(self, event: Event) -> None:
        """Record `event` behind everything enqueued so far.

        Raises:
            UsageError: `event` is of another device.
        """
        own = self._crossing(event)
        self.device.attempt(own.torch_event.record, self.torch_stream)
        if self.graph is None:
            own.recorded = True
        else:
            self.graph.records.append(own)

    def wait_event(self, event: Event) -> None:
        """Make everything enqueued later wait for the latest record of `event`; does not block.

        Raises:
            RequestStateError: `event` was never recorded, or is not external and this is captured.
            UsageError: `event` is of another device.
        """
        own = self._crossing(event)
        if self.graph is not None:
            self.graph.waits.append(own)
        elif not own.recorded and not self._captured():
            raise RequestStateError(f"stream {self.name} waits for an event that was never recorded")
        # Torch makes it an external wait if the event is external and this thread's current stream
        # is captured, as it is within `capture` and within `torch.cuda.graph`.
        self.device.attempt(self.torch_stream.wait_event, own.torch_event)

    def synchronize(self) -> None:
        """Block this thread until everything enqueued has run; an error fails the device."""
        self.device.ask(self.torch_stream.synchronize)

    def own(self, event: Event) -> CudaEvent:
        """`event`, if it belongs to this device.

        Raises:
            UsageError: it does not.
        """
        if not isinstance(event, CudaEvent) or event.device is not self.device:
            raise UsageError(f"{event!r} is not an event of the device of stream {self.name}")
        return event

    def _crossing(self, event: Event) -> CudaEvent:
        own, captured = self.own(event), self._captured()
        if captured and not own.external:
            raise RequestStateError(f"stream {self.name} is captured: events in and out must be external")
        if own.external and not captured and self.device.capturing():
            raise RequestStateError(
                f"this thread captures another stream than {self.name}, whose external events have to wait"
            )
        return own

    def _captured(self) -> bool:
        """Whether what this thread enqueues here becomes a graph; also in a capture of the engine's."""
        if self.graph is not None or not self._foreign:
            return self.graph is not None
        with self.device.here():
            capturing = torch.cuda.is_current_stream_capturing()
            return capturing and torch.cuda.current_stream() == self.torch_stream

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} of {self.device.name}>"


class CudaEvent:
    """A blocking event: a thread that waits for it sleeps instead of spinning on the driver's lock."""

    def __init__(self, device: CudaDevice, torch_event: torch.cuda.Event, external: bool) -> None:
        self.device = device
        self.torch_event = torch_event
        self.external = external
        self.recorded = False

    def __del__(self) -> None:
        if not self.external:  # graphs refer to external events by their handles
            self.device.reuse(self.torch_event)

    def query(self) -> bool:
        """Whether the latest record has been reached; True if there is none.

        Raises:
            DeviceError: the device failed.
        """
        reached = not self.recorded or self.device.ask(self.torch_event.query)
        self.device.check()
        return bool(reached)

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until the latest record is reached.

        Raises:
            DeviceError: the device failed.
        """
        if self.recorded:
            self.device.ask(self.torch_event.synchronize)
        self.device.check()


class CudaGraph:
    """A `torch.cuda.CUDAGraph`, the events that it waits for, and those that each replay records."""

    def __init__(self, stream: CudaStream) -> None:
        self.torch_graph = torch.cuda.CUDAGraph()
        self.waits: list[CudaEvent] = []
        self.records: list[CudaEvent] = []
        self._stream = stream

    def replay(self) -> None:
        """Enqueue it on the stream that it was captured from.

        Raises:
            RequestStateError: an event that it waits for was never recorded: CUDA would not wait.
        """
        if not all(event.recorded or event in self.records for event in self.waits):
            raise RequestStateError(f"stream {self._stream.name} waits for an event that was never recorded")
        self._stream.launch(self.torch_graph.replay)
        for event in self.records:
            event.recorded = True


def _torch_event(external: bool) -> torch.cuda.Event:
    if not external:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    try:
        return torch.cuda.Event(blocking=True, external=True)  # type: ignore[no-untyped-call]
    except TypeError as error:
        raise DeviceError(f"torch {torch.__version__} has no external events; 2.8 has") from error
