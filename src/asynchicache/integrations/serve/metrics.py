"""`/metrics`: metrics of the cache and of the server, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asynchicache.integrations.prometheus import CacheCollector, buckets
from asynchicache.integrations.serve.api import Api
from asynchicache.integrations.serve.problems import CLIENT_LEFT

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "asynchicache_serve_"


class ServerCollector(Collector):
    """Metrics of requests; listed in `docs/howto/serve.md`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def collect(self) -> Iterator[Metric]:
        counts, model = self._api.counts, self._api.model
        answers = {200: counts.answered, CLIENT_LEFT: counts.cancelled, **counts.refused}
        requests = CounterMetricFamily(
            _PREFIX + "requests_total", "Requests, by HTTP status.", labels=["status"]
        )
        for status, number in answers.items():
            requests.add_metric([str(status)], number)
        yield requests

        tokens = CounterMetricFamily(
            _PREFIX + "tokens_total", "Tokens of answered requests.", labels=["kind"]
        )
        tokens.add_metric(["prompt"], counts.prompt_tokens)
        tokens.add_metric(["cached"], counts.cached_tokens)
        tokens.add_metric(["completion"], counts.completion_tokens)
        yield tokens

        now = GaugeMetricFamily(_PREFIX + "requests", "Requests now.", labels=["state"])
        now.add_metric(["running"], model.running)
        now.add_metric(["waiting"], model.waiting)
        yield now

        storage = GaugeMetricFamily(
            _PREFIX + "storage_open", "1 while storage is open, 0 while it cannot be opened."
        )
        if self._api.storage.name:
            storage.add_metric([], int(bool(model.cache.statistics().storage)))
        yield storage

        seen = self._api.first_token.snapshot()
        waited = HistogramMetricFamily(
            _PREFIX + "first_token_seconds", "From a request's tokens to its answer's first."
        )
        waited.add_metric([], buckets(seen), seen.total)
        yield waited

    def describe(self) -> list[Metric]:
        return list(self.collect())


class Metrics:
    """All metrics of a scrape."""

    def __init__(self, api: Api) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(CacheCollector(api.model.cache))
        self._registry.register(ServerCollector(api))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format. Call on the loop; costs as much as `statistics`."""
        return generate_latest(self._registry)
