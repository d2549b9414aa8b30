"""Who is served now, and who waits: a line, first come first served, before a limited room."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from asynchicache.errors import BusyError, CapacityError, ConfigError


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many requests are in at once, how many of them decode together, and how many wait in line.

    Raises:
        ConfigError: nobody could ever be in, or a line of a negative length.
    """

    max_running: int
    max_waiting: int
    decode_batch: int

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ConfigError(f"max_running {self.max_running} must be 1 at least")
        if self.decode_batch < 1:
            raise ConfigError(f"decode_batch {self.decode_batch} must be 1 at least")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting {self.max_waiting} must be 0 at least")


class QueuedRequest:
    """One request's place: in the line, then in the room, then left."""

    def __init__(self, admission: Admission, tokens: int) -> None:
        self.tokens = tokens
        self.entered = asyncio.Event()
        self._admission = admission

    def leave(self) -> None:
        """Make room, or get out of the line; twice is harmless."""
        self._admission.left(self)


class Admission:
    """Lets requests in as long as all of their tokens, and those to come, fit.

    Nobody overtakes: a long request at the head of the line would wait for ever behind short ones.

    Args:
        tokens: prompt and output tokens of all that are in, at most.
        limits: on their number.
    """

    def __init__(self, tokens: int, limits: AdmissionLimits) -> None:
        self._tokens, self._free, self._limits = tokens, tokens, limits
        self._inside: set[QueuedRequest] = set()
        self._line: deque[QueuedRequest] = deque()

    @property
    def running(self) -> int:
        return len(self._inside)

    @property
    def waiting(self) -> int:
        return len(self._line)

    def join(self, tokens: int) -> QueuedRequest:
        """A place for a request of so many tokens: in the room at once if it fits and nobody waits.

        Raises:
            CapacityError: it can never fit.
            BusyError: the line is full.
        """
        if tokens > self._tokens:
            raise CapacityError(
                f"the prompt and max_new_tokens are {tokens} tokens in whole pages; the cache's device holds "
                f"{self._tokens}: ask for fewer, or raise device_slots or device_bytes"
            )
        queued = QueuedRequest(self, tokens)
        self._line.append(queued)
        self._advance()
        if not queued.entered.is_set() and len(self._line) > self._limits.max_waiting:
            self._line.remove(queued)
            raise BusyError(
                f"{self._limits.max_waiting} requests wait already, behind {self.running} that run: "
                "try again later, or raise max_waiting"
            )
        return queued

    def left(self, queued: QueuedRequest) -> None:
        if queued in self._inside:
            self._inside.remove(queued)
            self._free += queued.tokens
        elif queued in self._line:
            self._line.remove(queued)
        self._advance()

    def _advance(self) -> None:
        while self._line and self._has_room(self._line[0]):
            queued = self._line.popleft()
            self._inside.add(queued)
            self._free -= queued.tokens
            queued.entered.set()

    def _has_room(self, queued: QueuedRequest) -> bool:
        return len(self._inside) < self._limits.max_running and queued.tokens <= self._free
