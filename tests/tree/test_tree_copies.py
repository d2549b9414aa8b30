"""Copies in flight: what is visible meanwhile, and what is left when they end well or badly."""

from __future__ import annotations

from asynchicache.tree import tier_copies
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, LOADING, RESIDENT, SAVING
from asynchicache.types import Tier

STATE_DEVICE, STATE_HOST = 2, 3


def test_a_save_is_on_its_way_and_then_there(hybrid):
    hybrid.add("ab", states=[1])

    tier_copy = hybrid.save("ab")
    assert hybrid.node("ab").residency == [RESIDENT, SAVING, RESIDENT, SAVING]
    assert hybrid.evict(FULL_DEVICE).slots == {}
    assert hybrid.evict(STATE_DEVICE).slots == {}
    hybrid.check(tier_copies=[tier_copy])

    assert hybrid.finish(tier_copy) == {}
    assert hybrid.node("ab").residency == [RESIDENT] * 4
    hybrid.check()


def test_a_load_is_on_its_way_and_then_there(hybrid):
    hybrid.add_host("ab", states=[1])

    tier_copy = hybrid.load("ab")
    assert hybrid.node("ab").residency == [LOADING, RESIDENT, LOADING, RESIDENT]
    assert hybrid.match("ab").pages == 2
    assert hybrid.evict(FULL_HOST).slots == {}
    assert hybrid.evict(STATE_HOST).slots == {}
    hybrid.check(tier_copies=[tier_copy])

    assert hybrid.finish(tier_copy) == {}
    assert hybrid.node("ab").residency == [RESIDENT] * 4
    hybrid.check()


