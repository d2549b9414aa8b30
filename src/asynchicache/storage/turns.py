"""Whose turn it is to call an engine: so many calls at once, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, nullcontext


class Patience:
    """How long the parts of one call wait for their turns: since it began, or since one was answered.

    So a call of many parts is not cut short by an engine that does one after the other.

    Args:
        seconds: how long; None for as long as it takes.
    """

    __slots__ = ("_loop", "_seconds", "_until", "_waits")

    def __init__(self, seconds: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._waits: set[asyncio.Timeout] = set()
        self.renew()

    def renew(self) -> None:
        """A part was answered."""
        self._until = None if self._seconds is None else self._loop.time() + self._seconds
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(self._until)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """
        Raises:
            TimeoutError: what is waited for in the body takes longer.
        """
        async with asyncio.timeout_at(self._until) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


class Turns:
    """Most calls at once of one engine.

    Args:
        concurrency: how many.
    """

    def __init__(self, concurrency: int) -> None:
        self._all = asyncio.Semaphore(concurrency)
        # Nobody waits for puts, and there may be a GiB of them: they leave a turn to what is waited for.
        self._puts = asyncio.Semaphore(max(1, concurrency - 1))

    async def take(self, patience: Patience, *, put: bool) -> ExitStack:
        """Wait for a turn; it ends when what is returned is closed, which may happen twice.

        Args:
            patience: how long.
            put: nobody waits for the call, a put or a touch.

        Raises:
            TimeoutError: patience has come to its end first.
        """
        with ExitStack() as turn:
            for turns in (self._puts, self._all) if put else (self._all,):
                async with patience.waiting() if turns.locked() else nullcontext():
                    await turns.acquire()
                turn.callback(turns.release)
            return turn.pop_all()
