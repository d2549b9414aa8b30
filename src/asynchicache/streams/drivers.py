"""What runs the work of emulated streams: threads, the caller itself, or a loop with a seed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

from asynchicache.errors import ConfigError, DeviceError, InternalError
from asynchicache.ports import ThreadWorker

_MOMENT = 20e-6
"""Seconds; with the timer's slack some 75 microseconds, in which a thread wakes and takes the interpreter."""

Run = Callable[[], None]
"""One piece of work, with what it starts next; a driver calls it once and never holds a lock then."""


class Driver(Protocol):
    """Runs work for one device. The device decides what may run; a driver decides when, and where."""

    def lane(self, name: str) -> Callable[[Run], None]:
        """How one stream hands over its work: a piece at a time, the next when the last has run. What it
        gives raises DeviceError if it cannot take a piece.
        """
        ...

    def wait(self, reached: threading.Event) -> None:
        """Block this thread until `reached` is set by work that was handed over."""
        ...

    def yield_to_streams(self) -> None:
        """Let what was handed over begin, before this thread hands over more."""
        ...

    def close(self) -> None:
        """Join what threads there are, after the work handed over; twice is harmless."""
        ...


class ThreadDriver:
    """One daemon thread a stream, started with its first work: torch copies release the GIL, so
    streams truly overlap.
    """

    def __init__(self) -> None:
        self._threads: list[ThreadWorker] = []

    def lane(self, name: str) -> Callable[[Run], None]:
        # A stream hands over a piece only after the last one has run: one thread at a time, as it must be.
        thread = ThreadWorker(f"stream-{name}")
        self._threads.append(thread)

        def hand_over(run: Run) -> None:
            try:
                thread.submit(run)
            except RuntimeError as error:  # the system has none to spare
                raise DeviceError(f"no thread for stream {name!r}: {error}") from error

        return hand_over

    def wait(self, reached: threading.Event) -> None:
        reached.wait()

    def yield_to_streams(self) -> None:
        """A thread that enqueues keeps the interpreter for 5 ms (`sys.getswitchinterval`) if it does not
        block; a stream's thread that was woken for the first copy would wait for all the others."""
        time.sleep(_MOMENT)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


class InlineDriver:
    """Runs work in the caller as soon as its turn comes: no threads, no latency, one order.

    Work that becomes ready while other work runs waits in a queue, so that a long chain over many
    streams does not nest. When two threads enqueue at once, one of them runs the work of both.
    """

    def __init__(self) -> None:
        self._ready: deque[Run] = deque()
        self._turn = threading.Lock()

    def lane(self, name: str) -> Callable[[Run], None]:
        return self._hand_over

    def _hand_over(self, run: Run) -> None:
        self._ready.append(run)
        # Looked at again after the turn is given back: another thread may have added meanwhile.
        while self._ready and self._turn.acquire(blocking=False):
            try:
                while self._ready:
                    self._ready.popleft()()
            finally:
                self._turn.release()

    def wait(self, reached: threading.Event) -> None:
        reached.wait()

    def yield_to_streams(self) -> None:
        """What may run has run."""

    def close(self) -> None:
        """Nothing to join."""


class SeededDriver:
    """Runs every piece of work on the loop after a duration drawn from `rng`.

    In virtual time the seed alone decides how streams interleave, so a run can be replayed; an
    engine that is right for many seeds does not live by the timing luck of one machine.
    To be made on the loop's thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, *, mean_seconds: float = 0.001
    ) -> None:
        """
        Args:
            loop: where the work runs.
            rng: where durations come from, exponentially distributed.
            mean_seconds: the mean duration of a piece of work.

        Raises:
            ConfigError: `mean_seconds` is not above 0.
        """
        if not mean_seconds > 0:
            raise ConfigError(f"mean_seconds is {mean_seconds}; it must be above 0")
        self._loop = loop
        self._rng = rng
        self._rate = 1 / mean_seconds
        self._thread = threading.get_ident()
        self._numbers = count()
        self._pending: dict[int, tuple[float, Run]] = {}

    def lane(self, name: str) -> Callable[[Run], None]:
        return self._hand_over

    def _hand_over(self, run: Run) -> None:
        delay = self._rng.expovariate(self._rate)
        number = next(self._numbers)
        self._pending[number] = (self._loop.time() + delay, run)
        if threading.get_ident() == self._thread:
            self._loop.call_later(delay, self._fire, number)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._fire, number)

    def _fire(self, number: int) -> None:
        due_and_run = self._pending.pop(number, None)
        if due_and_run is not None:  # else `wait` ran it ahead of its timer
            due_and_run[1]()

    def wait(self, reached: threading.Event) -> None:
        """On the loop's own thread, run what is pending in the order it is due, ahead of time."""
        if threading.get_ident() != self._thread:
            reached.wait()
            return
        while not reached.is_set():
            due = [(due, number) for number, (due, _) in list(self._pending.items())]
            if not due:
                raise InternalError("the loop waits for work that only the loop could run")
            self._fire(min(due)[1])

    def yield_to_streams(self) -> None:
        """The seed decides when work begins."""

    def close(self) -> None:
        """Nothing to join."""
