"""Fences order work behind the bytes of one layer: streams, captured graphs, threads of serving engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from asynchicache.errors import DeviceError, RequestStateError
from asynchicache.streams.base import Event, Stream
from asynchicache.transfer.record import Submission, TransferRecord

_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3
"""Seconds between queries of a thread that waits; they double. A query takes the CUDA driver's lock."""


class Fence:
    """Orders a stream behind the bytes of one layer, on the device, without a host wait.

    The fence of a failed transfer lets the stream through, so that a forward never hangs on it: check
    `Ticket.ok` before its results are used.
    """

    __slots__ = ("_layer", "_submission")

    def __init__(self, submission: Submission, layer: int) -> None:
        self._submission = submission
        self._layer = layer

    def wait_on(self, stream: Stream) -> None:
        """Make everything that is enqueued on `stream` from now on wait for the layer.

        Raises:
            RequestStateError: the layer is not submitted yet, so there is nothing to wait for.
        """
        if self._submission.transfers is None:
            raise self._too_early()
        events = [self._event(*group) for group in self._submission.groups(self._layer)]
        _report_wait(self._submission, stream)
        for event in events:
            if event is not None:
                stream.wait_event(event)

    def record(self, event: Event, stream: Stream, *, waiters: Iterable[Stream] = ()) -> None:
        """Record `event` behind the layer, and behind what else is enqueued on `stream`.

        For external events, which a captured graph waits for: record them anew before each replay. Use a
        stream that runs nothing else, as it is held up until the layer is there.

        Args:
            event: to be recorded.
            stream: where.
            waiters: streams that wait for `event`. Default: none are known.

        Raises:
            RequestStateError: the layer is not submitted yet.
        """
        self.wait_on(stream)
        stream.record(event)
        for waiter in waiters:
            _report_wait(self._submission, waiter)

    def _event(self, transfer: TransferRecord, index: int | None) -> Event | None:
        """What to wait for; None where the layer has landed, or never will."""
        if not (transfer.is_enqueued(index) or transfer.is_ended(index)):
            raise self._too_early()
        return transfer.event(index)

    def _too_early(self) -> RequestStateError:
        return RequestStateError(
            f"layer {self._layer} is not submitted yet: await Ticket.submitted({self._layer}) first"
        )


class HostFence:
    """Lets a thread of a serving engine wait for one layer, as vLLM's `wait_for_layer_load` does.

    It queries the layer's events and does not need the loop, which may be blocked meanwhile, except that the
    iteration in which the ticket was made must end. On the loop's own thread it only checks: blocking there
    would hold up every request. As with other fences, a failed transfer lets through.
    """

    __slots__ = ("_layer", "_submission")

    def __init__(self, submission: Submission, layer: int) -> None:
        self._submission = submission
        self._layer = layer

    @property
    def open(self) -> bool:
        """Whether the layer is there, or will never be; from any thread."""
        submission = self._submission
        if submission.transfers is None:
            return submission.failure is not None
        return all(_is_over(*group) for group in submission.groups(self._layer))

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the layer is there or has failed.

        Args:
            timeout: seconds to wait at most; None waits forever, 0 only checks.

        Returns:
            Whether the fence is open; False if the timeout passed first.

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
            Whether `stream` is ordered behind the layer; False if the timeout passed first.

        Raises:
            RequestStateError: as `wait`.
        """
        if not self._wait(self._submitted, timeout):
            return False
        groups = list(self._submission.groups(self._layer))
        _report_wait(self._submission, stream)
        for event in [transfer.event(index) for transfer, index in groups]:
            if event is not None:
                stream.wait_event(event)
        return True

    def _wait(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        if reached():
            return True
        tick = self._submission.tick
        if timeout != 0 and tick is not None and tick.thread == threading.get_ident():
            raise RequestStateError(
                f"waiting for layer {self._layer} would block the loop, whose thread this is: await "
                f"Ticket.submitted({self._layer}) or Ticket.layer({self._layer}), or wait on another thread"
            )
        return _poll_until(reached, timeout)

    def _submitted(self) -> bool:
        """Whether the layer is enqueued, or will never be."""
        if self._submission.transfers is None:
            return False
        return all(
            transfer.is_enqueued(index) or transfer.is_ended(index) or transfer.error is not None
            for transfer, index in self._submission.groups(self._layer)
        )


def _is_over(transfer: TransferRecord, index: int | None) -> bool:
    """Whether a group has landed, or never will; asks the device, which knows before the loop does."""
    event = transfer.event(index)
    if transfer.is_ended(index):
        return True
    if event is None:  # not enqueued
        return transfer.error is not None
    try:
        return event.query()
    except DeviceError:
        return True


def _report_wait(submission: Submission, stream: Stream) -> None:
    """A stream that waits for pages is about to use them: they must not be given back before it has."""
    if submission.on_wait is not None:
        submission.on_wait(stream)


def _poll_until(reached: Callable[[], bool], timeout: float | None) -> bool:
    """Block this thread until `reached()`, for `timeout` seconds at most; False if the timeout passed
    first."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while not reached():
        left = _LONGEST_PAUSE if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
