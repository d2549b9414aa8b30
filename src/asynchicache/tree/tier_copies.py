"""Copies between the tiers of a tree, from their start to their end.

A copy marks its destinations LOADING or SAVING, locks its sources and destinations, and ends once:
settled or taken back. A node may be split meanwhile; both halves then belong to the copy. When a copy
fails, pages that others are building on it are lost as well: the tree drops them at once, and the copy
that still uses their slots returns the slots when it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    SAVING,
    Locks,
    Node,
    Pending,
    SlotPlace,
    is_full,
    other_tier,
    place_of,
    tier_of,
)
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.types import Tier


class CopyRequest(NamedTuple):
    """One component of one node that is to be copied to a tier."""

    node: Node
    component_id: int

    @property
    def size(self) -> int:
        """Number of slots it needs."""
        slots = self.node.slots
        return len(
            slots[place_of(self.component_id, Tier.DEVICE)]
            or slots[place_of(self.component_id, Tier.HOST)]
            or ()
        )


@dataclass(slots=True, eq=False)
class TierCopy:
    """One copy in flight between the tiers, from the tree's point of view.

    Attributes:
        tier: the destination; the source is the other one.
        pending: by place, the nodes whose slots are being filled.
        locks: what must not be evicted meanwhile.
    """

    tier: Tier
    pending: dict[SlotPlace, Pending] = field(default_factory=dict)
    locks: Locks = field(default_factory=list)

    def nodes(self, component: int) -> list[Node]:
        """The nodes that this copy fills for a component, including halves of split nodes."""
        pending = self.pending.get(place_of(component, self.tier))
        return list(pending.nodes) if pending else []

    def orphans(self, place: SlotPlace) -> list[int]:
        """Slots of a place that the tree dropped while this copy used them; `finish` returns them."""
        return [slot for pending in self.pending.values() for slot in pending.orphans.get(place, ())]


def missing_on_device(tree: UnifiedRadixTree, node: Node) -> list[CopyRequest]:
    """What a prefix that ends at `node` needs on the device and has on the host only: full pages, parents
    first, and the pages of windows, at most those that are kept. States are not the tree's to load: each
    request has its own."""
    for component in tree.windows:
        tree.cut_window(node, component.first_kept(node))
    wanted = []
    current = node
    while current.residency[FULL_DEVICE] == ABSENT and current.parent is not None:
        wanted.append(CopyRequest(current, FULL))
        current = current.parent
    wanted.reverse()
    for component in tree.windows:
        wanted += [
            CopyRequest(part, component.id)
            for part in component.needs(node)
            if component.nearest(part) is Tier.HOST
        ]
    return wanted


def missing_on_host(tree: UnifiedRadixTree, node: Node) -> list[CopyRequest]:
    """What of the path to `node` is on the device and not on the host, parents first; of windows only
    what is kept for a prefix that ends at `node`.

    Parents come along because a child on the host stands on its parent's pages there. A component
    whose device copy is itself still arriving is left for another time.
    """
    for component in tree.windows:
        tree.cut_window(node, component.first_kept(node))
    inside = {component.id: set(component.keeps(node)) for component in tree.windows}
    wanted: list[CopyRequest] = []
    for below in reversed([*node.path()]):
        if below.residency[FULL_HOST] == ABSENT:
            if below.residency[FULL_DEVICE] != RESIDENT:
                break
            wanted.append(CopyRequest(below, FULL))
        wanted += [
            CopyRequest(below, component_id)
            for component_id in range(1, tree.width)
            if is_unsaved(below, component_id) and below in inside.get(component_id, (below,))
        ]
    return wanted


def is_unsaved(node: Node, component_id: int) -> bool:
    """Whether a component of a node is on the device only."""
    device, host = place_of(component_id, Tier.DEVICE), place_of(component_id, Tier.HOST)
    return node.residency[device] == RESIDENT and node.residency[host] == ABSENT


def begin(tree: UnifiedRadixTree, tier: Tier, copies: Iterable[tuple[CopyRequest, list[int]]]) -> TierCopy:
    """Start a copy: fill the destinations with slots and lock both ends. Parents come before children."""
    tier_copy = TierCopy(tier)
    state = LOADING if tier is Tier.DEVICE else SAVING
    other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
    for (node, component_id), slots in copies:
        place = place_of(component_id, tier)
        tree.fill_slots(node, place, slots, state)
        _mark_pending(tier_copy, node, place)
        tier_copy.locks.append((node, place_of(component_id, other)))
        if component_id != FULL:
            tier_copy.locks += [(node, place_of(FULL, tier)), (node, place_of(FULL, other))]
    tree.lock_all(tier_copy.locks)
    return tier_copy


def begin_arrival(tree: UnifiedRadixTree, node: Node, components: Iterable[int]) -> TierCopy:
    """Start the copy, within the device, of states that `take_state(..., arriving=True)` took."""
    tier_copy = TierCopy(Tier.DEVICE)
    for component_id in components:
        _mark_pending(tier_copy, node, place_of(component_id, Tier.DEVICE))
        tier_copy.locks.append((node, FULL_DEVICE))
    tree.lock_all(tier_copy.locks)
    return tier_copy


def keep(tree: UnifiedRadixTree, tier_copy: TierCopy, locks: Locks) -> None:
    """Lock further places until a copy ends: sources that it copies to slots outside the tree."""
    for node, place in locks:
        tree.lock_for(tier_copy.locks, node, place)


def _mark_pending(tier_copy: TierCopy, node: Node, place: SlotPlace) -> None:
    pending = tier_copy.pending.get(place)
    if pending is None:
        pending = tier_copy.pending[place] = Pending(place, [])
    pending.nodes.append(node)
    node.pending = [*(node.pending or ()), pending]


def finish(tree: UnifiedRadixTree, tier_copy: TierCopy, *, arrived: bool) -> dict[SlotPlace, list[int]]:
    """End a copy.

    Returns:
        By place, slots that the tree no longer owns because this copy failed, or one that it depended
        on. Pages built on them in the same tier, and copies that were saving them, are taken back as
        well; leases on those lock nothing from then on.
    """
    lost: dict[SlotPlace, list[int]] = {}
    for pending in tier_copy.pending.values():
        lost.update(pending.orphans)
        for node in pending.nodes:
            _clear_pending(node, pending)
    for pending in tier_copy.pending.values():
        for node in pending.nodes:
            if arrived:
                tree.mark_resident(node, pending.place)
            else:
                _take_back(tree, node, pending.place, lost)
    tree.unlock_all(tier_copy.locks)
    return lost


def _clear_pending(node: Node, pending: Pending) -> None:
    left = [other for other in node.pending or () if other is not pending]
    node.pending = left or None


def _take_back(
    tree: UnifiedRadixTree, node: Node, place: SlotPlace, lost: dict[SlotPlace, list[int]]
) -> None:
    """Empty a place that never got its bytes, and for full pages everything below it in that tier."""
    if not is_full(place):
        _drop(tree, node, place, lost)
        return
    for below in reversed(list(tree.subtree(node))):
        for component_id in reversed(range(tree.width)):
            _drop(tree, below, place_of(component_id, tier_of(place)), lost)
        remove_if_dead(tree, below)


def _drop(tree: UnifiedRadixTree, node: Node, place: SlotPlace, lost: dict[SlotPlace, list[int]]) -> None:
    """Empty a place. A copy in flight that uses its slots owns them until it ends."""
    if node.residency[place] == ABSENT:
        return
    user = next((copy for copy in node.pending or () if copy.place in (place, other_tier(place))), None)
    if user is not None and user.place == place:
        user.nodes.remove(node)
        _clear_pending(node, user)
    owner = lost if user is None else user.orphans
    owner.setdefault(place, []).extend(tree.clear_slots(node, place))
    saved = other_tier(place)
    if node.residency[saved] == SAVING:  # from pages that are void
        _take_back(tree, node, saved, lost)


def remove_if_dead(tree: UnifiedRadixTree, node: Node) -> bool:
    """Remove a node without children that has no full pages in any tier; whether it was removed."""
    full = node.residency[FULL_DEVICE] != ABSENT or node.residency[FULL_HOST] != ABSENT
    if full or node.children or node.parent is None:
        return False
    tree.remove(node)
    return True
