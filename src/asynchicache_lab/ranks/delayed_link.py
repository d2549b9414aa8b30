"""A connection of two ranks in one seeded loop."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable


class DelayedLink:
    """One end of a connection in memory: bytes arrive in order, after drawn delays, in any portions.

    Attributes:
        spoil: changes bytes on their way.
        other: the other end.
        closed: whether the connection has ended.
    """

    def __init__(self, chance: random.Random, mean_seconds: float) -> None:
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self.other = self
        self._chance = chance
        # Drawn apart: a seed replays alike, however long the number of the process is that greetings name.
        self._cuts = random.Random(chance.random())
        self._mean = mean_seconds
        self._inbox: deque[bytes] = deque()
        self._sent: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._delivered = asyncio.Event()
        self._delivered.set()
        self._due = 0.0
        self.closed = False

    @classmethod
    def pair(cls, chance: random.Random, mean_seconds: float) -> tuple[DelayedLink, DelayedLink]:
        here, there = cls(chance, mean_seconds), cls(chance, mean_seconds)
        here.other, there.other = there, here
        return here, there

    def send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due, loop.time() + self._chance.expovariate(1 / self._mean))
        self._sent.append(self.spoil(data))
        self._delivered.clear()
        loop.call_at(self._due, self._deliver)

    def _deliver(self) -> None:
        self.other.arrive(self._sent.popleft())  # the oldest: timers due at once have no order
        if not self._sent:
            self._delivered.set()

    def arrive(self, data: bytes) -> None:
        self._inbox.append(data)
        self._arrived.set()

    async def receive(self) -> bytes:
        while not self._inbox:
            if self.closed or self.other.closed:
                return b""
            self._arrived.clear()
            await self._arrived.wait()
        data = self._inbox.popleft()
        if not data:
            return data
        cut = self._cuts.randrange(1, len(data) + 1)
        if cut < len(data):
            self._inbox.appendleft(data[cut:])
        return data[:cut]

    def close(self) -> None:
        """End the connection, for both ends; what is on its way may be lost."""
        for end in (self, self.other):
            end.closed = True
            end.arrive(b"")

    async def aclose(self) -> None:
        try:
            await self._delivered.wait()
        finally:
            self.close()
