"""Pools beside the full one, as the tree sees them: where a prefix may end, and what it needs there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from asynchicache.errors import ConfigError
from asynchicache.tree.node import FULL, LOADING, RESIDENT, Locks, Node, place_of
from asynchicache.types import Coverage, Tier

End = tuple[Node, int]
"""Where a prefix ends: a node, and how many pages of the child that the sequence runs into."""


class Component(Protocol):
    """A pool beside the full one, as the tree sees it: numbers and slots, no name, no bytes."""

    id: int

    paged: bool
    """Whether a node has a slot for each of its pages, which a split divides, or one at its end."""

    def longest(self, node: Node, partial: Node | None, inside: int) -> End:
        """The longest prefix, up to `inside` pages into `partial` behind `node`, that this pool allows."""
        ...

    def tier(self, node: Node) -> Tier | None:
        """The farthest tier that a prefix ending at `node` needs of this pool; None: it cannot end there.

        Slots that are LOADING count, behind their fence; slots that are SAVING do not count yet.
        """
        ...

    def needs(self, node: Node) -> Iterator[Node]:
        """The nodes whose slots a prefix that ends at `node` needs, the last one first."""
        ...

    def keeps(self, node: Node) -> Iterator[Node]:
        """The nodes whose slots are kept for a prefix that ends at `node`, the last one first."""
        ...

    def first_page(self, end: int, *, inside: bool) -> int:
        """The first page that a prefix of `end` pages needs; `inside`: it ends inside the last of them."""
        ...

    def nearest(self, node: Node) -> Tier | None:
        """The nearest tier that has the node's own slots, as `tier` counts."""
        ...


_USABLE = (RESIDENT, LOADING)
"""Of the device: what arrives there is awaited by layer."""


class _Places:
    """Where a component's slots stand."""

    __slots__ = ("_device", "_host", "id")

    def __init__(self, component_id: int) -> None:
        self.id = component_id
        self._device = place_of(component_id, Tier.DEVICE)
        self._host = place_of(component_id, Tier.HOST)

    def nearest(self, node: Node) -> Tier | None:
        residency = node.residency
        if residency[self._device] in _USABLE:
            return Tier.DEVICE
        return Tier.HOST if residency[self._host] == RESIDENT else None


class StateComponent(_Places):
    """A recurrent state: one slot, at the end of a node (coverage `TRAILING_PAGES`, 1)."""

    __slots__ = ()
    paged = False

    def longest(self, node: Node, partial: Node | None, inside: int) -> End:
        while node.parent is not None and self.nearest(node) is None:
            node = node.parent
        return node, 0

    def tier(self, node: Node) -> Tier | None:
        return self.nearest(node)

    def needs(self, node: Node) -> Iterator[Node]:
        if node.parent is not None:
            yield node

    keeps = needs

    def first_page(self, end: int, *, inside: bool) -> int:
        return max(end - 1, 0)


class WindowComponent(_Places):
    """A sliding window: the last `pages` pages before the end, or all of a shorter prefix.

    Before an end inside a page, it is that page and the window before it. The last `kept` pages are kept, see
    `Coverage.kept`.

    A node has slots for all of its pages or for none. A node without is a tombstone: the window moved on
    or was evicted, and a later insertion may fill it again.
    """

    __slots__ = ("kept", "pages")
    paged = True

    def __init__(self, component_id: int, pages: int, kept: int) -> None:
        super().__init__(component_id)
        self.pages = pages
        self.kept = kept

    def first(self, node: Node) -> int:
        """The first page that a prefix ending at `node` needs."""
        return self.first_page(node.end, inside=node.tail > 0)

    def first_page(self, end: int, *, inside: bool) -> int:
        return max(end - inside - self.pages, 0)

    def first_kept(self, node: Node) -> int:
        """The first page that is kept for a prefix ending at `node`."""
        return max(node.end - (node.tail > 0) - self.kept, 0)

    def longest(self, node: Node, partial: Node | None, inside: int) -> End:
        """One walk up: a gap moves the end to its upper edge, because every nearer end needs the gap too."""
        end = (node, inside)
        current, covered = (partial, inside) if partial is not None and inside else (node, node.pages)
        while current.parent is not None:
            if self.nearest(current) is None:
                end, covered = (current.parent, 0), 0
            elif covered >= self.pages + (end[0].tail > 0):
                break
            current = current.parent
            covered += current.pages
        return end

    def tier(self, node: Node) -> Tier | None:
        farthest = Tier.DEVICE
        for part in self.needs(node):
            tier = self.nearest(part)
            if tier is None:
                return None
            farthest = max(farthest, tier)
        return farthest

    def needs(self, node: Node) -> Iterator[Node]:
        return node.path(self.first(node))

    def keeps(self, node: Node) -> Iterator[Node]:
        return node.path(self.first_kept(node))


def make_component(coverage: Coverage, component_id: int, *, paged: bool) -> Component:
    """The component for a coverage; `paged` if the pool has a slot a page, not one for a state.

    Raises:
        ConfigError: no component serves it.
    """
    if coverage.pages is not None and paged:
        return WindowComponent(component_id, coverage.pages, coverage.kept)
    if coverage.pages == 1:
        return StateComponent(component_id)
    raise ConfigError(
        f"component {component_id}: no component covers {coverage.pages} trailing pages with states"
    )


def prefix_locks(component: Component, node: Node) -> Locks:
    """What keeps a prefix that ends at `node` restorable: the slots it needs where they are nearest, and
    the full pages that they would go with."""
    found = []
    for part in component.needs(node):
        tier = component.nearest(part)
        if tier is None:
            continue
        found.append((part, place_of(component.id, tier)))
        if part is node or tier is Tier.HOST:  # on the device the path's own end keeps those above
            found.append((part, place_of(FULL, tier)))
    return found
