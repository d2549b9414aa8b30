"""Who goes first, what goes with it, and what must stay."""

from __future__ import annotations

import pytest

from asynchicache.tree.node import ABSENT, FULL_DEVICE, FULL_HOST, RESIDENT, SlotPlace
from asynchicache.tree.value import SUPERSEDED_SHARE
from asynchicache.types import Tier

STATE_DEVICE, STATE_HOST = 2, 3


def order(bed, place: SlotPlace) -> str:
    """The pages in the order in which they go; every letter may be in the tree once only."""
    letters = {
        slot: letter
        for node in bed.tree.nodes()
        for slot, letter in zip(node.slots_at(place), bed.word(node)[-node.pages :], strict=False)
    }
    gone = ""
    while freed := bed.evict(place, 1).slots.get(place):
        gone += "".join(letters[slot] for slot in freed)
        bed.check()
    return gone


# Candidates


def test_only_ends_of_paths_are_candidates(bed):
    bed.add("ab")
    bed.add("abcd")
    bed.add("abxy")

    assert {bed.word(node) for node in bed.tree.queues[FULL_DEVICE].members} == {"abcd", "abxy"}


def test_every_state_is_a_candidate(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcd", states=[1])

    assert {hybrid.word(node) for node in hybrid.tree.queues[STATE_DEVICE].members} == {"ab", "abcd"}


def test_an_end_on_the_device_may_have_children_on_the_host(bed):
    bed.add_saved("ab")
    bed.add_saved("abcd")
    bed.evict(FULL_DEVICE, 2)

    assert bed.tree.queues[FULL_DEVICE].members == {bed.node("ab")}
    assert bed.tree.queues[FULL_HOST].members == {bed.node("abcd")}


# Order


def test_the_least_recently_used_end_goes_first(bed):
    for word in ("ab", "cd", "ef"):
        bed.add(word)
    bed.lock("ab").close()

    assert order(bed, FULL_DEVICE) == "dcfeba"


@pytest.mark.parametrize("place", [FULL_DEVICE, FULL_HOST])
def test_a_parent_is_as_recently_used_as_the_child_that_left_it(bed, place):
    for word in ("ab", "abcd", "xy"):
        bed.add_saved(word)
    if place == FULL_HOST:
        bed.evict(FULL_DEVICE)
    with bed.lock("xy"):
        bed.lock("abcd").close()  # later than `xy`, which was used later than `ab`
        bed.evict(place, 2)
        assert bed.words(place) == {"ab", "xy"}

    assert order(bed, place) == "yxba"


def test_states_go_by_their_own_use(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcd", states=[1])
    hybrid.add("xy", states=[1])
    hybrid.lock("ab").close()

    gone = [hybrid.evict(STATE_DEVICE, 1).slots[STATE_DEVICE][0] for _ in range(3)]

    assert gone == [1, 2, 0]


def test_using_a_prefix_does_not_use_the_states_before_it(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("xy", states=[1])
    hybrid.add("abcd", states=[1])
    hybrid.lock("xy").close()
    hybrid.lock("abcd").close()

    assert hybrid.evict(STATE_DEVICE, 1).slots == {STATE_DEVICE: [0]}


def states_in_order(bed, place: SlotPlace) -> list[int]:
    return [freed[place][0] for freed in iter(lambda: bed.evict(place, 1).slots, {})]


def test_a_state_that_the_conversation_went_past_goes_first(hybrid):
    hybrid.add("xy", states=[1])
    hybrid.add_saved("ab", states=[1])
    hybrid.finish(hybrid.save("xy"))
    hybrid.tree.supersede(hybrid.add("abcd", states=[1]), 1)
    hybrid.check()

    assert states_in_order(hybrid, STATE_DEVICE) == [1, 0, 2]
    assert states_in_order(hybrid, STATE_HOST) == [0, 1]  # numbered in the order of their saves


def test_a_state_at_a_branch_keeps_its_turn(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abxy")
    hybrid.add("z", states=[1])
    hybrid.tree.supersede(hybrid.add("abcd", states=[1]), 1)

    assert states_in_order(hybrid, STATE_DEVICE) == [1, 0, 2]


def test_a_superseded_state_that_is_used_again_keeps_its_turn(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("z", states=[1])
    node = hybrid.add("abcd", states=[1])
    for _ in range(3):
        hybrid.tree.supersede(node, 1)
    hybrid.lock("ab").close()
    hybrid.check()

    assert states_in_order(hybrid, STATE_DEVICE) == [1, 2, 0]


def test_a_pinned_state_can_be_superseded(hybrid):
    hybrid.add("z", states=[1])
    hybrid.add("ab", states=[1])
    with hybrid.lock("ab") as lease:
        hybrid.tree.supersede(hybrid.insert(lease, "abcd", states=[1]).node, 1)
    hybrid.check()

    assert states_in_order(hybrid, STATE_DEVICE) == [1, 0, 2]


def test_a_state_is_as_recently_used_as_what_left_from_below_it(hybrid):
    for word in ("ab", "abcd", "xy"):
        hybrid.add(word, states=[1])
    with hybrid.lock("xy"):
        hybrid.lock("abcd").close()
        hybrid.evict(FULL_DEVICE, 2)

    assert states_in_order(hybrid, STATE_DEVICE) == [2, 0]


# Amounts


def test_a_tail_is_cut_off_if_that_is_enough(bed):
    bed.add("abcdef")

    freed = bed.evict(FULL_DEVICE, 2)

    assert freed.slots == {FULL_DEVICE: [4, 5]}
    assert (freed.lost, freed.demoted) == (2, 0)
    assert bed.match("abcdef").pages == 4
    bed.check()


def test_a_tail_with_a_host_copy_is_cut_off_the_device_only(bed):
    bed.add_saved("abcdef")

    freed = bed.evict(FULL_DEVICE, 2)

    assert freed.slots == {FULL_DEVICE: [4, 5]}
    assert (freed.lost, freed.demoted) == (0, 2)
    assert bed.words(FULL_DEVICE) == {"abcd"}
    assert bed.words(FULL_HOST) == {"abcd", "abcdef"}
    bed.check()


def test_a_node_with_a_state_goes_whole(hybrid):
    hybrid.add("abcd", states=[1])

    freed = hybrid.evict(FULL_DEVICE, 1)

    assert freed.slots == {FULL_DEVICE: [0, 1, 2, 3], STATE_DEVICE: [0]}
    hybrid.check()


def test_the_rest_of_a_cut_node_can_be_found_extended_and_evicted(bed):
    bed.add("abcd")
    bed.evict(FULL_DEVICE, 1)

    bed.add("abcx")

    assert bed.node("abcx").slots_at(FULL_DEVICE) == [4]
    bed.check()
    assert bed.evict(FULL_DEVICE).count(FULL_DEVICE) == 4


def test_eviction_goes_up_the_path_until_it_is_enough(bed):
    bed.add("ab")
    bed.add("abcd")

    freed = bed.evict(FULL_DEVICE, 3)

    assert sorted(freed.slots[FULL_DEVICE]) == [1, 2, 3]
    assert bed.match("ab").pages == 1
    bed.check()


def test_less_is_freed_if_the_rest_is_held(bed):
    bed.add("ab")
    bed.add("xy")
    with bed.lock("xy") as lease:
        assert bed.evict(FULL_DEVICE, 3).count(FULL_DEVICE) == 2
        bed.check([lease])


def test_nothing_is_freed_of_an_empty_tree(bed):
    freed = bed.evict(FULL_DEVICE, 1)

    assert (freed.slots, freed.lost, freed.count(FULL_DEVICE)) == ({}, 0, 0)


# Cascade


def test_full_pages_take_their_state_along_in_that_tier_only(hybrid):
    hybrid.add_saved("ab", states=[1])

    freed = hybrid.evict(FULL_DEVICE)

    assert freed.slots == {FULL_DEVICE: [0, 1], STATE_DEVICE: [0]}
    assert hybrid.node("ab").residency == [ABSENT, RESIDENT, ABSENT, RESIDENT]
    assert hybrid.evict(FULL_HOST).slots == {FULL_HOST: [0, 1], STATE_HOST: [0]}
    assert hybrid.match("ab").full_pages == 0
    hybrid.check()


def test_a_state_goes_alone(hybrid):
    hybrid.add("ab", states=[1])

    freed = hybrid.evict(STATE_DEVICE)

    assert freed.slots == {STATE_DEVICE: [0]}
    assert (freed.lost, freed.demoted) == (0, 0)
    assert hybrid.match("ab").full_pages == 2
    hybrid.check()


def test_host_copies_go_from_under_device_pages(bed):
    bed.add_saved("ab")

    freed = bed.evict(FULL_HOST)

    assert freed.slots == {FULL_HOST: [0, 1]}
    assert (freed.lost, freed.demoted) == (0, 2)
    assert bed.match("ab").pages == 2
    bed.check()


# What is dirty


def test_only_what_the_host_has_goes_if_dirty_pages_must_stay(hybrid):
    hybrid.add_saved("ab", states=[1])
    hybrid.add("xy", states=[1])

    assert hybrid.evict(STATE_DEVICE, dirty=False).slots == {STATE_DEVICE: [0]}
    assert hybrid.evict(FULL_DEVICE, dirty=False).slots == {FULL_DEVICE: [0, 1]}
    hybrid.check()
    assert hybrid.evict(FULL_DEVICE).slots == {FULL_DEVICE: [2, 3], STATE_DEVICE: [1]}


def test_what_was_spared_keeps_its_turn(bed):
    bed.add("ab")
    bed.add_saved("cd")
    bed.add("ef")
    bed.evict(FULL_DEVICE, dirty=False)

    assert order(bed, FULL_DEVICE) == "bafe"


# Policies


@pytest.mark.parametrize(("policy", "expected"), [("size", "bcda"), ("lru", "bcda"), ("fifo", "abcd")])
def test_policies_differ(make_bed, policy, expected):
    bed = make_bed(eviction=policy)
    for letter in "abcd":
        bed.add(letter)
    bed.lock("a").close()

    assert order(bed, FULL_DEVICE) == expected


def test_fifo_goes_by_the_age_of_pages_and_not_of_the_node_that_holds_them(make_bed):
    bed = make_bed(eviction="fifo")
    bed.add("abcd")
    bed.add("xy")
    bed.lock("ab").close()  # splits: the node of `ab` is the youngest

    assert order(bed, FULL_DEVICE) == "dcbayx"


def test_a_policy_is_for_full_pages_and_states_are_lru(make_bed):
    bed = make_bed(states=1, eviction="fifo")
    bed.add("ab", states=[1])
    bed.add("cd", states=[1])
    bed.lock("ab").close()

    assert bed.evict(STATE_DEVICE, 1).slots == {STATE_DEVICE: [1]}
    bed.take_states(bed.node("cd"), Tier.DEVICE, [1])
    assert bed.evict(FULL_DEVICE, 2).slots[FULL_DEVICE] == [0, 1]


def test_pages_behind_which_nothing_can_be_resumed_go_first(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("cd", states=[1])
    hybrid.add("ef")
    hybrid.evict(FULL_DEVICE, 2)
    assert hybrid.words(FULL_DEVICE) == {"ab", "cd"}
    hybrid.tree.clear_slots(hybrid.node("cd"), STATE_DEVICE)
    hybrid.evict(FULL_DEVICE, 2)
    assert hybrid.words(FULL_DEVICE) == {"ab"}
    hybrid.check()


def test_what_loses_few_tokens_for_its_bytes_goes_first(make_bed):
    """A state costs as much as its pages: a short turn behind a long one frees much and loses little."""
    bed = make_bed(states=1)
    bed.tree.value.costs = (1.0, 10.0)
    bed.add("abcdefgh", states=[1])
    bed.add("abcdefghij", states=[1])
    bed.lock("abcdefgh").close()
    bed.add("xyzuvw", states=[1])
    assert bed.tree.value.density(bed.node("abcdefghij"), FULL_DEVICE) == 2 / (2 + 10)
    assert bed.tree.value.density(bed.node("xyzuvw"), FULL_DEVICE) == 6 / (6 + 10)
    assert bed.tree.value.density(bed.node("abcdefgh"), STATE_DEVICE) == 8 / 10
    bed.evict(FULL_DEVICE, 1)
    assert bed.words(FULL_DEVICE) == {"abcdefgh", "xyzuvw"}


def test_a_superseded_state_is_no_place_to_resume_for_long(make_bed):
    bed = make_bed(states=1)
    bed.add("ab", states=[1])
    bed.add("abcd", states=[1])
    bed.tree.supersede(bed.node("abcd"), 1)
    assert bed.tree.value.density(bed.node("ab"), STATE_DEVICE) == SUPERSEDED_SHARE * 2
    assert bed.tree.value.density(bed.node("abcd"), FULL_DEVICE) == 4 / (4 + 1)
    bed.lock("ab").close()
    assert bed.tree.value.density(bed.node("ab"), STATE_DEVICE) == 2


def test_what_is_cut_off_at_its_end_has_lost_the_stored_state_there(hybrid):
    hybrid.add("abcd")
    hybrid.node("abcd").stored = 0b11

    hybrid.evict(FULL_DEVICE, 1)

    assert hybrid.node("abc").stored == 0b01
