"""Prefixes that end inside a page.

A tail is a leaf with one slot, of whose page only the first tokens count. Its key is those tokens, filled up
with a word that is no token id. So it is a page of its own: no walk along a sequence runs into it, it never
counts as a whole page, and copies, locks, eviction and storage treat it as any other leaf. A sequence that
is filled up in the same way (`filled_up`) leads to it, page by page.

A request that resumes inside a page copies the page and writes behind the copied tokens; what the rest of
the copy holds is never read. So the page may as well be a whole one of a sequence that goes on differently.
With states, the sequence must end where the state was kept, and with windows, where the page of the window
was: only a whole tail will do. It needs the window before the page as well.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    Locks,
    Node,
    SlotPlace,
    place_of,
)
from asynchicache.tree.policies import NOBODY, Use
from asynchicache.tree.radix_tree import Inserted, Match, UnifiedRadixTree
from asynchicache.types import TOKEN_BYTES, Tier

_NO_TOKEN = (-1).to_bytes(TOKEN_BYTES, "little", signed=True)
"""Token ids are 0 at least (`types.token_array`)."""


class Tail(NamedTuple):
    """The end of a prefix, behind its whole pages.

    Attributes:
        node: the child of the prefix's last node whose first page begins with it.
        tokens: how many tokens, less than a page.
    """

    node: Node
    tokens: int


def padded(tokens: bytes, count: int, tree: UnifiedRadixTree) -> bytes:
    """The key of a tail that consists of the first `count` tokens given."""
    length = count * TOKEN_BYTES
    return tokens[:length] + _NO_TOKEN * ((tree.page_bytes - length) // TOKEN_BYTES)


def keys_behind(tree: UnifiedRadixTree, tokens: array[int], pages: int, limit: int) -> list[bytes]:
    """The keys of the tails at which a prefix of `tokens` may end behind its first `pages` pages, the
    shortest first.

    `limit`: the most tokens of the prefix.
    """
    start = pages * tree.page_bytes
    end = min(start + tree.page_bytes - TOKEN_BYTES, limit * TOKEN_BYTES)
    rest = memoryview(tokens).cast("B")[start:end].tobytes() if start < end else b""
    return [padded(rest, count, tree) for count in range(1, len(rest) // TOKEN_BYTES + 1)]


def filled_up(tree: UnifiedRadixTree, tokens: array[int], pages: int, count: int) -> array[int]:
    """The first `pages` pages of `tokens`, and the tail of `count` tokens behind them as a page."""
    whole = tokens[: pages * tree.page_size]
    whole.frombytes(padded(tokens[len(whole) : len(whole) + count].tobytes(), count, tree))
    return whole


def find(tree: UnifiedRadixTree, node: Node, tokens: array[int], limit: int) -> Tail | None:
    """The longest end of a prefix of `tokens` behind `node`, whose pages they begin with.

    Logarithmic in the children of `node`.

    Args:
        node: where the whole pages end.
        limit: the most tokens of the prefix.
    """
    start = node.end * tree.page_bytes
    end = min(start + tree.page_bytes - TOKEN_BYTES, limit * TOKEN_BYTES)
    if node.heads is None or end <= start:
        return None
    rest = memoryview(tokens).cast("B")[start:end].tobytes()
    # Of sorted strings, those next to a given one have the longest common prefix with it.
    at = bisect_left(node.heads, rest)
    near = [(_common(head, rest), head) for head in node.heads[max(at - 1, 0) : at + 1]]
    count, head = max(near, default=(0, b""))
    if tree.components:
        return _exact(tree, node, rest, count)
    return Tail(node.children[head], count) if count else None


def _exact(tree: UnifiedRadixTree, node: Node, rest: bytes, most: int) -> Tail | None:
    """The longest tail that begins `rest` and that every pool lets a prefix end at."""
    for count in range(most, 0, -1) if node.tails else ():
        child = node.children.get(padded(rest, count, tree))
        if child is not None and tree.restorable(child):
            return Tail(child, count)
    return None


def _common(head: bytes, rest: bytes) -> int:
    """The tokens that both begin with."""
    length = min(len(head), len(rest))
    differ = int.from_bytes(head[:length], "little") ^ int.from_bytes(rest[:length], "little")
    bits = (differ & -differ).bit_length() - 1 if differ else 8 * length
    return bits // (8 * TOKEN_BYTES)


def reach(tree: UnifiedRadixTree, match: Match, tokens: array[int], limit: int) -> Match:
    """The match, or one that ends further, before a tail: there may be a state where no whole page ends.

    Without states any end will do, so the match is the longest.
    """
    if not (tree.tails and tree.components):
        return match
    path = [match.node]
    while (child := tree.child(path[-1], tokens)) is not None and child.end <= match.full_pages:
        path.append(child)
    for node in reversed(path[1:]):
        if find(tree, node, tokens, limit) is not None:
            return Match(node, 0, node.end, match.full_pages, None, match.version)
    return match


def add(tree: UnifiedRadixTree, node: Node, tokens: array[int], slot: int, *, arriving: bool) -> Node:
    """Add the rest of `tokens` behind `node`, less than a page, as a tail that the tree has not.

    Args:
        node: where the whole pages of the tokens end, on the device.
        tokens: the sequence, up to its end.
        slot: device slot of the page; it is the tree's from now on.
        arriving: it is still being copied; `copies.finish` marks it resident.
    """
    rest = memoryview(tokens).cast("B")[node.end * tree.page_bytes :].tobytes()
    count = len(rest) // TOKEN_BYTES
    tail = _add_child(tree, node, padded(rest, count, tree), count)
    tree.fill_slots(tail, FULL_DEVICE, [slot], LOADING if arriving else RESIDENT)
    return tail


def _add_child(tree: UnifiedRadixTree, node: Node, key: bytes, count: int) -> Node:
    tail = tree.add_child(node, key)
    tail.tail = count
    node.tails += 1
    return tail


def insert_host(
    tree: UnifiedRadixTree, node: Node, tokens: array[int], slots: Sequence[int], count: int
) -> Inserted:
    """Take pages that storage delivered into host slots, behind `node`, the last of them a tail.

    Args:
        node: the node before them, as of `UnifiedRadixTree.insert_host`.
        tokens: the sequence, see `filled_up`.
        slots: host slots of the pages.
        count: tokens of the tail.
    """
    result = tree.insert_host(node, tokens, slots[:-1])
    above = result.node
    key = memoryview(tokens).cast("B")[above.end * tree.page_bytes :].tobytes()
    tail = above.children.get(key) or _add_child(tree, above, key, count)
    if tail.residency[FULL_HOST] == ABSENT:
        tree.fill_slots(tail, FULL_HOST, [slots[-1]], RESIDENT)
        tail.hits = max(tail.hits, 1)  # storage has it, so it is no prompt's end that goes on at once
        result.accepted += 1
        result.filled.append(tail)
    else:
        result.duplicates.append(slots[-1])
    tree.touch_pages(tail, NOBODY)
    result.node = tail
    return result


def get(tree: UnifiedRadixTree, node: Node, tokens: array[int]) -> Node | None:
    """The tail behind `node` that is exactly the rest of `tokens`."""
    rest = memoryview(tokens).cast("B")[node.end * tree.page_bytes :].tobytes()
    return node.children.get(padded(rest, len(rest) // TOKEN_BYTES, tree))


def place(node: Node, component_id: int = FULL) -> SlotPlace:
    """Where a page is copied from: the device, if it is there or on its way."""
    device = place_of(component_id, Tier.DEVICE)
    return device if node.residency[device] != ABSENT else place_of(component_id, Tier.HOST)


def locks(tree: UnifiedRadixTree, tail: Tail) -> Locks:
    """What keeps a tail: its page and its states, where they are nearest."""
    found = [(tail.node, place(tail.node))]
    for component in tree.components:
        tier = component.nearest(tail.node)
        if tier is not None:
            found += [(tail.node, place_of(component.id, tier)), (tail.node, place_of(FULL, tier))]
    return found


def use(tree: UnifiedRadixTree, tail: Tail, use: Use) -> None:
    """Mark a tail as used now; a whole page is used only if its own sequence is."""
    if tail.node.tail:
        tree.touch_pages(tail.node, use)
        for component in tree.components:
            tree.use(component, tail.node)


def supersede(tree: UnifiedRadixTree, node: Node) -> None:
    """Count a tail little: what was published begins with all of it, or is its sequence continued."""
    if node.parent is None or not node.tail:
        return
    for component in tree.components:
        tree.age(node, component.id)
    if all(component.paged for component in tree.components):  # else its state tells what its page is worth
        node.worth[FULL] = 0
        for slots in (FULL_DEVICE, FULL_HOST):
            tree.queues[slots].requeue(node)


def tier(tree: UnifiedRadixTree, tail: Tail) -> Tier:
    """The farthest tier that anything of a tail comes from."""
    page = Tier.DEVICE if place(tail.node) == FULL_DEVICE else Tier.HOST
    return max([page, *(component.tier(tail.node) or Tier.DEVICE for component in tree.components)])
