"""A task group that ends when its owner says so, and work that a cancelled caller does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class OwnedTasks:
    """Runs an `asyncio.TaskGroup` in a task of its own.

    A group entered by `HybridCache.open` itself would wrap whatever the caller's body raises in an
    exception group, and cancel the caller when a child fails. Children must not raise.
    """

    def __init__(self) -> None:
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
        return self._group.create_task(work)

    async def aclose(self) -> None:
        """Cancel what still runs and wait for its end."""
        self._supervisor.cancel()
        await asyncio.wait([self._supervisor])


async def shielded(closing: Coroutine[object, object, T]) -> T:
    """Run to the end even if the caller is cancelled meanwhile, then be cancelled."""
    task = asyncio.ensure_future(closing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
