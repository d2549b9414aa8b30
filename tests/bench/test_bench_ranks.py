"""`bench ranks`: it serves with real followers, and measures what it says."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from asynchicache.bench.ranks.options import ROUNDS, RanksOptions
from asynchicache.bench.ranks.report import Pair, Spread
from asynchicache.bench.ranks.run import run_ranks
from asynchicache.errors import ConfigError

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


def test_a_spread_is_the_middle_and_the_end_of_what_was_measured() -> None:
    assert Spread.of([3e-6, 1e-6, 2e-6]) == Spread(pytest.approx(2.0), pytest.approx(2.0))
    assert Spread.of([]) == Spread(0.0, 0.0)
    assert Pair(Spread(5.0, 9.0), Spread(2.0, 3.0)).added_us == 3.0


@pytest.mark.parametrize("ranks", [1, 65])
def test_a_number_of_ranks_that_is_no_group_is_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match="--ranks"):
        RanksOptions(ranks=ranks)
