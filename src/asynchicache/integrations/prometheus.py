"""Prometheus metrics of a cache, read from its statistics at each scrape.

    registry.register(CacheCollector(cache))

`docs/reference/metrics.md` describes each metric.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.controller.statistics import CacheStatistics
from asynchicache.errors import ConfigError
from asynchicache.histograms import SECONDS, Distribution
from asynchicache.integrations.metrics import FAMILIES, PREFIX, Family

_log = logging.getLogger(__name__)


class CacheCollector(Collector):
    """Collects the metrics of one cache. Create it on the cache's event loop; any thread may read it.

    A scrape from another thread requests the statistics from the loop. If the loop does not answer in time,
    or the cache is closed, the scrape returns the last statistics, so it never hangs with the loop.

    Args:
        labels: labels added to every metric, to distinguish several caches of one process.
        patience: seconds that a scrape waits for the loop.

    Raises:
        ConfigError: a metric already uses a label's name.
    """

    def __init__(
        self,
        cache: HybridCache | EngineCache,
        *,
        labels: Mapping[str, str] | None = None,
        patience: float = 2.0,
    ) -> None:
        used = {name for family in FAMILIES for name in family.labels} | {"model", "page_size"}
        taken = sorted(used.intersection(labels or {}))
        if taken:
            raise ConfigError(f"label {taken[0]!r} is one of the metrics' own: {sorted(used)}")
        self._cache = cache
        self._labels = dict(labels or {})
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._last = cache.statistics()

    def collect(self) -> Iterator[Metric]:
        statistics = self._statistics()
        yield self._info()
        for family in FAMILIES:
            yield self._filled(family, statistics)

    def describe(self) -> list[Metric]:
        """Return the metrics without values, so that registering does not collect them."""
        return [self._info(), *(self._empty(family) for family in FAMILIES)]

    def _statistics(self) -> CacheStatistics:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._last = self._cache.statistics()
        elif self._loop.is_running():
            self._ask_loop()
        return self._last

    def _ask_loop(self) -> None:
        answer: concurrent.futures.Future[CacheStatistics] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(lambda: answer.set_result(self._cache.statistics()))
            self._last = answer.result(self._patience)
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop was closed just now
            _log.warning("the event loop did not answer in %s s; metrics are those of before", self._patience)

    def _info(self) -> GaugeMetricFamily:
        spec = self._cache.spec
        info = GaugeMetricFamily(
            PREFIX + "cache", "1; what is cached.", labels=["model", "page_size", *self._labels]
        )
        info.add_metric([spec.model, str(spec.page_size), *self._labels.values()], 1)
        return info

    def _empty(self, family: Family) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
        labels = [*family.labels, *self._labels]
        if family.kind == "counter":
            return CounterMetricFamily(family.full_name, family.help, labels=labels)
        if family.kind == "histogram":
            return HistogramMetricFamily(family.full_name, family.help, labels=labels)
        return GaugeMetricFamily(family.full_name, family.help, labels=labels)

    def _filled(self, family: Family, statistics: CacheStatistics) -> Metric:
        metric = self._empty(family)
        for values, value in family.samples(statistics):
            labels = [*values, *self._labels.values()]
            if isinstance(metric, HistogramMetricFamily):
                assert isinstance(value, Distribution), f"{family.name} counts durations"
                metric.add_metric(labels, buckets(value), value.total)
            else:
                assert not isinstance(value, Distribution), f"{family.name} is one number"
                metric.add_metric(labels, value)
        return metric


def buckets(seen: Distribution) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, as Prometheus expects."""
    bounds = [*map(str, SECONDS), "+Inf"]
    return list(zip(bounds, accumulate(seen.counts), strict=True))
