"""The search is not blind: bugs that are planted one at a time are found, each within 2,000 seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from asynchicache_lab.chaos import run
from asynchicache_lab.chaos.run import run_script
from asynchicache_lab.chaos.search import quick_collection
from asynchicache_lab.chaos.workload import draw_script
from lab.chaos.known_seeds import KNOWN, known_first
from lab.chaos.planted import BUGS, Bug

MISFIT = re.compile(r"TypeError: .*\bargument")
MAX_SEEDS = 2000
FEW_SEEDS = 40


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with quick_collection():
        yield


def found_at(bug: Bug, seeds: Iterable[int], patch: pytest.MonkeyPatch) -> int | None:
    """The first seed that finds a bug."""
    patch.setattr(run, "MAX_STEPS", 25_000)  # no seed takes a fifth of it where nothing is wrong
    bug.plant(patch)
    for seed in seeds:
        if violations := run_script(draw_script(seed)).violations:
            misfits = [words for words in violations if MISFIT.search(words)]
            assert misfits == [], "what is planted is called otherwise by now: the search found nothing"
            return seed
    return None


def test_there_are_20_planted_bugs_and_more() -> None:
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names) >= 20
    assert KNOWN["chaos"].keys() <= set(names)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    known = bug.name in KNOWN["chaos"]
    seeds = known_first("chaos", bug.name, range(FEW_SEEDS if known else 0))
    if found_at(bug, seeds, monkeypatch) is None:
        assert not known, f"not found in {FEW_SEEDS} seeds"
        pytest.skip("no seed is known: `make soak` searches, scripts/planted_seeds.py writes it down")


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_some_seed_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_at(bug, known_first("chaos", bug.name, range(MAX_SEEDS)), monkeypatch) is not None
