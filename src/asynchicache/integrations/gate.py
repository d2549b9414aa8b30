"""A limit on bytes, for coroutines of one loop."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteGate:
    """Lets work in while the bytes of what is inside stay below a limit, first come, first served.

    Work larger than the limit gets in alone; work of no bytes never waits. Confined to its loop.

    Args:
        limit: bytes; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, nbytes: int) -> None:
        """Wait for room."""
        if not nbytes or (not self._waiting and self._fits(nbytes)):
            self._inside += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # let in, and cancelled before it could notice
                self.leave(nbytes)
            else:
                self._admit()  # it may have been what others waited behind
            raise

    def leave(self, nbytes: int) -> None:
        self._inside -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._fits(nbytes):
                    return
                self._inside += nbytes
                turn.set_result(None)
            self._waiting.popleft()

    def _fits(self, nbytes: int) -> bool:
        return self._limit is None or not self._inside or self._inside + nbytes <= self._limit
