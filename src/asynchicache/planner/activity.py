"""Work in flight, counted by when it began, so that a wait is not extended by later work. Pure."""

from __future__ import annotations

from collections import Counter


class Activity:
    """Counts copies, storage calls and the work that follows from them.

    All work belongs to a period. Work that follows from other work (a storage write after a host backup)
    belongs to the same period. A waiter closes the current period and waits for all periods up to it. It
    therefore waits for the work in flight at that time, and not for work that begins later.
    """

    __slots__ = ("_counts", "period")

    def __init__(self) -> None:
        self.period = 0
        self._counts: Counter[int] = Counter()

    def begin(self, period: int | None = None) -> int:
        """Count one more piece of work; returns its period, for `end`.

        Args:
            period: the period of the work that it follows from. Default: the current period.
        """
        period = self.period if period is None else period
        self._counts[period] += 1
        return period

    def end(self, period: int) -> None:
        """Count one piece of work of a period as ended."""
        self._counts[period] -= 1
        if not self._counts[period]:  # periods never come back, so the table would grow for ever
            del self._counts[period]

    def close_period(self) -> int:
        """Close the current period and start the next; returns the closed one."""
        self.period += 1
        return self.period - 1

    def running(self, until: int | None = None) -> int:
        """The work in flight; if `until` is given, only that of periods up to it."""
        if until is None:
            return self._counts.total()
        return sum(count for period, count in self._counts.items() if period <= until)
