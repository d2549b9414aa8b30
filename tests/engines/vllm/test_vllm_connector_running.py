"""`AsynchicacheConnector` in a running vLLM: hits, bytes, and what goes wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connecting import connector, damage
from running import BLOCK, Engine, cached, prompts, tokens
from seams import accepts, signature
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from asynchicache.errors import CacheError
from asynchicache.integrations.vllm.connector import AsynchicacheConnector

PROMPTS = [*prompts(2, 700), prompts(1, 22 * BLOCK, seed=6)[0]]  # the last one ends with a block
ATTENTION = [672, 736, 672]
STATES: list[int] = []
"""The length of their blocks, and with it of a hit, is vLLM's choice: 128 or 256, by the CPU's data types."""

Model = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("qwen3", ATTENTION),
        ("gemma3", ATTENTION),
        ("gpt_oss", ATTENTION),
        ("qwen3_next", STATES),
        ("qwen3_5", STATES),
        ("granite_hybrid", STATES),
        ("nemotron_h", STATES),
    ],
)
def test_hits_come_from_disk_and_from_host_memory_and_change_no_token(
    model: Model, tmp_path: Path, name: str, blocks: list[int]
) -> None:
    """As long as vLLM's own: after a restart, and after vLLM has dropped its blocks."""
    with Engine(model(name)) as plain:
        computed = plain.ask_in_turn(PROMPTS)
        local = plain.ask_in_turn(PROMPTS)
    with Engine(model(name), connector(tmp_path)) as first:
        cold = first.ask_in_turn(PROMPTS)
        assert first.llm.reset_prefix_cache()
        from_host = first.ask_in_turn(PROMPTS)
    with Engine(model(name), connector(tmp_path)) as second:
        from_disk = second.ask_in_turn(PROMPTS)

    assert cached(cold) == [0, 0, 0]
    assert cached(from_host) == cached(from_disk) == cached(local)
    assert cached(local) == blocks or (blocks is STATES and min(cached(local)) >= 512)
    assert tokens(cold) == tokens(computed)
    assert tokens(from_host) == tokens(from_disk) == tokens(local)


def test_damaged_pages_are_misses(model: Model, tmp_path: Path) -> None:
    asked = prompts(6, 200)
    with Engine(model("qwen3"), connector(tmp_path)) as first:
        expected = first.ask(asked)
    assert damage(tmp_path, every=4) > 5
    with Engine(model("qwen3"), connector(tmp_path)) as second:
        answers = second.ask(asked)
        corrupt = sum(
            value for (name, *labels), value in second.metrics().items() if labels[-1:] == ["corrupt"]
        )

    assert tokens(answers) == tokens(expected)
    assert 0 < sum(cached(answers)) < sum(len(prompt) // BLOCK * BLOCK for prompt in asked)
    assert corrupt > 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_a_conversation_longer_than_the_host_is_resumed_at_an_earlier_turn(
    model: Model, tmp_path: Path, name: str
) -> None:
    """vLLM offers the states of a hybrid at the ends of its prompts."""
    longest = prompts(1, 1900)[0]
    turns = [longest[:700], longest]
    with Engine(model(name), connector(tmp_path)) as first:
        computed = first.ask_in_turn(turns)
    with Engine(model(name), connector(tmp_path, host_bytes=3 << 20)) as second:
        again = second.ask(turns[1:])
        found = second.metrics()

    assert 0 < cached(again)[0] < 1792
    assert tokens(again) == tokens(computed[1:])
    assert found["vllm:asynchicache_connector_requests", "host_capacity"] == 1


def test_requests_choose_to_load_and_to_store_nothing(model: Model, tmp_path: Path) -> None:
    with Engine(model("qwen3"), connector(tmp_path)) as first:
        computed = first.ask_in_turn(PROMPTS[:1], hints={"no_store": True})
    with Engine(model("qwen3"), connector(tmp_path)) as second:
        assert cached(second.ask_in_turn(PROMPTS[:1])) == [0]
    with Engine(model("qwen3"), connector(tmp_path)) as third:
        assert cached(third.ask_in_turn(PROMPTS[:1], hints={"no_load": True})) == [0]
        third.llm.reset_prefix_cache()
        again = third.ask_in_turn(PROMPTS[:1])

    assert cached(again) == [672]
    assert tokens(again) == tokens(computed)


def test_after_a_reset_nothing_of_before_is_found(model: Model, tmp_path: Path) -> None:
    with Engine(model("qwen3"), connector(tmp_path)) as engine:
        engine.ask_in_turn(PROMPTS)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        after = engine.ask_in_turn(PROMPTS)
        assert engine.llm.reset_prefix_cache()
        again = engine.ask_in_turn(PROMPTS)

    assert cached(after) == [0, 0, 0]
    assert cached(again) == ATTENTION


def test_metrics_tell_where_hits_came_from(model: Model, tmp_path: Path) -> None:
    with Engine(model("qwen3"), connector(tmp_path)) as first:
        first.ask_in_turn(PROMPTS)
    with Engine(model("qwen3"), connector(tmp_path)) as second:
        second.ask_in_turn([*PROMPTS, [5] * 40])
        found = second.metrics()

    assert found["vllm:asynchicache_connector_hit_tokens", "storage"] == sum(ATTENTION)
    assert found["vllm:external_prefix_cache_hits",] == sum(ATTENTION)
    assert (
        found["vllm:asynchicache_connector_storage_blocks", "group0", "get", "hit"] == sum(ATTENTION) // BLOCK
    )
    assert found["vllm:asynchicache_connector_kept_blocks",] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_prefix_caching": False}, "set --enable-prefix-caching"),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"prefix_caching_hash_algo": "xxhash"}, "set PYTHONHASHSEED"),
        ({"host_bytes": 4096}, "host"),
    ],
)
def test_settings_that_lose_hits_stop_vllm_with_the_cure(
    model: Model, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    transfer = connector(tmp_path)
    for name in list(change):
        if name in transfer:
            transfer[name] = change.pop(name)
        elif name in transfer["kv_connector_extra_config"]:
            transfer["kv_connector_extra_config"][name] = change.pop(name)

    with pytest.raises(CacheError, match=message):
        Engine(model("qwen3"), transfer, **change)


def test_the_connector_can_be_called_in_every_way_that_vllm_may() -> None:
    for name, ours in vars(AsynchicacheConnector).items():
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if inspect.isfunction(ours) and inspect.isfunction(theirs) and name != "__init__":
            assert accepts(ours, signature(theirs)), name
    assert not AsynchicacheConnector.__abstractmethods__
