"""Sliding windows in the tree: where a prefix may end, what is kept for it, and what goes first.

Several tests are named for the crash in a serving engine's history that they would have caught.
"""

from __future__ import annotations

import pytest

from asynchicache.tree import tier_copies
from asynchicache.tree.node import FULL, FULL_DEVICE, FULL_HOST, SlotPlace, place_of
from asynchicache.tree.radix_tree import Pages
from asynchicache.tree.tier_copies import CopyRequest
from asynchicache.types import Tier

WINDOW, STATE = 1, 1
DEVICE, HOST = place_of(WINDOW, Tier.DEVICE), place_of(WINDOW, Tier.HOST)
MIXED_WINDOW = place_of(2, Tier.DEVICE)


def windowed(bed, place: SlotPlace = DEVICE) -> set[str]:
    """The pages that have a slot of the window, each as the word that ends with it."""
    found = set()
    for node in bed.tree.nodes():
        if node.slots[place] is not None:
            word = bed.word(node)
            found |= {word[:end] for end in range(node.end - node.pages + 1, node.end + 1)}
    return found


def kept_windows(bed, lease) -> list[str]:
    """The ends of the nodes whose window a lease keeps on the device, each as often as it does."""
    return sorted(bed.word(node) for node, place in lease.locked if place == DEVICE)


# Where a prefix may end


def test_a_window_from_the_first_page_on_ends_anywhere(sliding):
    sliding.add("abcdef")

    assert [sliding.match("abcdef", limit=n).pages for n in range(7)] == list(range(7))


def test_a_prefix_ends_only_behind_a_whole_window(sliding):
    sliding.add("abcdef", windows=3)  # the pages d, e and f

    assert sliding.match("abcdef").pages == 6
    assert sliding.match("abcdef", limit=5).pages == 5
    match = sliding.match("abcdef", limit=4)
    assert (match.pages, match.full_pages) == (0, 4)  # page d alone is half a window


def test_a_prefix_shorter_than_the_window_needs_all_of_it(bed, make_bed):
    bed = make_bed(windows=[4])
    bed.add("ab")

    assert bed.match("ab").pages == 2
    bed.evict(DEVICE)
    assert bed.match("ab").pages == 0


def test_a_window_may_lie_in_several_nodes(sliding):
    sliding.add("abcd")
    sliding.add("abxy")

    assert sliding.match("abcz").pages == 3  # pages b and c, of two nodes
    sliding.check()


def test_a_gap_moves_the_end_above_it(sliding):
    sliding.add("ab")
    sliding.add("abcd", windows=0)
    sliding.add("abcdefgh", windows=3)

    assert sliding.match("abcdefgh").pages == 8
    assert sliding.match("abcdef").pages == 2  # f is there, e is not
    assert sliding.match("abcd").pages == 2


def test_a_state_and_a_window_must_meet(mixed):
    """Least of their maxima is a prefix that one of them cannot restore (#39147, #39267)."""
    mixed.add("abcd", states=[STATE], windows=0)
    mixed.add("abcdef", windows=2)

    match = mixed.match("abcdef")

    assert (match.pages, match.full_pages) == (0, 6)
    assert mixed.tree.held_back(mixed.tokens("abcdef"), match).component_id == STATE


def test_two_windows_of_different_length_intersect(make_bed):
    bed = make_bed(windows=[1, 3])
    with bed.lock("abcdef") as lease:
        bed.insert(lease, "abcdef", windows=2)

    assert bed.match("abcdef").pages == 0  # the longer one lacks a page
    held = bed.tree.held_back(bed.tokens("abcdef"), bed.match("abcdef"))
    assert held == (2, False)


def test_what_had_to_make_room_is_told_from_what_never_was(sliding):
    sliding.add("abcdef", windows=2)
    sliding.evict(DEVICE)

    held = sliding.tree.held_back(sliding.tokens("abcdef"), sliding.match("abcdef"))

    assert held == (WINDOW, True)


def test_a_state_that_went_with_its_window_is_the_windows_fault(mixed):
    mixed.add("abcd", states=[STATE])
    mixed.evict(MIXED_WINDOW)

    held = mixed.tree.held_back(mixed.tokens("abcd"), mixed.match("abcd"))

    assert held == (2, True)


# Tombstones


def test_an_insert_fills_tombstones(sliding):
    sliding.add("abcdef", windows=2)
    sliding.evict(DEVICE)

    with sliding.tree.lease(sliding.tree.root(b"")) as lease:
        result = sliding.insert(lease, "abcdef", windows=3)

    assert result.windows == {WINDOW: {}}
    assert len(result.duplicates) == 6
    assert windowed(sliding) == {"abcd", "abcde", "abcdef"}
    sliding.check()


