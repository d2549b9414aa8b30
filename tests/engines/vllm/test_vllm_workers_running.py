"""`AsynchicacheConnector` in a vLLM whose two workers share a model by tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from connecting import connector, damage, shared_memory
from running import BLOCK, Engine, cached, prompts, tokens

PROMPTS = [*prompts(2, 700), *prompts(3, 22 * BLOCK, seed=6)]
HITS = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
TWO_WORKERS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_workers_get_their_parts_back_and_a_damaged_part_of_one_is_a_shorter_hit(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    before = shared_memory()
    with Engine(model("qwen3"), connector(tmp_path), **TWO_WORKERS) as first:
        computed = first.ask_in_turn(PROMPTS)
        assert first.llm.reset_prefix_cache()
        from_host = first.ask_in_turn(PROMPTS)
        first.ask([[5] * 20])  # its steps report the last copies
        assert first.held_blocks() == 0
    assert 0 < damage(tmp_path, every=40, pool="group0_tp1") < len(PROMPTS)
    with Engine(model("qwen3"), connector(tmp_path), **TWO_WORKERS) as second:
        from_disk = second.ask_in_turn(PROMPTS)
        again = second.ask_in_turn(PROMPTS)

    assert cached(computed) == [0] * len(PROMPTS)
    assert cached(from_host) == cached(again) == HITS
    whole = [got == best for got, best in zip(cached(from_disk), HITS, strict=True)]
    assert any(whole)
    assert not all(whole)
    assert tokens(computed) == tokens(from_host) == tokens(from_disk) == tokens(again)
    assert shared_memory() == before
