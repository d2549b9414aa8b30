"""Metrics of a real cache, as a scraper reads them."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from asynchicache import CacheConfig, ConfigError, HybridCache
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.histograms import SECONDS, Histogram
from asynchicache.integrations.metrics import FAMILIES, PREFIX
from asynchicache.integrations.prometheus import CacheCollector
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.faults import FaultRates, Faulty
from cache.engine import SPEC, Engine, config

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
PROMPT = list(range(100, 121))  # five pages of four tokens, and a token to compute


class Scrape:
    """What a scraper understands of the text that it is sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.families = {
            family.name: family
            for family in text_string_to_metric_families(generate_latest(registry).decode())
        }
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no sample of {name} has {labels}"
        return sum(found)


def registered(cache: HybridCache, **labels: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(CacheCollector(cache, labels=labels))
    return registry


async def serve_all(cache: HybridCache, prompts: Iterable[list[int]]) -> None:
    engine = Engine(cache)
    for prompt in prompts:
        await engine.serve(prompt)


@pytest.mark.asyncio
async def test_a_scrape_says_what_the_cache_did():
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(MemoryStore())) as cache:
        registry = registered(cache)
        await serve_all(cache, [PROMPT, PROMPT])
        await cache.flush()
        await serve_all(cache, [PROMPT, [*PROMPT[:12], 7, 7, 7]])
        scrape = Scrape(registry)

        assert scrape.total("requests_total") == 4
        assert scrape.total("requests_total", reason="none") == 2
        assert scrape.total("hit_tokens_total", tier="device") == 20
        assert scrape.total("hit_tokens_total", tier="storage") == 20
        given = scrape.total("hit_tokens_total") + scrape.total("missed_tokens_total")
        assert given == scrape.total("prompt_tokens_total")
        assert scrape.total("hit_slots_total", pool="kv", tier="storage") == 5
        assert scrape.total("hit_slots_total", pool="mamba", tier="storage") == 1
        assert scrape.total("hit_slots_total", pool="kv", tier="device") == 5
        # The last prompt's pages are there, its state is not: the states kept the hit back.
        assert scrape.total("missed_tokens_total", pool="mamba", reason="state") == 15
        slots = scrape.total("slots", pool="kv", tier="device")
        assert slots == config().device_slots["kv"]
        assert scrape.total("storage_pages_total", pool="kv", op="get", outcome="hit") == 5
        assert scrape.total("storage_breaker", state="closed") == len(SPEC.pools)
        assert scrape.total("storage_call_seconds_count", op="put") > 0
        assert scrape.total("copied_bytes_total", op="load") > 0
        loads = scrape.total("copy_seconds_count", op="load")
        assert scrape.total("copy_seconds_bucket", op="load", le="+Inf") == loads > 0
        assert scrape.total("cache", model=SPEC.model) == 1


@pytest.mark.asyncio
async def test_evictions_are_told_by_pool_and_tier():
    small = config(device_slots={"kv": 8, "mamba": 3}, host_ratio=1)
    async with HybridCache.open(SPEC, small) as cache:
        registry = registered(cache)
        await serve_all(cache, [list(range(start, start + 21)) for start in range(100, 500, 100)])
        scrape = Scrape(registry)

        assert scrape.total("evicted_slots_total", pool="kv", tier="device") > 0
        assert scrape.total("evicted_slots_total", pool="kv", tier="host") > 0
        assert scrape.total("lost_pages_total") == cache.statistics().planner.lost > 0


@pytest.mark.asyncio
async def test_every_family_is_valid_and_has_its_labels():
    async with HybridCache.open(
        SPEC, config(count_namespaces=2), storage=MemoryBackend(MemoryStore())
    ) as cache:
        registry = registered(cache, instance="a")
        await serve_all(cache, [PROMPT])
        scrape = Scrape(registry)

        known = {family.full_name.removesuffix("_total"): family for family in FAMILIES}
        assert set(scrape.families) == {*known, PREFIX + "cache"}
        for name, family in known.items():
            found = scrape.families[name]
            assert found.type == family.kind
            for sample in found.samples:
                assert set(sample.labels) - {"le"} == {*family.labels, "instance"}


@pytest.mark.asyncio
async def test_namespaces_are_counted_on_request_only_and_few_of_them():
    async with HybridCache.open(SPEC, config()) as cache:
        await Engine(cache).serve(PROMPT, namespace="a")
        assert not Scrape(registered(cache)).families[PREFIX + "namespace_hit_tokens"].samples

    async with HybridCache.open(SPEC, config(count_namespaces=2)) as cache:
        engine = Engine(cache)
        for name in ("a", "b", "c", "a", "d"):
            await engine.serve(PROMPT, namespace=name)
        scrape = Scrape(registered(cache))
        assert scrape.total("namespace_prompt_tokens_total", namespace="a") == 42
        assert scrape.total("namespace_hit_tokens_total", namespace="a") == 20
        assert scrape.total("namespace_prompt_tokens_total", namespace="other") == 42


