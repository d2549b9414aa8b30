"""vLLM still makes the calls that `make test` plays without it."""

from __future__ import annotations

import json
from pathlib import Path

from scenario import play

RECORDED = Path(__file__).parents[2] / "data" / "calls" / "vllm-0.33.0.json"


def test_the_calls_are_as_recorded(tmp_path: Path) -> None:
    assert play(tmp_path) == json.loads(RECORDED.read_text())
