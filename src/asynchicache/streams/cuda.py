"""Streams and events of an NVIDIA GPU: the driver's own, and torch's where an engine hands them in.

No Python function is ever a CUDA host callback: the driver's thread would need the GIL while the thread that
holds it waits inside the driver. Threads that block on events report completion instead.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Literal, ParamSpec, TypeVar

import torch

from asynchicache.cuda_driver import CudaDriver, exchange_capture_mode, relaxed_capture_mode
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

logger = logging.getLogger(__name__)

_idle: dict[tuple[int, bool], deque[torch.cuda.Stream]] = defaultdict(deque)
"""By GPU and urgency, streams of closed devices, on which nothing is enqueued. None is destroyed, as torch's
allocator may keep memory for it."""


class _Thread(threading.local):
    """State of a device that each thread has for itself."""

    current: CudaStream | None = None  # the stream whose `current` context the thread is in
    ours = False  # whether it has called `own_thread`


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
        self.driver = CudaDriver.load(index)
        self.error: DeviceError | None = None
        self._lock = threading.Lock()
        self._streams: list[CudaStream] = []
        self._wrapped: dict[int, CudaStream] = {}
        self._waiters: dict[tuple[CudaStream, bool], EventWaiter] = {}
        self._spare: deque[int] = deque()
        self._maker: CudaStream | None = None
        self._told_refused = False
        self._closed = False
        self.thread = _Thread()

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def stream(self, name: str, *, urgent: bool = False) -> CudaStream:
        """
        Raises:
            DeviceError: the driver makes none, for instance after an error.
        """
        stream = CudaStream(self, self._torch_stream(urgent), name, urgent=urgent)
        with self._lock:
            self._streams.append(stream)
        return stream

    def _torch_stream(self, urgent: bool) -> torch.cuda.Stream:
        """A stream of the driver's. Torch has 32 and hands them out in turns: each may be an engine's."""
        self.check()
        with suppress(IndexError):
            return _idle[self.index, urgent].pop()
        with self.here():
            handle = self.driver.make_stream(urgent=urgent)
            return torch.cuda.ExternalStream(handle, device=self.index)  # type: ignore[no-untyped-call]

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
            return CudaEvent(self, self._spare_event())
        if self.capturing():
            raise RequestStateError("this thread captures a stream: make external events before that")
        event = CudaEvent(self, 0, _external_event())
        # Torch creates an event with its first record, and skips waits for events that are not created: a
        # captured wait would silently be missing.
        self._maker = self._maker or self.stream("external-events")
        self._maker.put(event)
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

    def _spare_event(self) -> int:
        """An unused event; 0 if the driver makes none. Making and destroying one takes the context's lock, so
        they are reused."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_event()

    def _new_event(self) -> int:
        try:
            return self.ask(self.driver.make_event) or 0
        except CallRefusedError as error:  # for want of memory, say
            self.tell_refused(error)
            return 0

    def reuse(self, handle: int) -> None:
        """Keep an event whose last user is gone for the next `event`; from any thread.

        Streams that still wait for its record are not affected: CUDA binds a wait at the time of the call.
        """
        self._spare.append(handle)

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

    def notify(self, stream: Stream, event: Event, reached: Reached, *, late: bool = False) -> None:
        """Call `reached(error)` once, from a thread of the stream's, when the latest record of `event` is
        reached. `reached` must be short and must not raise. The thread blocks on one event after the other,
        so that there is a second one for `late` events.

        Raises:
            ClosedError: the device is closed.
            RequestStateError: `event` was never recorded.
            UsageError: `stream` or `event` is of another device.
        """
        own = self._own(stream)
        if not own.own(event).recorded:
            raise RequestStateError(f"stream {own.name} is to tell of an event that was never recorded")
        self._waiter(own, late).put(event, reached)

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.device is not self:
            raise UsageError(f"{stream!r} is not a stream of {self.name}")
        return stream

    def _waiter(self, stream: CudaStream, late: bool) -> EventWaiter:
        with self._lock:
            if self._closed:
                raise ClosedError(f"device {self.name} is closed")
            if (stream, late) not in self._waiters:
                self._waiters[stream, late] = EventWaiter(stream.name, self.own_thread)
            return self._waiters[stream, late]

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

    def ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """`attempt` a call of the driver, on any thread.

        The device is the thread's current one during the call: on a new thread a runtime call would otherwise
        create a context on GPU 0, hundreds of MiB of its memory, even for an event of GPU 1; and the default
        stream is the current device's.

        Raises:
            CallRefusedError: the driver did not do it, and the device goes on.
        """
        try:  # as `attempt`, for a call that is made for every layer
            return call(*args, **kwargs) if self.thread.ours else self._beside(partial(call, *args, **kwargs))
        except CallRefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary of the driver
            self._fail(error)
            return None

    def tell_refused(self, error: CallRefusedError) -> None:
        """Warn, once, that the driver does not let streams wait for one another."""
        with self._lock:
            told, self._told_refused = self._told_refused, True
        if not told:
            logger.warning("%s: the host waits where streams should: %s", self.name, error)

    def _beside(self, call: Callable[[], T]) -> T:
        with self.here(), relaxed_capture_mode():
            return call()

    def own_thread(self) -> None:
        """Do once what each call of this thread would do first; for a thread that does nothing else."""
        if not self.thread.ours:
            self.attempt(torch.cuda.set_device, self.index)
            exchange_capture_mode()
            self.thread.ours = True

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
            for stream in streams:
                _idle[self.index, stream.urgent].append(stream.torch_stream)
        for waiter in self._waiters.values():
            waiter.close()


