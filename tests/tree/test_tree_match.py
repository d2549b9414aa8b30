"""What `match` finds, and that it changes nothing."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from asynchicache.errors import InternalError
from asynchicache.tree.node import FULL_DEVICE, Node, place_of
from asynchicache.tree.radix_tree import HeldBack, Match, UnifiedRadixTree
from asynchicache.types import Tier

STATE_DEVICE, STATE_HOST = 2, 3


def snapshot(value: object, seen: set[int] | None = None) -> object:
    """Everything that can be reached from `value`, as plain values; nodes by their number."""
    seen = set() if seen is None else seen
    if isinstance(value, dict):
        return [(snapshot(k, seen), snapshot(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [snapshot(item, seen) for item in value]
    if isinstance(value, set):
        return sorted(str(snapshot(item, seen)) for item in value)
    if not type(value).__module__.startswith("asynchicache"):
        return repr(value)
    if id(value) in seen:
        return f"{type(value).__name__} {getattr(value, 'serial', '')}"
    seen.add(id(value))
    return [
        type(value).__name__,
        [(name, snapshot(getattr(value, name), seen)) for name in attributes(value)],
    ]


def attributes(value: object) -> list[str]:
    if is_dataclass(value):
        return [field.name for field in fields(value)]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return sorted({*slots, *getattr(value, "__dict__", {})} - {"__weakref__"})


def test_snapshot_sees_a_change_deep_in_the_tree(hybrid):
    hybrid.add("abcd", states=[1])
    before = snapshot(hybrid.tree)

    hybrid.node("abcd").worth[1] += 1

    assert snapshot(hybrid.tree) != before


@pytest.mark.parametrize("word", ["abcd", "ab", "abxy", "abcdef", "x", "", "abce"])
@pytest.mark.parametrize("seed", [b"", b"tenant"])
def test_match_changes_nothing(hybrid, word, seed):
    hybrid.add("abcd", states=[1])
    hybrid.add("abce")
    before = snapshot(hybrid.tree)

    hybrid.match(word, seed)
    hybrid.match(word, seed, limit=1)

    assert snapshot(hybrid.tree) == before


def test_match_finds_the_longest_known_prefix(bed):
    bed.add("abcd")
    bed.add("abxy")

    assert bed.match("abcdef").pages == 4
    assert bed.match("abxz").pages == 3
    assert bed.match("abq").pages == 2
    assert bed.match("b").pages == 0
    assert bed.match("").pages == 0


def test_a_page_matches_whole_or_not_at_all(bed):
    bed.add("ab")
    tokens = bed.tokens("ab")

    tokens[3] += 1

    assert bed.tree.match(tokens).pages == 1
    assert bed.tree.match(bed.tokens("ab")[:3]).pages == 1


@pytest.mark.parametrize(("limit", "pages"), [(0, 0), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_match_stops_at_the_limit(bed, limit, pages):
    bed.add("ab")
    bed.add("abcd")

    match = bed.match("abcdef", limit=limit)

    assert (match.pages, match.full_pages) == (pages, pages)


def test_pages_on_the_host_count(bed):
    bed.add_host("abc")

    assert bed.match("abcd").pages == 3


def test_namespaces_do_not_share_pages(bed):
    bed.add("abcd", b"one")
    bed.add("ab", b"two")

    assert bed.match("abcd", b"one").pages == 4
    assert bed.match("abcd", b"two").pages == 2
    assert bed.match("abcd").pages == 0
    bed.check()


def test_a_namespace_is_forgotten_with_its_last_page(bed):
    with bed.lock("ab", b"one") as lease:
        bed.insert(lease, "ab")
        assert set(bed.tree.roots) == {b"one"}
    with bed.lock("ab", b"two"):
        assert set(bed.tree.roots) == {b"one", b"two"}
    assert set(bed.tree.roots) == {b"one"}

    bed.evict(FULL_DEVICE)

    assert not bed.tree.roots


def test_two_matches_of_a_new_namespace_meet_in_one_root(bed):
    one, two = bed.match("ab", b"new"), bed.match("ab", b"new")

    with bed.tree.lock(one) as first, bed.tree.lock(two) as second:
        assert first.node is second.node is bed.tree.roots[b"new"]


# States


def test_a_prefix_ends_where_a_state_is(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcdef")

    match = hybrid.match("abcdeg")

    assert (match.pages, match.full_pages) == (2, 5)
    assert match.node is hybrid.node("ab")


def test_branching_pages_says_where_a_state_is_missing(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcdef", states=[1])

    assert hybrid.match("abcdeg").branching_pages == 5
    assert hybrid.match("abcdef").branching_pages is None
    assert hybrid.match("abx").branching_pages is None
    assert hybrid.match("abcdef", limit=3).branching_pages == 3


def test_branching_pages_is_none_without_states(bed):
    bed.add("abcd")

    assert bed.match("abx").branching_pages is None


def test_without_any_state_nothing_is_restorable(hybrid):
    hybrid.add("abcd")

    match = hybrid.match("abcd")

    assert (match.pages, match.full_pages) == (0, 4)


def test_a_state_on_the_host_will_do(hybrid):
    hybrid.add_saved("ab", states=[1])
    hybrid.evict(STATE_DEVICE)

    assert hybrid.match("ab").pages == 2


def test_every_kind_of_state_is_needed(make_bed):
    bed = make_bed(states=2)
    bed.add("ab", states=[1, 2])
    bed.add("abcd", states=[1])

    assert bed.match("abcd").pages == 2


def test_a_state_that_is_being_saved_stays(hybrid):
    hybrid.add("ab", states=[1])
    tier_copy = hybrid.save("ab")
    assert hybrid.match("ab").pages == 2

    hybrid.evict(STATE_DEVICE)
    assert hybrid.match("ab").pages == 2, "a copy keeps what it reads"

    hybrid.finish(tier_copy)
    hybrid.evict(STATE_DEVICE)
    assert hybrid.match("ab").pages == 2


@pytest.mark.parametrize("word", ["ab", "abcd", "abcdef"])
def test_restorable_nodes_are_those_that_a_match_ends_at(mixed, word):
    mixed.add("ab", states=[1])
    mixed.add("abcd", windows=1)  # no state, and half a window
    mixed.add("abcdef", states=[1])
    node = mixed.node(word)

    assert mixed.tree.restorable(node) == (mixed.match(word).node is node) == (word != "abcd")


def test_one_pool_that_lacks_its_slots_makes_a_node_no_end(make_bed):
    bed = make_bed(states=2)
    bed.add("ab", states=[1])
    bed.add("cd", states=[2])
    bed.add("ef", states=[1, 2])

    assert [bed.tree.restorable(bed.node(word)) for word in ("ab", "cd", "ef")] == [False, False, True]


# Stale matches


def test_a_match_is_stale_once_the_structure_changed(bed):
    match = bed.match("ab")
    bed.add("x")

    with pytest.raises(InternalError, match="match again"):
        bed.tree.lock(match)


def test_a_match_is_stale_once_its_state_is_gone(hybrid):
    hybrid.add("ab", states=[1])
    match = hybrid.match("ab")

    hybrid.evict(STATE_DEVICE)

    with pytest.raises(InternalError, match="match again"):
        hybrid.tree.lock(match)


def test_a_match_is_stale_once_a_tail_was_cut(bed):
    bed.add("abcd")
    match = bed.match("abcd")

    bed.evict(FULL_DEVICE, 1)

    with pytest.raises(InternalError, match="match again"):
        bed.tree.lock(match)


def test_representations_say_what_matters(bed):
    bed.add("abc")
    node: Node = bed.node("abc")

    assert repr(node) == "<Node 1 pages 0..3 R- locks [0, 0]>"
    assert repr(bed.match("abx")) == "<Match 2 of 2 pages>"


def test_page_size_is_part_of_the_tree():
    assert UnifiedRadixTree(64).page_bytes == 512


# Walks by full pages alone


def test_reach_finds_or_makes_the_end_of_a_prefix(hybrid):
    hybrid.add("abcd")

    node = hybrid.tree.reach(hybrid.tokens("abcx"), b"", 3)

    assert hybrid.word(node) == "abc"
    assert node is hybrid.tree.reach(hybrid.tokens("abcd"), b"", 3)
    hybrid.check()


@pytest.mark.parametrize("pages", [2, 3, 4, 5, 6])
def test_reach_walks_through_several_nodes(bed, pages):
    for word in ("ab", "abcd", "abcdef"):
        bed.add(word)

    assert bed.word(bed.tree.reach(bed.tokens("abcdef"), b"", pages)) == "abcdef"[:pages]


@pytest.mark.parametrize(("word", "pages"), [("abx", 3), ("abcde", 5), ("x", 1)])
def test_reach_finds_nothing_further_than_the_tree(bed, word, pages):
    bed.add("abcd")
    before = snapshot(bed.tree)

    assert bed.tree.reach(bed.tokens(word), b"", pages) is None
    assert bed.tree.reach(bed.tokens(word), b"other", pages) is None
    assert snapshot(bed.tree) == before


def test_reach_of_nothing_is_a_root(bed):
    assert bed.tree.reach(bed.tokens("ab"), b"new", 0).end == 0
    assert not bed.tree.roots


def test_child_is_the_next_node_of_a_sequence(bed):
    bed.add("ab")
    bed.add("abcd")

    assert bed.tree.child(bed.node("ab"), bed.tokens("abcx")) is bed.node("abcd")
    assert bed.tree.child(bed.node("ab"), bed.tokens("abx")) is None
    assert bed.tree.child(bed.node("ab"), bed.tokens("ab")) is None


# Every field of a match


def fields_of(match: Match) -> tuple[int, int, int, Node | None]:
    return match.inside, match.pages, match.full_pages, match.partial


def test_of_an_unknown_namespace_there_is_nothing(hybrid):
    hybrid.add("ab", states=[1])
    match = hybrid.match("ab", b"unknown")

    assert fields_of(match) == (0, 0, 0, None)
    assert match.version == hybrid.tree.version
    assert (match.node.end, match.node.digests, match.node.parent) == (0, [b"unknown"], None)
    assert b"unknown" not in hybrid.tree.roots


@pytest.mark.parametrize(
    ("word", "limit", "inside", "pages"),
    [
        ("abcd", None, 0, 4),
        ("abcdef", None, 0, 4),
        ("abcx", None, 3, 3),
        ("ax", None, 1, 1),
        ("x", None, 0, 0),
        ("", None, 0, 0),
        ("abcd", 0, 0, 0),
        ("abcd", 1, 1, 1),
        ("abcd", 4, 0, 4),
        ("abcd", 9, 0, 4),
    ],
)
def test_a_match_says_how_far_it_runs_into_a_node(bed, word: str, limit: int | None, inside: int, pages: int):
    node = bed.add("abcd")
    match = bed.match(word, limit=limit)

    assert fields_of(match) == (inside, pages, pages, node if inside else None)
    assert match.node is (node if pages == 4 else bed.tree.roots[b""])


def test_where_a_state_ends_a_match_nothing_of_the_next_node_is_matched(hybrid):
    hybrid.add("ab", states=[1])
    hybrid.add("abcdef")

    assert fields_of(hybrid.match("abcdex")) == (0, 2, 5, None)


def test_pages_without_digests_are_counted_up_to_the_first_that_has_some(bed):
    upper, middle, lower = (bed.add(word) for word in ("ab", "abcde", "abcdefg"))
    tree = bed.tree

    assert [tree.pages_without_digests(node) for node in (upper, middle, lower)] == [2, 5, 7]
    assert tree.first_without_digests(lower) is upper
    tree.digests(upper)
    assert [tree.pages_without_digests(node) for node in (upper, middle, lower)] == [0, 3, 5]
    assert tree.first_without_digests(lower) is middle
    tree.digests(lower)
    assert tree.pages_without_digests(lower) == 0
    assert tree.first_without_digests(lower) is None


def test_what_holds_a_match_back_is_the_pool_that_reaches_least(make_bed):
    bed = make_bed(states=2)
    bed.add("ab", states=[1, 2])
    bed.add("abcd", states=[1])
    bed.add("abcdef")

    def held_back(word: str) -> HeldBack | None:
        return bed.tree.held_back(bed.tokens(word), bed.match(word))

    assert held_back("ab") is None
    assert held_back("abcd") == HeldBack(2, dropped=False)
    assert held_back("abcdef") == HeldBack(2, dropped=False)
    assert held_back("abc") == HeldBack(1, dropped=False), "of two that reach equally far the first"
    bed.add("abcdef", states=[2])
    assert held_back("abcdef") == HeldBack(1, dropped=False)
    bed.evict(place_of(2, Tier.DEVICE))
    assert bed.match("ab").pages == 0
    assert held_back("ab") == HeldBack(2, dropped=True)
