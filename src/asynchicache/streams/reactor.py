"""Reports the completion of device work to the event loop; one wake-up serves many completions."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import anyio

from asynchicache.errors import ClosedError, ConfigError, DeviceError
from asynchicache.ports import Port
from asynchicache.streams.base import Device, Event, Stream

OnReached: TypeAlias = Callable[[BaseException | None], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReactorStatistics:
    """Counts since the reactor was made.

    Attributes:
        tracked: releases handed over.
        completed: releases called.
        wakes: times the loop was woken by completions.
        swept: completions found by the sweeper, for which no notification had come.
    """

    tracked: int
    completed: int
    wakes: int
    swept: int

    @property
    def in_flight(self) -> int:
        return self.tracked - self.completed


@dataclass(slots=True, eq=False)
class _Entry:
    """One `track`. Any thread writes `reached` and `error`; the rest is written under the lock.

    `queue` is what entries that are reached in order have in common.
    """

    device: Device
    stream: Stream
    event: Event
    release: OnReached
    queue: object
    since: float
    reached: bool = False
    error: BaseException | None = None
    finished: bool = False
    warned: bool = False


class CompletionReactor:
    """Calls `release(error)` on the loop, once, when the work enqueued before it has run.

    Releases of one stream are called in the order they were tracked. The device's threads put notifications
    into a queue that one posted call drains. Notifications may be lost (an error on the stream, a bug in a
    driver), so a sweeper queries the events too while something is in flight.

    `track` may be called from the thread that uses its stream; the rest is confined to the loop.
    """

    def __init__(self, port: Port, *, sweep_seconds: float = 0.05, warn_seconds: float = 60.0) -> None:
        """
        Args:
            port: how other threads reach the loop; also its clock.
            sweep_seconds: the longest that a completion stays unseen when its notification is lost.
            warn_seconds: how long work may be in flight before the log says so.

        Raises:
            ConfigError: `sweep_seconds` or `warn_seconds` is not above 0.
        """
        for name, seconds in (("sweep_seconds", sweep_seconds), ("warn_seconds", warn_seconds)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds}; it must be above 0")
        self._port = port
        self._context = copy_context()
        self._sweep_seconds = sweep_seconds
        self._warn_seconds = warn_seconds
        self._lock = threading.Lock()
        self._in_flight: dict[object, deque[_Entry]] = {}  # by queue
        self._reported: deque[_Entry] = deque()
        self._wake_posted = False
        self._sweeping = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle: anyio.Event | None = None
        self._closed = self._ended = False
        self._tracked = self._completed = self._wakes = self._swept = 0

    def track(
        self,
        device: Device,
        stream: Stream,
        release: OnReached,
        *,
        event: Event | None = None,
        late: bool = False,
    ) -> None:
        """Call `release(error)` on the loop, never from within this call, when all that is enqueued
        on `stream` now has run.

        Args:
            device, stream: where the work is.
            release: is given None, or the device's sticky error. Memory that the work touches must not be
                trusted then, and may still be written.
            event: recorded on `stream` just now, and never to be recorded again; saves recording another
                one. Default: the caller has none.
            late: `event` was recorded a while ago: its release has no order among those of the stream. May be
                called from the loop then.

        Raises:
            ClosedError: the reactor is closed; `release` will not be called.
        """
        if event is None:
            event = device.event()
            stream.record(event)
        entry = _Entry(device, stream, event, release, event if late else stream, self._port.now())
        with self._lock:
            if self._closed:
                raise ClosedError("the reactor is closed; nothing more can be tracked")
            self._in_flight.setdefault(entry.queue, deque()).append(entry)
            self._tracked += 1
        device.notify(stream, event, partial(self._tell, entry), late=late)
        self._ensure_sweeper(entry)

    def statistics(self) -> ReactorStatistics:
        return ReactorStatistics(self._tracked, self._completed, self._wakes, self._swept)

    async def aclose(self, deadline_seconds: float) -> int:
        """Refuse new work, and wait until nothing is in flight, for `deadline_seconds` at most.

        Returns:
            How many are still in flight. Their releases will never be called: the device may write to
            their pages at any time, so the caller must leak these, not free them.
        """
        with self._lock:
            self._closed = True
        self._idle = self._idle or anyio.Event()
        self._look()
        self._tell_idle()
        with anyio.move_on_after(deadline_seconds):
            await self._idle.wait()
        self._look()
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        return self.statistics().in_flight

    # From any thread.

    def _tell(self, entry: _Entry, error: BaseException | None) -> None:
        entry.error = error
        entry.reached = True
        self._reported.append(entry)
        with self._lock:
            wake, self._wake_posted = not self._wake_posted, True
        if wake:
            self._port.post(self._drain)

    def _ensure_sweeper(self, entry: _Entry) -> None:
        with self._lock:
            # If the loop is woken for it, it will be drained: no timer is needed.
            arm = not (self._sweeping or entry.reached)
            self._sweeping = self._sweeping or arm
        if arm:
            self._port.post(self._arm)

    # On the loop.

    def _drain(self) -> None:
        with self._lock:
            self._wake_posted = False
        self._wakes += 1
        if not self._ended:
            self._finish_reported()

    def _finish_reported(self) -> None:
        for _ in range(len(self._reported)):  # what is added meanwhile has posted another drain
            self._finish_through(self._reported.popleft())

    def _arm(self) -> None:
        if not self._ended:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._sweep_seconds, self._sweep)

    def _sweep(self) -> None:
        self._look()
        with self._lock:
            self._sweeping = bool(self._in_flight)
        if self._sweeping:
            self._arm()

    def _look(self) -> None:
        """Finish everything that is complete, with or without a notification."""
        if self._ended:
            return
        self._finish_reported()
        with self._lock:
            queues = [list(entries) for entries in self._in_flight.values()]
        for entries in queues:
            self._look_at(entries)

    def _look_at(self, entries: list[_Entry]) -> None:
        last = None
        for entry in entries:
            if not _complete(entry):
                self._warn_of(entry)
                break
            last = entry
            self._swept += 1
        if last is not None:
            self._finish_through(last)

    def _warn_of(self, entry: _Entry) -> None:
        seconds = self._port.now() - entry.since
        if seconds > self._warn_seconds and not entry.warned:
            entry.warned = True
            logger.warning(
                "stream %s of %s has not got further for %.0f s",
                entry.stream.name,
                entry.device.name,
                seconds,
            )

    def _finish_through(self, last: _Entry) -> None:
        """Finish `last` and all entries before it in its queue: streams run in order."""
        with self._lock:
            entries = [] if last.finished else self._pop_through(last)
        for entry in entries:
            self._finish(entry, entry.error if entry.reached else last.error)
        self._tell_idle()

    def _pop_through(self, last: _Entry) -> list[_Entry]:
        queue = self._in_flight[last.queue]
        popped = []
        while not last.finished:
            entry = queue.popleft()
            entry.finished = True
            popped.append(entry)
        if not queue:
            del self._in_flight[last.queue]
        return popped

    def _finish(self, entry: _Entry, error: BaseException | None) -> None:
        self._completed += 1
        try:
            self._context.run(entry.release, error)  # not in the context of the task that happens to poll
        except Exception:
            logger.exception("a release hook failed; the others go on")

    def _tell_idle(self) -> None:
        if self._idle is not None and not self._in_flight:
            self._idle.set()


def _complete(entry: _Entry) -> bool:
    """Query the entry's event. A failed device completes everything, with its error."""
    try:
        if not entry.event.query():
            return False
    except DeviceError as error:
        entry.error = entry.device.error or error
    entry.reached = True
    return True
