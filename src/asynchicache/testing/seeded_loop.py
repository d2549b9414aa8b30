"""An event loop in virtual time, in which one seed determines all scheduling and timing.

Like the deterministic simulators of FoundationDB and others: one thread, no real clock, no waiting. Time
jumps to the next timer, and the loop picks the next ready callback at random.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from contextvars import Context
from functools import partial
from heapq import heappop, heappush
from itertools import count
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

from asynchicache.errors import ConfigError, DeadlockError, UsageError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_SECONDS = 1e-6
"""What each callback takes. Above 0, so that tasks that spin on `sleep(0)` do not stop time."""

BLOCKING_SECONDS = 1e-3
"""The mean time until a blocking call begins, and again until its caller is told."""

_INSTEAD = (
    "a seeded loop runs no other thread and waits for none: use `await asyncio.to_thread(call)` or "
    "`await world.port.run_blocking(call)`, and `world.port.worker(name)` where calls have an order"
)


class SeededLoop(asyncio.BaseEventLoop):
    """Runs coroutines in one of their possible orders, chosen by `seed`.

    Ready callbacks run in random order, not first in, first out, which exposes code that relies on the
    order of two tasks. Blocking calls (`run_in_executor`, `asyncio.to_thread`) run on the loop itself after
    a random delay, and their results arrive after another one. Sockets, signals and processes are not
    supported. Nor are other threads, as `anyio.to_thread`, an executor's `submit` and `ModelThread` have
    them: to wait for one raises `UsageError`, or `DeadlockError` if that is seen only at the end.

    Attributes:
        random: chooses callbacks and durations.
        steps: number of callbacks run so far.
    """

    def __init__(
        self, seed: int, *, blocking_seconds: float = BLOCKING_SECONDS, max_steps: int = 10_000_000
    ) -> None:
        """
        Args:
            seed: the same seed and coroutines give the same run.
            blocking_seconds: mean delay before a blocking call starts, and again before its result arrives.
            max_steps: number of callbacks after which the run counts as endless.

        Raises:
            ConfigError: `blocking_seconds` or `max_steps` is not above 0.
        """
        super().__init__()
        # A separate generator, so that draws made by tests do not change the order of tasks.
        self.random = random.Random(f"loop {seed}")
        self.steps = 0
        self._seed = seed
        self._max_steps = max_steps
        self._now = 0.0
        self._numbers = count()
        self._soon: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._fingerprint = 0
        self._thread = threading.get_ident()
        self._intruder = ""
        if not (blocking_seconds > 0 and max_steps > 0):
            self.close()  # otherwise the finalizer warns
            raise ConfigError(f"blocking_seconds {blocking_seconds}, max_steps {max_steps}: must be above 0")
        self._blocking_rate = 1 / blocking_seconds

    @property
    def fingerprint(self) -> int:
        """A checksum of all choices so far. Equal fingerprints mean equal runs."""
        return self._fingerprint

    def time(self) -> float:
        """Virtual seconds since the loop was created. Time passes only when callbacks run or timers fire."""
        return self._now

    def skip(self, seconds: float) -> None:
        """Advance time without running anything, as on a suspended machine.

        Raises:
            ConfigError: the clock cannot go forward by `seconds`.
        """
        if not seconds >= 0:
            raise ConfigError(f"skip({seconds}): seconds must be 0 or more")
        self._now += seconds

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run `callback` before the clock next jumps to a timer, in random order."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Same as `call_soon`.

        Raises:
            UsageError: another thread called it; the seed does not control that thread's timing. Threads
                often lose this error, so the loop raises it too.
        """
        if threading.get_ident() != self._thread:
            self._intruder = threading.current_thread().name
            raise self._refusal()
        return self.call_soon(callback, *args, context=context)

    def _refusal(self) -> UsageError:
        return UsageError(f"seed {self._seed}: thread {self._intruder!r} called the loop; {_INSTEAD}")

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop.

        Raises:
            UsageError: it is to follow the future of another thread.
        """
        # Here, because the task that waits for it is still running: its traceback shows the line.
        if sys._getframe(1).f_code is asyncio.wrap_future.__code__:  # noqa: SLF001
            raise UsageError(f"seed {self._seed}: wait for a future of another thread; {_INSTEAD}")
        return super().create_future()

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func(*args)` on the loop after a delay; the result arrives after another. Ignores `executor`.

        As with a thread pool, a call that is cancelled before it starts never runs.
        """
        answer: asyncio.Future[T] = self.create_future()
        self.call_later(self._draw(), self._run_blocking, answer, partial(func, *args))
        return answer

    def _run_blocking(self, answer: asyncio.Future[T], call: Callable[[], T]) -> None:
        if answer.cancelled():
            return
        try:
            tell = partial(_answer, answer, call())
        except Exception as error:  # noqa: BLE001 - any error goes to the caller's future
            tell = partial(_refuse, answer, error)
        self.call_later(self._draw(), tell)

    def _draw(self) -> float:
        return self.random.expovariate(self._blocking_rate)

    # Overrides one iteration of `BaseEventLoop.run_forever`.

    def _run_once(self) -> None:
        if self._intruder:
            refusal, self._intruder = self._refusal(), ""  # once: what is left of the run is to be closed
            raise refusal
        self._take_due()
        if not self._soon:
            self._jump()
            return
        chosen = self.random.randrange(len(self._soon))
        self._note(chosen, len(self._soon))
        self._soon[chosen], self._soon[-1] = self._soon[-1], self._soon[chosen]
        handle = self._soon.pop()
        self._now += STEP_SECONDS
        if not handle.cancelled():
            handle._run()  # noqa: SLF001 - as every event loop does

    def _take_due(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            timer = heappop(self._timers)[2]
            if not timer.cancelled():
                self._soon.append(timer)

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        if not self._timers:
            told = f"seed {self._seed}: nothing can ever happen again\n{self._waiting()}"
            raise DeadlockError(f"{told}\n  if one of them waits for a thread: {_INSTEAD}")
        self._now = max(self._now, self._timers[0][0])

    def _note(self, chosen: int, ready: int) -> None:
        self.steps += 1
        if self.steps > self._max_steps:
            raise DeadlockError(f"seed {self._seed}: no end after {self._max_steps} steps\n{self._waiting()}")
        self._fingerprint = zlib.crc32(struct.pack("<dII", self._now, ready, chosen), self._fingerprint)

    def _waiting(self) -> str:
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        return "\n".join(sorted(f"  {describe(task)}" for task in tasks)) or "  no task is left"

    def close(self) -> None:
        super().close()
        self._soon.clear()
        self._timers.clear()


def describe(task: asyncio.Task[Any]) -> str:
    """Describe a task and where it waits, outermost frame first: `name: serve (engine.py:31) > ...`."""
    frames = []
    inner: object = task.get_coro()
    while isinstance(inner, CoroutineType) and inner.cr_frame is not None:
        code = inner.cr_code
        file = code.co_filename.rpartition("/")[2]
        frames.append(f"{code.co_qualname} ({file}:{inner.cr_frame.f_lineno})")
        inner = inner.cr_await
    return f"{task.get_name()}: {' > '.join(frames)}"


def _answer(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _refuse(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
