"""The tree's invariants, recomputed from scratch: a report in words, never an assertion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from asynchicache.hashing import page_digests
from asynchicache.tree.node import ABSENT, FULL_DEVICE, FULL_HOST, RESIDENT, Node, place_of, tier_of
from asynchicache.tree.radix_tree import PathLease, UnifiedRadixTree
from asynchicache.tree.tails import padded
from asynchicache.tree.tier_copies import TierCopy


def problems(
    tree: UnifiedRadixTree, leases: Iterable[PathLease] | None = None, tier_copies: Iterable[TierCopy] = ()
) -> list[str]:
    """Every broken invariant; empty when all is well. Linear in the tree.

    Args:
        leases: every open lease, or None if the caller does not know them: locks are not checked then.
        tier_copies: every copy in flight (`tier_copies.TierCopy`), which lock nodes as well.
    """
    found: list[str] = []
    roots = [(seed.hex(), root) for seed, root in tree.roots.items()]
    for seed, root in [*roots, *(("of another epoch", root) for root in tree.detached)]:
        if root.parent is not None or root.pages or root.key:
            found.append(f"root {seed} has pages or a parent")
    for node in tree.nodes():
        found.extend(_node(tree, node))
    found.extend(_slots_disjoint(tree))
    found.extend(_candidates(tree))
    found.extend(_kept(tree))
    found.extend(_holders(tree))
    if leases is not None:
        tier_copies = list(tier_copies)
        found.extend(_locks(tree, leases, tier_copies))
        found.extend(_arrivals(tree, tier_copies))
    return found


def _holders(tree: UnifiedRadixTree) -> Iterator[str]:
    watched = {(place, slot): node for place, slot, node in tree.slots_held()}
    places = tree.watched_places
    held = {(place, slot): node for node in tree.nodes() for place in places for slot in node.slots_at(place)}
    for key in watched.keys() | held.keys():
        if watched.get(key) is not held.get(key):
            yield f"slot {key[1]} of place {key[0]} is {held.get(key)!r}'s, not {watched.get(key)!r}'s"


def _node(tree: UnifiedRadixTree, node: Node) -> Iterator[str]:
    parent = node.parent
    if parent is None or parent.children.get(node.head) is not node:
        yield f"{node!r} is not its parent's child"
        return
    if len(node.key) != node.pages * tree.page_bytes or node.head != node.key[: tree.page_bytes]:
        yield f"{node!r} has a key of {len(node.key)} bytes"
    if node.end != parent.end + node.pages or not node.pages:
        yield f"{node!r} does not follow its parent, which ends at {parent.end}"
    yield from _residency(tree, node, parent)
    yield from _children(node)
    yield from _tails(tree, node)
    yield from _digests(tree, node, parent)


def _residency(tree: UnifiedRadixTree, node: Node, parent: Node) -> Iterator[str]:
    for place, slots in zip(tree.places, node.slots, strict=True):
        wanted = node.pages if place in tree.page_places else 1
        if (slots is None) != (node.residency[place] == ABSENT) or (
            slots is not None and len(slots) != wanted
        ):
            yield f"{node!r} has {slots} at place {place}, residency {node.residency[place]}"
        if node.locks[place] < 0:
            yield f"{node!r} has {node.locks[place]} locks at place {place}"
    if node.residency[FULL_DEVICE] == ABSENT and node.residency[FULL_HOST] == ABSENT:
        yield f"{node!r} has full pages nowhere"
    for place in (FULL_DEVICE, FULL_HOST):
        if node.residency[place] != ABSENT and parent.residency[place] == ABSENT:
            yield f"{node!r} has full pages in {tier_of(place).name} and its parent has not"
        for component_id in range(1, tree.width):
            if (
                node.residency[place_of(component_id, tier_of(place))] != ABSENT
                and node.residency[place] == ABSENT
            ):
                yield f"{node!r} has component {component_id} in {tier_of(place).name} without full pages"


def _children(node: Node) -> Iterator[str]:
    for place, counted in ((FULL_DEVICE, node.device_children), (FULL_HOST, node.host_children)):
        there = sum(child.residency[place] != ABSENT for child in node.children.values())
        if there != counted:
            yield f"{node!r} counts {counted} children in {tier_of(place).name}, has {there}"


def _tails(tree: UnifiedRadixTree, node: Node) -> Iterator[str]:
    if node.tail and (node.children or node.pages != 1 or node.key != padded(node.key, node.tail, tree)):
        yield f"{node!r} is a tail of {node.tail} tokens with children or another key"
    if tree.tails and (node.heads or []) != sorted(node.children):
        yield f"{node!r} does not know the heads of its children"
    if node.tails != sum(child.tail > 0 for child in node.children.values()):
        yield f"{node!r} counts {node.tails} tails"


def _digests(tree: UnifiedRadixTree, node: Node, parent: Node) -> Iterator[str]:
    if node.digests is None:
        return
    if parent.digests is None:
        yield f"{node!r} has digests and its parent has none"
        return
    prior = parent.digests[-1]
    if node.digests != page_digests(memoryview(node.key), tree.page_size, prior):
        yield f"{node!r} has digests that its tokens do not give"


def _slots_disjoint(tree: UnifiedRadixTree) -> Iterator[str]:
    for place in tree.places:
        last = max((max(slots) for node in tree.nodes() if (slots := node.slots[place])), default=0)
        found, again = bytearray(last + 1), Counter[int]()
        for slot in (slot for node in tree.nodes() for slot in node.slots[place] or ()):
            if found[slot]:
                again[slot] += 1
            found[slot] = 1
        for slot, owners in again.items():
            yield f"slot {slot} at place {place} belongs to {owners + 1} nodes"


def _candidates(tree: UnifiedRadixTree) -> Iterator[str]:
    nodes = list(tree.nodes())
    for place, queue in zip(tree.places, tree.queues, strict=True):
        expected = {node for node in nodes if tree.evictable(node, place)}
        for node in expected ^ queue.members:
            kind = "is no candidate" if node in expected else "is a stale candidate"
            yield f"{node!r} {kind} at place {place}"
        yield from (f"{problem} at place {place}" for problem in queue.problems())


def _kept(tree: UnifiedRadixTree) -> Iterator[str]:
    shelves = [queue.shelf for queue in tree.queues]
    for share in {id(shelf.share): shelf.share for shelf in shelves}.values():
        kept = sum(shelf.used for shelf in shelves if shelf.share is share)
        if kept != share.used or kept > share.most:
            yield f"hints keep {kept:g} slots or bytes, counted are {share.used:g} of at most {share.most:g}"


def _locks(
    tree: UnifiedRadixTree, leases: Iterable[PathLease], tier_copies: Iterable[TierCopy]
) -> Iterator[str]:
    expected: Counter[tuple[int, int]] = Counter()
    for locks in (*(lease.locked for lease in leases), *(tier_copy.locks for tier_copy in tier_copies)):
        expected.update((id(node), place) for node, place in locks)
    for node in tree.nodes():
        for place, count in enumerate(node.locks):
            if count != expected[id(node), place]:
                yield f"{node!r} has {count} locks at place {place}, leases hold {expected[id(node), place]}"


def _arrivals(tree: UnifiedRadixTree, tier_copies: Iterable[TierCopy]) -> Iterator[str]:
    """What is on its way to a place is brought there by one copy, no more and no less."""
    brought: Counter[tuple[int, int]] = Counter()
    for tier_copy in tier_copies:
        brought.update(
            (id(node), place) for place, pending in tier_copy.pending.items() for node in pending.nodes
        )
    for node in tree.nodes():
        for place, residency in enumerate(node.residency):
            copies = brought[id(node), place]
            if residency not in (ABSENT, RESIDENT) and copies != 1:
                yield f"{node!r} is on its way to place {place}, brought by {copies} copies"
