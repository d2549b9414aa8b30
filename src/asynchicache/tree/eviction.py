"""Eviction: free slots of one component in one tier, in the order of the policy.

Evicting full pages also evicts everything else of that node in that tier; evicting a window also
evicts the state that needs it; a state goes alone. A node stays in the tree as long as some tier has
its full pages: an evicted state leaves a tombstone, which a later insertion can fill.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asynchicache.tree.node import (
    FULL_DEVICE,
    FULL_HOST,
    RESIDENT,
    Node,
    SlotPlace,
    component_of,
    is_full,
    other_tier,
    place_of,
    tier_of,
)
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.tree.tier_copies import remove_if_dead
from asynchicache.types import Tier

MAX_VICTIMS = 1 << 62


@dataclass(slots=True, eq=False)
class Evicted:
    """What an eviction freed.

    Attributes:
        slots: by place, freed slots; the caller owns them.
        demoted: pages that remain in the other tier.
        lost: pages that no tier of the tree has any more.
    """

    slots: dict[SlotPlace, list[int]] = field(default_factory=dict)
    demoted: int = 0
    lost: int = 0

    def count(self, place: SlotPlace) -> int:
        return len(self.slots.get(place, ()))


def evict(
    tree: UnifiedRadixTree, place: SlotPlace, count: int, *, dirty: bool = True, victims: int = MAX_VICTIMS
) -> Evicted:
    """Free `count` slots of a place: more if a node cannot be split, fewer if candidates run out.

    Args:
        count: slots wanted.
        dirty: whether device pages and states without a copy on the host may be evicted.
        victims: nodes to evict from at most.
    """
    freed = Evicted()
    spared: list[Node] = []
    queue = tree.queues[place]
    while victims and freed.count(place) < count:
        node = queue.pop(tree.clock, tree.step, tree.now)
        if node is None:
            break
        if not _may_go(node, place, dirty):
            spared.append(node)
            continue
        victims -= 1
        if is_full(place):
            _evict_full(tree, node, place, count - freed.count(place), freed)
        elif place in tree.page_places:
            _evict_window(tree, node, place, count - freed.count(place), freed)
        else:
            _clear_slots(tree, node, place, freed)
    for node in spared:
        tree.refresh(node, place)
    return freed


def _may_go(node: Node, place: SlotPlace, dirty: bool) -> bool:
    if place == FULL_DEVICE and node.residency[FULL_HOST] != RESIDENT:
        return dirty and not node.children
    if place == FULL_HOST:
        return True
    return dirty or tier_of(place) is Tier.HOST or node.residency[other_tier(place)] == RESIDENT


def _clear_slots(tree: UnifiedRadixTree, node: Node, place: SlotPlace, freed: Evicted) -> None:
    freed.slots.setdefault(place, []).extend(tree.clear_slots(node, place))
    if node.slots[other_tier(place)] is None:
        node.dropped |= 1 << component_of(place)


def _evict_window(tree: UnifiedRadixTree, node: Node, place: SlotPlace, wanted: int, freed: Evicted) -> None:
    """Evict a node's pages of a window; only the first ones, if the rest is still a whole window."""
    window = next(component.pages for component in tree.windows if component.id == component_of(place))
    if wanted <= node.pages - window and not any(node.locks):
        upper = tree.split(node, wanted)
        tree.refresh(node, place)
        node = upper
    _clear_slots(tree, node, place, freed)
    if node.slots[other_tier(place)] is None:
        _drop_states(tree, node, freed)


def _drop_states(tree: UnifiedRadixTree, node: Node, freed: Evicted) -> None:
    """Evict the states of a node whose window is gone: no prefix can end there."""
    # The cascade goes one way, attention over windows over states. A state that is evicted leaves pages
    # that the next checkpoint makes useful again; the other way round, one small pool would empty the
    # large one.
    for component in tree.components:
        for tier in () if component.paged else (Tier.DEVICE, Tier.HOST):
            place = place_of(component.id, tier)
            if tree.evictable(node, place):  # not marked as dropped: it is the window that made room
                freed.slots.setdefault(place, []).extend(tree.clear_slots(node, place))


def _evict_full(tree: UnifiedRadixTree, node: Node, place: SlotPlace, wanted: int, freed: Evicted) -> None:
    others = [place_of(component_id, tier_of(place)) for component_id in range(1, tree.width)]
    states = [other for other in others if other not in tree.page_places]
    if wanted < node.pages and not any(node.slots[other] for other in states):
        if _alone(node):
            kept = (node.pages - wanted) * tree.page_bytes
            tree.ghosts.add(node.end - wanted, node.key[kept : kept + tree.page_bytes], node.end)
            freed.slots.setdefault(place, []).extend(tree.trim(node, wanted, place))
            freed.lost += wanted
            if tree.tells_losses:
                tree.policy.lost(node.seed(), wanted)
            tree.refresh(node, place)
            return
        tree.split(node, node.pages - wanted)  # a tail is enough: `node` is the tail now
    for other in others:  # not marked as dropped: it is the full pages that made room
        if node.slots[other] is not None:
            freed.slots.setdefault(other, []).extend(tree.clear_slots(node, other))
    freed.slots.setdefault(place, []).extend(tree.clear_slots(node, place))
    seed = node.seed() if tree.tells_losses else b""
    if remove_if_dead(tree, node):
        if tree.tells_losses:
            tree.policy.lost(seed, node.pages)
        if not node.tail:  # part of a page: a ghost of it would be taken for a page that was asked for
            tree.ghosts.add(node.end - node.pages, node.head, node.end)
        freed.lost += node.pages
    else:
        freed.demoted += node.pages


def _alone(node: Node) -> bool:
    """Whether a leaf has slots at one place only, so that its tail can be cut off without a split."""
    return not node.children and not any(node.locks) and node.slots.count(None) == len(node.slots) - 1
