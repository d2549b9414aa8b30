"""`invariants.problems` names every invariant that is broken on purpose."""

from __future__ import annotations

import pytest

from asynchicache.tree import invariants
from asynchicache.tree.node import ABSENT, FULL_DEVICE, FULL_HOST, RESIDENT

STATE_DEVICE, STATE_HOST = 2, 3


@pytest.fixture
def grown(hybrid):
    hybrid.add_saved("ab", states=[1])
    hybrid.add("abcd", states=[1])
    hybrid.add("abxy")
    hybrid.tree.digests(hybrid.node("abcd"))
    hybrid.check()
    return hybrid


def test_a_tree_that_is_well_has_no_problems(grown):
    with grown.lock("abcd") as lease:
        grown.check([lease])


def root_with_pages(bed):
    bed.tree.roots[b""].pages = 1


def foreign_parent(bed):
    bed.node("abcd").parent = bed.node("abxy")


def short_key(bed):
    bed.node("abcd").key = bed.node("abcd").key[:-8]


def wrong_end(bed):
    bed.node("abcd").end += 1


def lost_slots(bed):
    bed.node("abcd").slots[FULL_DEVICE] = None


def too_few_slots(bed):
    bed.node("abcd").slots[FULL_DEVICE].pop()


def two_states(bed):
    bed.node("abcd").slots[STATE_DEVICE].append(9)


def negative_locks(bed):
    bed.node("abcd").locks[FULL_HOST] = -1


def nowhere(bed):
    for place in (FULL_DEVICE, STATE_DEVICE):
        bed.tree.clear_slots(bed.node("abcd"), place)


def child_without_parent(bed):
    bed.tree.clear_slots(bed.node("ab"), FULL_DEVICE)


def state_without_pages(bed):
    bed.tree.clear_slots(bed.node("ab"), FULL_HOST)


def wrong_count_on_the_device(bed):
    bed.node("ab").device_children += 1


def wrong_count_on_the_host(bed):
    bed.node("ab").host_children += 1


def digests_of_other_tokens(bed):
    bed.node("abcd").digests[1] = bytes(32)


def digests_without_the_parents(bed):
    bed.node("ab").digests = None


def slot_of_two_nodes(bed):
    bed.node("abxy").slots[FULL_DEVICE][0] = bed.node("abcd").slots[FULL_DEVICE][0]


def forgotten_candidate(bed):
    bed.tree.queues[FULL_DEVICE].discard(bed.node("abxy"))


def stale_candidate(bed):
    bed.tree.queues[FULL_DEVICE].add(bed.node("ab"))


def candidate_without_entry(bed):
    queue = bed.tree.queues[STATE_DEVICE]
    queue.pop(9, 1), queue.pop(9, 1)
    queue.members |= {bed.node("ab"), bed.node("abcd")}


def candidate_with_a_later_entry(bed):
    bed.tree.queues[FULL_DEVICE].score(9, 1)
    bed.node("abxy").worth[0] = -1


def pin_of_nobody(bed):
    bed.tree.lock_for([], bed.node("abcd"), FULL_DEVICE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (root_with_pages, "root  has pages"),
        (foreign_parent, "is not its parent's child"),
        (short_key, "has a key of 24 bytes"),
        (wrong_end, "does not follow its parent, which ends at 2"),
        (lost_slots, "has None at place 0"),
        (too_few_slots, "has [2] at place 0"),
        (two_states, "has [1, 9] at place 2"),
        (negative_locks, "has -1 locks at place 1"),
        (nowhere, "has full pages nowhere"),
        (child_without_parent, "has full pages in DEVICE and its parent has not"),
        (state_without_pages, "has component 1 in HOST without full pages"),
        (wrong_count_on_the_device, "counts 3 children in DEVICE, has 2"),
        (wrong_count_on_the_host, "counts 1 children in HOST, has 0"),
        (digests_of_other_tokens, "has digests that its tokens do not give"),
        (digests_without_the_parents, "has digests and its parent has none"),
        (slot_of_two_nodes, "at place 0 belongs to 2 nodes"),
        (forgotten_candidate, "is no candidate at place 0"),
        (stale_candidate, "is a stale candidate at place 0"),
        (candidate_without_entry, "would come up too late at place 2"),
        (candidate_with_a_later_entry, "would come up too late at place 0"),
        (pin_of_nobody, "has 1 locks at place 0, leases hold 0"),
    ],
)
def test_damage_is_named(grown, damage, message):
    damage(grown)

    found = invariants.problems(grown.tree, [])

    assert any(message in problem for problem in found), found


def test_pins_are_not_checked_without_the_leases(grown):
    with grown.lock("abcd"):
        assert invariants.problems(grown.tree) == []
        assert invariants.problems(grown.tree, []) != []


def test_a_child_on_the_host_stands_on_its_parents_host_copy(grown):
    grown.node("abxy").residency[FULL_HOST] = RESIDENT
    grown.node("abxy").slots[FULL_HOST] = [8, 9]
    grown.node("ab").residency[FULL_HOST] = ABSENT

    assert any("has full pages in HOST and its parent has not" in p for p in invariants.problems(grown.tree))
