"""A tree to try things on: sequences are words, and every letter is a page of two tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import count, islice

import pytest

from asynchicache.tree import invariants, tier_copies
from asynchicache.tree.eviction import Evicted, evict
from asynchicache.tree.node import TIERS, Node, SlotPlace, place_of
from asynchicache.tree.radix_tree import Inserted, Match, Pages, PathLease, UnifiedRadixTree
from asynchicache.tree.tier_copies import CopyRequest, TierCopy
from asynchicache.types import Tier, trailing_pages

PAGE = 2


class Bed:
    """A tree whose slots nobody allocates: every place numbers its slots from 0 as they are offered."""

    def __init__(self, states: int = 0, eviction: str = "lru", windows: Sequence[int] = ()) -> None:
        """`windows`: trailing pages of each window; their components are numbered behind the states.

        `took`: by component, whether the tree took the state that was offered last.
        """
        coverages = [trailing_pages(1)] * states + [trailing_pages(pages) for pages in windows]
        component_ids = range(states + 1, len(coverages) + 1)
        self.tree = UnifiedRadixTree(PAGE, coverages, windows=component_ids, eviction=eviction)
        self.took: dict[int, bool] = {}
        self._numbers = [count() for _ in range(TIERS * self.tree.width)]

    @staticmethod
    def tokens(word: str) -> array[int]:
        return array("q", [token for letter in word for token in (ord(letter), 7)])

    def slots(self, place: SlotPlace, component_id: int) -> list[int]:
        return list(islice(self._numbers[place], component_id))

    def match(self, word: str, seed: bytes = b"", **limit: int) -> Match:
        return self.tree.match(self.tokens(word), seed, **limit)

    def lock(self, word: str, seed: bytes = b"") -> PathLease:
        return self.tree.lock(self.match(word, seed))

    def insert(
        self,
        lease: PathLease,
        word: str,
        *,
        states: Iterable[int] = (),
        windows: int | None = None,
        arriving: bool = False,
    ) -> Inserted:
        """Offer slots for all pages of `word` behind the lease, a state each for `states`, and of every
        window those of the last `windows` pages: by default of all that are new."""
        new = len(word) - lease.node.end
        pages = self.slots(Tier.DEVICE, new)
        count = new if windows is None else windows
        trailing = {
            component.id: Pages(len(word) - count, self.slots(place_of(component.id, Tier.DEVICE), count))
            for component in self.tree.windows
        }
        result = self.tree.insert(lease, self.tokens(word), pages, windows=trailing)
        self.take_states(result.node, Tier.DEVICE, states, arriving=arriving)
        return result

    def take_states(
        self, node: Node, tier: Tier, component_ids: Iterable[int], *, arriving: bool = False
    ) -> None:
        for component_id in component_ids:
            [slot] = self.slots(place_of(component_id, tier), 1)
            self.took[component_id] = self.tree.take_state(node, component_id, tier, slot, arriving=arriving)

    def add(
        self, word: str, seed: bytes = b"", *, states: Iterable[int] = (), windows: int | None = None
    ) -> Node:
        """Serve a request: its pages are on the device afterwards, and nobody holds them."""
        with self.lock(word, seed) as lease:
            return self.insert(lease, word, states=states, windows=windows).node

    def add_host(self, word: str, after: str = "", *, states: Iterable[int] = ()) -> Inserted:
        """Let storage deliver the pages of `word` that follow `after`."""
        node = self.node(after) if after else self.tree.root(b"")
        pages = self.slots(Tier.HOST, len(word) - len(after))
        result = self.tree.insert_host(node, self.tokens(word), pages)
        self.take_states(result.node, Tier.HOST, states)
        return result

    def node(self, word: str, seed: bytes = b"") -> Node:
        """The node that ends where `word` does."""
        node = self.tree.roots[seed]
        while node.end < len(word):
            node = node.children[self.tokens(word[node.end]).tobytes()]
        assert node.end == len(word), f"no node ends with {word}"
        return node

    def save(self, word: str) -> TierCopy:
        """Begin to copy what the path to `word` lacks on the host."""
        return self.begin(Tier.HOST, tier_copies.missing_on_host(self.tree, self.node(word)))

    def load(self, word: str) -> TierCopy:
        """Begin to copy what a prefix that ends with `word` lacks on the device."""
        node = self.node(word)
        states = [
            CopyRequest(node, component.id)
            for component in self.tree.components
            if not component.paged and component.tier(node) is Tier.HOST
        ]
        return self.begin(Tier.DEVICE, [*tier_copies.missing_on_device(self.tree, node), *states])

    def begin(self, tier: Tier, wanted: list[CopyRequest]) -> TierCopy:
        given = [(want, self.slots(TIERS * want.component_id + tier, want.size)) for want in wanted]
        return tier_copies.begin(self.tree, tier, given)

    def finish(self, tier_copy: TierCopy, *, arrived: bool = True) -> dict[int, list[int]]:
        return tier_copies.finish(self.tree, tier_copy, arrived=arrived)

    def add_saved(self, word: str, *, states: Iterable[int] = (), windows: int | None = None) -> Node:
        """Pages, and states at their end, on the device and on the host."""
        node = self.add(word, states=states, windows=windows)
        self.finish(self.save(word))
        return node

    def evict(self, place: SlotPlace, component_id: int = 1000, *, dirty: bool = True) -> Evicted:
        return evict(self.tree, place, component_id, dirty=dirty)

    def words(self, place: SlotPlace) -> set[str]:
        """The end of every node that has slots at a place, as words."""
        return {self.word(node) for node in self.tree.nodes() if node.slots[place] is not None}

    def word(self, node: Node) -> str:
        keys = []
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return "".join(map(chr, array("q", b"".join(reversed(keys)))[::PAGE]))

    def check(self, leases: Iterable[PathLease] = (), tier_copies: Iterable[TierCopy] = ()) -> None:
        assert invariants.problems(self.tree, leases, tier_copies) == []


@pytest.fixture
def make_bed() -> type[Bed]:
    return Bed


@pytest.fixture
def bed() -> Bed:
    """A tree of full pages alone."""
    return Bed()


@pytest.fixture
def hybrid() -> Bed:
    """A tree of full pages and one kind of state."""
    return Bed(states=1)


@pytest.fixture
def sliding() -> Bed:
    """A tree of full pages and a window of two pages."""
    return Bed(windows=[2])


@pytest.fixture
def mixed() -> Bed:
    """A tree of full pages, one kind of state (1) and a window of two pages (2)."""
    return Bed(states=1, windows=[2])
