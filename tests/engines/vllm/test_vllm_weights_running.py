"""Weights and adapters that change, in a running vLLM and between two of its starts: right tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connecting import connector
from models import RETRAINED, train_adapter
from running import Answer, Engine, prompts
from seams import signature
from test_vllm_tier_running import tiering
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

PROMPT = prompts(1, 700)[0]
HIT = 672
ADAPTERS: dict[str, Callable[[Path], dict[str, Any]]] = {"connector": connector, "tier": tiering}

Model = Callable[[str], Path]


def ask(engine: Engine, lora: LoRARequest | None = None) -> Answer:
    answer = engine.ask([PROMPT], lora=lora)[0]
    engine.ask([[5] * 40], lora=lora)  # its steps carry what the request before left to be kept
    return answer


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_nothing_of_the_old_weights_is_found_after_a_reload(
    adapter: str, named: bool, model: Model, tmp_path: Path
) -> None:
    """With the connector also if vLLM's reset does not include it; vLLM's own host memory needs that."""
    with Engine(model("qwen3" + RETRAINED)) as plain:
        expected = ask(plain)
    with Engine(model("qwen3"), ADAPTERS[adapter](tmp_path)) as engine:
        old = ask(engine)
        assert old.tokens != expected.tokens
        path = str(model("qwen3" + RETRAINED))
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if named:
            engine.llm.llm_engine.engine_core.set_weight_version("2")
        if adapter == "connector":
            assert engine.llm.reset_prefix_cache()
            mixed = ask(engine)
            assert (mixed.cached, mixed.tokens) == (0, expected.tokens)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        after = ask(engine)
        assert engine.llm.reset_prefix_cache()
        again = ask(engine)
    assert [answer.tokens for answer in (after, again)] == [expected.tokens] * 2
    assert [answer.cached for answer in (after, again)] == [0, HIT]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_that_is_trained_again_into_its_folder_is_another_one(
    adapter: str, model: Model, tmp_path: Path
) -> None:
    base, folder, lora = model("qwen3"), tmp_path / "sql", {"enable_lora": True, "max_lora_rank": 8}
    request = LoRARequest("sql", 1, str(folder))
    expected = {}
    for seed in (1, 2):
        train_adapter(folder, base, seed)
        with Engine(base, **lora) as plain:
            expected[seed], without = ask(plain, request).tokens, ask(plain).tokens
    assert len({tuple(each) for each in (without, *expected.values())}) == 3
    found = []
    for seed in (1, 2, 1):
        train_adapter(folder, base, seed)
        with Engine(base, ADAPTERS[adapter](tmp_path / "store"), **lora) as engine:
            answers = [ask(engine, request), ask(engine)]
        assert [answer.tokens for answer in answers] == [expected[seed], without]
        found.append([answer.cached for answer in answers])
    assert found == [[0, 0], [0, HIT], [HIT, HIT]]


def test_a_checkpoint_and_its_settings_are_known_by_their_content(model: Model, tmp_path: Path) -> None:
    """Under one name and one `weight_version`."""
    link, hits, said = tmp_path / "model", [], []
    for name, theta in (("qwen3", 1e4), ("qwen3" + RETRAINED, 1e4), ("qwen3", 5e5), ("qwen3", 1e4)):
        link.unlink(missing_ok=True)
        link.symlink_to(model(name))
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        with Engine(link, connector(tmp_path / "store"), hf_overrides=rope) as engine:
            answer = ask(engine)
        hits.append(answer.cached)
        said.append(tuple(answer.tokens))
    assert hits == [0, 0, 0, HIT]
    assert said[3] == said[0]
    assert len(set(said)) == 3


def test_what_is_wrapped_is_vllms() -> None:
    assert signature(EngineCore.collective_rpc) == ["self", "method", "timeout=", "args=", "kwargs="]
    assert signature(EngineCore.set_weight_version) == ["self", "weight_version"]
