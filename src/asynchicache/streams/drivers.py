"""Drivers run the work of emulated streams: on threads, in the caller, or on a loop with a seed."""

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
"""Seconds. With the timer's slack about 75 microseconds: enough for a thread to wake and take the GIL."""

DriverStep = Callable[[], None]
"""One piece of work, and starting the next one; a driver calls it once, without holding a lock."""


class Driver(Protocol):
    """Runs work for one device. The device decides what may run; a driver decides when, and where."""

    def lane(self, name: str) -> Callable[[DriverStep], None]:
        """A function by which one stream hands over its work, one piece at a time, the next when the last has
        run. It raises DeviceError if it cannot take a piece.
        """
        ...

    def wait(self, reached: threading.Event) -> None:
        """Block this thread until `reached` is set by work that was handed over."""
        ...

    def yield_to_streams(self) -> None:
        """Give work that was handed over the chance to start, before this thread hands over more."""
        ...

    def close(self) -> None:
        """Join the threads, if any, after the work handed over; may be called twice."""
        ...


class ThreadDriver:
    """One daemon thread per stream, started with its first work. Torch copies release the GIL, so streams
    really overlap.
    """

    def __init__(self) -> None:
        self._threads: list[ThreadWorker] = []

    def lane(self, name: str) -> Callable[[DriverStep], None]:
        # `ThreadWorker` allows one submitting thread at a time, and a stream hands over a piece only after
        # the last one has run.
        thread = ThreadWorker(f"stream-{name}")
        self._threads.append(thread)

        def hand_over(run: DriverStep) -> None:
            try:
                thread.submit(run)
            except RuntimeError as error:  # the system starts no more threads
                raise DeviceError(f"no thread for stream {name!r}: {error}") from error

        return hand_over

    def wait(self, reached: threading.Event) -> None:
        reached.wait()

    def yield_to_streams(self) -> None:
        # A thread that enqueues and does not block keeps the GIL for 5 ms (`sys.getswitchinterval`): the
        # stream's thread, woken for the first copy, would start only when all others are enqueued.
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
        self._ready: deque[DriverStep] = deque()
        self._turn = threading.Lock()

    def lane(self, name: str) -> Callable[[DriverStep], None]:
        return self._hand_over

    def _hand_over(self, run: DriverStep) -> None:
        self._ready.append(run)
        # Check again after releasing the lock: another thread may have added work in between.
        while self._ready and self._turn.acquire(blocking=False):
            try:
                while self._ready:
                    self._ready.popleft()()
            finally:
                self._turn.release()

    def wait(self, reached: threading.Event) -> None:
        reached.wait()

    def yield_to_streams(self) -> None:
        """Everything that may run has run."""

    def close(self) -> None:
        """Nothing to join."""


class SeededDriver:
    """Runs every piece of work on the loop after a duration drawn from `rng`.

    In virtual time the seed alone decides how streams interleave, so that a run can be replayed. Many seeds
    cover orders that one machine's timing never shows. Create it on the loop's thread.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, *, mean_seconds: float = 0.001
    ) -> None:
        """
        Args:
            rng: draws the durations, which are exponentially distributed.
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
        self._pending: dict[int, tuple[float, DriverStep]] = {}

    def lane(self, name: str) -> Callable[[DriverStep], None]:
        return self._hand_over

    def _hand_over(self, run: DriverStep) -> None:
        delay = self._rng.expovariate(self._rate)
        number = next(self._numbers)
        self._pending[number] = (self._loop.time() + delay, run)
        if threading.get_ident() == self._thread:
            self._loop.call_later(delay, self._fire, number)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._fire, number)

    def _fire(self, number: int) -> None:
        due_and_run = self._pending.pop(number, None)
        if due_and_run is not None:  # otherwise `wait` ran it before its timer fired
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
