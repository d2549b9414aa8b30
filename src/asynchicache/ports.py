"""Clock, threads and randomness behind one port, so that the whole cache can run in virtual time."""

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
    """Runs calls off the loop, one after another, in the order in which they were given."""

    def submit(self, call: Callable[[], object]) -> None:
        """Run `call` later. What it raises would end the worker, so it must not."""
        ...

    def close(self) -> None:
        """Wait until everything submitted has run; it may block, so not on the loop. Twice is harmless."""
        ...

    def abandon(self) -> None:
        """Run nothing more than what runs now, and do not wait for that."""
        ...


class Port(Protocol):
    """What the library may ask of the world outside its coroutines."""

    @property
    def random(self) -> random.Random:
        """The only source of randomness; seeded, so that a run can be replayed."""
        ...

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean something."""
        ...

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run `call` off the loop. Cancelling the waiter does not stop the call."""
        ...

    def worker(self, name: str) -> Worker:
        """A worker of its own, for calls that need an order."""
        ...

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the loop soon; from any thread. Dropped once the loop is closed."""
        ...

    async def aclose(self) -> None:
        """Join the threads; blocking calls that still run are waited for."""
        ...


class ThreadWorker:
    """A daemon thread, started with the first call. `submit` is for one thread at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned = False

    def submit(self, call: Callable[[], object]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            thread.start()  # a system without threads to spare raises here, and may have one next time
            self._thread = thread
        self._inbox.put(call)

    def _serve(self) -> None:
        while (call := self._inbox.get()) is not None and not self._abandoned:
            call()
            del call  # an idle thread must not keep alive what its last call held, tensors say

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join()

    def abandon(self) -> None:
        self._abandoned = True
        self._inbox.put(None)


class AsyncioPort:
    """The real world: the running loop's clock, a thread pool of our own.

    The pool is not asyncio's default one, whose threads others may hold for minutes.
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
