"""Policies and memories side by side: the table, the advice, and the picture."""

from __future__ import annotations

import gzip
import re
from itertools import islice
from pathlib import Path

import pytest

from asynchicache.errors import ConfigError
from asynchicache.replay.compare import Comparison, run_comparison
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.run import run_replay

TOOLS = Path(__file__).parents[1] / "data" / "traces" / "taubench_airline_gpt4o.jsonl.gz"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first third of a real one."""
    path = tmp_path_factory.mktemp("trace") / "first.jsonl"
    with gzip.open(TOOLS, "rt") as lines:
        path.write_text("".join(islice(lines, 800)))
    return str(path)


@pytest.fixture(scope="module")
def comparison(trace: str, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    report = tmp_path_factory.mktemp("compare") / "curves.html"
    steps: list[tuple[int, int]] = []
    options = ReplayOptions(
        trace,
        pools="kv,mamba",
        compare=True,
        compare_shares="0.4,0.1,1",
        state_tokens=1600,
        report=str(report),
    )
    found = run_comparison(options, lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    return found


def test_every_policy_meets_every_memory(comparison: Comparison):
    pairs = [(row.policy, row.share) for row in comparison.rows]
    assert pairs == [(policy, share) for policy in ("size", "lru") for share in (0.1, 0.4, 1.0)]
    assert comparison.ok
    for rows in comparison.by_policy().values():
        rates = [row.hit_rate for row in rows]
        assert rates == sorted(rates)


def test_a_row_is_what_a_replay_gives(trace: str, comparison: Comparison):
    alone = run_replay(
        ReplayOptions(trace, pools="kv,mamba", memory_share=0.1, policy="lru"), lambda done, total: None
    )
    row = next(row for row in comparison.rows if (row.policy, row.share) == ("lru", 0.1))
    assert (row.hit_rate, row.states_kept) == (alone.hit_rate, alone.states_kept)
    assert row.memory_tokens == int(0.1 * alone.working_set["kv"] * 16)


def test_the_smallest_memory_that_is_good_enough_is_advised(comparison: Comparison):
    advice = comparison.advice
    best = max(row.hit_rate for row in comparison.rows)
    assert advice.share == 0.4
    assert advice.hit_rate >= comparison.target * best
    assert all(row.hit_rate < comparison.target * best for row in comparison.rows if row.share < 0.4)
    assert advice.host_tokens + advice.states * 1600 == 60_364
    assert f"tokens_per_state={advice.tokens_per_state}" in str(advice)
    assert comparison.as_json()["advice"]["states"] == advice.states


def test_the_report_is_one_file_with_a_curve_for_each_policy(comparison: Comparison):
    page = Path(comparison.report).read_text("utf-8")
    curves = [points.split() for points in re.findall(r'<polyline[^>]* points="([^"]*)"', page)]
    assert [len(points) for points in curves] == [3, 3]
    assert not any(word in page for word in ("<script", "http:", "https:", "src="))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compare_policies": "size,best"}, "eviction policy 'best' is none of"),
        ({"compare_shares": "0.1,2"}, "--compare-shares 2: must be at most 1"),
        ({"compare_shares": "0,0.1"}, "--compare-shares 0,0.1: must be above 0"),
        ({"compare_shares": "a lot"}, "--compare-shares a lot: must be a number"),
        ({"target": 1.5}, "--target 1.5"),
        ({"report": "/nowhere/x.html"}, "--report: /nowhere is not a folder"),
    ],
)
def test_options_of_a_comparison_are_checked(options: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        ReplayOptions(trace="t", **options)
