"""Work in flight, counted by when it began, so that a wait ends however much begins after it. Pure."""

from __future__ import annotations

from collections import Counter


class Activity:
    """Counts copies, storage calls and what follows from them.

    Work belongs to a period. What follows from other work, as a write to storage follows from a copy to the
    host, belongs to the period of that work. A waiter closes the current period and waits for the periods
    up to it, so it waits for all that was in flight when it was called and for nothing that begins later.
    """

    __slots__ = ("_counts", "period")

    def __init__(self) -> None:
        self.period = 0
        self._counts: Counter[int] = Counter()

    def begin(self, period: int | None = None) -> int:
        """Count one more piece of work; returns its period, for `end`.

        Args:
            period: of the work that it follows from. Default: the current one.
        """
        period = self.period if period is None else period
        self._counts[period] += 1
        return period

    def end(self, period: int) -> None:
        """One piece of work of a period has ended."""
        self._counts[period] -= 1
        if not self._counts[period]:
            del self._counts[period]

    def close_period(self) -> int:
        """Let what begins from now on belong to the next period; returns the one that is closed."""
        self.period += 1
        return self.period - 1

    def running(self, until: int | None = None) -> int:
        """Work in flight, of the periods up to `until` if that is given."""
        if until is None:
            return self._counts.total()
        return sum(count for period, count in self._counts.items() if period <= until)
