"""What of a sequence is in the tree, and what keeps it from being more. Changes nothing but `reach`,
which may cut a node."""

from __future__ import annotations

from array import array
from operator import itemgetter
from typing import NamedTuple

from asynchicache.hashing import page_digests
from asynchicache.tree.components import Component, End
from asynchicache.tree.node import Node
from asynchicache.tree.store import NodeStore


class Match:
    """What of a sequence is in the tree; of the version of the tree that it was made from.

    Attributes:
        node: where the longest restorable prefix ends, or the node before, see `inside`.
        inside: pages of `node`'s child towards the sequence that the prefix takes; 0 if it ends at `node`.
        pages: length of the restorable prefix, in pages: every pool has what it needs, here or on the host.
        full_pages: how far the full component alone reaches; beyond `pages`, a state or window is missing.
        partial: the child of `node` that the prefix ends in, or None.
        version: of the tree, when the match was made.
    """

    __slots__ = ("full_pages", "inside", "node", "pages", "partial", "version")

    def __init__(
        self, node: Node, inside: int, pages: int, full_pages: int, partial: Node | None, version: int
    ) -> None:
        self.node = node
        self.inside = inside
        self.pages = pages
        self.full_pages = full_pages
        self.partial = partial
        self.version = version

    @property
    def branching_pages(self) -> int | None:
        """Where a state would make the whole full match restorable (`mamba_branching_seqlen`, in
        pages); None if nothing is held back."""
        return self.full_pages if self.full_pages > self.pages else None

    def __repr__(self) -> str:
        return f"<Match {self.pages} of {self.full_pages} pages>"


class HeldBack(NamedTuple):
    """Why a match is shorter than its full pages: the component, and whether what is missing was there
    once and had to make room."""

    component: int
    dropped: bool


class MatchingTree(NodeStore):
    """The looking half of `UnifiedRadixTree`."""

    def match(self, tokens: array[int], seed: bytes = b"", *, limit: int | None = None) -> Match:
        """The longest restorable prefix of `tokens`, `limit` pages at most. Changes nothing."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        pages = len(view) // size
        end = (pages if limit is None or limit > pages else limit) * size
        node = self.roots.get(seed)
        if node is None:
            return Match(self.bare_root(seed), 0, 0, 0, None, self.version)
        at, partial, inside = 0, None, 0
        while at < end:
            child = node.children.get(view[at : at + size].tobytes())
            if child is None:
                break
            key = child.key
            after = at + len(key)
            if after <= end and key.startswith(view[at:after]):
                node, at = child, after
                continue
            partial, inside = child, self._common(key, view, at, end)
            break
        return self._settle_match(node, partial, inside)

    def _settle_match(self, node: Node, partial: Node | None, inside: int) -> Match:
        full = node.end + inside
        if not self.components:
            return Match(node, inside, full, full, partial, self.version)
        pages, before = full, -1
        while pages != before:  # an end that one pool moved up may not suit the others
            before = pages
            for aux in self.components:
                node, inside = aux.longest(node, partial, inside)
            pages = node.end + inside
        return Match(node, inside, pages, full, partial if inside else None, self.version)

    def held_back(self, tokens: array[int], match: Match) -> HeldBack | None:
        """Which pool keeps a match below its full pages; None if nothing does."""
        if match.pages == match.full_pages:
            return None
        tip = self._tip(match.node, tokens, match.full_pages)
        node, partial = (tip, None) if tip.end == match.full_pages else (tip.parent, tip)
        assert node is not None, "a root has no pages beyond the match"
        inside = match.full_pages - node.end
        ends = [(aux, _pages(aux.longest(node, partial, inside))) for aux in self.components]
        aux, _ = min(ends, key=itemgetter(1))
        if self._was_dropped(aux, tip, match.pages):
            return HeldBack(aux.number, dropped=True)
        for window in self.windows:  # a state goes with its window, which is to blame then
            if self._was_dropped(window, tip, match.pages):
                return HeldBack(window.number, dropped=True)
        return HeldBack(aux.number, dropped=False)

    @staticmethod
    def _was_dropped(aux: Component, tip: Node, pages: int) -> bool:
        current = tip
        while current.parent is not None and current.end > pages:
            if current.dropped >> aux.number & 1:
                return True
            current = current.parent
        return False

    def _tip(self, node: Node, tokens: array[int], pages: int) -> Node:
        """The node below `node`, on the way of `tokens`, that holds their page number `pages` - 1."""
        while node.end < pages:
            child = self.child(node, tokens)
            assert child is not None, "a match went that way"
            node = child
        return node

    def restorable(self, node: Node) -> bool:
        """Whether every pool beside the full one lets a prefix end at `node`."""
        for aux in self.components:  # a loop: a generator costs more than the checks
            if aux.tier(node) is None:
                return False
        return True

    def _common(self, key: bytes, view: memoryview, at: int, end: int) -> int:
        """Whole pages that `key` and `view[at:end]` share, by bisection over buffers."""
        size = self.page_bytes
        low, high = 1, min(len(key), end - at) // size  # the first page matched: it was the lookup
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(view[at : at + middle * size]):
                low = middle
            else:
                high = middle - 1
        return low

    def reach(self, tokens: array[int], seed: bytes, pages: int) -> Node | None:
        """The node that ends after `pages` pages of `tokens`, by its full pages alone, cutting one if
        need be; None if the tree does not reach that far."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        node, end = self.roots.get(seed) or self.bare_root(seed), pages * size
        while node.end < pages:
            start = node.end * size
            child = node.children.get(view[start : start + size].tobytes())
            if child is None:
                return None
            common = self._common(child.key, view, start, end)
            if common < child.pages and node.end + common < pages:
                return None
            node = child if common == child.pages else self.split(child, common)
        return node

    def child(self, node: Node, tokens: array[int]) -> Node | None:
        """The child of `node`, which `tokens` run through, that holds their next page."""
        start = node.end * self.page_bytes
        return node.children.get(memoryview(tokens).cast("B")[start : start + self.page_bytes].tobytes())

    # Digests

    def pages_without_digests(self, node: Node) -> int:
        """Pages of the path to `node` whose digests were not computed yet."""
        pages = 0
        while node.digests is None:
            pages += node.pages
            assert node.parent is not None, "roots have their seed"
            node = node.parent
        return pages

    def first_without_digests(self, node: Node) -> Node | None:
        """The first node of the path to `node` whose digests were not computed yet; None if all were."""
        found = None
        while node.digests is None:
            found = node
            assert node.parent is not None, "roots have their seed"
            node = node.parent
        return found

    def digests(self, node: Node) -> list[bytes]:
        """Digests of the node's own pages; computed once, for the whole path that lacks them."""
        missing = []
        current = node
        while current.digests is None:
            missing.append(current)
            assert current.parent is not None, "roots have their seed"
            current = current.parent
        for below in reversed(missing):
            assert current.digests is not None, "the path above was just filled"
            below.digests = page_digests(memoryview(below.key), self.page_size, current.digests[-1])
            current = below
        assert node.digests is not None, "just filled"
        return node.digests


def _pages(end: End) -> int:
    node, inside = end
    return node.end + inside
