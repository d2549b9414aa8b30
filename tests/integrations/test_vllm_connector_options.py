"""Options of vLLM's connector, and settings of vLLM's that it refuses with the cure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm.options import check_engine, read_options

GIVEN = {
    "host_bytes": 1 << 20,
    "storage": "file",
    "storage_options": {"path": "/x/{replica}"},
    "weight_version": "w",
}


TWO_WORKERS = {"world_size": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def vllm_config(**changes: Any) -> SimpleNamespace:
    fields = {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "kv_load_failure_policy": "recompute",
        "world_size": 1,
        "tensor_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "uni",
        "enable_sleep_mode": False,
        "speculative_config": None,
    } | changes
    one = SimpleNamespace(**fields)
    return SimpleNamespace(
        cache_config=one,
        kv_transfer_config=one,
        parallel_config=one,
        model_config=one,
        speculative_config=one.speculative_config,
    )


def drafts(method: str, *, own_kv: bool) -> SimpleNamespace:
    return SimpleNamespace(method=method, uses_draft_kv_cache=lambda: own_kv)


def test_options_are_those_of_the_cache_and_the_connectors_own() -> None:
    own, cache = read_options(GIVEN | {"idle_wait_ms": 5, "eviction": "lru"}, replica=3)

    assert own.idle_wait_ms == 5
    assert cache.page_keys
    assert cache.storage_options == {"path": "/x/3"}
    assert cache.tokens_per_state == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_slots": {}}, "device_slots is not an option of vLLM's connector"),
        ({"page_keys": True}, "page_keys is not an option"),
        ({"idle_wait_ms": 101}, "idle_wait_ms"),
        ({"host_byte": 1}, "host_byte"),
        ({"weight_version": None}, "storage needs weight_version"),
        ({"storage": 7}, "storage 7"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(GIVEN | options, replica=0)


def test_host_memory_must_be_sized() -> None:
    with pytest.raises(ConfigError, match="host_bytes is missing"):
        read_options({"storage": "memory", "weight_version": "w"}, replica=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_prefix_caching": False}, "set --enable-prefix-caching"),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, "set PYTHONHASHSEED, or keep sha256"),
        ({"world_size": 2}, "2 workers .* AsynchicacheTier instead"),
        (TWO_WORKERS | {"decode_context_parallel_size": 2}, "2 workers .* AsynchicacheTier instead"),
        (TWO_WORKERS | {"nnodes": 2}, "workers on 2 nodes"),
        ({"speculative_config": drafts("eagle", own_kv=True)}, "use a method without one"),
        (TWO_WORKERS | {"distributed_executor_backend": "ray"}, "--distributed-executor-backend mp"),
    ],
)
def test_settings_that_lose_hits_are_refused_with_the_cure(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(vllm_config(**change), hash_seed=None)


def test_settings_that_lose_nothing_are_taken() -> None:
    check_engine(vllm_config(), hash_seed=None)
    check_engine(vllm_config(**TWO_WORKERS), hash_seed=None)
    check_engine(vllm_config(speculative_config=drafts("ngram", own_kv=False)), hash_seed=None)
    check_engine(vllm_config(enable_sleep_mode=True), hash_seed=None)
    check_engine(vllm_config(prefix_caching_hash_algo="xxhash"), hash_seed="0")


def test_sleep_mode_needs_a_vllm_that_tells_of_it() -> None:
    with pytest.raises(ConfigError, match="leave out --enable-sleep-mode"):
        check_engine(vllm_config(enable_sleep_mode=True), hash_seed=None, told_of_sleep=False)
