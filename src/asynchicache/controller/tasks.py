"""The loop that an object belongs to, a task group that its owner closes, and work that is not cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from threading import get_ident
from typing import TypeVar

from asynchicache.errors import UsageError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class OneLoop:
    """The event loop that an object is confined to: the one that runs when it is made.

    A future of one loop does not wake the tasks of another, so whoever awaited it there would hang.
    """

    __slots__ = ("_loop", "_thread", "_what")

    def __init__(self, what: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._what = what

    def check(self) -> None:
        """
        Raises:
            UsageError: another loop runs, or none in another thread.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            if get_ident() == self._thread:
                return  # nothing can be awaited
            raise UsageError(
                f"{self._what} belongs to the thread of its event loop, and another one calls: hand the call "
                "over with loop.call_soon_threadsafe"
            ) from None
        if running is not self._loop:
            raise UsageError(
                f"{self._what} belongs to the event loop that opened it, and another one runs: open one "
                "here, or hand the work over with asyncio.run_coroutine_threadsafe"
            )


class OwnedTasks:
    """Runs an `asyncio.TaskGroup` in a task of its own.

    A group entered by `HybridCache.open` itself would wrap every exception of the caller's body in an
    exception group, and cancel the caller when a child fails. Here a failed child affects no other task.

    Attributes:
        running: tasks that have not ended.
    """

    def __init__(self) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._ready = asyncio.Event()
        self._supervisor = asyncio.create_task(self._supervise(), name="asynchicache-tasks")

    async def _supervise(self) -> None:
        async with self._group:
            self._ready.set()
            await asyncio.get_running_loop().create_future()  # until cancelled

    async def ready(self) -> None:
        await self._ready.wait()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._group.create_task(_contained(work))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        task.add_done_callback(lambda _: work.close())  # a task cancelled before it begins does not close it
        return task

    async def aclose(self) -> None:
        """Cancel all running tasks and wait for their end."""
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])


async def _contained(work: Coroutine[object, object, None]) -> None:
    """Log exceptions: in a task group, one would cancel all other tasks and refuse new ones."""
    try:
        await work
    except Exception:
        logger.exception("a task of the cache failed; the others go on")


async def shielded(work: Coroutine[object, object, T]) -> T:
    """Run `work` to its end, even if the caller is cancelled (repeatedly); then raise the cancellation.

    Raises:
        RuntimeError: no loop runs, because the caller is garbage-collected after its loop has ended.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        work.close()  # `ensure_future` would make a loop that never runs and is never closed
        raise
    task = loop.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    return task.result()