def test_pages_that_are_there_stay_the_callers(sliding):
    sliding.add("abcd", windows=2)

    with sliding.tree.lease(sliding.tree.root(b"")) as lease:
        slots = sliding.slots(DEVICE, 3)
        result = sliding.tree.insert(
            lease, sliding.tokens("abcd"), sliding.slots(FULL, 4), windows={WINDOW: Pages(1, slots)}
        )

    assert result.windows == {WINDOW: {2: slots[1], 3: slots[2]}}
    assert windowed(sliding) == {"ab", "abc", "abcd"}
    sliding.check()


def test_a_split_leaves_both_halves_their_slots(sliding):
    sliding.add("abcd")
    sliding.add("abxy", windows=2)

    slots = [slot for word in ("a", "ab", "abcd") for slot in sliding.node(word).slots_at(DEVICE)]

    assert slots == [0, 1, 2, 3]
    sliding.check()


# What is kept


def test_a_lease_keeps_its_window_with_the_page_before_and_no_more(sliding):
    sliding.add("abcdef")

    with sliding.lock("abcdef") as lease:
        sliding.evict(DEVICE)
        assert windowed(sliding) == {"abcd", "abcde", "abcdef"}
        sliding.check([lease])
    sliding.evict(DEVICE)
    assert windowed(sliding) == set()


def test_a_lease_keeps_a_window_through_a_split(sliding):
    """Lock and unlock walked different nodes after a split (#24153, #24972, #36377)."""
    sliding.add("abcd")
    with sliding.lock("abcd") as lease:
        sliding.add("abcxy", windows=2)  # cuts the leased window in two
        sliding.check([lease])
        sliding.evict(DEVICE)
        assert {"abc", "abcd"} <= windowed(sliding)
    sliding.check()
    assert all(not any(node.locks) for node in sliding.tree.nodes())


def test_two_leases_on_one_window_are_let_go_one_by_one(sliding):
    sliding.add("abcd")
    first, second = sliding.lock("abcd"), sliding.lock("abcd")
    sliding.add("abcxy", windows=2)

    first.close()
    sliding.evict(DEVICE)
    assert {"abc", "abcd"} <= windowed(sliding)
    sliding.check([second])
    second.close()
    sliding.check()


def test_a_lease_that_moves_on_keeps_both_windows_until_told(sliding):
    sliding.add("abcd", windows=2)
    with sliding.lock("abcd") as lease:
        sliding.insert(lease, "abcdefg", windows=3)
        sliding.evict(DEVICE)
        assert windowed(sliding) >= {"abc", "abcd", "abcdef", "abcdefg"}  # a forward may read all of it
        behind: tier_copies.Locks = []
        sliding.tree.drop_behind(lease, WINDOW, 4, behind)
        sliding.evict(DEVICE)
        assert {"abc", "abcd"} <= windowed(sliding)
        sliding.tree.unlock_all(behind)
        sliding.evict(DEVICE)
        assert windowed(sliding) == {"abcde", "abcdef", "abcdefg"}
        sliding.check([lease])


# What goes first


def test_what_lies_behind_the_window_goes_first(sliding):
    """A hot window was evicted before a cold one (#26615, #26907)."""
    sliding.add("abcdef")
    sliding.add("xy")

    assert [sliding.evict(DEVICE, 1).count(DEVICE) for _ in range(3)] == [1, 2, 1]

    assert sliding.match("abcdef").pages == 6
    assert windowed(sliding) == {"abcde", "abcdef", "x", "xy"}


def test_the_window_of_the_last_turn_goes_before_older_conversations(sliding):
    sliding.add("xy")
    sliding.add("abcd", windows=2)
    with sliding.lock("abcd") as lease:
        result = sliding.insert(lease, "abcdefgh", windows=2)
        sliding.tree.supersede(result.node, WINDOW)

    sliding.evict(DEVICE, 2)

    assert windowed(sliding) == {"x", "xy", "abcdefg", "abcdefgh"}


def test_a_window_at_a_branch_is_not_superseded(sliding):
    sliding.add("xy")
    sliding.add("abcd", windows=2)
    sliding.add("abcdyz", windows=2)
    with sliding.lock("abcd") as lease:
        result = sliding.insert(lease, "abcdefgh", windows=2)
        sliding.tree.supersede(result.node, WINDOW)

    sliding.evict(DEVICE, 2)

    assert "xy" not in windowed(sliding)
    assert "abcd" in windowed(sliding)


def test_a_state_goes_with_the_window_that_it_needs(mixed):
    mixed.add("abcd", states=[STATE])

    freed = mixed.evict(MIXED_WINDOW)

    assert freed.count(place_of(STATE, Tier.DEVICE)) == 1
    mixed.check()


