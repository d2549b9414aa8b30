"""`bench ranks`: it serves with real followers, and measures what it says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from asynchicache.cli.main import main
from asynchicache.errors import ConfigError
from asynchicache.ranks.follower import RankFollower
from asynchicache.specs import ModelSpec
from asynchicache_lab.bench.ranks.options import ROUNDS, RanksOptions
from asynchicache_lab.bench.ranks.report import Pair, Spread
from asynchicache_lab.bench.ranks.run import run_ranks
from asynchicache_lab.bench.ranks.simulation import published_model, simulate

HALVES = (range(32), range(32, 60))
"""Layers of two stages: the model repeats three linear layers and one of attention."""

SMALL = RanksOptions(ranks=3, conversations=3, request_length=256, decode_steps=2, collectives=6)


def test_a_group_hits_what_one_rank_hits_and_everything_is_measured() -> None:
    seen: list[tuple[int, int]] = []
    report = asyncio.run(run_ranks(SMALL, lambda done, of: seen.append((done, of))))

    assert report.ok, report
    assert report.hit_tokens == 3 * 256 * sum(range(ROUNDS))
    assert (report.requests, seen[-1]) == (12, (12, 12))
    digests_of_a_request = 256 // 64 * 32
    assert report.log_bytes > digests_of_a_request
    spreads = [report.question, report.load, report.publish, report.collective, report.decode.group]
    assert all(0 < one.p50 <= one.p99 for one in spreads)
    assert not replace(report, hit_tokens=0).ok
    assert not replace(report, failure="rank 1 is lost").ok


def test_a_simulated_group_hits_everything_and_reads_no_wrong_byte() -> None:
    options = RanksOptions(ranks=4, conversations=24, request_length=256)
    report, again = simulate(options), simulate(options)

    assert report.violations == []
    assert report.ok
    assert report.hit_tokens == 24 * 256 * sum(range(ROUNDS))
    assert report.prompt_tokens == 24 * 256 * sum(range(ROUNDS + 1))
    assert (again.hit_tokens, again.log_bytes) == (report.hit_tokens, report.log_bytes)
    assert report.leader_seconds > 0


STAGES = [published_model(64).shard(pp=(rank, 2), layers=half) for rank, half in enumerate(HALVES)]
STRIPES = [published_model(64).shard(cp=(rank, 2)) for rank in range(2)]
GRID = [
    published_model(64).shard(tp=(rank % 2, 2), pp=(rank // 2, 2), layers=HALVES[rank // 2])
    for rank in range(4)
]


@pytest.mark.parametrize("parts", [STAGES, STRIPES, GRID], ids=["pp2", "cp2", "tp2 x pp2"])
def test_other_ways_to_divide_a_model(parts: list[ModelSpec]) -> None:
    """Prefetches end before their step is marked, so stages read ahead of it."""
    options = RanksOptions(ranks=len(parts), conversations=24, request_length=256)
    report = simulate(options, parts=parts)
    assert report.violations == []
    assert report.hit_tokens == 24 * 256 * sum(range(ROUNDS))


def test_a_simulated_group_with_a_wrong_rank_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankFollower, "_computed", lambda self: ())  # copies do not wait for forwards
    report = simulate(RanksOptions(ranks=4, conversations=24, request_length=256))
    assert not report.ok
    assert "wrong pages of" in report.violations[0]


def test_the_command_simulates(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--simulated", "--ranks", "2", "--conversations", "2", "--request-length", "128", "--json", "-"]
    assert main(["bench", "ranks", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["log_bytes_per_request"] == found["log_bytes"] / 8 > 0


def test_a_spread_is_the_middle_and_the_end_of_what_was_measured() -> None:
    assert Spread.of([3e-6, 1e-6, 2e-6]) == Spread(pytest.approx(2.0), pytest.approx(2.0))
    assert Spread.of([]) == Spread(0.0, 0.0)
    assert Pair(Spread(5.0, 9.0), Spread(2.0, 3.0)).added_us == 3.0


def test_a_number_of_ranks_that_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp size 3 must divide"):
        simulate(RanksOptions(ranks=3))


@pytest.mark.parametrize("ranks", [1, 65])
def test_a_number_of_ranks_that_is_no_group_is_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match="--ranks"):
        RanksOptions(ranks=ranks)
