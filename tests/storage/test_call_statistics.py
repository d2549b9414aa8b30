"""How calls of an engine are added up."""

from __future__ import annotations

from asynchicache.storage.statistics import CallCounters
from asynchicache.types import Outcome


def test_calls_pages_bytes_and_seconds_are_added_up() -> None:
    tally = CallCounters(page_bytes=100)

    tally.count_answered({Outcome.HIT: 3, Outcome.MISS: 2, Outcome.FAILED: 0}, 0.5)
    tally.count_answered({Outcome.STORED: 1, Outcome.EXISTS: 4}, 0.25)
    counts = tally.snapshot()

    assert (counts.calls, counts.pages, counts.bytes, counts.seconds) == (2, 10, 400, 0.75)
    assert counts.outcomes == {Outcome.HIT: 3, Outcome.MISS: 2, Outcome.STORED: 1, Outcome.EXISTS: 4}
    assert counts.latencies.count == 2
    assert (counts.errors, counts.late) == (0, 0)


def test_what_was_refused_without_asking_is_no_call() -> None:
    tally = CallCounters(page_bytes=100)

    tally.count_refused({Outcome.REJECTED: 5})
    counts = tally.snapshot()

    assert (counts.calls, counts.pages, counts.bytes, counts.seconds) == (0, 5, 0, 0)
    assert counts.outcomes == {Outcome.REJECTED: 5}


def test_a_snapshot_stays_as_it_was() -> None:
    tally = CallCounters(page_bytes=1)
    tally.count_answered({Outcome.HIT: 1}, 1.0)
    before = tally.snapshot()
    tally.count_answered({Outcome.HIT: 1}, 1.0)
    tally.errors += 1
    tally.late += 2

    assert (before.pages, before.outcomes, before.errors, before.late) == (1, {Outcome.HIT: 1}, 0, 0)
    after = tally.snapshot()
    assert (after.pages, after.errors, after.late) == (2, 1, 2)
