"""A circuit breaker: after some failures in a row, an engine is left alone for a while.

Nygard, "Release It!", 2007: closed until it has failed too often, open for a while, then half-open,
when one call may try.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """Whether calls go through."""

    CLOSED = "closed"  # all do
    OPEN = "open"  # none does
    HALF_OPEN = "half_open"  # one does, and its end decides


class CircuitBreaker:
    """Counts failures in a row; pure, told the time by `now`.

    Args:
        failures: failures in a row that open it.
        cooldown: seconds that it stays open, and after which a try that never ended is given up.
        now: seconds on a clock that never goes back.
    """

    __slots__ = ("_cooldown", "_count", "_now", "_since", "_threshold", "opened", "state")

    def __init__(self, failures: int, cooldown: float, now: Callable[[], float]) -> None:
        self._threshold = failures
        self._cooldown = cooldown
        self._now = now
        self._count = 0
        self._since = 0.0
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it opened."""

    def allow(self) -> bool:
        """Whether a call may start now; when half-open, the answer is yes once a cooldown."""
        if self.state is BreakerState.CLOSED:
            return True
        now = self._now()
        if now - self._since < self._cooldown:
            return False
        self.state = BreakerState.HALF_OPEN
        self._since = now
        return True

    def succeeded(self, *, weak: bool = False) -> None:
        """A call ended well.

        Args:
            weak: no bytes were moved. That ends a try, but forgets no failures: an engine that
                keeps its index in memory knows what exists on a disk that is dead.
        """
        if self.state is BreakerState.OPEN:
            return  # a late answer of a call from before
        if not weak:
            self._count = 0
        elif self.state is BreakerState.HALF_OPEN:
            self._count = self._threshold - 1
        self.state = BreakerState.CLOSED

    def failed(self) -> None:
        """A call failed, or outlived its deadline."""
        if self.state is BreakerState.OPEN:
            return
        self._count += 1
        if self.state is BreakerState.HALF_OPEN or self._count >= self._threshold:
            self.state = BreakerState.OPEN
            self._since = self._now()
            self.opened += 1
