"""Clock, threads and randomness behind one interface, so that the whole cache can run in virtual time."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol, TypeVar

T = TypeVar("T")


class Worker(Protocol):
    """Runs calls off the loop, one after another, in order of submission."""

    def submit(self, call: Callable[[], object]) -> None:
        """Run `call` later. It must not raise: an exception would end the worker."""
        ...

    def close(self) -> None:
        """Wait until all submitted calls have run. Idempotent; may block, so do not call it on the loop."""
        ...

    def abandon(self) -> None:
        """Drop calls that have not begun; do not wait for the running one."""
        ...


class Port(Protocol):
    """All that the library uses outside its coroutines."""

    @property
    def random(self) -> random.Random:
        """The only source of randomness; seeded, so that a run can be replayed."""
        ...

    def now(self) -> float:
        """Seconds on a monotonic clock; only differences are meaningful."""
        ...

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run `call` off the loop. Cancelling the waiter does not stop the call."""
        ...

    def worker(self, name: str) -> Worker:
        """Make a worker, for calls that must run in order."""
        ...

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the loop soon; callable from any thread. Dropped once the loop is closed."""
        ...

    async def aclose(self) -> None:
        """Join the threads, after running blocking calls have ended."""
        ...


class ThreadWorker:
    """A daemon thread, started by the first call. Only one thread at a time may call `submit`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = False

    def submit(self, call: Callable[[], object]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            thread.start()  # raises if no thread is available; a later call may succeed
            self._thread = thread
        self._inbox.put(call)

    def _serve(self) -> None:
        while (call := self._inbox.get()) is not None and not self._abandoned:
            call()
            del call  # an idle thread must not keep objects of its last call alive, such as tensors

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join()

    def abandon(self) -> None:
        self._abandoned = True
        self._inbox.put(None)


class AsyncioPort:
    """The real port: the running loop's clock and a thread pool of its own.

    It does not use asyncio's default pool, whose threads other code may hold for minutes.
    """

    def __init__(self, *, threads: int = 8, seed: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="asynchicache-io")
        self.random = random.Random(seed)

    def now(self) -> float:
        return self._loop.time()

    async def run_blocking(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._pool, call)

    def worker(self, name: str) -> ThreadWorker:
        return ThreadWorker(name)

    def post(self, call: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(call)
            except RuntimeError:  # closed between the two lines
                return

    async def aclose(self) -> None:
        await self._loop.run_in_executor(None, self._pool.shutdown)
