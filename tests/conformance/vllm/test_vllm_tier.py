"""Our tier under vLLM's own `TieringOffloadingManager`: every answer, and the bytes behind every hit."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from rig import CHUNK_BYTES, FULL, KEYS, MAMBA, WINDOW, Open, Rig, key
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.spec import AsynchicacheTieringSpec
from storage.redis_servers import RedisServer


def test_a_chunk_goes_all_the_way_down_and_comes_back(open_rig: Open) -> None:
    rig = open_rig()
    context = rig.request()
    assert rig.ask(KEYS[:3], context) == ["RETRY"] * 3
    rig.settle()
    assert rig.ask(KEYS[:3], context) == ["MISS"] * 3

    rig.compute(KEYS[:3], context)
    assert rig.ask(KEYS[:3], context) == ["HIT"] * 3  # from the primary tier
    rig.finish(context)
    rig.evict_all()

    later = rig.request()
    assert rig.ask(KEYS[:4], later) == ["RETRY"] * 4
    rig.settle()
    assert rig.ask(KEYS[:4], later) == ["HIT_PENDING"] * 3 + ["MISS"]
    assert rig.ask(KEYS[:3], later) == ["HIT_PENDING"] * 3  # nothing was read yet
    rig.settle()
    assert rig.ask(KEYS[:3], later) == ["HIT"] * 3
    rig.finish(later)
    assert rig.fetch(KEYS[:4]) == ["HIT"] * 3 + ["MISS"]


def test_chunks_that_the_primary_tier_evicts_come_back(open_rig: Open) -> None:
    rig = open_rig(chunks=4)
    for name in KEYS:  # six chunks through a primary tier of four
        rig.finish(rig.compute([name]))
        rig.settle()

    for name in KEYS:
        assert rig.fetch([name]) == ["HIT"]


def test_groups_of_a_hybrid_model_never_take_each_others_chunks(open_rig: Open) -> None:
    rig = open_rig(groups=(FULL, WINDOW, MAMBA))
    names = [key("block", group) for group in (0, 1, 2)]
    rig.store_and_evict([names[0], names[2]])

    assert rig.fetch(names) == ["HIT", "MISS", "HIT"]
    assert set(rig.tier._chunks.statistics) == {"group0", "group1", "group2"}


def test_the_salt_of_a_request_keeps_its_chunks_to_itself(open_rig: Open) -> None:
    """vLLM hashes a request's `cache_salt` into its first block, and so into every key after it."""
    rig = open_rig()
    chains = {salt: salted_keys(salt) for salt in ("one", "other", None)}
    rig.store_and_evict(chains["one"])

    assert rig.fetch(chains["other"]) == ["MISS", "MISS"]
    assert rig.fetch(chains[None]) == ["MISS", "MISS"]
    assert rig.fetch(chains["one"]) == ["HIT", "HIT"]


def salted_keys(salt: str | None) -> list[bytes]:
    """Keys of two blocks of the same tokens, by vLLM's own hashes."""
    init_none_hash(sha256_cbor)
    extra = (("cache_salt", salt),) if salt else None
    first = hash_block_tokens(sha256_cbor, None, range(16), extra)
    return [make_offload_key(block, 0) for block in (first, hash_block_tokens(sha256_cbor, first, range(16)))]


