"""Work in flight, counted by the period in which it began."""

from __future__ import annotations

from asynchicache.planner.activity import Activity


def test_all_that_began_and_has_not_ended_is_running() -> None:
    activity = Activity()

    periods = [activity.begin() for _ in range(3)]
    assert (periods, activity.running()) == ([0, 0, 0], 3)
    activity.end(periods[0])
    assert activity.running() == 2
    activity.end(periods[1])
    activity.end(periods[2])
    assert activity.running() == 0


def test_a_closed_period_gets_no_more_work_but_what_follows_from_its_own() -> None:
    activity = Activity()
    first = activity.begin()

    assert activity.close_period() == first
    second = activity.begin()
    assert second == activity.period == first + 1
    assert activity.begin(first) == first, "what follows from the work of a period belongs to it"

    assert (activity.running(first), activity.running(second), activity.running()) == (2, 3, 3)
    activity.end(first)
    assert (activity.running(first), activity.running()) == (1, 2)
    activity.end(first)
    assert (activity.running(first), activity.running()) == (0, 1)


def test_a_wait_for_an_earlier_period_does_not_count_a_later_one() -> None:
    activity = Activity()
    closed = [activity.close_period() for _ in range(3)]
    later = activity.begin()

    assert closed == [0, 1, 2]
    assert [activity.running(period) for period in (*closed, later)] == [0, 0, 0, 1]
    activity.end(later)
    assert activity.running(later) == 0
    assert activity._counts == {}, "periods whose work has ended are forgotten"
