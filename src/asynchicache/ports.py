"""Clock, threads and randomness behind one port, so that the whole cache can run in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


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

    def post(self, call: Callable[[], object]) -> None:
        """Run `call` on the loop soon; from any thread. Dropped once the loop is closed."""
        ...

    async def aclose(self) -> None:
        """Join the threads; blocking calls that still run are waited for."""
        ...


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

    def post(self, call: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(call)
            except RuntimeError:  # closed between the two lines
                return

    async def aclose(self) -> None:
        await self._loop.run_in_executor(None, self._pool.shutdown)
