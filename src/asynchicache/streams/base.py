"""Streams, events and devices: CUDA's semantics, written down once for every driver.

Rules that all drivers keep (CUDA runtime: cudaEventRecord, cudaStreamWaitEvent):

1. A stream runs what it is given in order; two streams run in any order unless an event joins them.
2. `wait_event` and `query` bind to the latest `record` at the time of the call; recording again
   later does not move an earlier wait.
3. A copy reads its source when it runs, not when it is given to the stream.
4. Errors are sticky: after one, nothing on the device succeeds any more, and every later record
   completes with that error.
5. Stricter than CUDA, where it would be a silent no-op: waiting on an event that was never
   recorded raises `RequestStateError`.
6. What is captured in a graph runs at each replay. Only external events cross a graph's border: a
   captured wait binds to the latest record at the time of the replay, not of the capture
   (cudaEventWaitExternal). The thread that captures records them, and waits for them, nowhere else
   meanwhile, and makes none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Event(Protocol):
    """A point in a stream. One record serves everybody who asks or waits for it; who wants another point
    takes another event, so that nobody's moves. What a driver needs for an event it uses again, once the
    last reference to the event is gone.
    """

    @property
    def recorded(self) -> bool: ...

    def query(self) -> bool:
        """Whether the latest record has been reached; True if there is none.

        Raises:
            DeviceError: the device failed.
        """
        ...

    def synchronize(self) -> None:
        """Block this thread until the latest record is reached; never on the loop.

        Raises:
            DeviceError: the device failed.
        """
        ...


@runtime_checkable
class Stream(Protocol):
    """A queue of work of one device; from any one thread at a time."""

    @property
    def name(self) -> str: ...

    def launch(self, work: Callable[[], object]) -> None:
        """Enqueue `work`. An emulated stream calls it when its turn comes; a CUDA stream calls it
        at once, as the current stream, and the copies and kernels it makes are what is enqueued.
        """
        ...

    def current(self) -> AbstractContextManager[object]:
        """For many launches in a row: what each would do first is done once. For one thread, which must not
        hand over to other coroutines meanwhile.
        """
        ...

    def record(self, event: Event) -> None:
        """Let `event` stand for everything enqueued so far.

        Raises:
            RequestStateError: a capture forbids it (rule 6).
        """
        ...

    def wait_event(self, event: Event) -> None:
        """Let nothing enqueued later run before the latest record of `event`.

        Raises:
            RequestStateError: `event` was never recorded, or a capture forbids it (rule 6).
        """
        ...


class Graph(Protocol):
    """What a stream was given once, to be given again and again."""

    def replay(self) -> None:
        """Enqueue it once more, on the stream that it was captured from.

        Raises:
            RequestStateError: an event that it waits for was never recorded.
        """
        ...


class Device(Protocol):
    """One device: makes streams and events, owns whatever threads drive them."""

    @property
    def name(self) -> str:
        """As torch names it: `cpu`, `cuda:0`."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The sticky error, or None."""
        ...

    def stream(self, name: str) -> Stream: ...

    def event(self, *, external: bool = False) -> Event:
        """A new event.

        Args:
            external: it crosses the border of graphs: what is captured may wait for it. Default: False.
        """
        ...

    def owns(self, event: Event) -> bool:
        """Whether `event` is of this device, so that its streams can wait for it."""
        ...

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        """While the context is open, what is enqueued on `stream` does not run: it becomes the graph."""
        ...

    def yield_to_streams(self) -> None:
        """Let what was enqueued begin before this thread enqueues more: for a moment, and never on the
        loop. Where the device does not share the processor's interpreter with us, nothing happens.
        """
        ...

    def notify(self, stream: Stream, event: Event, reached: Callable[[BaseException | None], None]) -> None:
        """Call `reached(error)` from any thread, once, when the latest record of `event` is reached.

        Notifications may be lost where a driver is made to lose them (tests); who must not miss
        one keeps a sweeper.

        Args:
            stream: where `event` was recorded. What is to be told of one stream is told in order.
            event: not to be recorded again before `reached` was called.

        Raises:
            RequestStateError: `event` was never recorded.
        """
        ...

    def close(self) -> None:
        """Join the driver's threads; work still enqueued is run first."""
        ...