class CudaStream:
    """A stream of ours or of an engine; made by `CudaDevice`.

    Attributes:
        handle: the driver's.
    """

    def __init__(
        self,
        device: CudaDevice,
        torch_stream: torch.cuda.Stream,
        name: str,
        *,
        urgent: bool = False,
        foreign: bool = False,
    ) -> None:
        """
        Args:
            urgent: its kernels go before those of other streams.
            foreign: it belongs to an engine, which may capture it by `torch.cuda.graph`.
        """
        self.device = device
        self.name = name
        self.torch_stream = torch_stream
        self.handle: int = torch_stream.cuda_stream
        self.urgent = urgent
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
        around = () if thread.ours else (self.device.here, self._beside_captures)
        with self.device.within(*around, self._as_torchs):
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
        self.put(own)
        if self.graph is None:
            own.recorded = True
        else:
            self.graph.records.append(own)

    def put(self, event: CudaEvent) -> None:
        """Record an event, without a check and without noting it. If the driver makes or records none, this
        blocks until the stream has got there, so that none is missed."""
        if event.torch_event is not None:
            self.device.attempt(event.torch_event.record, self.torch_stream)
        elif not event.handle:
            self.synchronize()
        else:
            try:
                self.device.ask(self.device.driver.record, event.handle, self.handle)
            except CallRefusedError as error:
                self.device.tell_refused(error)
                self.synchronize()

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
        if own.torch_event is None:
            self._wait_for(own)
        else:
            # Torch makes it an external wait if this thread's current stream is captured, as it is within
            # `capture` and within `torch.cuda.graph`.
            self.device.attempt(self.torch_stream.wait_event, own.torch_event)

    def _wait_for(self, event: CudaEvent) -> None:
        try:
            if event.handle:
                self.device.ask(self.device.driver.wait, self.handle, event.handle)
        except CallRefusedError as error:
            self.device.tell_refused(error)
            self.device.ask(self.device.driver.synchronize, event.handle)

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
        own = self.own(event)
        if not (own.external or self._foreign or self.graph):
            return own
        captured = self._captured()
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
    """A blocking event: a thread that waits for it sleeps instead of spinning on the driver's lock.

    An external one is torch's, which alone records it in graphs. One without a handle, where the driver made
    none, has been reached once it is recorded.
    """

    __slots__ = ("device", "external", "handle", "recorded", "torch_event")

    def __init__(self, device: CudaDevice, handle: int, torch_event: torch.cuda.Event | None = None) -> None:
        self.device = device
        self.handle = handle
        self.torch_event = torch_event
        self.external = torch_event is not None
        self.recorded = False

    def __del__(self) -> None:
        if self.handle:  # graphs refer to external events by their handles
            self.device.reuse(self.handle)

    def query(self) -> bool:
        """Whether the latest record has been reached; True if there is none.

        Raises:
            DeviceError: the device failed, or the driver does not say.
        """
        reached = not self.recorded or self._ask("query")
        self.device.check()
        return bool(reached)

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until the latest record is reached.

        Raises:
            DeviceError: the device failed.
        """
        if self.recorded:
            self._ask("synchronize")
        self.device.check()

    def _ask(self, name: Literal["query", "synchronize"]) -> object:
        if self.torch_event is not None:
            return self.device.ask(getattr(self.torch_event, name))
        return not self.handle or self.device.ask(getattr(self.device.driver, name), self.handle)


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


def _external_event() -> torch.cuda.Event:
    try:
        return torch.cuda.Event(blocking=True, external=True)  # type: ignore[no-untyped-call]
    except TypeError as error:
        raise DeviceError(f"torch {torch.__version__} has no external events; 2.8 has") from error
