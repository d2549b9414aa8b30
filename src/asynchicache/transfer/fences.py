"""What orders others behind the bytes of one layer: streams, captured graphs, threads of other engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from asynchicache.errors import DeviceError, RequestStateError
from asynchicache.streams.base import Event, Stream
from asynchicache.transfer.record import LayerStatus, Tick, TransferView

_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between looks of a thread that waits; they double. A look takes the CUDA driver's lock."""


class Fenced(Protocol):
    """What a fence has to know of a ticket."""

    @property
    def tick(self) -> Tick | None: ...

    @property
    def views(self) -> Sequence[TransferView] | None: ...

    @property
    def ordered(self) -> Callable[[Stream], object] | None: ...

    def status(self, layer: int) -> LayerStatus: ...


class Fence:
    """Orders a stream behind the bytes of one layer, on the device, without a host wait.

    A failed transfer lets through, so that a forward never hangs on it: look at `Ticket.ok` before
    its results are used.
    """

    __slots__ = ("_layer", "_ticket")

    def __init__(self, ticket: Fenced, layer: int) -> None:
        self._ticket = ticket
        self._layer = layer

    def wait_on(self, stream: Stream) -> None:
        """Let nothing that is enqueued on `stream` from now on run before the layer is there.

        Raises:
            RequestStateError: the layer is not submitted yet, so there is nothing to wait for.
        """
        views = self._ticket.views
        if views is None:
            raise self._too_early()
        events = [self._event(view) for view in views]
        _note(self._ticket, stream)
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def record(self, event: Event, stream: Stream) -> None:
        """Let `event` stand for the layer, and for what else is enqueued on `stream`.

        For external events, which a captured graph waits for: record them anew before each replay. Keep
        a stream for this, which would else be held up until the layer is there.

        Raises:
            RequestStateError: the layer is not submitted yet.
        """
        self.wait_on(stream)
        stream.record(event)

    def _event(self, view: TransferView) -> Event | None:
        """What to wait for; None where the layer has landed, or never will."""
        group = view.group(self._layer)
        if group is None and view.record.failure is None:
            raise self._too_early()
        if group is not None and not (group.submitted or group.finished):
            raise self._too_early()
        return None if group is None else group.event

    def _too_early(self) -> RequestStateError:
        return RequestStateError(
            f"layer {self._layer} is not submitted yet: await Ticket.submitted({self._layer}) first"
        )


class HostFence:
    """Lets a thread of another engine wait for one layer, as vLLM's `wait_for_layer_load` does.

    It asks the layer's events and never needs the loop, which may stand still meanwhile, but for the turn
    in which the ticket was made: that must end. On the loop's own thread it only looks; to block there would
    hold up every request. As with other fences, a failed transfer lets through.
    """

    __slots__ = ("_layer", "_ticket")

    def __init__(self, ticket: Fenced, layer: int) -> None:
        self._ticket = ticket
        self._layer = layer

    @property
    def open(self) -> bool:
        """Whether the layer is there, or will never be; from any thread."""
        views = self._ticket.views
        if views is None:
            return self._ticket.status(self._layer) is LayerStatus.FAILED
        return all(self._passes(view) for view in views)

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the layer is there or has failed.

        Args:
            timeout: seconds to wait at most; None waits without end, 0 only looks.

        Returns:
            Whether the fence is open; False if the time was up first.

        Raises:
            RequestStateError: this is the loop's own thread, which would have to block.
        """
        return self._wait(lambda: self.open, timeout)

    def wait_on(self, stream: Stream, timeout: float | None = None) -> bool:
        """As `Fence.wait_on`, but block this thread until the layer is enqueued.

        Args:
            stream: this thread's.
            timeout: as for `wait`.

        Returns:
            Whether `stream` is ordered behind the layer; False if the time was up first.

        Raises:
            RequestStateError: as `wait`.
        """
        if not self._wait(self._submitted, timeout):
            return False
        groups = [view.group(self._layer) for view in self._ticket.views or ()]
        _note(self._ticket, stream)
        for event in [group.event for group in groups if group is not None]:
            if event is not None:
                stream.wait_event(event)
        return True

    def _wait(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        if reached():
            return True
        tick = self._ticket.tick
        if timeout != 0 and tick is not None and tick.thread == threading.get_ident():
            raise RequestStateError(
                f"waiting for layer {self._layer} would block the loop, whose thread this is: await "
                f"Ticket.submitted({self._layer}) or Ticket.layer({self._layer}), or wait on another thread"
            )
        return _look_until(reached, timeout)

    def _submitted(self) -> bool:
        """Whether the layer is enqueued, or will never be."""
        views = self._ticket.views
        if views is None:
            return False
        groups = [(view.group(self._layer), view.record) for view in views]
        return all(
            (group is not None and (group.submitted or group.finished))
            or (record.failure or record.error) is not None
            for group, record in groups
        )

    def _passes(self, view: TransferView) -> bool:
        group = view.group(self._layer)
        if group is None:
            return (view.record.failure or view.record.error) is not None
        event = group.event
        if group.finished:
            return True
        if event is None:
            return view.record.error is not None
        try:
            return event.query()
        except DeviceError:
            return True


def _note(ticket: Fenced, stream: Stream) -> None:
    """Whoever orders a stream behind pages is about to use them there: they must not be given back before."""
    if ticket.ordered is not None:
        ticket.ordered(stream)


def _look_until(reached: Callable[[], bool], timeout: float | None) -> bool:
    """Block this thread until `reached()`, for `timeout` seconds at most; False if the time was up first."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while not reached():
        left = _LONGEST_PAUSE if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
