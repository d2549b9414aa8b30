"""Turns changes of the tree's slots into events. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator

from asynchicache.controller.namespaces import Namespaces
from asynchicache.events import CacheEvent, PagesRemoved, PagesStored, TiersCleared
from asynchicache.specs import PoolSpec
from asynchicache.tree.node import RESIDENT, Node, SlotPlace, component_of, place_of, tier_of
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.types import TOKEN_BYTES, Tier


class TreeEvents:
    """The `watcher` of a tree while there are subscribers: emits an event for each change of whole pages.

    There is none for tails: who routes by events asks for whole pages.
    """

    def __init__(
        self,
        tree: UnifiedRadixTree,
        owners: tuple[PoolSpec, ...],
        namespaces: Namespaces,
        tell: Callable[[CacheEvent], None],
    ) -> None:
        """
        Args:
            owners: the pool of each component.
            namespaces: the namespaces of the tree's roots.
        """
        self._tree = tree
        self._owners = owners
        self._namespaces = namespaces
        self._tell = tell

    def on_arrive(self, node: Node, place: SlotPlace) -> None:
        if self._is_told(node):
            self._tell(self.describe(node, component_of(place), tier_of(place)))

    def _is_told(self, node: Node) -> bool:
        """Whether a node has whole pages, of the weights that are served now."""
        return not node.tail and self._tree.is_current(node)

    def on_evict(self, node: Node, place: SlotPlace, pages: int) -> None:
        if not self._is_told(node):
            return
        component_id = component_of(place)
        count = pages if self._owners[component_id].per_token else 1
        digests = tuple(self._tree.digests(node)[-count:])
        self._tell(PagesRemoved(self._owners[component_id].name, tier_of(place), digests))

    def on_store(self, node: Node, component_id: int) -> None:
        if self._is_told(node):
            self._tell(self.describe(node, component_id, Tier.STORAGE))

    def on_clear(self, *tiers: Tier) -> None:
        self._tell(TiersCleared(tiers))
        for node in self._tree.nodes(current=True):
            for event in self.present(node):
                if event.tier in tiers:
                    self._tell(event)

    def present(
        self, node: Node, writing: Container[tuple[Node, int]] = frozenset()
    ) -> Iterator[PagesStored]:
        """Events for all that a node has, by tier. `writing`: storage writes in flight, left out."""
        for component_id in range(self._tree.width if not node.tail else 0):
            for tier in (Tier.DEVICE, Tier.HOST):
                if node.residency[place_of(component_id, tier)] == RESIDENT:
                    yield self.describe(node, component_id, tier)
            if node.stored >> component_id & 1 and (node, component_id) not in writing:
                yield self.describe(node, component_id, Tier.STORAGE)

    def describe(self, node: Node, component_id: int, tier: Tier) -> PagesStored:
        """The event for the pages of a node; for a state, for its last page."""
        pool, size = self._owners[component_id], self._tree.page_size
        count = node.pages if pool.per_token else 1
        digests = self._tree.digests(node)
        tokens = array("q", node.key[-count * size * TOKEN_BYTES :])
        parent = digests[-count - 1] if count < node.pages else self._before(node)
        namespace = self._namespaces.named(node.seed())
        return PagesStored(pool.name, tier, tuple(digests[-count:]), parent, tokens, size, *namespace)

    def _before(self, node: Node) -> bytes | None:
        """Digest of the page before a node; None after the root, whose digest is a seed."""
        parent = node.parent
        return self._tree.digests(parent)[-1] if parent is not None and parent.pages else None
