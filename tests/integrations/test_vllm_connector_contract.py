"""What the connector owes vLLM: its methods, its words, its metrics."""

from __future__ import annotations

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from asynchicache.integrations.vllm import words
from asynchicache.integrations.vllm.connector import AsynchicacheConnector
from asynchicache.integrations.vllm.metrics import ConnectorMetrics, ConnectorStats
from conformance.seams import accepts

DATA = Path(__file__).parents[1] / "data"
SEAM: dict[str, dict[str, Any]] = json.loads((DATA / "seams" / "vllm-0.33.0.json").read_text())
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE = SEAM[f"{V1}.base:KVConnectorBase_V1"]
HYBRID = SEAM[f"{V1}.base:SupportsHMA"]
METHODS: dict[str, list[str]] = BASE["methods"] | HYBRID["methods"]
OURS = sorted(name for name in METHODS if name in vars(AsynchicacheConnector))


@pytest.mark.parametrize("method", OURS)
def test_the_connector_can_be_called_in_every_way_that_vllm_may(method: str) -> None:
    ours = inspect.unwrap(getattr(AsynchicacheConnector, method))

    assert accepts(ours, METHODS[method])


def test_the_connector_does_all_that_vllm_leaves_to_connectors() -> None:
    assert {*BASE["abstract"], *HYBRID["abstract"]} <= set(vars(AsynchicacheConnector))


def test_our_words_are_those_of_vllm() -> None:
    results = SEAM[f"{V1}.base:KVConnectorTransferResults"]["fields"]
    fields = words.KVConnectorTransferResults.__dataclass_fields__
    sources = SEAM["vllm.v1.metrics.cache_hit_source:CacheHitSource"]["members"]

    assert [name.rstrip("=") for name in results] == list(fields)
    assert {one.name: str(one.value) for one in words.CacheHitSource} == sources
    assert {one.name for one in words.KVConnectorRole} == set(SEAM[f"{V1}.base:KVConnectorRole"]["members"])


def test_metrics_of_the_next_engine_of_a_process_can_be_registered() -> None:
    """vLLM unregisters what begins with `vllm:`, and nothing else."""
    registry = CollectorRegistry()

    for _ in range(2):
        for collector in list(registry._collector_to_names):
            if getattr(collector, "_name", "").startswith("vllm:"):
                registry.unregister(collector)
        kinds: dict[type, Any] = {Counter: partial(Counter, registry=registry)}
        metrics = ConnectorMetrics(None, kinds, ["engine"], {0: ["0"]})

    stats = ConnectorStats.of([("hit_tokens", ["host"], 5.0), ("kept_blocks", [], 2.0)])
    metrics.observe(stats.aggregate(stats).data, 0)
    labels = {"engine": "0", "tier": "host"}
    assert registry.get_sample_value("vllm:asynchicache_connector_hit_tokens_total", labels) == 10.0


def test_statistics_are_summed_for_the_log() -> None:
    stats = ConnectorStats.of([("hit_tokens", ["host"], 5.0), ("hit_tokens", ["host"], 1.5)])

    assert stats.reduce() == {"hit_tokens host": 6.5}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert ConnectorStats(data={}).is_empty()
