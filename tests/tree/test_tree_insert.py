"""What `insert` and `insert_host` make of the slots that they are offered."""

from __future__ import annotations

from array import array

import pytest

from asynchicache.errors import InternalError
from asynchicache.hashing import page_digests, placed_pages
from asynchicache.tree.node import ABSENT, FULL_DEVICE, FULL_HOST, LOADING, RESIDENT

STATE_DEVICE, STATE_HOST = 2, 3


def test_new_pages_are_taken(bed):
    with bed.lock("abc") as lease:
        result = bed.insert(lease, "abc")

    assert (result.accepted, result.duplicates, result.filled) == (3, [], [result.node])
    assert bed.node("abc").slots == [[0, 1, 2], None]
    bed.check()


def test_known_pages_are_duplicates(bed):
    lease = bed.lock("abcd")
    bed.add("ab")  # somebody else is faster: slots 0 and 1

    result = bed.insert(lease, "abcd")

    assert result.duplicates == [2, 3]
    assert result.accepted == 2
    assert [bed.word(node) for node in result.filled] == ["abcd"]
    assert bed.node("abcd").slots_at(FULL_DEVICE) == [4, 5]
    bed.check([lease])
    lease.close()


def test_a_divergence_splits_and_takes_the_rest(bed):
    bed.add("abcd")
    lease = bed.lock("")

    result = bed.insert(lease, "abxy")

    assert result.duplicates == [4, 5]
    assert bed.node("abxy").slots_at(FULL_DEVICE) == [6, 7]
    assert bed.words(FULL_DEVICE) == {"ab", "abcd", "abxy"}
    lease.close()
    bed.check()


def test_ending_inside_a_node_splits_it(hybrid):
    hybrid.add("abcd")

    node = hybrid.add("ab", states=[1])

    assert hybrid.match("abcd").pages == 2
    assert node.pages == 2
    hybrid.check()


def test_pages_on_the_host_only_come_back_with_fresh_slots(bed):
    bed.add_saved("abcd")
    bed.evict(FULL_DEVICE)
    assert bed.words(FULL_DEVICE) == set()
    lease = bed.lock("")

    result = bed.insert(lease, "abx")

    assert (result.accepted, result.duplicates) == (3, [])
    assert [bed.word(node) for node in result.filled] == ["ab", "abx"]
    assert bed.node("ab").residency == [RESIDENT, RESIDENT]
    assert bed.node("abcd").residency == [ABSENT, RESIDENT]
    lease.close()
    bed.check()


def test_inserting_nothing_can_still_bring_a_state(hybrid):
    hybrid.add("ab")
    lease = hybrid.lock("")
    hybrid.insert(lease, "ab")

    result = hybrid.insert(lease, "ab", states=[1])

    assert (result.accepted, result.duplicates, hybrid.took) == (0, [], {1: True})
    lease.close()
    hybrid.check()


def test_a_state_that_is_there_is_not_taken_again(hybrid):
    hybrid.add("ab", states=[1])

    with hybrid.lock("ab") as lease:
        hybrid.insert(lease, "ab", states=[1])

    assert hybrid.took == {1: False}
    assert hybrid.node("ab").slots_at(STATE_DEVICE) == [0]


def test_the_empty_prefix_has_no_state(hybrid):
    with hybrid.lock("") as lease:
        hybrid.insert(lease, "", states=[1])
    assert hybrid.took == {1: False}


