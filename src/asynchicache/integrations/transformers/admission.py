"""Admission control: a FIFO queue, and limits on the number of running requests and their tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from asynchicache.errors import BusyError, CapacityError, ConfigError
from asynchicache.options import check_fields

MAX_RUNNING = 32
MAX_WAITING = 256
"""Defaults of the first two limits."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on running requests, on rows of a decode batch, and on queued requests.

    Raises:
        ConfigError: a limit is below 1, or max_waiting below 0.
    """

    max_running: int
    max_waiting: int
    decode_batch: int

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_running < 1:
            raise ConfigError(f"max_running {self.max_running} must be 1 at least")
        if self.decode_batch < 1:
            raise ConfigError(f"decode_batch {self.decode_batch} must be 1 at least")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting {self.max_waiting} must be 0 at least")


class QueuedRequest:
    """One request: it waits, then runs, then leaves.

    Attributes:
        tokens: prompt and output tokens, in whole pages.
        entered: set when it may run.
    """

    def __init__(self, admission: PromptAdmission, tokens: int) -> None:
        self.tokens = tokens
        self.entered = asyncio.Event()
        self._admission = admission

    def leave(self) -> None:
        """Release the request's tokens, or leave the queue. Idempotent."""
        self._admission.left(self)


class PromptAdmission:
    """Admits requests while all their prompt and output tokens fit.

    Requests do not overtake each other: otherwise short requests could starve a long one.

    Args:
        tokens: most prompt and output tokens of all running requests.
    """

    def __init__(self, tokens: int, limits: AdmissionLimits) -> None:
        self._tokens, self._free, self._limits = tokens, tokens, limits
        self._running: set[QueuedRequest] = set()
        self._queue: deque[QueuedRequest] = deque()
        self._pauses = 0
        self._idle = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def join(self, tokens: int) -> QueuedRequest:
        """Queue a request of `tokens` tokens; admitted at once if it fits and the queue is empty.

        Raises:
            CapacityError: the request can never fit.
            BusyError: the queue is full.
        """
        if tokens > self._tokens:
            raise CapacityError(
                f"the prompt and max_new_tokens are {tokens} tokens in whole pages; the cache's device holds "
                f"{self._tokens}: ask for fewer, or raise device_slots or device_bytes"
            )
        queued = QueuedRequest(self, tokens)
        self._queue.append(queued)
        self._advance()
        if not queued.entered.is_set() and len(self._queue) > self._limits.max_waiting:
            self._queue.remove(queued)
            raise BusyError(
                f"{self._limits.max_waiting} requests wait already, behind {self.running} that run: "
                "try again later, or raise max_waiting"
            )
        return queued

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Wait until none runs; in the body of `async with` none does, and those that come are queued."""
        self._pauses += 1
        try:
            while self._running:
                self._idle.clear()
                await self._idle.wait()
            yield
        finally:
            self._pauses -= 1
            self._advance()

    def left(self, queued: QueuedRequest) -> None:
        if queued in self._running:
            self._running.remove(queued)
            self._free += queued.tokens
            if not self._running:
                self._idle.set()
        elif queued in self._queue:
            self._queue.remove(queued)
        self._advance()

    def _advance(self) -> None:
        while self._queue and self._has_room(self._queue[0]):
            queued = self._queue.popleft()
            self._running.add(queued)
            self._free -= queued.tokens
            queued.entered.set()

    def _has_room(self, queued: QueuedRequest) -> bool:
        if self._pauses:
            return False
        return len(self._running) < self._limits.max_running and queued.tokens <= self._free