def test_a_state_stays_while_its_window_is_on_the_host(mixed):
    mixed.add_saved("abcd", states=[STATE])

    freed = mixed.evict(MIXED_WINDOW)

    assert not freed.count(place_of(STATE, Tier.DEVICE))
    assert mixed.match("abcd").pages == 4


def test_full_pages_take_the_window_along(sliding):
    sliding.add_saved("abcd")

    freed = sliding.evict(FULL_DEVICE)

    assert freed.count(DEVICE) == 4
    assert windowed(sliding, HOST) == {"ab", "abc", "abcd"}
    assert sliding.match("abcd").pages == 4
    sliding.check()


def test_a_leaf_is_cut_no_shorter_than_room_is_wanted(sliding):
    sliding.add("abcdef")

    freed = sliding.evict(FULL_DEVICE, 1)

    assert (freed.count(FULL_DEVICE), freed.count(DEVICE)) == (1, 1)
    assert sliding.match("abcdef").pages == 5
    sliding.check()


# Copies


def test_only_the_window_and_the_page_before_it_are_saved(sliding):
    sliding.add("abcdef")

    tier_copy = sliding.save("abcdef")
    sliding.finish(tier_copy)

    assert windowed(sliding, HOST) == {"abcd", "abcde", "abcdef"}
    sliding.evict(FULL_DEVICE)
    assert sliding.match("abcdef", limit=5).pages == 5  # as of a prompt whose last token is computed anew
    sliding.check()


def test_exactly_the_missing_window_is_loaded(sliding):
    """A gap in the window on the host crashed the load (#25067, #28161)."""
    sliding.add_saved("abcdef")
    sliding.evict(FULL_DEVICE)

    with sliding.lock("abcdef") as lease:
        wanted = tier_copies.missing_on_device(sliding.tree, lease.node)
        sizes = {n: sum(w.size for w in wanted if w.component_id == n) for n in (FULL, WINDOW)}
        assert sizes == {FULL: 6, WINDOW: 3}
        tier_copy = sliding.begin(Tier.DEVICE, wanted)
        sliding.check([lease], [tier_copy])
        sliding.finish(tier_copy)
    assert windowed(sliding) == {"abcd", "abcde", "abcdef"}
    sliding.check()


def test_a_window_half_on_the_device_is_completed(sliding):
    sliding.add_saved("abcdef", windows=2)
    sliding.add("abcdex", windows=1)  # cuts the window: e by itself
    sliding.evict(DEVICE)
    with sliding.tree.lease(sliding.node("abcde")) as lease:
        sliding.insert(lease, "abcdef", windows=1)

    with sliding.lock("abcdef") as lease:
        wanted = tier_copies.missing_on_device(sliding.tree, lease.node)

        assert wanted == [CopyRequest(sliding.node("abcde"), WINDOW)]


def test_a_copy_in_flight_is_split_with_its_node(sliding):
    sliding.add("abcd")
    tier_copy = sliding.save("abcd")
    sliding.add("abcxy", windows=2)
    sliding.check(tier_copies=[tier_copy])

    sliding.finish(tier_copy)

    assert {"abc", "abcd"} <= windowed(sliding, HOST)
    sliding.check()


@pytest.mark.parametrize("place", [FULL_HOST, HOST])
def test_a_copy_in_flight_keeps_what_it_copies(sliding, place):
    """Host pages went while they were being loaded (#26728, #27424)."""
    sliding.add_saved("abcdef")
    sliding.evict(FULL_DEVICE)
    tier_copy = sliding.load("abcdef")

    assert not sliding.evict(place).count(place)
    sliding.finish(tier_copy)
    sliding.check()


def test_a_failed_load_takes_its_window_back(sliding):
    sliding.add_saved("abcdef")
    sliding.evict(FULL_DEVICE)
    tier_copy = sliding.load("abcdef")

    lost = sliding.finish(tier_copy, arrived=False)

    assert sorted(map(len, lost.values())) == [3, 6]
    assert sliding.match("abcdef").pages == 6  # still on the host
    sliding.check()


# What a lease keeps of what was published


def test_a_lease_keeps_each_page_that_was_taken_once_and_none_before(sliding):
    with sliding.lock("abcdef") as lease:
        sliding.insert(lease, "abcdef", windows=4)  # the pages c to f; d to f are kept

        assert kept_windows(sliding, lease) == ["abc", "abcdef"]


def test_a_lease_keeps_none_that_were_refused_but_for_its_window(sliding):
    with sliding.lock("abcdef") as lease:
        sliding.add("abcdef")
        sliding.insert(lease, "abcdef")

        assert kept_windows(sliding, lease) == ["abcdef"]