@pytest.mark.parametrize("bits", [128, 256])
def test_keys_of_every_hash_that_vllm_has_are_taken(open_rig: Open, bits: int) -> None:
    """xxhash gives 16 bytes, SHA-256 gives 32."""
    rig = open_rig()
    short = [make_offload_key(KEYS[0][: bits // 8], 0)]
    rig.store_and_evict(short)

    assert rig.fetch(short) == ["HIT"]


@pytest.mark.parametrize("storage", ["memory", "redis", "object"])
def test_other_storage_serves_as_well(open_rig: Open, tmp_path: Path, storage: str) -> None:
    with ExitStack() as stack:
        options: dict[str, Any] = {}
        if storage == "redis":
            options = {"url": stack.enter_context(RedisServer(tmp_path)).url}
        elif storage == "object":
            options = {"url": f"file://{tmp_path / 'objects'}"}
        rig = open_rig({"storage": storage, "storage_options": options}, groups=(FULL, MAMBA))
        both = [*KEYS, *(key("state", 2),)]
        rig.store_and_evict(both)

        assert rig.fetch(both) == ["HIT"] * len(both)
        rig.shutdown()


def test_a_key_of_a_group_that_there_is_not_is_a_miss(open_rig: Open) -> None:
    rig = open_rig()

    assert rig.fetch([key("block", 7)]) == ["MISS"]


def test_what_was_stored_is_found_after_a_restart(open_rig: Open) -> None:
    first = open_rig()
    first.store_and_evict(KEYS)
    first.shutdown()

    assert open_rig().fetch(KEYS) == ["HIT"] * len(KEYS)


@pytest.mark.parametrize(
    "other",
    [
        {"tier": {"weight_version": "w2"}},
        {"tier": {"salt": "tenant"}},
        {"model": "org/other"},
        {"tp_size": 2},
        {"groups": (OffloadingGroupConfig(32, FULL.layer_names, 0),)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_chunks_of_other_weights_models_splits_and_salts_are_not_taken(
    open_rig: Open, other: dict[str, Any]
) -> None:
    first = open_rig()
    first.store_and_evict(KEYS)
    first.shutdown()

    assert open_rig(**other).fetch(KEYS) == ["MISS"] * len(KEYS)


def test_a_request_may_ask_not_to_be_stored_or_served(open_rig: Open) -> None:
    rig = open_rig()
    rig.finish(rig.compute(KEYS[:1], rig.request({"asynchicache": {"no_store": True}})))
    rig.finish(rig.compute(KEYS[1:2]))
    rig.evict_all()

    unserved = rig.request({"asynchicache": {"no_load": True}})
    assert rig.ask(KEYS[:2], unserved) == ["MISS", "MISS"]
    assert rig.fetch(KEYS[:2]) == ["MISS", "HIT"]


def test_a_hint_has_chunks_looked_up_before_they_are_asked_for(open_rig: Open) -> None:
    rig = open_rig()
    rig.store_and_evict(KEYS[:2])
    hashes = [one[:-4].hex() for one in KEYS[:3]]
    actions = [
        KvHintAction("1", "prefetch", "1", {"block_hashes": hashes}),
        KvHintAction("2", "pin", "1", {"ttl": 60}),
    ]

    context = rig.request(hints=KvHintsEnvelope("1", "m", actions))
    rig.tier.drain_jobs()

    assert rig.ask(KEYS[:3], context) == ["HIT_PENDING", "HIT_PENDING", "MISS"]
    counted = rig.manager.get_stats().data["data"]["vllm:asynchicache_tier_hints"]
    assert counted == {("file", "taken"): 1, ("file", "ignored"): 1}


def test_back_pressure_drops_stores_and_is_told_of_failures(open_rig: Open) -> None:
    pressure = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
    always = {"high_water_s": 1e-12, "low_water_s": 1e-13, "warmup_completions": 1, "cooldown_s": 3600}
    rig = open_rig(backpressure={**pressure, **always})

    for name in KEYS[:2]:  # the first warms it up
        rig.compute([name])
        rig.settle()
    rig.end_step()
    assert rig.tier.bp_detector.is_under_pressure()
    rig.compute(KEYS[3:5])
    rig.settle()

    dropped = rig.manager.get_stats().data["data"]["vllm:kv_offload_tiering_backpressure_blocks_dropped"]
    assert sum(dropped.values()) == 2


def test_more_than_may_be_under_way_is_shed(open_rig: Open) -> None:
    rig = open_rig({"store_bytes": CHUNK_BYTES})
    context = rig.request()
    for name in KEYS[:4]:
        rig.compute([name], context)  # faster than a loop can start
    rig.finish(context)
    rig.settle()
    rig.settle()

    found = rig.manager.get_stats().data["data"]
    shed = sum(found.get("vllm:asynchicache_tier_shed_bytes", {}).values())
    stored = sum(
        value for labels, value in found["vllm:asynchicache_tier_bytes"].items() if labels[-1] == "put"
    )
    assert stored + shed == 4 * CHUNK_BYTES
    assert not rig.manager.has_pending_work()


def test_metrics_are_those_that_were_declared(open_rig: Open) -> None:
    rig = open_rig()
    declared = type(rig.spec).build_metric_definitions(rig.spec.extra_config)
    rig.store_and_evict(KEYS)
    rig.fetch([*KEYS, key("unknown")])

    found = rig.manager.get_stats().data["data"]

    assert set(found) <= set(declared)
    for name, values in found.items():
        assert all(len(labels) == len(declared[name].labelnames) for labels in values), name
    chunks = found["vllm:asynchicache_tier_chunks"]
    assert chunks["file", "group0", "put", "stored"] == len(KEYS)
    assert chunks["file", "group0", "get", "hit"] == len(KEYS)
    assert found["vllm:asynchicache_tier_bytes"]["file", "group0", "get"] == len(KEYS) * CHUNK_BYTES
    again = rig.manager.get_stats()
    assert again is None or "vllm:asynchicache_tier_chunks" not in again.data["data"]  # differences, not sums
    assert "asynchicache_storage" in type(rig.spec).config_info_keys(rig.spec.extra_config)


def test_metrics_reach_prometheus_through_vllm(open_rig: Open) -> None:
    rig = open_rig()
    rig.store_and_evict(KEYS)
    extra = dict(rig.spec.extra_config)
    vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = OffloadPromMetrics(vllm_config, kinds, ["model_name", "engine"], {0: ["org/tiny", "0"]})
    stats = rig.manager.get_stats()
    stats.set_info(rig.manager.config_info())

    metrics.observe(stats.data)

    labels = {"model_name": "org/tiny", "engine": "0", "storage": "file", "pool": "group0"}
    found = registry.get_sample_value(
        "vllm:asynchicache_tier_chunks_total", {**labels, "op": "put", "outcome": "stored"}
    )
    assert found == len(KEYS)
    assert registry.get_sample_value("vllm:asynchicache_tier_breaker_open", labels) == 0


def test_the_next_engine_of_a_process_registers_its_metrics_anew(open_rig: Open) -> None:
    extra = dict(open_rig().spec.extra_config)
    vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    for _ in range(2):
        unregister_vllm_metrics()  # as each engine's `PrometheusStatLogger` begins
        kinds = {kind: kind for kind in (Gauge, Counter, Histogram)}
        OffloadPromMetrics(vllm_config, kinds, ["model_name", "engine"], {0: ["org/tiny", "0"]})
    unregister_vllm_metrics()
    assert not [name for name in REGISTRY._names_to_collectors if "asynchicache" in name]


def test_the_configuration_of_the_page_turns_it_on(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/howto/vllm_tier.md").read_text("utf-8")
    (block,) = [text for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "kv_connector" in text]
    extra = json.loads(block)["kv_connector_extra_config"]
    (tier,) = extra.pop("secondary_tiers")
    tier["storage_options"] = {"path": f"{tmp_path}/{{replica}}", "capacity_bytes": 1 << 22}
    assert OffloadingSpecFactory.get_spec_cls(extra) is AsynchicacheTieringSpec
    assert set(extra) == {"spec_name", "spec_module_path", "cpu_bytes_to_use"}

    rigs = [Rig(tier, replica=replica) for replica in (0, 1)]  # side by side

    for rig in rigs:
        rig.store_and_evict(KEYS)
        assert rig.fetch(KEYS) == ["HIT"] * len(KEYS)
        rig.shutdown()


def test_events_tell_what_was_stored(open_rig: Open) -> None:
    rig = open_rig({"enable_kv_events": True, "locality": "LOCAL"}, events=True)
    rig.compute(KEYS[:2])
    rig.settle()
    rig.settle()

    (stored,) = [event for event in rig.manager.take_events() if event.medium.name == "STORAGE"]
    assert (stored.keys, stored.removed, stored.locality.name) == (KEYS[:2], False, "LOCAL")


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"weight_version": ""}, "weight_version"),
        ({"storage": "tape"}, "'tape' is none of the backends"),
        ({"storage_optons": {}}, "storage_optons"),
        ({"locality": "NEAR"}, "locality 'NEAR' must be one of"),
        ({"store_bytes": 0}, "store_bytes 0 must be a whole number above 0"),
        ({"storage_limits": {"dead_line": 1}}, "dead_line"),
    ],
)
def test_wrong_options_are_refused_by_name(open_rig: Open, tier: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_rig(tier)
