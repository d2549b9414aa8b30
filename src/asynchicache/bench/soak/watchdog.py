"""Finds what blocks the event loop: a beat on the loop, and a thread that looks at the loop's stack."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

_BEAT_SECONDS = 0.005
_LOOK_SECONDS = 0.02
_TASKS = Path("/proc/self/task")
_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Stall:
    """The loop stood still.

    Attributes:
        seconds: for how long.
        starved: how much of that threads of ours waited for a core, which no code can help.
        stack: where the loop's thread was, outermost first.
    """

    seconds: float
    starved: float
    stack: str

    @property
    def blocked(self) -> float:
        """Seconds that something on the loop took, or waited for."""
        return self.seconds - self.starved


class LoopWatchdog:
    """Watches the running loop for as long as it is entered.

    A machine that others use stops threads for a while, and so stops the loop; the kernel's accounts
    (`schedstat`, Linux) say for how long a thread was ready and had no core, and that is taken off.

    Attributes:
        stalls: when something blocked the loop for longer than the limit.
        starved: stalls longer than the limit that were the machine's.
        longest: the longest that something blocked the loop, in seconds.
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
        self._seen = threading.Event()
        self._waits = _waits()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._timer.cancel()
        self._thread.join()

    def wait_until_seen(self, timeout: float) -> bool:
        """Block until a stall is seen while it lasts; for those who block on purpose."""
        return self._seen.wait(timeout)

    # On the loop.

    def _beat(self) -> None:
        now = time.monotonic()
        late = now - self._last - _BEAT_SECONDS
        if late > self._limit / 4:
            self._judge(late)
        self._last, self._stack = now, ""
        self._timer = self._loop.call_later(_BEAT_SECONDS, self._beat)

    def _judge(self, seconds: float) -> None:
        stall = Stall(seconds, _starved(self._waits, _waits(), self._native), self._stack)
        self.longest = max(self.longest, stall.blocked)
        if stall.blocked > self._limit:
            self.stalls.append(stall)
        elif seconds > self._limit:
            self.starved += 1

    # On the watchdog's thread.

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            age = time.monotonic() - self._last
            if age > self._limit / 2:
                self._stack = _where(sys._current_frames().get(self._ident))  # noqa: SLF001  the way to ask
            if age > self._limit + 2 * _BEAT_SECONDS:
                self._seen.set()
            elif age < _LOOK_SECONDS:
                self._waits = _waits()


def _where(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    lines = traceback.extract_stack(frame)[-_FRAMES:]
    return " > ".join(f"{line.name} ({Path(line.filename).name}:{line.lineno})" for line in lines)


def _waits() -> Mapping[str, int]:
    """By thread, the nanoseconds that it was ready to run and had no core."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError):  # it ended meanwhile
            continue
    return found


def _starved(before: Mapping[str, int], after: Mapping[str, int], loop: str) -> float:
    """Seconds that the loop waited for a core, and that another thread did, who may hold what it needs."""
    grown = {thread: wait - before.get(thread, 0) for thread, wait in after.items()}
    own = grown.pop(loop, 0)
    return (own + max(grown.values(), default=0)) / 1e9
