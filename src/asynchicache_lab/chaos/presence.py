"""Find which pages of a prompt are available, page by page: in the tree by nodes, in the store by keys.

It shares no code with the library's own lookup (`match`, its bisection, or sets of lengths).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    Node,
    SlotPlace,
    place_of,
)
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.types import Coverage, Tier

PageFlags: TypeAlias = list[bytearray]
"""By component, one byte a page: 1 if the page, or the state behind it, is there."""


def nothing(components: int, pages: int) -> PageFlags:
    return [bytearray(pages) for _ in range(components)]


def longest(coverages: Sequence[Coverage], there: PageFlags) -> int:
    """The longest prefix, in pages, that all components cover. The first component needs every page."""
    full = there[FULL].find(0)
    end = len(there[FULL]) if full < 0 else full
    while end and not all(map(window_covers, coverages[1:], there[1:], [end] * len(coverages))):
        end -= 1
    return end


def window_covers(coverage: Coverage, there: bytearray, end: int) -> bool:
    """Whether a window, or a state, is there before page `end`."""
    first = max(end - (coverage.pages or end), 0)
    return there.find(0, first, end) < 0


def in_memory(tree: UnifiedRadixTree, tokens: array[int], seed: bytes, pages: int) -> PageFlags:
    """Which of a sequence's first `pages` pages the tree holds."""
    found = nothing(tree.width, pages)
    for node, first, count in _along(tree, memoryview(tokens).cast("B"), seed, pages):
        for component_id in range(tree.width):
            if is_held(node, component_id):
                start, stop = span(tree, node, component_id)
                stop = min(stop, first + count)
                found[component_id][start:stop] = b"\1" * max(stop - start, 0)
    return found


def _along(
    tree: UnifiedRadixTree, view: memoryview, seed: bytes, pages: int
) -> Iterator[tuple[Node, int, int]]:
    """The nodes along a sequence, each with its first page and its number of matching pages."""
    node, at = tree.roots.get(seed), 0
    while node is not None and at < pages:
        ahead = (
            (child, shared_pages(child, view, at, pages, tree.page_bytes)) for child in node.children.values()
        )
        node, count = next((found for found in ahead if found[1]), (None, 0))
        if node is not None:
            yield node, at, count
            at += count
            node = node if count == node.pages else None


def shared_pages(node: Node, view: memoryview, at: int, pages: int, size: int) -> int:
    """Number of leading pages of `node` that match the sequence from page `at` on."""
    most = min(node.pages, pages - at)
    part, key = view[at * size : (at + most) * size], memoryview(node.key)
    if part == key[: most * size]:
        return most
    return next(n for n in range(most) if part[n * size : n * size + size] != key[n * size : n * size + size])


def tokens_in_memory(
    tree: UnifiedRadixTree, coverages: Sequence[Coverage], tokens: array[int], seed: bytes, whole: int
) -> int:
    """The longest prefix in tokens that the tree holds, leaving one to compute, by looking at every node.

    `whole`: the pages of the longest prefix that ends with a page.
    """
    size, best, root = tree.page_size, whole * tree.page_size, tree.roots.get(seed)
    for node in tree.nodes():
        path = [node]
        while (above := path[-1].parent) is not None:
            path.append(above)
        if path.pop() is not root:
            continue
        ids = array("q", b"".join(part.key for part in reversed(path)))
        end = (node.end - 1) * size + (node.tail or size)
        common = next(
            (n for n, pair in enumerate(zip(ids, tokens, strict=False)) if pair[0] != pair[1]), None
        )
        common = min(len(ids), len(tokens)) if common is None else common
        if len(coverages) == 1:
            best = max(best, min(common, end))
        elif node.tail and common >= end < len(tokens) and _ends(tree, coverages, tokens, seed, node):
            best = max(best, end)
    return min(best, len(tokens) - 1)


def _ends(
    tree: UnifiedRadixTree, coverages: Sequence[Coverage], tokens: array[int], seed: bytes, tail: Node
) -> bool:
    """Whether a prefix may end at a tail: its states, its pages of windows and those before it are there."""
    there = in_memory(tree, tokens, seed, tail.end - 1)
    return all(
        is_held(tail, n) and (not _paged(tree, n) or window_covers(coverages[n], there[n], tail.end - 1))
        for n in range(1, tree.width)
    )


def is_held(node: Node, component_id: int, *, without: SlotPlace | None = None) -> bool:
    """Whether the node's slots of a component are usable by a request, in either tier, or in the one that is
    not `without`."""
    places = [place_of(component_id, tier) for tier in (Tier.DEVICE, Tier.HOST)]
    device, host = (ABSENT if place == without else node.residency[place] for place in places)
    if component_id == FULL:
        return device != ABSENT or host == RESIDENT
    return device in (RESIDENT, LOADING) or host == RESIDENT


def span(tree: UnifiedRadixTree, node: Node, component_id: int) -> tuple[int, int]:
    """The pages that a node's slots of a component cover: all of the node's, or the last one for a state."""
    return node.end - (node.pages if _paged(tree, component_id) else 1), node.end


def _paged(tree: UnifiedRadixTree, component_id: int) -> bool:
    """Whether a component has a slot for each page."""
    return place_of(component_id, Tier.DEVICE) in tree.page_places


def reclaimable(tree: UnifiedRadixTree, place: SlotPlace) -> int:
    """Number of slots of a place that repeated eviction could free."""
    if place not in (FULL_DEVICE, FULL_HOST):
        return sum(node.count_slots(place) for node in tree.nodes() if _is_free(node, place))
    going: set[int] = set()
    for node in reversed(list(tree.nodes())):  # children first
        if _is_free(node, place) and _stands_alone(node, place, going):
            going.add(id(node))
    return sum(node.count_slots(place) for node in tree.nodes() if id(node) in going)


def _is_free(node: Node, place: SlotPlace) -> bool:
    return node.residency[place] == RESIDENT and not node.locks[place]


def _stands_alone(node: Node, place: SlotPlace, going: set[int]) -> bool:
    """Whether everything that depends on the node's full pages is evicted before it."""
    children = node.children.values()
    if place == FULL_DEVICE and node.residency[FULL_HOST] != RESIDENT:  # the pages would be lost
        return all(id(child) in going and child.residency[FULL_HOST] == ABSENT for child in children)
    return all(child.residency[place] == ABSENT or id(child) in going for child in children)