def test_a_state_fills_a_tombstone(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcd", states=[1])
    hybrid.evict(STATE_DEVICE, 1)
    assert hybrid.node("ab").residency == [RESIDENT, ABSENT, ABSENT, ABSENT]
    assert hybrid.match("abx").pages == 0

    hybrid.add("ab", states=[1])

    assert hybrid.match("abx").pages == 2
    hybrid.check()


def test_an_arriving_state_can_be_matched_but_not_evicted(hybrid):
    with hybrid.lock("") as lease:
        hybrid.insert(lease, "ab", states=[1], arriving=True)

    assert hybrid.node("ab").residency[STATE_DEVICE] == LOADING
    assert hybrid.match("ab").pages == 2
    assert hybrid.evict(STATE_DEVICE).slots == {}


def test_more_slots_than_pages_are_refused(bed):
    lease = bed.lock("")

    with pytest.raises(InternalError, match="3 slots for pages from 0; 2 pages given"):
        bed.tree.insert(lease, bed.tokens("ab"), [0, 1, 2])
    with pytest.raises(InternalError, match="1 slots for pages from 0; 0 pages given"):
        bed.tree.insert_host(bed.tree.root(b""), bed.tokens(""), [0])

    lease.close()
    bed.check()


def test_pages_behind_a_prefix_that_is_on_the_host_only_are_refused(bed):
    bed.add_host("ab")
    lease = bed.lock("ab")

    with pytest.raises(InternalError, match="not on the device"):
        bed.insert(lease, "abc")

    lease.close()


# From storage


def test_storage_delivers_behind_a_prefix(hybrid):
    hybrid.add_saved("ab")

    result = hybrid.add_host("abcd", after="ab", states=[1])

    assert (result.accepted, hybrid.took) == (2, {1: True})
    assert hybrid.node("abcd").residency == [ABSENT, RESIDENT, ABSENT, RESIDENT]
    assert hybrid.match("abcd").pages == 4
    hybrid.check()


def test_storage_delivers_what_the_host_has_already(bed):
    bed.add_host("abc")

    result = bed.add_host("abcd")

    assert result.duplicates == [3, 4, 5]
    assert result.accepted == 1
    bed.check()


def test_storage_delivers_the_host_copy_of_device_pages(bed):
    bed.add("ab")

    result = bed.add_host("abcd")

    assert (result.accepted, result.duplicates) == (4, [])
    assert bed.node("ab").residency == [RESIDENT, RESIDENT]
    bed.check()


def test_a_state_that_the_host_has_is_not_taken_again(hybrid):
    hybrid.add_host("ab", states=[1])

    hybrid.add_host("ab", states=[1])
    assert hybrid.took == {1: False}


def test_storage_cannot_deliver_behind_device_pages(bed):
    bed.add("ab")

    with pytest.raises(InternalError, match="not on the host"):
        bed.add_host("abcd", after="ab")


def test_host_pages_reach_a_new_namespace_through_a_bare_match(bed):
    match = bed.match("ab", b"new")

    bed.tree.insert_host(match.node, bed.tokens("ab"), [0, 1])

    assert bed.match("ab", b"new").pages == 2


# Splits


def test_a_split_keeps_every_page_with_its_slot(bed):
    bed.add_saved("abcdef")
    bed.add("abxy")

    assert bed.node("ab").slots == [[0, 1], [0, 1]]
    assert bed.node("abcdef").slots == [[2, 3, 4, 5], [2, 3, 4, 5]]
    assert (bed.node("ab").end, bed.node("abcdef").end) == (2, 6)
    bed.check()


def test_what_belongs_to_the_end_of_a_node_stays_there(hybrid):
    hybrid.add_saved("abcd", states=[1])
    hybrid.node("abcd").stored = 0b11
    lease = hybrid.lock("abcd")

    hybrid.add("abxy")

    upper, lower = hybrid.node("ab"), hybrid.node("abcd")
    assert [upper.slots[STATE_DEVICE], upper.slots[STATE_HOST]] == [None, None]
    assert [lower.slots_at(STATE_DEVICE), lower.slots_at(STATE_HOST)] == [[0], [0]]
    assert (upper.locks, lower.locks) == ([0, 0, 0, 0], [2, 0, 1, 0])
    assert (upper.stored, lower.stored) == (0b01, 0b11)
    hybrid.check([lease])
    lease.close()


def test_a_split_keeps_hits_and_age(bed):
    lower = bed.add("abcd")
    bed.tree.count_hit(lower)

    upper = bed.tree.split(lower, 2)

    assert (upper.hits, upper.worth) == (lower.hits, lower.worth)
    assert upper.serial != lower.serial


def test_a_hit_counts_for_the_whole_path(bed):
    bed.add("ab")
    node = bed.add("abcd")

    path = bed.tree.count_hit(node)

    assert [bed.word(met) for met in path] == ["ab", "abcd"]
    assert [met.hits for met in path] == [1, 1]


# Digests


@pytest.mark.parametrize("words", [["abcdef"], ["ab", "abcdef"], ["abcdef", "abcx", "a"]])
@pytest.mark.parametrize("seed", [b"", b"s" * 32])
def test_digests_are_the_chain_over_the_whole_sequence(bed, words, seed):
    for word in words:
        bed.add(word, seed)
    node = bed.node("abcdef", seed)

    bed.tree.digests(node)

    path = []
    while node.parent is not None:
        path = [*node.digests, *path]
        node = node.parent
    assert path == page_digests(bed.tokens("abcdef"), 2, seed)
    bed.check()


def test_a_split_keeps_every_page_with_its_digest(bed):
    whole = bed.tree.digests(bed.add("abcdef"))

    bed.add("abxy")

    assert bed.node("ab").digests == whole[:2]
    assert bed.node("abcdef").digests == whole[2:]
    assert bed.tree.digests(bed.node("abxy")) == page_digests(bed.tokens("abxy"), 2)[2:]
    bed.check()


def test_a_page_lies_at_one_place_however_its_path_is_split(bed):
    word = "".join(chr(number) for number in range(0x100, 0x100 + 150))
    whole = page_digests(bed.tokens(word), 2)
    bed.add(word)
    for length in (1, 30, 64, 65, 66, 128, 129):
        bed.add(f"{word[:length]}x")

    nodes = [node for node in bed.tree.nodes() if node.pages]
    ours = [node for node in nodes if bed.tree.digests(node)[-1] in whole]
    assert len(ours) == 8
    placed = [page for node in sorted(ours, key=lambda node: node.end) for page in bed.tree.placed(node)]
    assert placed == placed_pages(whole, range(150))
    ends = [bed.tree.placed(bed.node(f"{word[:length]}x"))[0] for length in (64, 65, 66)]
    assert [(page.group, page.place) for page in ends] == [(whole[0], 64), (whole[64], 1), (whole[64], 2)]
    bed.check()


def test_cutting_a_tail_cuts_its_digests(bed):
    whole = bed.tree.digests(bed.add("abcd"))

    bed.evict(FULL_DEVICE, 1)

    assert bed.node("abc").digests == whole[:3]
    bed.check()


def test_wide_token_ids_reach_the_digests(bed):
    tokens = array("q", [1 << 33, 2, 3, 4])
    with bed.tree.lock(bed.tree.match(tokens)) as lease:
        node = bed.tree.insert(lease, tokens, [0, 1]).node

    assert bed.tree.digests(node) == page_digests(tokens, 2)


def test_host_pages_are_split_like_device_pages(bed):
    bed.add_host("abcd")
    bed.add_host("abx")

    assert bed.node("ab").slots_at(FULL_HOST) == [0, 1]
    assert bed.node("abcd").slots_at(FULL_HOST) == [2, 3]
    bed.check()
