"""The requests of one pool: how many run at once, what becomes of them, and their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from obstore.store import ObjectStore

from asynchicache.errors import ClosedError
from asynchicache.types import Outcome

T = TypeVar("T")

_FAILURES: ContextVar[list[Exception]] = ContextVar("failures of the requests of one call")


class RequestTurns(NamedTuple):
    """Limits of concurrent requests, of all pools: those for pages, and lookups, which wait for no page."""

    pages: asyncio.Semaphore
    lookups: asyncio.Semaphore


class Requests:
    """The requests of one pool.

    They cannot be cancelled, because obstore may still read a page that it is storing. So a cancelled call
    waits for its requests, whose own timeouts end them.

    Args:
        store: the object store.
        turns: limits concurrent requests.
        pool: the pool's name.
    """

    def __init__(self, store: ObjectStore, turns: RequestTurns, pool: str) -> None:
        self.store = store
        self.turns = turns
        self.running: set[asyncio.Task[object]] = set()
        self.closed = False
        self._pool = pool

    async def aclose(self) -> None:
        self.closed = True
        while self.running:
            await asyncio.wait(self.running)

    async def each(
        self,
        work: Callable[..., Awaitable[T]],
        *columns: Sequence[object],
        turns: asyncio.Semaphore | None = None,
    ) -> list[T]:
        """Run `work` for every row, several concurrently, as `turns` (default: those for pages) allow. A
        cancelled caller still waits for started work.

        Raises:
            StorageError: the first error that `work` raised.
        """
        if self.closed:
            raise ClosedError(f"object engine of pool {self._pool!r} is closed")
        waiting: set[asyncio.Task[T]] = set()
        rows = zip(*columns, strict=True)
        turns = turns or self.turns.pages
        tasks = [asyncio.create_task(self._in_turn(turns, waiting, work, *row)) for row in rows]
        waiting.update(tasks)
        for task in tasks:
            self.running.add(task)
            task.add_done_callback(self._ended)
        try:
            await _all_done(tasks)
        except asyncio.CancelledError:
            for task in waiting:  # they have not touched their slots yet
                task.cancel()
            await _all_done(tasks)
            raise
        return [task.result() for task in tasks]

    async def _in_turn(
        self,
        turns: asyncio.Semaphore,
        waiting: set[asyncio.Task[T]],
        work: Callable[..., Awaitable[T]],
        *row: object,
    ) -> T:
        async with turns:
            waiting.discard(asyncio.current_task())
            return await work(*row)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self.running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, since only the first of a call's errors is raised


@contextmanager
def noting() -> Iterator[list[Exception]]:
    """Collect the failures of the requests that the body makes."""
    failures: list[Exception] = []
    outer = _FAILURES.set(failures)
    try:
        yield failures
    finally:
        _FAILURES.reset(outer)


def failed(error: Exception) -> Outcome:
    _FAILURES.get().append(error)
    return Outcome.FAILED


async def _all_done(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Wait for tasks, without cancelling them if the caller is cancelled."""
    if tasks:
        await asyncio.wait(tasks)
