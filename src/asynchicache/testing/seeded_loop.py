"""An event loop in virtual time, in which one seed decides everything that a machine would leave to luck.

After the deterministic simulators of FoundationDB and others: one thread, no clock, no waiting. Time jumps
to the next timer, and which of the ready callbacks runs next is drawn.
"""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import zlib
from collections.abc import Callable
from contextvars import Context
from functools import partial
from heapq import heappop, heappush
from itertools import count
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

from asynchicache.errors import ConfigError, DeadlockError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_SECONDS = 1e-6
"""What each callback takes. Above 0, so that tasks that spin on `sleep(0)` do not stop time."""

BLOCKING_SECONDS = 1e-3
"""The mean time until a blocking call begins, and again until its caller is told."""


class SeededLoop(asyncio.BaseEventLoop):
    """Runs coroutines in one order of all that are possible, drawn from `seed`.

    Ready callbacks run in any order, not first come first served: whoever relies on the order of two
    tasks is found out. Blocking calls (`run_in_executor`, `asyncio.to_thread`) run on the loop itself, a
    drawn time after they were asked for, and their callers learn of it a drawn time later. There are no
    sockets, no signals, no processes, and no other threads: `anyio.to_thread` cannot work here.

    Attributes:
        random: decides what runs next, and how long things take.
        steps: callbacks run so far.
    """

    def __init__(
        self, seed: int, *, blocking_seconds: float = BLOCKING_SECONDS, max_steps: int = 10_000_000
    ) -> None:
        """
        Args:
            seed: the same seed and the same coroutines make the same run.
            blocking_seconds: the mean time until a blocking call begins, and again until it is told of.
            max_steps: callbacks after which the run counts as one that never ends.

        Raises:
            ConfigError: `blocking_seconds` or `max_steps` is not above 0.
        """
        super().__init__()
        # A source of its own: what tests draw for themselves does not change the order of tasks.
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
        if not (blocking_seconds > 0 and max_steps > 0):
            self.close()  # else its finalizer warns
            raise ConfigError(f"blocking_seconds {blocking_seconds}, max_steps {max_steps}: must be above 0")
        self._blocking_rate = 1 / blocking_seconds

    @property
    def fingerprint(self) -> int:
        """A checksum of every choice so far: two runs that differ anywhere differ in it."""
        return self._fingerprint

    def time(self) -> float:
        """Seconds since the loop was made; they pass only as callbacks run and timers are jumped to."""
        return self._now

    def skip(self, seconds: float) -> None:
        """Let time pass in which nothing ran: as on a machine that was suspended.

        Raises:
            ConfigError: a clock that only goes forward cannot skip that.
        """
        if not seconds >= 0:
            raise ConfigError(f"skip({seconds}): seconds must be 0 or more")
        self._now += seconds

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run `callback` some time, before the clock jumps."""
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`.

        Raises:
            RuntimeError: it was called by another thread, whose timing no seed decides.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("a seeded loop has one thread; let other work go through its port")
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def run_in_executor(self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func(*args)` on the loop, later; who waits is told later still. `executor` is ignored.

        Cancelled before it has begun, it never begins; as with a pool of threads.
        """
        answer: asyncio.Future[T] = self.create_future()
        self.call_later(self._draw(), self._run_blocking, answer, partial(func, *args))
        return answer

    def _run_blocking(self, answer: asyncio.Future[T], call: Callable[[], T]) -> None:
        if answer.cancelled():
            return
        try:
            tell = partial(_answer, answer, call())
        except Exception as error:  # noqa: BLE001 - the boundary of a call that belongs to its waiter
            tell = partial(_refuse, answer, error)
        self.call_later(self._draw(), tell)

    def _draw(self) -> float:
        return self.random.expovariate(self._blocking_rate)

    # What `BaseEventLoop.run_forever` calls again and again.

    def _run_once(self) -> None:
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
            handle._run()  # noqa: SLF001 - what every loop does with its handles

    def _take_due(self) -> None:
        while self._timers and self._timers[0][0] <= self._now:
            timer = heappop(self._timers)[2]
            if not timer.cancelled():
                self._soon.append(timer)

    def _jump(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        if not self._timers:
            raise DeadlockError(f"seed {self._seed}: nothing can ever happen again\n{self._waiting()}")
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
    """What a task is and, from the outside in, where it waits: `name: serve (engine.py:31) > ...`."""
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
