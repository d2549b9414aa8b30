"""What hints keep: set aside when its turn to go has come, in a share, and for so long."""

from __future__ import annotations

from math import inf

import pytest

from asynchicache.tree.keeps import HintShare
from asynchicache.tree.node import FULL_DEVICE, Keep, Node
from asynchicache.tree.policies import EvictionQueue, ValueQueue

ROOT = Node(None, b"", b"", 0, 1)


def node(serial: int, *, until: float = 0.0, seed: bytes = b"a", pages: int = 1, above: Node = ROOT) -> Node:
    made = Node(above, b"", b"", pages, 1)
    made.serial, made.worth = serial, [serial]
    made.slots[FULL_DEVICE] = list(range(pages))
    made.keep = Keep(until, seed) if until else None
    return made


@pytest.fixture(params=[EvictionQueue, ValueQueue])
def queue(request: pytest.FixtureRequest) -> EvictionQueue:
    """A queue of a place with 40 slots, of which hints may keep 10."""
    made = request.param(0, FULL_DEVICE, 1.0 if request.param is EvictionQueue else lambda _: 1.0)
    made.shelf.share = HintShare(40)
    return made


def pops(queue: EvictionQueue, now: float, count: int = 99) -> list[int]:
    found = []
    while len(found) < count and (one := queue.pop(1000, 1, now)) is not None:
        queue.shelf.discard(one)  # as if its slots were freed
        found.append(one.serial)
    return found


def test_what_is_kept_goes_after_all_else_first_whose_time_is_over_first(queue):
    for one in (node(1, until=60), node(2), node(3, until=50), node(4)):
        queue.add(one)

    assert pops(queue, now=10) == [2, 4, 3, 1]
    assert queue.shelf.share.used == 0


def test_time_that_is_over_keeps_nothing(queue):
    for one in (node(1, until=60), node(2), node(3)):
        queue.add(one)

    assert pops(queue, now=10, count=1) == [2]
    assert queue.problems() == []
    assert pops(queue, now=60) == [1, 3]


def test_only_kept_candidates_are_the_last_resort_of_a_shared_memory(queue):
    assert queue.score(1000, 1, 10) is None
    queue.add(node(1, until=60))
    assert queue.score(1000, 1, 10) == inf
    assert queue.score(1000, 1, 60) < inf


def test_more_than_a_share_goes_as_any_other(queue):
    for serial in range(1, 13):
        queue.add(node(serial, until=60))

    assert pops(queue, now=10, count=4) == [9, 10, 11, 12], "eight are four fifths of ten"
    queue.add(node(20, until=60, seed=b"b"))
    queue.add(node(21))
    assert pops(queue, now=10) == [21, 1, 2, 3, 4, 5, 6, 7, 8, 20], "another namespace has some of the rest"


def test_pages_above_what_is_kept_are_charged_once(queue):
    above = node(1, pages=4)
    first, second = node(2, until=60, pages=2, above=above), node(3, until=50, pages=2, above=above)
    for one in (first, second, node(4)):
        queue.add(one)
    assert pops(queue, now=10, count=1) == [4]
    share = queue.shelf.share
    assert share.used == queue.shelf.used == 8
    upper = node(5, pages=3)
    above.pages, above.parent = 1, upper  # as `split` does
    queue.shelf.split(upper, above)
    assert queue.problems() == []
    queue.shelf.discard(first)
    assert share.used == 6, "the other one stands on them"
    queue.shelf.discard(second)
    assert (share.used, share.namespaces) == (0, 0)


def test_a_later_end_of_the_sequence_is_kept_instead(queue):
    before, after = node(1, until=60), node(2, until=60)
    before.superseded = 1
    for one in (before, after, node(3)):
        queue.add(one)

    assert pops(queue, now=10) == [1, 3, 2]


def test_what_is_in_use_for_a_while_stays_kept(queue):
    used = node(1, until=60)
    for one in (used, node(2), node(3)):
        queue.add(one)
    assert pops(queue, now=10, count=1) == [2]
    queue.discard(used)
    queue.add(node(4, until=60))
    assert pops(queue, now=20) == [3, 4], "it is no candidate"
    queue.add(used)
    queue.add(node(5))
    assert pops(queue, now=30) == [5, 1]
    assert queue.shelf.share.used == 0


def test_what_comes_and_goes_leaves_no_entries(queue):
    for serial in range(1, 500):
        one = node(serial, until=3600)
        queue.add(one)
        assert queue.score(1000, 1, 10) == inf
        queue.discard(one)
        queue.shelf.discard(one)

    assert len(queue.shelf.ends) < 200
