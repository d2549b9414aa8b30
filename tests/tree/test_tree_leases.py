"""Locks: who holds what, and for how long."""

from __future__ import annotations

import gc

import pytest

from asynchicache.errors import InternalError, LeaseWarning
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST

STATE_DEVICE, STATE_HOST = 2, 3


def test_a_lease_keeps_the_path_and_nothing_else(bed):
    bed.add("abcd")
    bed.add("abxy")
    lease = bed.lock("abc")

    bed.evict(FULL_DEVICE)

    assert bed.words(FULL_DEVICE) == {"ab", "abc"}
    bed.check([lease])
    lease.close()


def test_closing_gives_back_exactly_once(bed):
    bed.add("ab")
    one, two = bed.lock("ab"), bed.lock("ab")

    one.close()
    one.close()

    assert one.closed
    assert bed.node("ab").locks[FULL_DEVICE] == 1
    two.close()
    bed.evict(FULL_DEVICE)
    assert bed.match("ab").pages == 0


def test_a_lost_lease_warns_and_gives_back_at_once(bed):
    bed.add("ab")
    lease = bed.lock("ab")
    gc.disable()  # a cycle through the lease would keep it until the collector comes
    try:
        with pytest.warns(LeaseWarning, match="a request was lost, not closed: leave it by `async with`"):
            del lease
    finally:
        gc.enable()

    assert bed.node("ab").locks == [0, 0]
    bed.check()


def test_pinning_splits_where_the_match_ends(bed):
    bed.add("abcd")

    with bed.lock("abx") as lease:
        assert bed.word(lease.node) == "ab"
        assert bed.node("abcd").pages == 2
        bed.check([lease])


def test_a_lease_on_a_state_keeps_it_and_its_pages(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcd", states=[1])

    with hybrid.lock("ab") as lease:
        hybrid.evict(STATE_DEVICE)
        hybrid.evict(FULL_DEVICE)
        assert hybrid.match("abcd").pages == 2
        hybrid.check([lease])

    hybrid.evict(FULL_DEVICE)
    assert hybrid.match("ab").full_pages == 0


def test_a_lease_keeps_the_host_where_the_device_has_nothing(hybrid):
    hybrid.add_saved("ab", states=[1])
    hybrid.add_saved("abcd", states=[1])
    hybrid.evict(FULL_DEVICE, 2)
    assert hybrid.words(FULL_DEVICE) == {"ab"}

    with hybrid.lock("abcd") as lease:
        hybrid.evict(FULL_DEVICE)
        hybrid.evict(FULL_HOST)
        hybrid.evict(STATE_HOST)
        assert hybrid.words(FULL_DEVICE) == {"ab"}
        assert hybrid.words(FULL_HOST) == {"ab", "abcd"}
        assert hybrid.words(STATE_HOST) == {"abcd"}
        hybrid.check([lease])


def test_a_lease_moves_to_what_was_inserted_behind_it(bed):
    lease = bed.lock("abcd")
    bed.insert(lease, "abcd")
    bed.evict(FULL_DEVICE)
    assert bed.match("abcd").pages == 4

    bed.tree.relock(lease, bed.tree.root(b""))
    bed.check([lease])
    bed.evict(FULL_DEVICE)

    assert bed.match("abcd").pages == 0
    lease.close()


def test_a_lease_follows_a_split(bed):
    bed.add("abcd")
    lease = bed.lock("abcd")

    bed.add("abxy")
    bed.evict(FULL_DEVICE)

    assert bed.match("abcd").pages == 4
    bed.check([lease])
    lease.close()
    bed.evict(FULL_DEVICE)
    assert bed.match("abcd").pages == 0


def test_a_closed_lease_publishes_nothing(bed):
    lease = bed.lock("ab")
    lease.close()

    with pytest.raises(InternalError, match="closed"):
        bed.insert(lease, "ab")

    bed.check()


def test_a_root_that_the_tree_never_had_can_be_let_go(bed):
    bare = bed.match("ab", b"new").node
    locks = [(bare, FULL_DEVICE)]
    bed.tree.lock_all(locks)
    bed.add("ab", b"new")

    bed.tree.unlock_all(locks)

    assert bed.match("ab", b"new").pages == 2


def test_a_lease_on_a_root_is_on_the_trees_own(bed):
    with bed.tree.lease(bed.match("ab", b"new").node) as lease:
        bed.insert(lease, "ab")

    assert bed.match("ab", b"new").pages == 2
