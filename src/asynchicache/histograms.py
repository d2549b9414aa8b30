"""Histograms of durations with fixed buckets; one observation costs a bisection and two additions."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

SECONDS = (
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""Upper bounds of the buckets: from a copy in memory to hanging storage."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A snapshot of a histogram.

    Attributes:
        counts: by bucket, observations above the previous bound and up to `SECONDS[i]`; the last bucket has
            those above all bounds.
        total: the sum of all observations, in seconds.
    """

    counts: tuple[int, ...] = (0,) * (len(SECONDS) + 1)
    total: float = 0.0

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The bound of the bucket below which `share` of the observations are; 0 if there are none.

        Above the last bound it is infinite.
        """
        wanted, seen = share * self.count, 0
        for bound, count in zip((*SECONDS, math.inf), self.counts, strict=True):
            seen += count
            if seen and seen >= wanted:
                return bound
        return 0.0


class Histogram:
    """Counts durations; confined to one thread."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._total += seconds

    def snapshot(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total)
