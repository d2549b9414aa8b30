"""Find what blocks the event loop, with a heartbeat on the loop and a thread that inspects its stack."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

_BEAT_SECONDS = 0.005
_LOOK_SECONDS = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")
_TASKS = Path("/proc/self/task")
_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Stall:
    """A period in which the loop was blocked.

    Attributes:
        seconds: its duration.
        starved: seconds of it in which our threads waited for a core; caused by the machine, not by code.
        cpu: seconds of it that the loop's thread computed.
        collecting: seconds of it spent in garbage collection, on any thread.
        stack: stack of the loop's thread, outermost first; empty if another thread held the GIL.
    """

    seconds: float
    starved: float
    cpu: float
    collecting: float
    stack: str

    @property
    def blocked(self) -> float:
        """Seconds caused by code on the loop: the duration without starvation."""
        return self.seconds - self.starved

    def __str__(self) -> str:
        return (
            f"the loop was blocked for {self.blocked * 1e3:.0f} ms ({self.cpu * 1e3:.0f} ms computing, "
            f"{self.collecting * 1e3:.0f} ms collecting garbage): {self.stack or 'no stack was taken'}"
        )


class LoopWatchdog:
    """Watches the running loop while entered.

    A shared machine also stops threads, and so the loop. Linux's `schedstat` and `stat` report how long a
    ready thread had no core, and how long the host gave the machine's cores to other guests; the watchdog
    subtracts these times.

    Attributes:
        stalls: periods in which code blocked the loop for longer than the limit.
        starved: number of stalls longer than the limit that the machine caused.
        longest: longest time that code blocked the loop, in seconds.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.stalls: list[Stall] = []
        self.starved = 0
        self.longest = 0.0
        self._limit = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._native = str(threading.get_native_id())
        self._last = time.monotonic()
        self._stack = ""
        self._cpu = time.thread_time()
        self._collecting = self._collection_began = 0.0
        self._seen = threading.Event()
        self._waits, self._stolen = _waits(), _stolen()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        gc.callbacks.append(self._collects)
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._timer.cancel()
        gc.callbacks.remove(self._collects)
        self._thread.join()

    def wait_until_seen(self, timeout: float) -> bool:
        """Block until the watchdog notices the ongoing stall; for tests that block on purpose."""
        return self._seen.wait(timeout)

    # On the loop.

    def _beat(self) -> None:
        now = time.monotonic()
        late = now - self._last - _BEAT_SECONDS
        if late > self._limit / 4:
            self._judge(late)
        self._last, self._stack, self._cpu, self._collecting = now, "", time.thread_time(), 0.0
        self._timer = self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _judge(self, seconds: float) -> None:
        starved = _starved(self._waits, _waits(), self._native) + _stolen() - self._stolen
        cpu = time.thread_time() - self._cpu
        stall = Stall(seconds, starved, cpu, self._collecting, self._stack)
        self.longest = max(self.longest, stall.blocked)
        if stall.blocked > self._limit:
            self.stalls.append(stall)
        elif seconds > self._limit:
            self.starved += 1

    def _collects(self, phase: str, _: object) -> None:
        if phase == "start":
            self._collection_began = time.monotonic()
        else:
            self._collecting += time.monotonic() - self._collection_began

    # On the watchdog's thread.

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            age = time.monotonic() - self._last
            if age > self._limit / 2:
                self._stack = _where(sys._current_frames().get(self._ident))  # noqa: SLF001  the only API
            if age > self._limit + 2 * _BEAT_SECONDS:
                self._seen.set()
            elif age < _LOOK_SECONDS:
                self._waits, self._stolen = _waits(), _stolen()


def _where(frame: FrameType | None) -> str:
    """The innermost calls. Must be quick and read no source files: holding a frame keeps its locals alive,
    even after the function has returned."""
    calls: list[str] = []
    while frame is not None and len(calls) < _FRAMES:
        code = frame.f_code
        calls.append(f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        frame = frame.f_back
    return " > ".join(reversed(calls))


def _waits() -> Mapping[str, int]:
    """By thread, the nanoseconds in which it was ready but had no core."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError):  # the thread has ended
            continue
    return found


def _stolen() -> float:
    """Seconds, summed over cores, in which the host ran other guests on this machine's cores (steal time)."""
    with _STAT.open("rb") as file:
        return int(file.readline().split()[8]) / _TICKS


def _starved(before: Mapping[str, int], after: Mapping[str, int], loop: str) -> float:
    """Seconds that the loop's thread, or another thread that may block it, waited for a core."""
    grown = {thread: wait - before.get(thread, 0) for thread, wait in after.items()}
    own = grown.pop(loop, 0)
    return (own + max(grown.values(), default=0)) / 1e9
