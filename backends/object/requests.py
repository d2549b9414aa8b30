"""The requests of one pool: how many run at once, what becomes of them, and their failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from obstore.store import ObjectStore

from asynchicache.backends.object.stores import FAILURES, is_throttled
from asynchicache.errors import ClosedError
from asynchicache.types import Outcome

T = TypeVar("T")

_FAILURES: ContextVar[list[Exception]] = ContextVar("failures of the requests of one call")
_TURNS: ContextVar[Turns] = ContextVar("the turns by which a request runs")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds until a request that the store had no time for is sent again; each pause is twice the last."""


class Turns:
    """Concurrent requests: at most `most`, and fewer while the store says that these are too many.

    As TCP does (Chiu and Jain, 1989): half as many when the store complains, once for what was sent before;
    and one more after as many answers as there are requests at once.
    """

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._most = self._allowed = float(most)
        self._withheld = 0
        self._complaints = 0

    async def __aenter__(self) -> None:
        await self._free.acquire()

    async def __aexit__(self, *raised: object) -> None:
        if self._withheld < self._most - int(self._allowed):
            self._withheld += 1
        else:
            self._free.release()

    async def send(self, request: Callable[[], Awaitable[T]], patience: float) -> T:
        """Send a request, again and again while the store has no time for it.

        Args:
            request: sends it.
            patience: seconds after which it is not sent again.

        Raises:
            BaseError, OSError: what it raised at last.
        """
        now, pause = asyncio.get_running_loop().time, _FIRST_PAUSE
        latest = now() + patience
        while True:
            complaints = self._complaints
            try:
                answer = await request()
            except FAILURES as error:
                if not is_throttled(error):
                    raise
                self._slow_down(complaints)
                if now() + pause > latest:
                    raise
            else:
                self._speed_up()
                return answer
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _slow_down(self, complaints: int) -> None:
        if complaints == self._complaints:
            self._complaints += 1
            self._allowed = max(self._allowed / 2, 1.0)

    def _speed_up(self) -> None:
        self._allowed = min(self._allowed + 1 / self._allowed, self._most)
        while self._withheld > self._most - int(self._allowed):
            self._withheld -= 1
            self._free.release()


class RequestTurns(NamedTuple):
    """Limits of concurrent requests, of all pools: those for pages, and lookups, which wait for no page."""

    pages: Turns
    lookups: Turns


class Requests:
    """The requests of one pool.

    They cannot be cancelled, because obstore may still read a page that it is storing. So a cancelled call
    waits for its requests, whose own timeouts end them.

    Args:
        store: the object store.
        turns: limits concurrent requests.
        pool: the pool's name.
        patience: seconds for which a request is sent again while the store has no time for it.
    """

    def __init__(self, store: ObjectStore, turns: RequestTurns, pool: str, patience: float) -> None:
        self.store = store
        self.turns = turns
        self.running: set[asyncio.Task[object]] = set()
        self.closed = False
        self._pool = pool
        self._patience = patience

    async def aclose(self) -> None:
        self.closed = True
        while self.running:
            await asyncio.wait(self.running)

    async def each(
        self,
        work: Callable[..., Awaitable[T]],
        *columns: Sequence[object],
        turns: Turns | None = None,
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
        turns: Turns,
        waiting: set[asyncio.Task[T]],
        work: Callable[..., Awaitable[T]],
        *row: object,
    ) -> T:
        async with turns:
            waiting.discard(asyncio.current_task())
            _TURNS.set(turns)
            return await work(*row)

    async def send(self, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request, by the turns of `each` that it is part of, if any; see `Turns.send`."""
        return await _TURNS.get(self.turns.lookups).send(request, self._patience)

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
