"""Streams and events without a GPU: CUDA's semantics as a state machine, whose work a driver runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from asynchicache.errors import ClosedError, DeviceError, RequestStateError, UsageError
from asynchicache.streams.base import Event, Stream
from asynchicache.streams.drivers import Driver, DriverStep
from asynchicache.streams.waiter import Reached

Work: TypeAlias = Callable[[], object]


@dataclass(slots=True, eq=False)
class _Mark:
    """One record of an event. Waits and queries refer to the mark; recording again makes a new one, so that
    they do not move.
    """

    reached: bool = False
    blocked: list[_Lane] = field(default_factory=list)
    callbacks: list[Reached] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Call:
    work: Work


@dataclass(slots=True, eq=False)
class _Record:
    mark: _Mark


@dataclass(slots=True, eq=False)
class _Wait:
    mark: _Mark


_StreamCommand: TypeAlias = _Call | _Record | _Wait


@dataclass(slots=True, eq=False)
class _Lane:
    """The queue of one stream; `busy` while its last command runs, or waits for a mark."""

    start: Callable[[DriverStep], None]
    commands: deque[_StreamCommand] = field(default_factory=deque)
    busy: bool = False


class _Machine:
    """All lanes of a device, under one lock.

    It decides under the lock and acts after releasing it: work and callbacks are foreign code, and never run
    with the lock held.
    """

    def __init__(self, name: str, driver: Driver) -> None:
        self.name = name
        self.error: DeviceError | None = None
        self.capturing: list[int] = []  # ids of threads, once per stream that they capture
        self._driver = driver
        self._lock = threading.Lock()
        self._lanes: list[_Lane] = []
        self._closed = False

    def lane(self, name: str) -> _Lane:
        lane = _Lane(self._driver.lane(name))
        with self._lock:
            self._lanes.append(lane)
        return lane

    def check(self) -> None:
        """Raise if the device failed; a new error each time, since a raised one keeps its frames."""
        if self.error is not None:
            raise DeviceError(str(self.error)) from self.error

    def push(self, lane: _Lane, command: _StreamCommand) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"device {self.name} is closed")
            lane.commands.append(command)
            acts = self._settle(lane)
        _perform(acts)

    def tell(self, mark: _Mark, reached: Reached) -> None:
        """Call `reached(error)` once `mark` is reached; at once if it is."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"device {self.name} is closed")
            if not mark.reached:
                mark.callbacks.append(reached)
                return
        reached(self.error)

    def wait(self, mark: _Mark) -> None:
        """Block this thread until `mark` is reached."""
        reached = threading.Event()
        with self._lock:
            if mark.reached:
                return
            mark.callbacks.append(lambda _: reached.set())
        self._driver.wait(reached)

    def yield_to_streams(self) -> None:
        self._driver.yield_to_streams()

    def close(self) -> None:
        with self._lock:
            lanes = [] if self._closed else list(self._lanes)
        for lane in lanes:
            mark = _Mark()
            self.push(lane, _Record(mark))
            self.wait(mark)
        with self._lock:
            self._closed = True
        self._driver.close()

    def _settle(self, lane: _Lane) -> list[DriverStep]:
        """Advance `lane` and every lane that this wakes. Not recursive, as chains may be long."""
        acts: list[DriverStep] = []
        ready = deque([lane])
        while ready:
            ready.extend(self._advance(ready.popleft(), acts))
        return acts

    def _advance(self, lane: _Lane, acts: list[DriverStep]) -> list[_Lane]:
        """Take commands until one has to wait; returns the lanes that became ready."""
        woken: list[_Lane] = []
        while lane.commands and not lane.busy:
            match lane.commands.popleft():
                case _Record(mark):
                    woken += self._reach(mark, acts)
                case _Wait(mark) if not mark.reached:
                    lane.busy = True
                    mark.blocked.append(lane)
                case _Call(work):
                    lane.busy = True
                    acts.append(partial(self._start, lane, partial(self._run, lane, work)))
        return woken

    def _reach(self, mark: _Mark, acts: list[DriverStep]) -> list[_Lane]:
        mark.reached = True
        acts += [partial(callback, self.error) for callback in mark.callbacks]
        woken = mark.blocked
        for lane in woken:
            lane.busy = False
        mark.callbacks, mark.blocked = [], []
        return woken

    def _start(self, lane: _Lane, run: DriverStep) -> None:
        try:
            lane.start(run)
        except DeviceError as error:  # no thread: the device has failed, which those who wait must learn
            self._fail(error)
            run()

    def _run(self, lane: _Lane, work: Work) -> None:
        """Called by the driver, on any thread, at any time."""
        try:
            if self.error is None:
                work()
        except BaseException as error:
            # The boundary of foreign work: after any exception its copies cannot be trusted.
            self._fail(error)
            if isinstance(error, KeyboardInterrupt):  # it is meant for the caller, not for the work
                raise
        finally:
            with self._lock:
                lane.busy = False
                acts = self._settle(lane)
            _perform(acts)

    def _fail(self, error: BaseException) -> None:
        failure = DeviceError(f"{self.name} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        with self._lock:
            self.error = self.error or failure


def _perform(acts: list[DriverStep]) -> None:
    for act in acts:
        act()


class EmulatedEvent:
    """A point in an emulated stream; made by `EmulatedDevice.event`."""

    __slots__ = ("external", "machine", "mark")

    def __init__(self, machine: _Machine, external: bool) -> None:
        self.machine = machine
        self.external = external
        self.mark: _Mark | None = None

    @property
    def recorded(self) -> bool:
        return self.mark is not None

    def query(self) -> bool:
        """Whether the latest record has been reached; True if there is none.

        Raises:
            DeviceError: the device failed, even if after this record, as on CUDA.
        """
        self.machine.check()
        mark = self.mark
        return mark is None or mark.reached

    def synchronize(self) -> None:
        """Block this thread until the latest record is reached.

        Raises:
            DeviceError: the device failed.
        """
        self.machine.check()
        mark = self.mark
        if mark is not None:
            self.machine.wait(mark)
        self.machine.check()


class EmulatedStream:
    """A queue of work; made by `EmulatedDevice.stream`."""

    handle = 0
    __slots__ = ("graph", "lane", "machine", "name")

    def __init__(self, machine: _Machine, name: str) -> None:
        self.name = name
        self.machine = machine
        self.lane = machine.lane(name)
        self.graph: EmulatedGraph | None = None  # while it is captured

    def launch(self, work: Work) -> None:
        """Enqueue `work`. The first exception that any work raises fails the device: later work does not
        run, and later records complete with the error.

        Raises:
            ClosedError: the device is closed.
        """
        if self.graph is not None:
            self.graph.calls.append(lambda: self.launch(work))
            return
        self.machine.push(self.lane, _Call(work))

    def current(self) -> AbstractContextManager[object]:
        """A context that does nothing."""
        return nullcontext()

    def record(self, event: Event) -> None:
        """Record `event` behind everything enqueued so far.

        Raises:
            ClosedError: the device is closed.
            RequestStateError: a capture forbids it, see `_crossing`.
            UsageError: `event` is of another device.
        """
        own, mark = self._crossing(event), _Mark()
        if self.graph is not None:
            self.graph.calls.append(lambda: self.record(own))
            return
        self.machine.push(self.lane, _Record(mark))
        own.mark = mark

    def wait_event(self, event: Event) -> None:
        """Make everything enqueued later wait for the latest record of `event`.

        Raises:
            ClosedError: the device is closed.
            RequestStateError: `event` was never recorded, or a capture forbids it, see `_crossing`.
            UsageError: `event` is of another device.
        """
        own = self._crossing(event)
        if self.graph is not None:
            self.graph.calls.append(lambda: self.wait_event(own))
            return
        mark = own.mark
        if mark is None:
            raise RequestStateError(f"stream {self.name} waits for an event that was never recorded")
        self.machine.push(self.lane, _Wait(mark))

    def _crossing(self, event: Event) -> EmulatedEvent:
        """Check what CUDA requires: events in and out of a capture are external, and during the capture its
        thread uses external events nowhere else."""
        own, captured = self.own(event), self.graph is not None
        if captured and not own.external:
            raise RequestStateError(f"stream {self.name} is captured: events in and out must be external")
        if own.external and not captured and threading.get_ident() in self.machine.capturing:
            raise RequestStateError(
                f"this thread captures another stream than {self.name}, whose external events have to wait"
            )
        return own

    def own(self, event: Event) -> EmulatedEvent:
        """
        Raises:
            UsageError: `event` is of another device.
        """
        if not isinstance(event, EmulatedEvent) or event.machine is not self.machine:
            raise UsageError(f"{event!r} is not an event of the device of stream {self.name}")
        return event

    def __repr__(self) -> str:
        return f"<EmulatedStream {self.name} of {self.machine.name}>"


class EmulatedGraph:
    """Calls of one stream, made again at each replay; made by `EmulatedDevice.capture`."""

    def __init__(self) -> None:
        self.calls: list[Work] = []

    def replay(self) -> None:
        """Enqueue everything once more; waits bind now.

        Raises:
            ClosedError: the device is closed.
            RequestStateError: an event that is waited for was never recorded.
        """
        for call in self.calls:
            call()


class EmulatedDevice:
    """A device of emulated streams. Its bytes are host memory, so torch's name for it is `cpu`.

    Program order is always an order in which everything can run, since a wait binds to a record
    that was enqueued before it: streams cannot block each other forever.
    """

    def __init__(self, driver: Driver, *, name: str = "cpu") -> None:
        """
        Args:
            driver: runs the work of this device, and of no other.
            name: as torch names the device where the work's tensors lie.
        """
        self._machine = _Machine(name, driver)

    @property
    def name(self) -> str:
        return self._machine.name

    @property
    def error(self) -> DeviceError | None:
        """The sticky error, caused by the first exception that work raised, or None."""
        return self._machine.error

    def stream(self, name: str, *, urgent: bool = False) -> EmulatedStream:
        return EmulatedStream(self._machine, name)

    def event(self, *, external: bool = False) -> EmulatedEvent:
        """
        Raises:
            RequestStateError: `external`, and this thread captures a stream of this device.
        """
        if external and threading.get_ident() in self._machine.capturing:
            raise RequestStateError("this thread captures a stream: make external events before that")
        return EmulatedEvent(self._machine, external)

    def owns(self, part: Event | Stream) -> bool:
        return isinstance(part, EmulatedEvent | EmulatedStream) and part.machine is self._machine

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[EmulatedGraph]:
        """Within the context, what is enqueued on `stream` becomes a graph and does not run.

        Raises:
            RequestStateError: `stream` is being captured already.
            UsageError: `stream` is of another device.
        """
        own = self._own(stream)
        if own.graph is not None:
            raise RequestStateError(f"stream {own.name} is being captured already")
        own.graph, thread = EmulatedGraph(), threading.get_ident()
        self._machine.capturing.append(thread)
        try:
            yield own.graph
        finally:
            self._machine.capturing.remove(thread)
            own.graph = None

    def own_thread(self) -> None:
        """Nothing: calls need no context."""

    def yield_to_streams(self) -> None:
        """Give the streams' threads, if any, the chance to start; see `ThreadDriver.yield_to_streams`."""
        self._machine.yield_to_streams()

    def notify(self, stream: Stream, event: Event, reached: Reached, *, late: bool = False) -> None:
        """Call `reached(error)` once when the work before the latest record of `event` has run, or was
        skipped; at once if it has. `reached` must be short and must not raise: the stream's next work waits
        for it.

        Raises:
            ClosedError: the device is closed.
            RequestStateError: `event` was never recorded.
            UsageError: `stream` or `event` is of another device.
        """
        mark = self._own(stream).own(event).mark
        if mark is None:
            raise RequestStateError(f"stream {stream.name} is to tell of an event that was never recorded")
        self._machine.tell(mark, reached)

    def _own(self, stream: Stream) -> EmulatedStream:
        if not isinstance(stream, EmulatedStream) or stream.machine is not self._machine:
            raise UsageError(f"{stream!r} is not a stream of device {self.name}")
        return stream

    def close(self) -> None:
        """Run what is enqueued, then join the driver's threads; may be called twice."""
        self._machine.close()
