"""Prefixes that end inside a page, against all sequences that the tree holds."""

from __future__ import annotations

import random
from array import array
from itertools import count

import pytest

from asynchicache.tree import invariants, tails, tier_copies
from asynchicache.tree.eviction import evict
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, Node, place_of
from asynchicache.tree.radix_tree import Pages, PathLease, UnifiedRadixTree
from asynchicache.types import TOKEN_BYTES, Tier, trailing_pages
from soaking import first

PAGE = 4
SEEDS = (b"", b"n" * 32)
STATE = 1


class Bed:
    """A tree with tails; slots are numbers that nobody uses twice."""

    def __init__(self, *, states: bool) -> None:
        coverages = [trailing_pages(1)] if states else []
        self.tree = UnifiedRadixTree(PAGE, coverages, eviction="lru", tails=True)
        self._slots = count()
        self.states = states

    def lease(self, tokens: array[int], seed: bytes) -> PathLease:
        """On the whole pages that a request resumes behind."""
        match = self.tree.match(tokens, seed, limit=(len(tokens) - 1) // PAGE)
        return self.tree.lock(tails.reach(self.tree, match, tokens, len(tokens) - 1))

    def hit(self, tokens: array[int], seed: bytes) -> int:
        lease = self.lease(tokens, seed)
        tail = tails.find(self.tree, lease.node, tokens, len(tokens) - 1)
        found = lease.node.end * PAGE + (tail.tokens if tail is not None else 0)
        if tail is not None:
            tails.use(self.tree, tail, 0.0)
        lease.close()
        return found

    def add(self, tokens: array[int], seed: bytes) -> None:
        """Publish a sequence, to its last token; with a state there."""
        match = self.tree.match(tokens, seed)
        node = match.node  # on the host, what is behind it is computed again
        while node.residency[FULL_DEVICE] == 0:
            node = node.parent
        lease = self.tree.lease(node)
        whole = len(tokens) // PAGE
        slots = [next(self._slots) for _ in range(whole - node.end)]
        end = self.tree.insert(lease, tokens, slots).node
        if len(tokens) % PAGE:
            kept = tails.get(self.tree, end, tokens)
            end = kept or tails.add(self.tree, end, tokens, next(self._slots), arriving=False)
            tails.use(self.tree, tails.Tail(end, end.tail), 0.0)
        if self.states:
            self.tree.take_state(end, STATE, Tier.DEVICE, next(self._slots))
        lease.close()

    def save(self, node: Node) -> None:
        """Copy the path to a node to the host."""
        wanted = tier_copies.missing_on_host(self.tree, node)
        batch = [(want, [next(self._slots) for _ in range(want.size)]) for want in wanted]
        tier_copies.finish(self.tree, tier_copies.begin(self.tree, Tier.HOST, batch), arrived=True)

    def check(self) -> None:
        assert invariants.problems(self.tree, []) == []

    def ends(self, seed: bytes) -> list[tuple[bytes, Node]]:
        """Every node of a namespace, with the tokens of its path."""
        root = self.tree.roots.get(seed)
        found = []
        for node in self.tree.nodes():
            path = [node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            if path[-1] is root:
                key = b"".join(part.key for part in reversed(path))
                missing = PAGE - node.tail if node.tail else 0
                found.append((key[: len(key) - missing * TOKEN_BYTES], node))
        return found

    def longest(self, tokens: array[int], seed: bytes) -> int:
        """The longest prefix that could be resumed, by comparing token by token with all that there is."""
        limit, best = len(tokens) - 1, 0
        for key, node in self.ends(seed):
            common = shared(tokens.tobytes(), key)
            if not self.states:
                best = max(best, min(common, limit))
            elif common == len(key) // TOKEN_BYTES <= limit and self.tree.restorable(node):
                best = max(best, common)
        return best


def shared(one: bytes, other: bytes) -> int:
    common = 0
    size = TOKEN_BYTES
    while common * size < min(len(one), len(other)):
        at = common * size
        if one[at : at + size] != other[at : at + size]:
            break
        common += 1
    return common


def a_sequence(draw: random.Random, known: list[array[int]]) -> array[int]:
    """New, or one from before that goes on, or leaves it somewhere."""
    before = draw.choice(known) if known and draw.random() < 0.8 else array("q")
    kept = before[: draw.randint(0, len(before))] if draw.random() < 0.5 else before
    return kept + array("q", (draw.choice((0, 1, 2**62)) for _ in range(draw.randint(1, 7))))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(
    ("seed", "steps"), first(2, [(0, 200), (3, 200), *((seed, 400) for seed in range(6))])
)
def test_hits_are_the_longest_that_could_be_resumed(seed, steps, states):
    draw, bed, known, found = random.Random(seed), Bed(states=states), [], 0
    for _ in range(steps):
        tokens, namespace = a_sequence(draw, known), draw.choice(SEEDS)
        hit = bed.hit(tokens, namespace)
        assert hit == bed.longest(tokens, namespace)
        found += hit % PAGE > 0
        bed.add(tokens, namespace)
        known.append(tokens)
        bed.check()
        nodes = list(bed.tree.nodes())
        if draw.random() < 0.3:
            bed.save(draw.choice(nodes))
        for place in (FULL_DEVICE, FULL_HOST, *([place_of(STATE, Tier.DEVICE)] if states else [])):
            if draw.random() < 0.2:
                evict(bed.tree, place, draw.randint(1, 12))
        bed.check()
    assert found > 10, "nothing was tested"


def words(*ids: int) -> array[int]:
    return array("q", ids)


def test_a_whole_page_that_goes_on_differently_is_copied_up_to_there():
    bed = Bed(states=False)
    bed.add(words(1, 2, 3, 4, 5, 6, 7, 8), b"")

    assert bed.hit(words(1, 2, 3, 4, 5, 6, 9, 9, 9), b"") == 6
    assert bed.hit(words(1, 2, 9, 9, 9), b"") == 2
    assert bed.hit(words(1, 2, 3, 4, 5, 6, 7, 8), b"") == 7, "one token is left to compute"


def test_a_state_serves_only_the_end_where_it_was_kept():
    bed = Bed(states=True)
    bed.add(words(1, 2, 3, 4, 5, 6), b"")

    assert bed.hit(words(1, 2, 3, 4, 5, 6, 7), b"") == 6
    assert bed.hit(words(1, 2, 3, 4, 5, 7, 7), b"") == 0
    assert bed.hit(words(1, 2, 3, 4, 5, 6), b"") == 0, "its last token would not be computed"


def test_the_longest_of_several_exact_ends_is_found():
    bed = Bed(states=True)
    bed.add(words(1, 2), b"")
    bed.add(words(1, 2, 3), b"")
    bed.add(words(1, 2, 2), b"")

    assert bed.hit(words(1, 2, 3, 4), b"") == 3
    assert bed.hit(words(1, 2, 2, 2), b"") == 3
    assert bed.hit(words(1, 2, 4, 4), b"") == 2


def test_a_tail_is_never_taken_for_a_whole_page():
    bed = Bed(states=False)
    bed.add(words(1, 2, 3), b"")
    [tail] = bed.tree.nodes()

    assert bed.tree.match(words(1, 2, 3, 4), b"").pages == 0
    assert tail.tail == 3
    assert bed.tree.digests(tail) != bed.tree.digests(
        bed.tree.add_child(tail.parent, words(1, 2, 3, 0).tobytes())
    )


def test_a_tail_that_was_continued_goes_first():
    bed = Bed(states=False)
    bed.add(words(9, 9, 9), b"")
    bed.add(words(1, 2, 3), b"")
    old = tails.get(bed.tree, bed.tree.root(b""), words(1, 2, 3))
    bed.add(words(1, 2, 3, 4), b"")
    tails.supersede(bed.tree, old)

    evict(bed.tree, FULL_DEVICE, 1)

    assert old.parent is None
    bed.check()


def test_a_tail_counts_for_the_node_that_it_stands_on():
    bed = Bed(states=False)
    bed.add(words(1, 2, 3, 4, 5), b"")
    evict(bed.tree, FULL_DEVICE, 1)

    assert [node.tail for node in bed.tree.nodes()] == [0], "the tail goes before its page"


def test_namespaces_share_no_tails():
    bed = Bed(states=False)
    bed.add(words(1, 2, 3), SEEDS[0])

    assert bed.hit(words(1, 2, 3, 4), SEEDS[1]) == 0


@pytest.mark.parametrize("states", [False, True])
def test_a_conversation_that_goes_on_from_a_tail_ages_the_state_before_it(states):
    bed = Bed(states=states)
    bed.add(words(1, 2, 3, 4), b"")
    bed.add(words(1, 2, 3, 4, 5, 6), b"")
    [page] = [node for node in bed.tree.nodes() if not node.tail]
    [tail] = [node for node in bed.tree.nodes() if node.tail]
    if states:
        bed.tree.supersede(tail, STATE)

    assert bool(page.superseded) == states


@pytest.mark.parametrize("there", range(16))
def test_a_tail_needs_its_page_of_a_window_and_the_window_before_it(there: int) -> None:
    """Whichever pages of the window there are, the longest end that they allow is found."""
    tree = UnifiedRadixTree(PAGE, [trailing_pages(2)], windows=[1], eviction="lru", tails=True)
    tokens = array("q", range(1, 3 * PAGE + 3))  # three pages and two tokens
    has = [bool(there >> page & 1) for page in range(4)]
    lease = tree.lease(tree.root(b""))
    end = tree.insert(lease, tokens, [0, 1, 2]).node
    tail = tails.add(tree, end, tokens, 3, arriving=False)
    for page in range(4):
        if has[page]:
            node = tail if page == 3 else tree.reach(tokens, b"", page + 1)
            assert node is not None
            assert tree.take_pages(node, 1, Tier.DEVICE, Pages(page, [10 + page])) == {}
    lease.close()

    whole = next(end for end in (3, 2, 1, 0) if all(has[max(end - 2, 0) : end]))
    whole_tail = all(has[1:])
    filled = tails.filled_up(tree, tokens, 3, 2)
    assert tree.match(filled, b"").pages == (4 if whole_tail else whole)
    found = tails.find(tree, end, tokens, len(tokens))
    assert (found is not None) == whole_tail
    assert tree.restorable(tail) == whole_tail
    assert invariants.problems(tree, []) == []
