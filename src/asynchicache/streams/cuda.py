"""Streams and events of an NVIDIA GPU, over `torch.cuda`.

No Python function is ever a CUDA host callback: the driver's thread would want the GIL while the
GIL's holder waits inside the driver. Threads that block on events tell of completion instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from asynchicache.captures import beside_captures
from asynchicache.errors import ClosedError, ConfigError, DeviceError, RequestStateError, UsageError
from asynchicache.streams.base import Event, Stream

Reached = Callable[[BaseException | None], None]


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
        self._waiters: dict[CudaStream, Waiter] = {}
        # Making and destroying CUDA events takes the context's lock: they are used again.
        self._spare: deque[Event] = deque()
        self._closed = False

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def stream(self, name: str) -> CudaStream:
        """
        Raises:
            DeviceError: the driver makes none, as after an error.
        """
        stream = CudaStream(self, self._torch_stream(), name)
        with self._lock:
            self._streams.append(stream)
        return stream

    def _torch_stream(self) -> torch.cuda.Stream:
        try:
            return torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceError(f"{self.name} makes no stream: {error}") from error

    def wrap(self, torch_stream: torch.cuda.Stream) -> CudaStream:
        """The stream of someone else, an engine's compute stream say; the same one each time.

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
        """
        event = CudaEvent(self, external)
        if external:
            # Torch creates an event with its first record, and skips waits for events that are not
            # created: a capture would silently hold no wait.
            stream = self._torch_stream()
            with self.guard():
                event.torch_event.record(stream)
            self.check()
        return event

    def owns(self, event: Event) -> bool:
        return isinstance(event, CudaEvent) and event.device is self

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[CudaGraph]:
        """Let what is enqueued on `stream` meanwhile become a graph; nothing of it runs now.

        Captured in CUDA's thread-local mode: in the global one, which is torch's default, what other
        threads do can break the capture. Whoever captures by torch alone should do the same.

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

    def give_way(self) -> None:
        """A GPU begins by itself."""

    def notify(self, stream: Stream, reached: Reached) -> None:
        """Call `reached(error)` once, from the stream's waiter thread, when all work now enqueued
        has run. `reached` must be short and must not raise.

        Raises:
            ClosedError: the device is closed.
            UsageError: `stream` is of another device.
        """
        own = self._own(stream)
        event = self._spare_event()
        own.record(event)
        self._waiter(own).put(event, reached)

    def _own(self, stream: Stream) -> CudaStream:
        if not isinstance(stream, CudaStream) or stream.device is not self:
            raise UsageError(f"{stream!r} is not a stream of {self.name}")
        return stream

    def _spare_event(self) -> Event:
        try:
            return self._spare.pop()
        except IndexError:
            return self.event()

    def _waiter(self, stream: CudaStream) -> Waiter:
        with self._lock:
            if self._closed:
                raise ClosedError(f"device {self.name} is closed")
            if stream not in self._waiters:
                self._waiters[stream] = Waiter(stream.name, self._spare.append)
            return self._waiters[stream]

    def check(self) -> None:
        """
        Raises:
            DeviceError: the device failed.
        """
        if self.error is not None:
            raise DeviceError(str(self.error)) from self.error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """For calls of the driver: the first exception of the body fails the device, and goes no further.

        The device is the thread's current one meanwhile. Whatever thread asks, an event of GPU 1 must not
        make a context on GPU 0, some hundreds of MiB of its memory, as a runtime call on a new thread does.
        """
        try:
            with torch.cuda.device(self.index):
                yield
        except Exception as error:  # noqa: BLE001 - the boundary of foreign work and of the driver
            failure = DeviceError(f"{self.name} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            with self._lock:
                self.error = self.error or failure

    def close(self) -> None:
        """Wait for what is enqueued on our own streams, then join the waiters; twice is harmless."""
        with self._lock:
            self._closed = True
        for stream in self._streams:
            stream.synchronize()
        for waiter in self._waiters.values():
            waiter.close()


class CudaStream:
    """A `torch.cuda.Stream` of ours or of an engine; made by `CudaDevice`."""

    def __init__(
        self, device: CudaDevice, torch_stream: torch.cuda.Stream, name: str, *, foreign: bool = False
    ) -> None:
        """`foreign`: it is an engine's, which may capture it by `torch.cuda.graph`."""
        self.device = device
        self.name = name
        self.torch_stream = torch_stream
        self._foreign = foreign
        self.graph: CudaGraph | None = None  # while it is captured by us

    def launch(self, work: Callable[[], object]) -> None:
        """Call `work` now, with this stream as torch's current one, which is a thing of the thread:
        `work` must not hand over to other coroutines. An exception fails the device, as it does
        where work runs later: nobody knows which of its copies were enqueued.
        """
        if self.device.error is None:
            with self.device.guard(), torch.cuda.stream(self.torch_stream):
                work()

    def record(self, event: Event) -> None:
        """Let `event` stand for everything enqueued so far.

        Raises:
            UsageError: `event` is of another device.
        """
        own = self._own(event)
        with self.device.guard():
            own.torch_event.record(self.torch_stream)
        if self.graph is None:
            own.recorded = True
        else:
            self.graph.records.append(own)

    def wait_event(self, event: Event) -> None:
        """Let nothing enqueued later run before the latest record of `event`; does not block.

        Raises:
            RequestStateError: `event` was never recorded, or is not external and this is captured.
            UsageError: `event` is of another device.
        """
        own = self._own(event)
        if self.graph is not None:
            self.graph.waits.append(own)
        elif not own.recorded and not self._captured():
            raise RequestStateError(f"stream {self.name} waits for an event that was never recorded")
        with self.device.guard():
            # Torch makes it an external wait if the event is external and this thread's current stream
            # is captured, as it is within `capture` and within `torch.cuda.graph`.
            self.torch_stream.wait_event(own.torch_event)

    def synchronize(self) -> None:
        """Block this thread until everything enqueued has run; an error fails the device."""
        with self.device.guard(), beside_captures():
            self.torch_stream.synchronize()

    def _own(self, event: Event) -> CudaEvent:
        if not isinstance(event, CudaEvent) or event.device is not self.device:
            raise UsageError(f"{event!r} is not an event of the device of stream {self.name}")
        if not event.external and self._captured():
            raise RequestStateError(f"stream {self.name} is captured: events in and out must be external")
        return event

    def _captured(self) -> bool:
        """Whether what this thread enqueues here becomes a graph. CUDA would break an engine's capture."""
        if self.graph is not None or not self._foreign:
            return self.graph is not None
        with torch.cuda.device(self.device.index):
            capturing = torch.cuda.is_current_stream_capturing()
            return capturing and torch.cuda.current_stream() == self.torch_stream

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} of {self.device.name}>"