@pytest.mark.asyncio
async def test_what_an_alert_takes_the_increase_of_is_there_before_it_counts():
    """An increase does not see what a series counted before its first sample."""
    asked = re.findall(r"increase\(asynchicache_(\w+)\{(\w+)=\"(\w+)\"\}", ALERTS.read_text())
    assert len(asked) >= 3
    two = config(storage=["memory", {"backend": "memory", "name": "far"}])
    async with HybridCache.open(SPEC, two) as cache:
        scrape = Scrape(registered(cache))
        for name, label, value in asked:
            assert scrape.total(name, **{label: value}) == 0
        for pool in SPEC.pools:
            for stage in ("memory", "far"):
                labels = {"stage": stage, "pool": pool.name, "op": "get", "outcome": "corrupt"}
                assert scrape.total("storage_stage_pages_total", **labels) == 0
        assert scrape.total("shed_slots_total", reason="budget") == 0


async def scrape_beside(rates: FaultRates, deadline: float) -> Scrape:
    """What is told after a prompt was served beside storage that is broken like this."""
    backend = Faulty(MemoryBackend(MemoryStore()), rates, random.Random(0))
    options = config(storage_limits=PoolLimits(deadline=deadline, closing=1.0, retries=0, failures=2))
    async with HybridCache.open(SPEC, options, storage=backend) as cache:
        await serve_all(cache, [PROMPT])
        scrape = Scrape(registered(cache))
        backend.rates = FaultRates()
        backend.release()
    return scrape


@pytest.mark.asyncio
async def test_storage_that_fails_is_told_from_storage_that_hangs():
    failing = await scrape_beside(FaultRates(fail=1.0), deadline=60)
    assert failing.total("storage_faults_total", reason="error") > 0
    assert failing.total("storage_faults_total", reason="timeout") == 0
    assert failing.total("shed_slots_total", reason="failed") > 0
    assert failing.total("requests_total", reason="storage_failed") == 1

    hanging = await scrape_beside(FaultRates(hang=1.0), deadline=0.02)
    assert hanging.total("storage_faults_total", reason="timeout") > 0
    assert hanging.total("storage_faults_total", reason="error") == 0
    assert hanging.total("storage_breaker_opened_total") > 0
    assert hanging.total("storage_breaker", state="open") > 0
    assert hanging.total("requests_total", reason="deadline") == 1
    assert hanging.total("missed_tokens_total", pool="kv", reason="deadline") == 21


@pytest.mark.asyncio
async def test_another_thread_may_scrape_and_never_hangs_with_the_loop():
    async with HybridCache.open(SPEC, config()) as cache:
        patient, hurried = CollectorRegistry(), CollectorRegistry()
        patient.register(CacheCollector(cache, patience=60))
        await serve_all(cache, [PROMPT])
        hurried.register(CacheCollector(cache, patience=0.01))
        await serve_all(cache, [PROMPT])
        seen = await asyncio.to_thread(Scrape, patient)
        assert seen.total("requests_total") == 2

        stale: list[Scrape] = []
        other = threading.Thread(target=lambda: stale.append(Scrape(hurried)))
        other.start()
        other.join()  # the loop is held up: this thread is the loop's
        assert stale[0].total("requests_total") == 1
    assert Scrape(hurried).total("requests_total") == 2


def test_a_closed_loop_leaves_the_last_metrics():
    async def main() -> CollectorRegistry:
        async with HybridCache.open(SPEC, config()) as cache:
            registry = registered(cache)
            await serve_all(cache, [PROMPT])
            Scrape(registry)
        return registry

    assert Scrape(asyncio.run(main())).total("requests_total") == 1


@pytest.mark.asyncio
async def test_labels_of_the_metrics_own_are_refused():
    async with HybridCache.open(SPEC, config()) as cache:
        with pytest.raises(ConfigError, match="'pool' is one of the metrics' own"):
            CacheCollector(cache, labels={"pool": "mine"})


@pytest.mark.asyncio
async def test_statistics_do_not_change_later():
    """Their dictionaries used to be the cache's own."""
    async with HybridCache.open(SPEC, config()) as cache:
        before = cache.statistics()
        await serve_all(cache, [PROMPT, PROMPT])

        assert sum(before.served.reasons.values()) == sum(before.served.hit_tokens.values()) == 0
        assert not before.served.missed_tokens
        assert not before.served.hit_slots
        assert before.transfers.latencies != cache.statistics().transfers.latencies


def test_a_negative_number_of_namespaces_is_refused():
    with pytest.raises(ConfigError, match="count_namespaces -1 must be a whole number of at least 0"):
        CacheConfig(count_namespaces=-1)


def test_a_duration_is_counted_up_to_its_bound():
    histogram = Histogram()
    for seconds in (0.0, SECONDS[0], SECONDS[0] * 1.001, SECONDS[-1] * 2):
        histogram.observe(seconds)
    seen = histogram.snapshot()

    assert (seen.counts[0], seen.counts[1], seen.counts[-1]) == (2, 1, 1)
    assert seen.count == 4
    assert seen.total == pytest.approx(sum((0.0, SECONDS[0], SECONDS[0] * 1.001, SECONDS[-1] * 2)))
