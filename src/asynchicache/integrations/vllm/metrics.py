"""The tier's metrics, declared and reported as vLLM requires: differences, once per scheduler step.

Names begin with `vllm:` because vLLM unregisters only those before the next engine in the same process
registers its own metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from asynchicache.integrations.page_pool import PagePoolStatistics
from asynchicache.integrations.vllm.seam import (
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.statistics import CallStatistics

PAGES = "vllm:asynchicache_tier_chunks"
BYTES = "vllm:asynchicache_tier_bytes"
SECONDS = "vllm:asynchicache_tier_call_seconds"
CALLS = "vllm:asynchicache_tier_calls"
SHED = "vllm:asynchicache_tier_shed_bytes"
HINTS = "vllm:asynchicache_tier_hints"
BREAKER = "vllm:asynchicache_tier_breaker_open"
RUNNING = "vllm:asynchicache_tier_running_calls"

_POOL = ("storage", "pool")
_CALL = (*_POOL, "op")

Labels = tuple[str, ...]
Totals = dict[tuple[str, Labels], float]

DEFINITIONS: Mapping[str, OffloadingMetricMetadata] = {
    PAGES: OffloadingCounterMetadata(
        "Chunks asked for, by storage call and what became of them.", (*_CALL, "outcome")
    ),
    BYTES: OffloadingCounterMetadata("Bytes of chunks read from storage and written to it.", _CALL),
    SECONDS: OffloadingCounterMetadata("Seconds of storage calls, late ones up to their deadline.", _CALL),
    CALLS: OffloadingCounterMetadata("Storage calls.", _CALL),
    SHED: OffloadingCounterMetadata("Bytes not stored because store_bytes were in flight.", ("storage",)),
    HINTS: OffloadingCounterMetadata("Hints of requests, by what became of them.", ("storage", "result")),
    BREAKER: OffloadingGaugeMetadata("1 while storage is not asked because it failed lately.", _POOL),
    RUNNING: OffloadingGaugeMetadata("Storage calls that have not ended.", _POOL),
}
"""Metrics by name; vLLM's registry adds `_total` to counters."""


class TierCounters:
    """Converts totals to differences since the last report.

    Args:
        storage: value of the label `storage`; it distinguishes two tiers of an engine.
    """

    def __init__(self, storage: str) -> None:
        self._storage = storage
        self._reported: Totals = {}
        self._own: Totals = defaultdict(float)

    def shed(self, nbytes: int) -> None:
        """Count bytes of chunks that were shed."""
        self._own[SHED, (self._storage,)] += nbytes

    def hinted(self, result: str, count: int) -> None:
        """Count hints that were `taken` or `ignored`."""
        self._own[HINTS, (self._storage, result)] += count

    def report(self, pools: Mapping[str, PagePoolStatistics]) -> OffloadingConnectorStats:
        """Return counter increases since the last report, and current gauges."""
        totals = dict(self._own)
        stats = OffloadingConnectorStats()
        for name, statistics in pools.items():
            labels = (self._storage, name)
            totals.update(_totals(statistics, labels))
            open_now = statistics.storage.breaker is not BreakerState.CLOSED
            stats.set_gauge(BREAKER, int(open_now), labels)
            stats.set_gauge(RUNNING, statistics.storage.running, labels)
        for (metric, found), total in totals.items():
            if new := total - self._reported.get((metric, found), 0):
                stats.increase_counter(metric, new, found)
        self._reported = totals
        return stats


def _totals(statistics: PagePoolStatistics, labels: Labels) -> Totals:
    storage = statistics.storage
    calls = {"exists": storage.exists, "get": storage.get, "put": storage.put, "delete": storage.delete}
    return {
        key: value for op, call in calls.items() for key, value in _call_totals(call, (*labels, op)) if value
    }


def _call_totals(call: CallStatistics, labels: Labels) -> Iterator[tuple[tuple[str, Labels], float]]:
    yield (CALLS, labels), call.calls
    yield (BYTES, labels), call.bytes
    yield (SECONDS, labels), call.seconds
    for outcome, count in call.outcomes.items():
        yield (PAGES, (*labels, outcome.value)), count
