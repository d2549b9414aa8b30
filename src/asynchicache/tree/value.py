"""What a hybrid model loses with the slots of a node: tokens that could not be restored, for each byte.

States and pages are measured alike, so that both compete for the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asynchicache.tree.components import Component
from asynchicache.tree.node import FULL, Node, SlotPlace, component_of, place_of, tier_of
from asynchicache.types import Tier

SUPERSEDED_SHARE = 1 / 30
"""What a state counts after a later one of the same sequence was published. With 1/10 the trace of tool calls
loses a point, with 0 sub-agents do not find the states that they branch off from."""

_MAX_STEPS = 64
"""Nodes that are looked at, up a path, for the end of another prefix that can be restored."""


class PrefixValue:
    """Measures nodes; it changes nothing.

    Attributes:
        costs: by component, the bytes of a slot, or anything in proportion.
    """

    def __init__(
        self, components: Sequence[Component], costs: Sequence[float], restorable: Callable[[Node], bool]
    ) -> None:
        """
        Args:
            components: beside the full one.
            costs: see above.
            restorable: whether every pool beside the full one lets a prefix end at a node.
        """
        self._components = components
        self.costs = costs
        self._restorable = restorable

    def density(self, node: Node, place: SlotPlace) -> float:
        """Tokens that could not be restored any more without the slots of a place, in pages, for each byte
        that comes free.

        With pages, all that stands on them goes, and in the end those above that serve no other prefix. Pages
        behind which no prefix can end are worth nothing.
        """
        component_id = component_of(place)
        if component_id == FULL:
            if node.children:  # they are in the other tier, and would have to wait for these pages
                return 1.0 / self.costs[FULL]
            if not self._restorable(node):
                return 0.0
        lost, freed = self._lost_pages(node)
        if component_id == FULL:
            return lost / (freed * self.costs[FULL] + self._others_bytes(node, tier_of(place)))
        share = SUPERSEDED_SHARE if node.superseded >> component_id & 1 else 1.0
        return share * lost / self.costs[component_id]

    def _others_bytes(self, node: Node, tier: Tier) -> float:
        """Bytes of a node's states and windows in a tier."""
        return sum(
            node.count_slots(place_of(component.id, tier)) * self.costs[component.id]
            for component in self._components
        )

    def _lost_pages(self, node: Node) -> tuple[int, int]:
        """Pages between the end of a node and the prefix that could be restored instead; and those of them
        that serve no other prefix. Superseded states do not count as a place to resume: they go soon."""
        above, freed, alone = node.parent, node.pages, True
        assert above is not None, "a root has no slots"
        for _ in range(_MAX_STEPS):
            if above.parent is None:
                break
            if (node.superseded or not above.superseded) and self._restorable(above):
                break
            alone = alone and len(above.children) == 1
            if alone:
                freed += above.pages
            above = above.parent
        return node.end - above.end, freed
