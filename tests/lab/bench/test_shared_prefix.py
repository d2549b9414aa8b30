"""`bench shared-prefix`: every prompt but the first of a group finds the system prompt."""

import asyncio
from fractions import Fraction

import pytest

from asynchicache_lab.bench.shared_prefix import SharedPrefixOptions, ideal_hit_rate, run_shared_prefix
from asynchicache_lab.bench.tally import HitReport


def run(options: SharedPrefixOptions) -> HitReport:
    return asyncio.run(run_shared_prefix(options, lambda done, turns: None))


@pytest.mark.parametrize(("system", "page"), [(512, 64), (500, 64), (130, 16)])
def test_the_ideal_is_reached(system: int, page: int) -> None:
    options = SharedPrefixOptions(4, 5, system, 60, 40, page)
    report = run(options)

    assert report.ok
    assert report.hit_rate == pytest.approx(float(ideal_hit_rate(options)))
    assert report.round_rates[0] == 0
    assert report.round_rates[1:] == [pytest.approx(options.shared / (system + 60))] * 4


def test_ideal() -> None:
    assert ideal_hit_rate(SharedPrefixOptions()) == Fraction(15, 16) * Fraction(2048, 2176)
    assert ideal_hit_rate(SharedPrefixOptions(gsp_prompts_per_group=1)) == 0
    assert ideal_hit_rate(SharedPrefixOptions(gsp_system_prompt_len=63)) == 0
