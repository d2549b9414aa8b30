"""The search is not blind: bugs that are planted one at a time are found, each within 2,000 seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

from asynchicache.testing.chaos import run
from asynchicache.testing.chaos.run import run_script
from asynchicache.testing.chaos.search import quick_collection
from asynchicache.testing.chaos.workload import draw_script
from testing.planted import BUGS, Bug

MISFIT = re.compile(r"TypeError: .*\bargument")
MAX_SEEDS = 2000
FEW_SEEDS = 50
RARE = {
    "acknowledged_before_it_is_durable",
    "audit_sees_nothing",
    "beginnings_are_told_of_first",
    "checksum_not_checked",
    "copies_are_told_apart_by_value",
    "durable_believes_its_marks",
    "durable_forgets_tails",
    "fingerprint_without_weight_version",
    "freed_twice",
    "index_not_asked_for",
    "large_requests_wait_for_ever",
    "loading_page_served_without_its_fence",
    "minimum_instead_of_intersection",
    "needless_quarantine_leaks",
    "no_deadline",
    "old_snapshot_published_for_a_new_length",
    "published_window_is_anybodys",
    "salt_ignored",
    "shards_share_a_key",
    "slots_are_moved_without_their_bytes",
    "slots_of_a_late_call_are_given_back",
    "split_forgets_who_keeps_the_window",
    "state_published_inside_a_page",
    "tombstone_recovered_though_it_was_none",
    "waiter_that_gives_up_frees_the_read",
}
"""Bugs that a few seeds may miss: they are looked for in `make soak`."""

SOON = [bug for bug in BUGS if bug.name not in RARE]
LATER = [bug for bug in BUGS if bug.name in RARE]


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
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 20
    assert {bug.name for bug in BUGS} > RARE


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_replaces_what_exists(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(
        monkeypatch
    )  # raises where the function has another name by now: the rare ones are rarely searched


@pytest.mark.parametrize("bug", SOON, ids=lambda bug: bug.name)
def test_few_seeds_find_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_at(bug, range(FEW_SEEDS), monkeypatch) is not None


@pytest.mark.soak
@pytest.mark.parametrize("bug", LATER, ids=lambda bug: bug.name)
def test_some_seed_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_at(bug, range(MAX_SEEDS), monkeypatch) is not None
