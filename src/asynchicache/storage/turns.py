"""Whose turn it is to call an engine: so many calls at once, first come, first served."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack


class Turns:
    """Most calls at once of one engine.

    Args:
        concurrency: how many.
    """

    def __init__(self, concurrency: int) -> None:
        self._all = asyncio.Semaphore(concurrency)
        # Nobody waits for puts, and there may be a GiB of them: they leave a turn to what is waited for.
        self._puts = asyncio.Semaphore(max(1, concurrency - 1))

    async def take(self, *, put: bool) -> ExitStack:
        """Wait for a turn; it ends when what is returned is closed, which may happen twice."""
        with ExitStack() as turn:
            for turns in (self._puts, self._all) if put else (self._all,):
                await turns.acquire()
                turn.callback(turns.release)
            return turn.pop_all()