def test_saving_brings_the_parents_along(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcd", states=[1])

    wanted = tier_copies.missing_on_host(hybrid.tree, hybrid.node("abcd"))

    assert [(hybrid.word(want.node), want.component_id, want.size) for want in wanted] == [
        ("ab", FULL, 2), ("ab", 1, 1), ("abcd", FULL, 2), ("abcd", 1, 1),
    ]  # fmt: skip


def test_what_is_saved_or_being_saved_is_not_wanted_again(hybrid):
    hybrid.add("ab", states=[1])
    tier_copy = hybrid.save("ab")
    assert tier_copies.missing_on_host(hybrid.tree, hybrid.node("ab")) == []

    hybrid.finish(tier_copy)

    assert tier_copies.missing_on_host(hybrid.tree, hybrid.node("ab")) == []


def test_what_is_arriving_itself_is_saved_another_time(hybrid):
    lease = hybrid.lock("")
    hybrid.insert(lease, "ab", states=[1], arriving=True)

    wanted = tier_copies.missing_on_host(hybrid.tree, hybrid.node("ab"))

    assert [want.component_id for want in wanted] == [FULL]
    lease.close()


def test_loading_wants_the_host_only_end_of_the_path(bed):
    bed.add_saved("ab")
    bed.add_host("abcd", after="ab")
    bed.add_host("abcdef", after="abcd")

    wanted = tier_copies.missing_on_device(bed.tree, bed.node("abcdef"))

    assert [bed.word(want.node) for want in wanted] == ["abcd", "abcdef"]


# Splits in flight


def test_both_halves_of_a_split_belong_to_the_flight(hybrid):
    hybrid.add("abcd", states=[1])
    tier_copy = hybrid.save("abcd")

    hybrid.add("abxy")

    assert {hybrid.word(node) for node in tier_copy.nodes(FULL)} == {"ab", "abcd"}
    assert [hybrid.word(node) for node in tier_copy.nodes(1)] == ["abcd"]
    assert hybrid.node("ab").residency == [RESIDENT, SAVING, ABSENT, ABSENT]
    hybrid.check(tier_copies=[tier_copy])

    hybrid.finish(tier_copy)

    assert hybrid.words(FULL_HOST) == {"ab", "abcd"}
    assert hybrid.node("ab").residency[FULL_HOST] == RESIDENT
    hybrid.check()


def test_both_halves_are_taken_back_when_the_flight_fails(bed):
    bed.add_host("abcd")
    tier_copy = bed.load("abcd")
    bed.add_host("abxy")

    lost = bed.finish(tier_copy, arrived=False)

    assert sorted(lost[FULL_DEVICE]) == [0, 1, 2, 3]
    assert bed.words(FULL_DEVICE) == set()
    assert bed.match("abcd").pages == 4
    bed.check()


def test_a_flight_without_copies_of_a_component_names_no_nodes(bed):
    bed.add("ab")

    tier_copy = bed.save("ab")

    assert tier_copy.nodes(1) == []
    bed.finish(tier_copy)


# Failures


def test_a_failed_save_leaves_the_device_alone(hybrid):
    hybrid.add("ab", states=[1])

    lost = hybrid.finish(hybrid.save("ab"), arrived=False)

    assert lost == {FULL_HOST: [0, 1], STATE_HOST: [0]}
    assert hybrid.node("ab").residency == [RESIDENT, ABSENT, RESIDENT, ABSENT]
    hybrid.check()


def test_a_failed_save_takes_back_what_storage_put_on_it(hybrid):
    hybrid.add("ab")
    tier_copy = hybrid.save("ab")
    hybrid.add_host("abcd", after="ab", states=[1])

    lost = hybrid.finish(tier_copy, arrived=False)

    assert {place: sorted(slots) for place, slots in lost.items()} == {
        FULL_HOST: [0, 1, 2, 3],
        STATE_HOST: [0],
    }
    assert hybrid.match("abcd").full_pages == 2
    hybrid.check()


def test_a_failed_load_takes_back_what_was_computed_on_it(hybrid):
    hybrid.add_host("ab", states=[1])
    tier_copy = hybrid.load("ab")
    lease = hybrid.lock("ab")
    hybrid.insert(lease, "abcd", states=[1])

    lost = hybrid.finish(tier_copy, arrived=False)

    assert sorted(lost[FULL_DEVICE]) == [0, 1, 2, 3]
    assert sorted(lost[STATE_DEVICE]) == [0, 1]
    assert hybrid.match("abcd").full_pages == 2
    hybrid.check([lease])
    lease.close()
    hybrid.check()


def test_a_failed_load_spares_other_branches(bed):
    bed.add_saved("ab")
    bed.add_host("abcd", after="ab")
    tier_copy = bed.load("abcd")
    bed.add("abxy")

    lost = bed.finish(tier_copy, arrived=False)

    assert bed.words(FULL_DEVICE) == {"ab", "abxy"}
    assert len(lost[FULL_DEVICE]) == 2
    bed.check()


# Flights that stand on one another


def test_a_flight_keeps_the_slots_that_another_failure_took_from_it(bed):
    bed.add_host("ab")
    bed.add_host("abcd", after="ab")
    below, above = bed.load("ab"), bed.load("abcd")

    assert bed.finish(below, arrived=False) == {FULL_DEVICE: [0, 1]}
    assert bed.words(FULL_DEVICE) == set(), "nothing may be found on pages that never came"
    assert (above.orphans(FULL_DEVICE), above.orphans(FULL_HOST)) == ([2, 3], [])
    bed.check(tier_copies=[above])

    assert bed.finish(above, arrived=True) == {FULL_DEVICE: [2, 3]}
    assert bed.words(FULL_DEVICE) == set()
    bed.check()


def test_what_a_failure_took_can_be_loaded_again_while_the_old_copy_runs(bed):
    bed.add_host("ab")
    bed.add_host("abcd", after="ab")
    below, above = bed.load("ab"), bed.load("abcd")
    bed.finish(below, arrived=False)

    again = bed.load("abcd")
    bed.check(tier_copies=[above, again])
    assert bed.finish(above, arrived=False) == {FULL_DEVICE: [2, 3]}
    bed.finish(again)

    assert bed.match("abcd").pages == 4
    assert bed.node("abcd").slots_at(FULL_DEVICE) == [6, 7]
    bed.check()


def test_pages_under_an_arriving_state_go_when_what_they_stand_on_fails(hybrid):
    hybrid.add_host("ab", states=[1])
    load = hybrid.load("ab")
    lease = hybrid.lock("ab")
    node = hybrid.insert(lease, "abcd", states=[1], arriving=True).node
    arrival = tier_copies.begin_arrival(hybrid.tree, node, [1])

    lost = hybrid.finish(load, arrived=False)
    hybrid.check([lease], [arrival])
    later = hybrid.finish(arrival)

    assert sorted(lost[FULL_DEVICE]) == [0, 1, 2, 3]
    assert lost[STATE_DEVICE] == [0]
    assert later == {STATE_DEVICE: [1]}
    assert hybrid.words(FULL_DEVICE) == set()
    lease.close()
    hybrid.check()


def test_what_was_computed_on_a_failed_load_is_not_saved(hybrid):
    hybrid.add_host("ab")
    load = hybrid.load("ab")
    lease = hybrid.lock("")
    hybrid.insert(lease, "abcd", states=[1])
    save = hybrid.save("abcd")

    lost = hybrid.finish(load, arrived=False)
    assert hybrid.match("abcd").full_pages == 2
    later = hybrid.finish(save)

    assert lost == {FULL_DEVICE: [0, 1]}
    assert later == {FULL_DEVICE: [4, 5], FULL_HOST: [2, 3], STATE_DEVICE: [0], STATE_HOST: [0]}
    assert hybrid.match("abcd").full_pages == 2
    lease.close()
    hybrid.check()


def test_a_load_keeps_its_source_when_the_host_loses_it(bed):
    bed.add("ab")
    save = bed.save("ab")
    bed.add_host("abcd", after="ab")
    load = bed.load("abcd")

    lost = bed.finish(save, arrived=False)

    assert lost == {FULL_HOST: [0, 1]}
    bed.check(tier_copies=[load])
    assert bed.finish(load) == {FULL_HOST: [2, 3]}
    assert bed.node("abcd").residency == [RESIDENT, ABSENT]
    bed.check()


def test_both_copies_of_a_page_can_be_lost(bed):
    bed.add("ab")
    save = bed.save("ab")
    bed.add_host("abcd", after="ab")
    load = bed.load("abcd")

    bed.finish(save, arrived=False)
    lost = bed.finish(load, arrived=False)

    assert lost == {FULL_HOST: [2, 3], FULL_DEVICE: [2, 3]}
    assert bed.match("abcd").pages == 2
    bed.check()


# Arrivals


def test_a_state_arrives(hybrid):
    lease = hybrid.lock("")
    node = hybrid.insert(lease, "ab", states=[1], arriving=True).node
    tier_copy = tier_copies.begin_arrival(hybrid.tree, node, [1])
    lease.close()
    assert hybrid.evict(FULL_DEVICE).slots == {}
    hybrid.check(tier_copies=[tier_copy])

    assert hybrid.finish(tier_copy) == {}

    assert node.residency[STATE_DEVICE] == RESIDENT
    assert hybrid.evict(STATE_DEVICE).slots == {STATE_DEVICE: [0]}


def test_a_state_that_never_arrives_is_a_tombstone(hybrid):
    with hybrid.lock("") as lease:
        node = hybrid.insert(lease, "ab", states=[1], arriving=True).node
        tier_copy = tier_copies.begin_arrival(hybrid.tree, node, [1])

    assert hybrid.finish(tier_copy, arrived=False) == {STATE_DEVICE: [0]}

    assert node.residency == [RESIDENT, ABSENT, ABSENT, ABSENT]
    hybrid.check()


def test_a_flight_keeps_what_it_is_told_to(hybrid):
    hybrid.add("ab", states=[1])
    tier_copy = tier_copies.begin(hybrid.tree, Tier.DEVICE, [])

    tier_copies.keep(hybrid.tree, tier_copy, [(hybrid.node("ab"), STATE_DEVICE)])
    assert hybrid.evict(STATE_DEVICE).slots == {}
    hybrid.check(tier_copies=[tier_copy])
    hybrid.finish(tier_copy)

    assert hybrid.evict(STATE_DEVICE).slots == {STATE_DEVICE: [0]}


def test_a_wanted_state_takes_one_slot(hybrid):
    node = hybrid.add("abcd", states=[1])

    assert tier_copies.CopyRequest(node, FULL).size == 4
    assert tier_copies.CopyRequest(node, 1).size == 1
    assert tier_copies.begin(hybrid.tree, Tier.HOST, []).locks == []
