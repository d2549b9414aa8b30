"""The thread that enqueues copies, watched; and a thread that is in its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from cProfile import Profile
from functools import partial

from asynchicache.ports import AsyncioPort, ThreadWorker


class SubmitPort(AsyncioPort):
    """The real port, whose submit thread is watched.

    Attributes:
        spent: of each of its calls, seconds on the clock and of its processor.
        profile: runs its calls, if there is one.
    """

    def __init__(self) -> None:
        super().__init__(threads=2)
        self.spent: list[tuple[float, float]] = []
        self.profile: Profile | None = None

    def worker(self, name: str) -> ThreadWorker:
        return _Watched(name, self) if name.endswith("submit") else ThreadWorker(name)

    def watch(self, call: Callable[[], object]) -> None:
        if self.profile is not None:
            self.profile.runcall(call)
            return
        started = time.perf_counter(), time.thread_time()
        call()
        self.spent.append((time.perf_counter() - started[0], time.thread_time() - started[1]))


class _Watched(ThreadWorker):
    def __init__(self, name: str, port: SubmitPort) -> None:
        super().__init__(name)
        self._port = port

    def submit(self, call: Callable[[], object]) -> None:
        super().submit(partial(self._port.watch, call))


@contextmanager
def busy_python() -> Iterator[None]:
    """A thread that runs Python all the time, as an engine's scheduler does."""
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            sum(range(2000))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
