"""Metrics of the tier and of the connector, as vLLM requires: differences, once per scheduler step.

Names begin with `vllm:` because vLLM unregisters only those before the next engine in the same process
registers its own metrics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from asynchicache.controller.statistics import CacheStatistics
from asynchicache.integrations.page_pool import PagePoolStatistics
from asynchicache.integrations.vllm.seam import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.statistics import CallStatistics
from asynchicache.types import MissReason, Tier

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


class MetricFamily(NamedTuple):
    """One metric: `vllm:asynchicache_connector_` and its name."""

    name: str
    labels: tuple[str, ...]
    help: str

    @property
    def full_name(self) -> str:
        return f"vllm:asynchicache_connector_{self.name}"


FAMILIES = (
    MetricFamily("requests", ("reason",), "Requests looked up, by the reason why the hit was not longer."),
    MetricFamily("hit_tokens", ("tier",), "Prompt tokens restored, by the farthest tier they came from."),
    MetricFamily("kept_blocks", (), "Blocks and states copied from the device to host memory."),
    MetricFamily("not_kept_blocks", (), "Blocks and states not copied because host memory was full."),
    MetricFamily("evicted_blocks", ("pool",), "Blocks and states evicted from host memory."),
    MetricFamily("failed_copies", (), "Copies between device and host memory that failed."),
    MetricFamily("shed_blocks", (), "Blocks and states not stored because writes fell behind."),
    MetricFamily("storage_blocks", ("pool", "op", "outcome"), "Blocks and states by call and outcome."),
    MetricFamily("storage_bytes", ("pool", "op"), "Bytes read from storage and written to it."),
    MetricFamily("storage_seconds", ("pool", "op"), "Seconds of storage calls."),
)
"""All are counters; vLLM's registry adds `_total`."""

MetricSample = tuple[str, list[str], float]


class ConnectorStats(KVConnectorStats):
    """Increases of counters, as `data["samples"]`: name, labels, value."""

    @classmethod
    def of(cls, samples: Iterable[MetricSample]) -> Self:
        return cls(data={"samples": [list(sample) for sample in samples]})

    def reset(self) -> None:
        """Forget the samples."""
        self.data = {"samples": []}

    def aggregate(self, other: KVConnectorStats) -> Self:
        """Add another interval's samples."""
        return self.of([*_samples(self.data), *_samples(other.data)])

    def reduce(self) -> dict[str, int | float]:
        """Return sums by name and labels, for vLLM's log."""
        sums: dict[str, int | float] = {}
        for name, labels, value in _samples(self.data):
            title = " ".join([name, *labels])
            sums[title] = round(sums.get(title, 0) + value, 3)
        return sums

    def is_empty(self) -> bool:
        return not self.data.get("samples")


def _samples(data: dict[str, Any]) -> Iterator[MetricSample]:
    for name, labels, value in data.get("samples", ()):
        yield name, list(labels), value


class StatisticsDeltas:
    """Converts the cache's counters to increases since the last report."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, tuple[str, ...]], float] = {}

    def report(self, statistics: CacheStatistics) -> ConnectorStats:
        samples = []
        for name, labels, total in _connector_totals(statistics):
            key = name, tuple(labels)
            if more := total - self._reported.get(key, 0):
                samples.append((name, labels, more))
                self._reported[key] = total
        return ConnectorStats.of(samples)


def _connector_totals(statistics: CacheStatistics) -> Iterator[MetricSample]:
    served, planner = statistics.served, statistics.planner
    for reason in MissReason:
        yield "requests", [reason.value], served.reasons[reason]
    for tier in (Tier.HOST, Tier.STORAGE):
        yield "hit_tokens", [tier.name.lower()], served.hit_tokens[tier]
    yield "kept_blocks", [], planner.backed_up
    yield "not_kept_blocks", [], planner.host_pressure
    yield "failed_copies", [], statistics.traffic.copies_failed
    yield "shed_blocks", [], statistics.traffic.shed.total()
    for pool, (_, evicted) in statistics.evicted.items():
        yield "evicted_blocks", [pool], evicted
    for pool, storage in statistics.storage.items():
        calls = {"exists": storage.exists, "get": storage.get, "put": storage.put}
        for op, call in calls.items():
            yield from _connector_calls(pool, op, call)


def _connector_calls(pool: str, op: str, call: CallStatistics) -> Iterator[MetricSample]:
    for outcome, blocks in call.outcomes.items():
        yield "storage_blocks", [pool, op, outcome.value], blocks
    yield "storage_bytes", [pool, op], call.bytes
    yield "storage_seconds", [pool, op], call.seconds


class ConnectorMetrics(KVConnectorPromMetrics):
    """The counters in vLLM's registry, in the server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = next(made for kind, made in metric_types.items() if kind.__name__ == "Counter")
        self._counters: dict[str, Any] = {
            family.name: counter(
                name=family.full_name, documentation=family.help, labelnames=[*labelnames, *family.labels]
            )
            for family in FAMILIES
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine reports."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in _samples(transfer_stats_data):
            self._counters[name].labels(*engine, *labels).inc(value)
