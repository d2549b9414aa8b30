"""What became of the calls to one pool's engine, counted."""

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
    """One kind of call (`exists`, `get`, `put`, `delete`, `touch`) of one pool.

    Attributes:
        calls: calls of the engine; what was refused without asking it is not one.
        pages: keys asked for, refused ones included.
        bytes: bytes of pages that were read or stored; 0 for calls that move none.
        seconds: sum of the calls' latencies; of late ones up to their deadline.
        outcomes: pages by what became of them; HIT for those that the engine was told the use of.
        latencies: how the calls' latencies are distributed.
        errors: times that the engine raised or answered nonsense, tries that were repeated included.
        late: calls whose deadline came first.
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
    """One pool in storage.

    Attributes:
        pool: its name.
        exists, get, put, delete, touch: by kind of call.
        running: calls that the engine has not ended, late ones included.
        lingering: those of them that nobody waits for any more.
        breaker: whether calls go through.
        opened: how often the breaker opened.
        known: what is known of its pages without asking.
        full: the engine's medium refuses to take more; it is asked again after a while.
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


class CallCounters:
    """Counts one kind of call.

    Args:
        page_bytes: bytes that a page with a good outcome stands for.
    """

    __slots__ = ("_latencies", "_outcomes", "_page_bytes", "errors", "late")

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self.errors = 0
        self.late = 0
        self._latencies = Histogram()
        self._outcomes: Counter[Outcome] = Counter()

    def count_answered(self, counts: Mapping[Outcome, int], seconds: float) -> None:
        """The engine was asked."""
        self._latencies.observe(seconds)
        self.count_refused(counts)

    def count_refused(self, counts: Mapping[Outcome, int]) -> None:
        """The engine was not asked."""
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
