"""The default policy: LRU by a clock of pages, minus a credit for prompts with many new pages."""

from __future__ import annotations

from array import array

import pytest

from asynchicache.tree.eviction import evict
from asynchicache.tree.ghosts import Ghosts
from asynchicache.tree.node import FULL_DEVICE, Node
from asynchicache.tree.policies import NOBODY, SizeCredit, Use
from asynchicache.tree.radix_tree import UnifiedRadixTree

HALF_LIFE = 100


def tokens(pages: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + pages))


def end(pages: int = 1) -> Node:
    return Node(None, b"", b"", pages, 1)


def experienced(capacity: int = 1000) -> SizeCredit:
    """A policy that has seen 20 requests of 8 new pages, which returned after 100 pages."""
    made = SizeCredit(capacity, 1)
    for _ in range(20):
        node = end()
        made.published(node, 1000, NOBODY)
        made.credit(node, 1000 + HALF_LIFE, Use(tokens=8))
    return made


def credit(of: SizeCredit, new: int, hint: float = 0.0) -> float:
    return of.credit(end(), 1, Use(tokens=new, hint=hint))


@pytest.mark.parametrize(("new", "halvings"), [(8, 0), (16, 0.5), (32, 1), (2, -1), (0, -1.5), (8 << 10, 2)])
def test_twice_the_usual_size_is_half_a_return_older(new: int, halvings: float):
    assert credit(experienced(), new) == pytest.approx(-halvings * HALF_LIFE, rel=0.15)


def test_a_hint_counts_like_size_within_the_same_bounds():
    assert credit(experienced(), 8, 1.0) == pytest.approx(HALF_LIFE, rel=0.1)
    assert credit(experienced(), 8, 2.0) == pytest.approx(2 * HALF_LIFE, rel=0.1)
    assert credit(experienced(), 2, 2.0) == pytest.approx(2 * HALF_LIFE, rel=0.1)
    assert credit(experienced(), 8, -2.0) == pytest.approx(-2 * HALF_LIFE, rel=0.1)


def test_before_anybody_returned_it_is_lru():
    fresh = SizeCredit(1000, 1)
    assert [credit(fresh, new) for new in (1, 8, 500)] == [0, 0, 0]


def test_a_return_counts_once():
    policy, node = SizeCredit(1000, 1), end()
    policy.published(node, 1, NOBODY)
    for _ in range(30):
        policy.credit(node, 51, Use(tokens=1, known=1))
    assert credit(policy, 100) == 0, "one return is not enough"


def test_what_was_evicted_lately_is_not_new():
    tree = UnifiedRadixTree(1, eviction="size", capacity=1000)
    prompt, other = array("q", range(64)), array("q", range(100, 164))
    serve(tree, prompt)
    evict(tree, FULL_DEVICE, 32)
    evict(tree, FULL_DEVICE, 32)
    assert [tree.count_known(tokens, tree.match(tokens)) for tokens in (prompt, other)] == [64, 0]

    tree.policy = experienced()
    assert tree.asked(prompt, tree.match(prompt)).credit > 0
    assert tree.asked(other, tree.match(other)).credit < 0


def test_the_memory_of_what_was_evicted_is_bounded():
    ghosts = Ghosts(10, 1)
    for number in range(9):
        ghosts.add(0, tokens(1, number).tobytes(), 10)
    assert [ghosts.reach(tokens(12, number), 0) for number in range(9)] == [0] * 5 + [10] * 4


def test_the_order_is_that_of_worth_and_the_credit_of_the_request():
    """Three requests, the first of which is far larger than usual: it goes before those used earlier."""
    tree = UnifiedRadixTree(1, eviction="size", capacity=1000)
    for number in (*range(30), *range(30)):  # sizes and returns to compare with
        serve(tree, array("q", [1000 + number] * 8))
    small = serve(tree, array("q", [1] * 4))
    large = serve(tree, array("q", [2] * 64))
    assert large.worth[0] < small.worth[0]
    evict(tree, FULL_DEVICE, 64)
    assert large.parent is None


def serve(tree: UnifiedRadixTree, tokens: array[int]) -> Node:
    match = tree.match(tokens)
    with tree.lock(match, tree.asked(tokens, match)) as lease:
        slots = range(len(tokens) - match.pages)
        return tree.insert(lease, tokens, slots).node
