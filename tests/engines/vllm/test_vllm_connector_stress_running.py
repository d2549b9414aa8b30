"""`AsynchicacheConnector` under stress: no token changes, no wrong page is stored, nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connecting import connector, shared_memory, stored_pages, worst_difference
from running import GATED_DELTA_NETS, Engine, Prompt, cached, tokens

Model = Callable[[str], Path]

MANY_PREEMPTIONS = 138
FEW_BLOCKS = {"num_gpu_blocks_override": 50, "max_model_len": 1024, "max_num_seqs": 16}


def conversations(count: int, turns: int, seed: int) -> list[list[Prompt]]:
    """Waves of requests at once: every conversation grows, and three requests come twice."""
    numbers = random.Random(seed)
    talks = [[numbers.randrange(3, 500) for _ in range(numbers.randrange(150, 500))] for _ in range(count)]
    waves = [
        [talk + [numbers.randrange(3, 500) for _ in range(90 * turn)] for talk in talks]
        for turn in range(turns)
    ]
    return [wave + wave[:3] for wave in waves]


def answers(engine: Engine, waves: list[list[Prompt]], **how: Any) -> tuple[list[list[list[int]]], int]:
    """Tokens of all waves, and how many tokens of prompts were not computed; vLLM forgets after each wave."""
    got, hits = [], 0
    for wave in waves:
        answered = engine.ask(wave, **how)
        got.append(tokens(answered))
        hits += sum(cached(answered))
        while not engine.llm.reset_prefix_cache():  # a copy refers to blocks, and no step reports its end
            engine.ask([[5] * 20], new=1)
    engine.ask([[5] * 20])  # its steps report the last copies
    assert engine.held_blocks() == 0
    return got, hits


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("gemma3", {"num_gpu_blocks_override": 150, "max_model_len": 1024}, {}),  # preempts
        ("qwen3", {}, {"host_bytes": 2 << 20}),  # evicts all the time
        ("gpt_oss", {}, {}),
        ("qwen3_next", {}, {}),
        ("qwen3_5", {}, {}),
        ("granite_hybrid", {}, {}),
        ("nemotron_h", {}, {}),
    ],
    ids=[
        "gemma3-preempted",
        "small-host",
        "gpt_oss",
        "qwen3_next",
        "qwen3_5",
        "granite_hybrid",
        "nemotron_h",
    ],
)
def test_under_stress_no_token_changes_and_no_wrong_page_is_stored(
    model: Model, tmp_path: Path, name: str, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    """An engine of its own computes everything, and every stored page is compared with its."""
    waves, turn = conversations(10, 3, 3), {"new": 24}
    with Engine(model(name), connector(tmp_path / "computed")) as plain:
        expected, none = answers(plain, waves, afresh=True, **turn)
    starts = []
    for _ in range(2):
        with Engine(model(name), connector(tmp_path / "stressed", **options), **arguments) as engine:
            starts.append(answers(engine, waves, **turn))

    assert none == 0
    if name not in GATED_DELTA_NETS:  # in bfloat16 a hit rounds otherwise, and tokens change late
        assert [got for got, _ in starts] == [expected] * 2
    assert min(hits for _, hits in starts) > 0
    check_pages(tmp_path, name)


def check_pages(folder: Path, name: str) -> None:
    stressed, computed = stored_pages(folder / "stressed"), stored_pages(folder / "computed")
    dtype = "bytes" if name in GATED_DELTA_NETS else "float32"
    pages, worst = worst_difference(stressed, computed, dtype)
    print(f"PAGES {name}: {len(stressed)} stored, {pages} compared, {worst=}")
    assert pages > 30
    assert worst < 1e-4
    if name not in GATED_DELTA_NETS:
        assert pages == len(stressed)


def test_preempted_requests_continue_with_the_same_tokens(model: Model, tmp_path: Path) -> None:
    """Blocks for a third of what runs: vLLM takes them from one request for another, again and again."""
    numbers, before = random.Random(11), shared_memory()
    talks = [[numbers.randrange(3, 500) for _ in range(numbers.randrange(40, 130))] for _ in range(40)]
    waves, turn = [talks, [talk + talk[:20] for talk in talks]], {"new": 150}
    with Engine(model("qwen3"), connector(tmp_path / "computed")) as plain:
        expected, _ = answers(plain, waves, afresh=True, **turn)
    starts, preemptions = [], 0.0
    for _ in range(2):
        with Engine(model("qwen3"), connector(tmp_path / "stressed"), **FEW_BLOCKS) as engine:
            starts.append(answers(engine, waves, **turn))
            preemptions += engine.metrics()["vllm:num_preemptions",]
    print(f"PREEMPTIONS {preemptions}")

    assert preemptions >= MANY_PREEMPTIONS
    assert [got for got, _ in starts] == [expected] * 2
    assert min(hits for _, hits in starts) > 0
    check_pages(tmp_path, "qwen3")
    assert shared_memory() == before