class CudaEvent:
    """A blocking event: who waits for it sleeps, and does not spin on the driver's lock."""

    def __init__(self, device: CudaDevice, external: bool) -> None:
        self.device = device
        self.external = external
        self.recorded = False
        self.torch_event = _torch_event(external)

    def query(self) -> bool:
        """Whether the latest record has been reached; True if there is none.

        Raises:
            DeviceError: the device failed.
        """
        reached = True
        if self.recorded:
            with self.device.guard(), beside_captures():
                reached = self.torch_event.query()  # type: ignore[no-untyped-call]
        self.device.check()
        return reached

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until the latest record is reached.

        Raises:
            DeviceError: the device failed.
        """
        if self.recorded:
            with self.device.guard(), beside_captures():
                self.torch_event.synchronize()
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


class Waiter:
    """The recorded events of one stream, first in first out, and a thread that blocks on the head.

    One queue a stream: events of a slow stream do not hold up those of others. Behind a head that
    was waited for, events that are complete by then are passed on without blocking again.
    """

    def __init__(self, name: str, spare: Callable[[Event], object]) -> None:
        """`spare` takes back each event that was reached."""
        self._spare = spare
        self._inbox: SimpleQueue[tuple[Event, Reached] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"waiter-{name}", daemon=True)
        self._thread.start()

    def put(self, event: Event, reached: Reached) -> None:
        """Call `reached` once, when the latest record of `event` is reached, or with the error."""
        self._inbox.put((event, reached))

    def close(self) -> None:
        """Join the thread, after what was put; twice is harmless."""
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            event, reached = item
            error = self._block(event)
            if error is None:
                self._spare(event)
            reached(error)
            del item, event, reached  # an idle stream must not keep the leases of its last transfer

    @staticmethod
    def _block(event: Event) -> DeviceError | None:
        try:
            if not event.query():
                event.synchronize()
        except DeviceError as error:
            return error
        return None
