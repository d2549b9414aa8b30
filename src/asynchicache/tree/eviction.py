"""Making room: one component's slots in one tier, the policy's first choice first.

Giving up full pages takes everything else of that node in that tier along; giving up a window
takes the state that would need it; a state goes alone. What is left behind stays in the tree for as
long as full pages are somewhere: a state that is gone is a tombstone, not a hole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asynchicache.tree.copies import remove_if_dead
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, RESIDENT, TIERS, Node, place
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.types import Tier


@dataclass(slots=True, eq=False)
class Evicted:
    """What an eviction freed.

    Attributes:
        slots: by place, slots that are the caller's now.
        demoted: pages that live on in the other tier.
        lost: pages that no tier of the tree has any more.
    """

    slots: dict[int, list[int]] = field(default_factory=dict)
    demoted: int = 0
    lost: int = 0

    def count(self, at: int) -> int:
        return len(self.slots.get(at, ()))


def evict(tree: UnifiedRadixTree, at: int, count: int, *, dirty: bool = True) -> Evicted:
    """Free `count` slots of a place, more if a node cannot be cut, fewer if no candidate is left.

    Args:
        tree: the tree.
        at: which component and tier (`node.place`).
        count: slots wanted.
        dirty: whether device pages and states may go that have no copy on the host.
    """
    freed = Evicted()
    spared: list[Node] = []
    queue = tree.queues[at]
    while freed.count(at) < count:
        node = queue.pop()
        if node is None:
            break
        if not _may_go(node, at, dirty):
            spared.append(node)
            continue
        if at < TIERS:
            _evict_full(tree, node, at, count - freed.count(at), freed)
        elif at in tree.page_places:
            _evict_window(tree, node, at, count - freed.count(at), freed)
        else:
            _vacate(tree, node, at, freed)
    for node in spared:
        queue.add(node)
    return freed


def _may_go(node: Node, at: int, dirty: bool) -> bool:
    if at == FULL_DEVICE and node.residency[FULL_HOST] != RESIDENT:
        return dirty and not node.children
    if at == FULL_HOST:
        return True
    return dirty or at % TIERS == Tier.HOST or node.residency[at + Tier.HOST] == RESIDENT


def _vacate(tree: UnifiedRadixTree, node: Node, at: int, freed: Evicted) -> None:
    freed.slots.setdefault(at, []).extend(tree.vacate(node, at))
    if node.slots[at ^ 1] is None:
        node.dropped |= 1 << at // TIERS


def _evict_window(tree: UnifiedRadixTree, node: Node, at: int, wanted: int, freed: Evicted) -> None:
    """Give up a node's pages of a window: the first ones, if its last ones are a window by themselves."""
    window = next(component.pages for component in tree.windows if component.id == at // TIERS)
    if wanted <= node.pages - window and not any(node.pins):
        upper = tree.split(node, wanted)
        tree.refresh(node, at)
        node = upper
    _vacate(tree, node, at, freed)
    if node.slots[at ^ 1] is None:
        _drop_states(tree, node, freed)


def _drop_states(tree: UnifiedRadixTree, node: Node, freed: Evicted) -> None:
    """Give up the states of a node whose window is gone: nobody can resume there."""
    for component in tree.components:
        for tier in () if component.paged else (Tier.DEVICE, Tier.HOST):
            at = place(component.id, tier)
            if tree.evictable(node, at):  # not marked as dropped: it is the window that made room
                freed.slots.setdefault(at, []).extend(tree.vacate(node, at))


def _evict_full(tree: UnifiedRadixTree, node: Node, at: int, wanted: int, freed: Evicted) -> None:
    others = [at + TIERS * component_id for component_id in range(1, tree.width)]
    states = [other for other in others if other not in tree.page_places]
    if wanted < node.pages and not any(node.slots[other] for other in states):
        if _alone(node):
            freed.slots.setdefault(at, []).extend(tree.trim(node, wanted, at))
            freed.lost += wanted
            tree.refresh(node, at)
            return
        tree.split(node, node.pages - wanted)  # a tail is enough: `node` is the tail now
    for other in others:
        if node.slots[other] is not None:
            _vacate(tree, node, other, freed)
    freed.slots.setdefault(at, []).extend(tree.vacate(node, at))
    if remove_if_dead(tree, node):
        freed.lost += node.pages
    else:
        freed.demoted += node.pages


def _alone(node: Node) -> bool:
    """Whether a leaf is at one place only, so that its tail can be cut off without a trace."""
    return not node.children and not any(node.pins) and node.slots.count(None) == len(node.slots) - 1
