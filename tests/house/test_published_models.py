"""A part of what the scripts over published configurations and chat templates show."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from transformers import CONFIG_MAPPING, Qwen3Config

from asynchicache.integrations.transformers.asking import spec_from_model

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="a source distribution has no scripts")


@cache
def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_published_configurations_are_described_as_their_models_keep_them() -> None:
    table = script("model_table")
    named = {"Qwen/Qwen3-0.6B", "falcon-7b", "openai/gpt-oss-20b", "MiniMaxAI/MiniMax-M3", "bart-large"}
    rows = {name: table.judge(name, config) for name, config in table.published(named)}
    assert [(row.verdict, row.sizes, row.agrees, row.problem) for row in rows.values()] == [
        ("refused", "", None, ""),
        ("accepted", "kv 114,688", True, ""),
        ("accepted, with dtype='bfloat16'", "kv 24,576, swa 24,576", True, ""),
        ("refused", "", None, ""),
        ("asked", "kv 8,192", True, ""),
    ]


NO_POOLS = {
    "bert": "set is_decoder=True",
    "blt": "pass the configuration of its decoder",
    "gemma4_unified_assistant": "its target's cache",
    "idefics": "encoder's input",
    "openai-gpt": "caches nothing; compute its prompts whole",
    "paligemma": "after it; compute its prompts whole",
    "pi0": "pass the configuration of its decoder",
    "rwkv": "0 attention layers; .* write its pools yourself",
    "xlstm": "counts no attention heads; .* write its pools yourself",
}


@pytest.mark.parametrize("kind", NO_POOLS)
def test_a_refusal_says_what_to_do(kind: str) -> None:
    table = script("model_table")
    config = CONFIG_MAPPING[kind]()
    if kind in ("rwkv", "xlstm"):  # a forward finds it
        config.num_hidden_layers = 2
    row = table.judge(kind, config)
    assert row.problem == ""
    assert row.verdict == "refused"
    assert re.search(NO_POOLS[kind], row.why)


def test_a_table_tells_of_what_does_not_fit() -> None:
    table, config = script("model_table"), Qwen3Config(num_hidden_layers=2)
    spec = spec_from_model(config, page_size=16)
    (pool,) = spec.pools
    wider = replace(
        spec, pools=(replace(pool, tensors=(*pool.tensors, replace(pool.tensors[0], name="more"))),)
    )
    agrees, why = table.ask(config, wider)
    assert not agrees
    assert "contradicts" in table.Row("x", "qwen3", "accepted", "kv 1", agrees, why).problem
    assert "no cure" in table.Row("x", "x", "refused", why="it is odd").problem


def test_no_turn_is_lost_to_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = script("template_turns")
    (tmp_path / "refuses.jinja").write_text("{{ raise_exception(messages) }}")
    assert asyncio.run(turns.main([str(tmp_path), "--lengths", "1", "--vocabularies", "1"])) == 0
    printed = capsys.readouterr().out
    assert printed.count(", 0 lost,") == len(turns.CELLS)
    assert "skipped: refuses" in printed
