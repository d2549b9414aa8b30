"""`AsynchicacheTier` below vLLM's own tiering, in a running vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import Engine, cached, prompts, tokens

PROMPTS = prompts(2, 700)


def tiering(folder: Path) -> dict[str, Any]:
    """What docs/howto/vllm.md configures, with a spec that runs on a CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [
                {
                    "type": "AsynchicacheTier",
                    "module_path": "asynchicache.integrations.vllm.tier",
                    "storage": "file",
                    "storage_options": {"path": str(folder)},
                    "weight_version": "w1",
                }
            ],
        },
    }


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("qwen3", [672, 736]),
        ("gemma3", [672, 736]),
        ("gpt_oss", [672, 736]),
        ("qwen3_next", [512, 512]),
        ("qwen3_5", [512, 512]),
    ],
)
def test_a_restart_finds_what_was_computed_and_answers_the_same(
    model: Callable[[str], Path], tmp_path: Path, name: str, blocks: list[int]
) -> None:
    """Hits are as long as those of vLLM's own prefix cache: all full blocks but that of the last token."""
    with Engine(model(name)) as plain:
        computed = plain.ask_in_turn(PROMPTS)
        local = plain.ask_in_turn(PROMPTS)
    with Engine(model(name), tiering(tmp_path)) as first:
        cold = first.ask_in_turn(PROMPTS)
    with Engine(model(name), tiering(tmp_path)) as second:
        warm = second.ask_in_turn(PROMPTS)

    assert cached(cold) == [0, 0]
    assert cached(warm) == cached(local) == blocks
    assert tokens(cold) == tokens(computed)
    assert tokens(warm) == tokens(local)
