"""Counters of the calls to one pool's engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.histograms import Distribution, Histogram
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.presence import PresenceStatistics
from asynchicache.types import Outcome

_MOVED = frozenset({Outcome.HIT, Outcome.STORED})


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Counters of one kind of call (`exists`, `get`, `put`, `delete`, `touch`) of one pool.

    Attributes:
        calls: engine calls; a batch refused without asking the engine does not count.
        pages: keys asked for, including refused ones.
        bytes: bytes of pages read or stored; 0 for calls that move no pages.
        seconds: sum of the calls' latencies; a late call counts up to its deadline.
        outcomes: pages by outcome; a page that `touch` reported counts as HIT.
        latencies: distribution of the calls' latencies.
        errors: times that the engine raised or gave an invalid answer, including retries.
        late: calls that missed their deadline.
    """

    calls: int
    pages: int
    bytes: int
    seconds: float
    outcomes: Mapping[Outcome, int]
    latencies: Distribution
    errors: int
    late: int


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counters of one pool in storage.

    Attributes:
        pool: the pool's name.
        exists, get, put, delete, touch: counters of each kind of call.
        running: engine calls in flight, including late ones.
        lingering: calls in flight that no caller waits for any more.
        breaker: state of the circuit breaker.
        opened: how often the breaker opened.
        known: counts of remembered pages.
        full: the engine's medium refuses new pages; the engine tries again after a while.
        shed: pages that this stage of a chain did not get: it was behind, or there was no room to carry them.
    """

    pool: str
    exists: CallStatistics
    get: CallStatistics
    put: CallStatistics
    delete: CallStatistics
    touch: CallStatistics
    running: int
    lingering: int
    breaker: BreakerState
    opened: int
    known: PresenceStatistics
    full: bool = False
    shed: int = 0


class CallCounters:
    """Counts one kind of call.

    Args:
        page_bytes: bytes counted for each page with outcome HIT or STORED.
    """

    __slots__ = ("_latencies", "_outcomes", "_page_bytes", "errors", "late")

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.errors = 0
        self.late = 0
        self._latencies = Histogram()
        self._outcomes: Counter[Outcome] = Counter()

    def count_answered(self, counts: Mapping[Outcome, int], seconds: float) -> None:
        """Count one engine call."""
        self._latencies.observe(seconds)
        self.count_refused(counts)

    def count_refused(self, counts: Mapping[Outcome, int]) -> None:
        """Count pages that the engine was not asked for."""
        for outcome, count in counts.items():
            if count:
                self._outcomes[outcome] += count

    def snapshot(self) -> CallStatistics:
        moved = sum(self._outcomes[outcome] for outcome in _MOVED)
        latencies = self._latencies.snapshot()
        return CallStatistics(
            latencies.count,
            self._outcomes.total(),
            moved * self._page_bytes,
            latencies.total,
            dict(self._outcomes),
            latencies,
            self.errors,
            self.late,
        )
