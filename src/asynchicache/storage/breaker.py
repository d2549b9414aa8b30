"""A circuit breaker: after several consecutive failures, stop calling an engine for a cooldown.

Nygard, "Release It!", 2007: the breaker is closed until too many calls fail, open for a cooldown, then
half-open: one trial call decides whether it closes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """Which calls the breaker allows."""

    CLOSED = "closed"  # all
    OPEN = "open"  # none
    HALF_OPEN = "half_open"  # one trial call, whose result decides


class CircuitBreaker:
    """Counts consecutive failures. Pure: it reads the time only from `now`.

    Args:
        failures: consecutive failures that open the breaker.
        cooldown: seconds that the breaker stays open, and that a trial call may run before another starts.
        now: monotonic clock, in seconds.
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
        """How often the breaker opened."""

    def allow(self) -> bool:
        """Whether a call may start now. A half-open breaker allows one call per cooldown."""
        if self.state is BreakerState.CLOSED:
            return True
        now = self._now()
        if now - self._since < self._cooldown:
            return False
        self.state = BreakerState.HALF_OPEN
        self._since = now
        return True

    def succeeded(self, *, weak: bool = False) -> None:
        """Record a successful call.

        Args:
            weak: the call moved no bytes. It closes a half-open breaker but does not reset the failure
                count: an engine with an in-memory index answers `exists` even if its disk is dead.
        """
        if self.state is BreakerState.OPEN:
            return  # a late answer to a call that started before the breaker opened
        if not weak:
            self._count = 0
        elif self.state is BreakerState.HALF_OPEN:
            self._count = self._threshold - 1
        self.state = BreakerState.CLOSED

    def failed(self) -> None:
        """Record a call that failed or missed its deadline."""
        if self.state is BreakerState.OPEN:
            return
        self._count += 1
        if self.state is BreakerState.HALF_OPEN or self._count >= self._threshold:
            self.state = BreakerState.OPEN
            self._since = self._now()
            self.opened += 1
