"""Streams, events and devices: the semantics of CUDA, defined once for every driver.

Rules that all drivers keep (CUDA runtime: cudaEventRecord, cudaStreamWaitEvent):

1. A stream runs what it is given in order; two streams run in any order unless an event joins them.
2. `wait_event` and `query` bind to the latest `record` at the time of the call; recording again
   later does not move an earlier wait.
3. A copy reads its source when it runs, not when it is given to the stream.
4. Errors are sticky: after one, nothing on the device succeeds any more, and every later record
   completes with that error.
5. Stricter than CUDA, where it would be a silent no-op: waiting on an event that was never
   recorded raises `RequestStateError`.
6. What is captured in a graph runs at each replay. Only external events connect a graph with the rest: a
   captured wait binds to the latest record at the time of the replay, not of the capture
   (cudaEventWaitExternal). During the capture, the capturing thread neither makes external events nor
   records or waits for them on other streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from asynchicache.errors import UsageError


@runtime_checkable
class Event(Protocol):
    """A point in a stream. One record serves any number of queries and waits; use another event for another
    point, so that no point moves while others wait for it. A driver reuses its own event once the last
    reference to this one is gone.
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
    """A queue of work of one device; may be used by any one thread at a time."""

    @property
    def name(self) -> str: ...

    @property
    def handle(self) -> int:
        """The driver's, for calls that name their stream; 0 where there is none."""
        ...

    def launch(self, work: Callable[[], object]) -> None:
        """Enqueue `work`. An emulated stream calls it when its turn comes; a CUDA stream calls it at once, as
        torch's current stream, so that the copies and kernels of `work` are enqueued.

        Raises:
            CallRefusedError: the driver refused what `work` asked for, and the device goes on.
        """
        ...

    def current(self) -> AbstractContextManager[object]:
        """Do once what each of many launches would do first. For one thread, which must not yield to other
        coroutines within the context.
        """
        ...

    def record(self, event: Event) -> None:
        """Record `event` behind everything enqueued so far.

        Raises:
            RequestStateError: a capture forbids it (rule 6).
        """
        ...

    def wait_event(self, event: Event) -> None:
        """Make everything enqueued later wait for the latest record of `event`.

        Raises:
            RequestStateError: `event` was never recorded, or a capture forbids it (rule 6).
        """
        ...


class Graph(Protocol):
    """Work that was captured once, to be enqueued repeatedly."""

    def replay(self) -> None:
        """Enqueue it once more, on the stream that it was captured from.

        Raises:
            RequestStateError: an event that it waits for was never recorded.
        """
        ...


class Device(Protocol):
    """One device: makes streams and events, and owns the threads that drive them."""

    @property
    def name(self) -> str:
        """Torch's name: `cpu`, `cuda:0`."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The sticky error, or None."""
        ...

    def stream(self, name: str, *, urgent: bool = False) -> Stream:
        """A new stream.

        Args:
            name: for people.
            urgent: where the device knows priorities, its kernels go before those of other streams.
        """
        ...

    def event(self, *, external: bool = False) -> Event:
        """A new event.

        Args:
            external: captured work may wait for it. Default: False.
        """
        ...

    def owns(self, part: Event | Stream) -> bool:
        """Whether an event or a stream belongs to this device; False for anything else, torch's own too."""
        ...

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        """Within the context, what is enqueued on `stream` does not run, but becomes the graph."""
        ...

    def own_thread(self) -> None:
        """Do once what each call of this thread would do first, if there is anything; may be called again.
        For a thread that works for this device alone until it ends.
        """
        ...

    def yield_to_streams(self) -> None:
        """Give streams that are threads of this interpreter the chance to start, before this thread enqueues
        more. Blocks for a moment; never call it on the loop. Does nothing on other devices.
        """
        ...

    def notify(
        self,
        stream: Stream,
        event: Event,
        reached: Callable[[BaseException | None], None],
        *,
        late: bool = False,
    ) -> None:
        """Call `reached(error)` from any thread, once, when the latest record of `event` is reached.

        Notifications may be lost (tests have drivers that lose them); a caller that must not miss one polls
        as well.

        Args:
            stream: where `event` was recorded. Notifications of one stream come in order.
            event: not to be recorded again before `reached` was called.
            late: others of the stream may have been asked for that were recorded after `event`.

        Raises:
            RequestStateError: `event` was never recorded.
        """
        ...

    def close(self) -> None:
        """Run what is still enqueued, then join the driver's threads."""
        ...


def check_stream(device: Device, stream: Stream) -> None:
    """
    Raises:
        UsageError: the stream is not one of the device.
    """
    if not device.owns(stream):
        raise UsageError(
            f"{stream!r} is no stream of this {device.name} device: give one that it made, "
            "cache.device.stream(name), or wrapped, cache.device.wrap(torch's stream)"
        )
