"""A limit on the bytes of storage writes in flight."""

from __future__ import annotations

import asyncio
from collections import deque


class WriteBudget:
    """A bound on bytes in flight, with a queue for writes that a caller waits for.

    Other writes begin at once or not at all, and never before a queued one. A single write may be larger than
    the bound.

    Attributes:
        used: bytes in flight, including those that an engine still reads after its deadline.
    """

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._writes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> bool:
        """Begin a write of `size` bytes; False if there is no room for it now."""
        # Never past one that waits: small writes would keep a large one waiting for ever.
        if self._waiting or (self.used and self.used + size > self._limit):
            return False
        self._begin(size)
        return True

    async def wait(self, size: int) -> None:
        """Begin a write of `size` bytes as soon as there is room, in the order of the calls.

        Does not wait for bytes that an engine reads after its deadline: it may read them forever.
        """
        if not self._waiting and self._fits(size):
            self._begin(size)
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:  # its turn had come in the same iteration, and its bytes are counted
                self.end(size)
            raise

    def end(self, size: int, *, late: int = 0) -> None:
        """End a write; the engine may still read `late` bytes of it."""
        self._writes -= 1
        self.used -= size - late
        self._next()

    def end_late(self, size: int) -> None:
        """Free the late bytes of an ended write, which the engine no longer reads."""
        self.used -= size
        self._next()

    def _fits(self, size: int) -> bool:
        # By the number of writes, not by `used`: late bytes may stay for ever.
        return not self._writes or self.used + size <= self._limit

    def _begin(self, size: int) -> None:
        self._writes += 1
        self.used += size

    def _next(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._begin(size)
                turn.set_result(None)
