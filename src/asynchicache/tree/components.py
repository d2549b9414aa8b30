"""What the tree asks of a pool's coverage: where a prefix may end, and what must then be kept."""

from __future__ import annotations

from typing import Protocol

from asynchicache.errors import ConfigError
from asynchicache.tree.node import FULL, LOADING, RESIDENT, Node, place
from asynchicache.types import Coverage, Tier


class Component(Protocol):
    """A pool beside the full one, as the tree sees it: numbers and slots, no name, no bytes."""

    number: int

    def tier(self, node: Node) -> Tier | None:
        """The farthest tier that a prefix ending at `node` needs of this pool; None: it cannot end there.

        A place in flight up counts as there, behind its fence; one in flight down does not count yet.
        """
        ...

    def places(self, node: Node) -> list[tuple[Node, int]]:
        """What keeps a prefix that ends at `node` restorable: nodes and the places to pin."""
        ...

    def divide(self, upper: Node, lower: Node) -> None:
        """Share the slots of `lower`, which was one node, with `upper`, its new first half."""
        ...


class StateComponent:
    """A recurrent state: one slot, at the end of a node (coverage `TRAILING_PAGES`, 1)."""

    __slots__ = ("_device", "_host", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._device = place(number, Tier.DEVICE)
        self._host = place(number, Tier.HOST)

    def tier(self, node: Node) -> Tier | None:
        device = node.residency[self._device]
        if device in (RESIDENT, LOADING):
            return Tier.DEVICE
        return Tier.HOST if node.residency[self._host] == RESIDENT else None

    def places(self, node: Node) -> list[tuple[Node, int]]:
        tier = self.tier(node)
        if tier is None:
            return []
        return [(node, place(self.number, tier)), (node, place(FULL, tier))]  # it goes when they go

    def divide(self, upper: Node, lower: Node) -> None:
        """Nothing: the state after the last token stays with the node that ends there."""


def component(coverage: Coverage, number: int) -> Component:
    """The component for a coverage.

    Raises:
        ConfigError: no component serves it.
    """
    if coverage.pages == 1:
        return StateComponent(number)
    raise ConfigError(f"component {number}: no component covers {coverage.pages} trailing pages")
