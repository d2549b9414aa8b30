"""Nodes and the books about them: who may be evicted, how many children hold slots, what is pinned.

Every change of a node's slots goes through `occupy`, `settle` and `vacate`, and every change of the
structure through `grow`, `split`, `trim` and `remove`: the books are kept there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from asynchicache.tree.components import Component, WindowComponent, component
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, RESIDENT, TIERS, Node, Pins, place
from asynchicache.tree.policies import EvictionQueue, lru, policy
from asynchicache.types import TOKEN_BYTES, Coverage, Tier


class SlotWatcher(Protocol):
    """Is told what nodes have, as it changes; it must not change the tree."""

    def arrived(self, node: Node, at: int) -> None:
        """The bytes of a place may be read from now on."""
        ...

    def left(self, node: Node, at: int, pages: int) -> None:
        """The last `pages` pages of a place are about to go, or its state."""
        ...

    def stored(self, node: Node, number: int) -> None:
        """A component is known to be in storage."""
        ...

    def cleared(self, *tiers: Tier) -> None:
        """These tiers were emptied without a word a page; what the tree has in them now stays."""
        ...


class NodeStore:
    """The structure below `UnifiedRadixTree`.

    Attributes:
        page_size, page_bytes: tokens of a page, and bytes of them in a key.
        components: the pools beside the full one, numbered from 1 in this order.
        windows: those of them that have a slot for each page.
        queues: by `place`: who may give up slots there.
        roots: by namespace seed, for as long as something stands on them.
        version: changes whenever a match may no longer hold; one of another version is stale.
        watcher: told of slots that come and go; None, and then at no cost, if nobody listens.
    """

    def __init__(
        self,
        page_size: int,
        coverages: Sequence[Coverage] = (),
        *,
        windows: Collection[int] = (),
        eviction: str = "lru",
    ) -> None:
        """
        Args:
            page_size: tokens of a page.
            coverages: of the pools beside the full one.
            windows: the numbers, from 1, of those that have a slot a page; the others have one a state.
            eviction: the policy that orders the full one's nodes.
        """
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.components: list[Component] = [
            component(c, n, paged=n in windows) for n, c in enumerate(coverages, start=1)
        ]
        self.windows = [aux for aux in self.components if isinstance(aux, WindowComponent)]
        self.width = 1 + len(self.components)
        paged = [FULL, *(aux.number for aux in self.windows)]
        self.page_places = tuple(place(number, tier) for number in paged for tier in (Tier.DEVICE, Tier.HOST))
        self._window_places = frozenset(self.page_places[TIERS:])
        self._inherited = sum(1 << number for number in paged)
        full = policy(eviction)
        self.queues = [
            EvictionQueue(full if at < TIERS else lru, at // TIERS, at) for at in range(TIERS * self.width)
        ]
        self.counts_hits = eviction in ("lfu", "slru")
        self.roots: dict[bytes, Node] = {}
        self.version = 0
        self.watcher: SlotWatcher | None = None
        self.clock = 0
        self._serial = 0

    # Structure

    def root(self, seed: bytes) -> Node:
        """The root of a namespace, made if it is new."""
        root = self.roots.get(seed)
        if root is None:
            root = self.roots[seed] = self.bare_root(seed)
        return root

    def bare_root(self, seed: bytes) -> Node:
        """A root that is not the tree's, for whoever only looks."""
        root = Node(None, b"", b"", 0, self.width)
        root.residency = [RESIDENT] * (TIERS * self.width)
        root.digests = [seed]
        return root

    def rooted(self, node: Node) -> Node:
        """`node`, or the tree's own root if `node` is one that the tree does not have."""
        return node if node.pages or node.digests is None else self.root(node.digests[0])

    def _prune(self, root: Node) -> None:
        """Drop a root that nothing stands on: there may be as many namespaces as requests."""
        if root.children or any(root.pins) or root.digests is None:
            return
        if self.roots.get(root.digests[0]) is root:
            del self.roots[root.digests[0]]

    def grow(self, parent: Node, key: bytes) -> Node:
        """A new leaf without slots; `parent` has no child that begins with the same page."""
        head = key[: self.page_bytes]
        node = Node(parent, key, head, len(key) // self.page_bytes, self.width)
        self._number(node)
        node.born = node.serial
        parent.children[head] = node
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages` pages; returns the new first half, `node` stays the second.

        States, and the leases on a path, belong to the end of a node, so they stay where they are. Who
        keeps pages of a window keeps both halves from now on.
        """
        parent = _parent(node)
        cut = pages * self.page_bytes
        upper = Node(parent, node.key[:cut], node.head, pages, self.width)
        self._number(upper)
        upper.used = list(node.used)
        upper.hits = node.hits
        upper.born = node.born
        upper.stored = node.stored & self._inherited
        upper.dropped = node.dropped & self._inherited
        parent.children[node.head] = upper
        node.key = node.key[cut:]
        node.head = node.key[: self.page_bytes]
        node.parent = upper
        node.pages -= pages
        upper.children[node.head] = node
        if node.digests is not None:
            upper.digests, node.digests = node.digests[:pages], node.digests[pages:]
        self._divide(upper, node)
        if node.holders:
            self._hold_both(upper, node)
        for aux in self.windows:
            for at in (place(aux.number, Tier.DEVICE), place(aux.number, Tier.HOST)):
                self.refresh(upper, at)
        return upper

    def _divide(self, upper: Node, lower: Node) -> None:
        """Share slots a page, and the copies that fill them."""
        for at in self.page_places:
            slots = lower.slots[at]
            if slots is not None:
                upper.slots[at], lower.slots[at] = slots[: upper.pages], slots[upper.pages :]
                upper.residency[at] = lower.residency[at]
        upper.device_children = int(lower.residency[FULL_DEVICE] != ABSENT)
        upper.host_children = int(lower.residency[FULL_HOST] != ABSENT)
        if lower.pending:
            flying = [copy for copy in lower.pending if copy.at in self.page_places]
            for copy in flying:
                copy.nodes.append(upper)
            upper.pending = flying or None

    def _hold_both(self, upper: Node, lower: Node) -> None:
        for pins in {id(pins): pins for pins in lower.holders or ()}.values():
            more = [(upper, at) for node, at in pins if node is lower and at in self._window_places]
            for node, at in more:
                self.pin_for(pins, node, at)

    def cut_window(self, node: Node, number: int) -> None:
        """Have a node begin where the window of `node` does."""
        pages = next(aux.pages for aux in self.windows if aux.number == number)
        first = max(node.end - pages, 0)
        while node.end - node.pages > first and node.parent is not None:
            node = node.parent
        if node.end - node.pages < first < node.end:
            self.split(node, node.pages - (node.end - first))

    def trim(self, node: Node, pages: int, at: int) -> list[int]:
        """Cut the last pages off an unpinned leaf that has slots at one place only; returns theirs.

        Like `split` and `remove` of the second half, without making it first.
        """
        slots = node.held(at)
        if self.watcher is not None:
            self.watcher.left(node, at, pages)
        node.pages -= pages
        node.end -= pages
        node.key = node.key[: node.pages * self.page_bytes]
        node.slots[at] = slots[: node.pages]
        node.stored &= self._inherited
        if node.digests is not None:
            node.digests = node.digests[: node.pages]
        self.version += 1
        return slots[node.pages :]

    def remove(self, node: Node) -> None:
        """Take out a node without slots or children."""
        parent = _parent(node)
        del parent.children[node.head]
        self.version += 1
        for queue in self.queues:
            queue.discard(node)
        node.parent = None
        used, gone = parent.used, node.used
        for number in range(self.width):
            if gone[number] > used[number]:
                used[number] = gone[number]
        if not parent.pages:
            self._prune(parent)

    def _number(self, node: Node) -> None:
        self.version += 1
        self._serial += 1
        node.serial = self._serial

    # Slots

    def occupy(self, node: Node, at: int, slots: list[int], residency: int) -> None:
        """Give an empty place of a node its slots."""
        node.slots[at] = slots
        node.residency[at] = residency
        node.dropped &= ~(1 << at // TIERS)
        if at == FULL_DEVICE:
            parent = _parent(node)
            parent.device_children += 1
            self.refresh(parent, FULL_DEVICE)
        elif at == FULL_HOST:
            parent = _parent(node)
            parent.host_children += 1
            self.refresh(parent, FULL_HOST)
        self.refresh(node, at)
        if self.watcher is not None and residency == RESIDENT:
            self.watcher.arrived(node, at)

    def settle(self, node: Node, at: int) -> None:
        """The bytes of a place have arrived."""
        node.residency[at] = RESIDENT
        self.refresh(node, at)
        if self.watcher is not None:
            self.watcher.arrived(node, at)

    def vacate(self, node: Node, at: int) -> list[int]:
        """Empty a place of a node; returns its slots, which the caller owns now."""
        slots = node.held(at)
        if self.watcher is not None and node.residency[at] == RESIDENT:
            self.watcher.left(node, at, node.pages)
        self.version += 1
        node.slots[at] = None
        node.residency[at] = ABSENT
        self.queues[at].discard(node)
        if at == FULL_DEVICE:
            parent = _parent(node)
            parent.device_children -= 1
            self._inherit_use(parent, node)
            self.refresh(parent, FULL_DEVICE)
        elif at == FULL_HOST:
            parent = _parent(node)
            parent.host_children -= 1
            self._inherit_use(parent, node)
            self.refresh(parent, FULL_HOST)
        return slots

    @staticmethod
    def _inherit_use(parent: Node, node: Node) -> None:
        if node.used[FULL] > parent.used[FULL]:
            parent.used[FULL] = node.used[FULL]

    # Candidates

    def refresh(self, node: Node, at: int) -> None:
        """Put a node in, or take it out of, the queue of a place."""
        if self.evictable(node, at):
            self.queues[at].add(node)
        else:
            self.queues[at].discard(node)

    @staticmethod
    def evictable(node: Node, at: int) -> bool:
        """Whether the slots of a place may be taken away: arrived, unpinned, and nobody stands on them.

        Children stand on the full pages of their parent in the same tier, so only ends of paths are
        candidates, and pinning one node keeps the whole path above it.
        """
        if node.residency[at] != RESIDENT or node.pins[at] or node.parent is None:
            return False
        if at == FULL_DEVICE:
            return not node.device_children
        if at == FULL_HOST:
            return not node.host_children
        return True

    def pin_for(self, pins: Pins, node: Node, at: int) -> None:
        """Add one place to what somebody keeps; `pins` is theirs, and grows when the node is split."""
        pins.append((node, at))
        self._pin(pins, node, at)

    def pin_all(self, pins: Pins) -> None:
        """Keep all of `pins` until `unpin_all` of the same list."""
        for node, at in pins:
            self._pin(pins, node, at)

    def unpin_all(self, pins: Pins) -> None:
        """Let go of everything in a list, which is empty then."""
        while pins:
            node, at = pins.pop()
            self._unpin(pins, node, at)

    def unpin_for(self, pins: Pins, index: int) -> None:
        """Let go of one place in a list."""
        node, at = pins.pop(index)
        self._unpin(pins, node, at)

    def _pin(self, pins: Pins, node: Node, at: int) -> None:
        node.pins[at] += 1
        if node.pins[at] == 1:
            self.queues[at].discard(node)
        if at in self._window_places:
            if node.holders is None:
                node.holders = []
            node.holders.append(pins)

    def _unpin(self, pins: Pins, node: Node, at: int) -> None:
        if at in self._window_places:
            _forget(node.holders or [], pins)
        node.pins[at] -= 1
        if not node.pins[at]:
            if node.pages:
                self.refresh(node, at)
            else:
                self._prune(node)

    def touch(self, node: Node, component: int) -> None:
        self.clock += 1
        node.used[component] = self.clock

    # Walks

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def subtree(self, node: Node) -> Iterator[Node]:
        """`node` and everything below it, parents first."""
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack.extend(current.children.values())


def _forget(holders: list[Pins], pins: Pins) -> None:
    """Take out one entry that is `pins` itself: an equal list may be somebody else's."""
    for index in range(len(holders) - 1, -1, -1):
        if holders[index] is pins:
            del holders[index]
            return


def _parent(node: Node) -> Node:
    assert node.parent is not None, "a root has no slots to change"
    return node.parent
