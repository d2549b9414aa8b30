"""The unified radix tree: one tree of pages for every pool of a hybrid model.

After SGLang's UnifiedRadixTree (sgl-project/sglang#23316) with other mechanics: `match` changes
nothing, `pin` returns a lease, `insert` is one transaction that says what became of every slot, and
slots that are on their way are marked as such instead of being committed early.

The tree decides and counts; it never allocates, frees or copies. Whoever calls it owns the slots
that it returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asynchicache.errors import InternalError
from asynchicache.leases import Lease
from asynchicache.tree.components import Component, pins
from asynchicache.tree.matching import Match, MatchingTree
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    Node,
    Pins,
    place,
)
from asynchicache.types import Tier


class PathLease(Lease):
    """Keeps one prefix: the path to `node` where it is, and what its end needs of the other pools."""

    __slots__ = ("node", "pinned")

    def __init__(self, tree: UnifiedRadixTree, node: Node, pinned: Pins) -> None:
        super().__init__(lambda: tree.unpin_all(pinned))  # not through `self`: a lost lease ends at once
        self.node = node
        self.pinned = pinned


class Pages(NamedTuple):
    """Slots of consecutive pages, from page number `first` on."""

    first: int
    slots: Sequence[int]


@dataclass(slots=True, eq=False)
class Inserted:
    """What became of the slots that were offered to `insert` or `insert_host`.

    Attributes:
        node: where the inserted sequence ends.
        duplicates: offered page slots that the tree already had pages for; they stay the caller's.
        taken: how many offered page slots are the tree's own now.
        windows: by component number and page, the offered slots that stay the caller's.
        fresh: nodes that hold newly taken pages, parents first.
    """

    node: Node
    duplicates: list[int] = field(default_factory=list)
    taken: int = 0
    windows: dict[int, dict[int, int]] = field(default_factory=dict)
    fresh: list[Node] = field(default_factory=list)


class UnifiedRadixTree(MatchingTree):
    """Match, pin, insert. Copies are in `tree.copies`, eviction in `tree.eviction`."""

    # Leases

    def pin(self, match: Match) -> PathLease:
        """Keep a match: nothing of its prefix can be evicted until the lease is closed.

        Raises:
            InternalError: the tree changed since the match was made.
        """
        if match.version != self.version:
            raise InternalError("a match was pinned after the tree had changed; match again")
        node = match.node
        if match.inside and match.partial is not None:
            partial = match.partial
            node = partial if match.inside == partial.pages else self.split(partial, match.inside)
        self.touch(node, FULL)
        for aux in self.components:
            self.use(aux, node)
        return self.lease(node)

    def use(self, aux: Component, node: Node) -> None:
        """What a prefix that ends at `node` needs of a pool is used now: what lies nearer the root, where
        more sequences may need it, a little later than the rest."""
        for part in aux.needs(node):
            self.touch(part, aux.number)

    def lease(self, node: Node) -> PathLease:
        """Keep the path to `node`, and what a prefix needs there of the other pools."""
        node = self.rooted(node)
        pinned = self._anchors(node)
        for aux in self.components:
            pinned += pins(aux, node)
        self.pin_all(pinned)
        return PathLease(self, node, pinned)

    @staticmethod
    def _anchors(node: Node) -> list[tuple[Node, int]]:
        """The ends of the path to `node`, in each tier that it needs."""
        if node.residency[FULL_DEVICE] != ABSENT:
            return [(node, FULL_DEVICE)]
        anchors = [(node, FULL_HOST)]
        above = device_end(node)
        if above.parent is not None:
            anchors.append((above, FULL_DEVICE))
        return anchors

    def repin(self, lease: PathLease, node: Node) -> None:
        """Move a lease to another end of the same sequence. It keeps the windows there, and those that it
        kept on the device: a forward that reads them may be under way; `drop_behind` lets go of them."""
        lease.node = node
        pinned = lease.pinned  # always this list: it is what closing the lease gives back
        kept = {place(aux.number, Tier.DEVICE) for aux in self.windows}
        old = [i for i, (_, at) in enumerate(pinned) if at not in kept]
        for held, at in self._anchors(node):
            self.pin_for(pinned, held, at)
        self.keep_windows(lease, Tier.DEVICE)
        for index in reversed(old):
            self.unpin_for(pinned, index)

    def keep_windows(self, lease: PathLease, tier: Tier) -> None:
        """Have a lease keep, in one tier, the windows that its end needs."""
        for aux in self.windows:
            at = place(aux.number, tier)
            for part in aux.needs(lease.node):
                if part.residency[at] != ABSENT and (part, at) not in lease.pinned:
                    self.pin_for(lease.pinned, part, at)

    def drop_behind(self, lease: PathLease, number: int, page: int, pinned: Pins) -> None:
        """Move the windows before a page from what a lease keeps to what `pinned` does."""
        places = (place(number, Tier.DEVICE), place(number, Tier.HOST))
        for index in reversed(range(len(lease.pinned))):
            node, at = lease.pinned[index]
            if at in places and node.end <= page:
                self.pin_for(pinned, node, at)
                self.unpin_for(lease.pinned, index)

    # Insertion

    def insert(
        self,
        lease: PathLease,
        tokens: array[int],
        slots: Sequence[int],
        *,
        windows: Mapping[int, Pages] | None = None,
    ) -> Inserted:
        """Publish computed pages behind a lease, and move the lease to their end.

        Args:
            lease: on the prefix that the pages follow; it must be on the device.
            tokens: the whole sequence, from its first token.
            slots: device slots of the pages after the lease's end, in order.
            windows: by component number, device slots of the last pages, as far back as there are any.

        Raises:
            InternalError: the lease is closed, its prefix is not on the device, or there are more
                slots than pages.
        """
        if lease.closed:
            raise InternalError(f"pages inserted behind {lease.node!r} with a lease that is closed")
        if lease.node.residency[FULL_DEVICE] == ABSENT:
            raise InternalError(f"pages inserted behind {lease.node!r}, which is not on the device")
        result = self._walk_in(lease.node, tokens, slots, FULL_DEVICE)
        node = result.node
        begun = [node.end - node.pages for node in result.fresh]
        for number, pages in (windows or {}).items():
            self.cut_window(node, number)  # so that what lies behind it can go by itself
            result.windows[number] = self.take_pages(node, number, Tier.DEVICE, pages)
            self.use(self.components[number - 1], node)
        result.fresh = [
            part for fresh, start in zip(result.fresh, begun, strict=True) for part in _parts(fresh, start)
        ]
        self.touch(node, FULL)
        self.repin(lease, node)
        for number, pages in (windows or {}).items():
            self._keep_taken(lease, number, pages.first, result.windows[number])
        return result

    def _keep_taken(self, lease: PathLease, number: int, first: int, refused: Mapping[int, int]) -> None:
        """Have a lease keep the pages of a window that were taken from page `first` on, those too that its
        end needs no more: the forward that wrote them, or one that reads them, may be under way."""
        at = place(number, Tier.DEVICE)
        node = lease.node
        while node.end > first and node.parent is not None:
            if node.end - 1 not in refused and (node, at) not in lease.pinned:
                self.pin_for(lease.pinned, node, at)
            node = node.parent

    def insert_host(self, node: Node, tokens: array[int], slots: Sequence[int]) -> Inserted:
        """Take pages that storage delivered into host slots, behind `node`.

        The path to `node` must have, or be about to have, its pages on the host: a child on the host
        stands on its parent's. Pages of a node that is on the device only become its host copy.

        Raises:
            InternalError: `node` is not on the host, or there are more slots than pages.
        """
        node = self.rooted(node)
        if node.residency[FULL_HOST] == ABSENT:
            raise InternalError(f"host pages inserted behind {node!r}, which is not on the host")
        result = self._walk_in(node, tokens, slots, FULL_HOST)
        self.touch(result.node, FULL)
        return result

    def _walk_in(self, node: Node, tokens: array[int], slots: Sequence[int], at: int) -> Inserted:
        """Walk down from `node`; pages that have no slots at a place get those offered."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        begin, done = node.end, 0
        end = (begin + len(slots)) * size
        if end > len(view):
            raise InternalError(f"{len(slots)} slots for pages from {begin}; {len(view) // size} pages given")
        result = Inserted(node)
        while done < len(slots):
            start = (begin + done) * size
            child = node.children.get(view[start : start + size].tobytes())
            if child is None:
                child = self.grow(node, view[start:end].tobytes())
            else:
                common = self._common(child.key, view, start, end)
                child = child if common == child.pages else self.split(child, common)
            offered = slots[done : done + child.pages]
            if child.residency[at] == ABSENT:
                self.occupy(child, at, list(offered), RESIDENT)
                result.taken += len(offered)
                result.fresh.append(child)
            else:
                result.duplicates.extend(offered)
            done += child.pages
            node = child
        result.node = node
        return result

    def take_state(self, node: Node, number: int, tier: Tier, slot: int, *, arriving: bool = False) -> bool:
        """Attach a state to the end of `node`; False if it has one there: the slot stays the caller's.

        `arriving`: it is still being copied; `copies.finish` will settle it.
        """
        at = place(number, tier)
        if node.parent is None or node.residency[at] != ABSENT:
            return False
        self.touch(node, number)
        self.occupy(node, at, [slot], LOADING if arriving else RESIDENT)
        return True

    def take_pages(self, node: Node, number: int, tier: Tier, pages: Pages) -> dict[int, int]:
        """Fill the tombstones of a window with the slots of a run of pages that ends where `node` does;
        a node is cut where the run begins.

        Returns:
            By page number, the slots that stay the caller's: the tree has those pages already, or no
            full pages of them in that tier.
        """
        at = place(number, tier)
        refused: dict[int, int] = {}
        while node.end > pages.first and node.parent is not None:
            start = max(node.end - node.pages, pages.first)
            offered = pages.slots[start - pages.first : node.end - pages.first]
            if node.residency[at] != ABSENT or node.residency[place(FULL, tier)] == ABSENT:
                refused.update(zip(range(start, node.end), offered, strict=True))
            else:
                if len(offered) < node.pages:
                    self.split(node, node.pages - len(offered))
                self.occupy(node, at, list(offered), RESIDENT)
            node = node.parent
        return refused

    def supersede(self, node: Node, number: int) -> None:
        """A state or window was published at `node`: let the one before it go first, if nothing branched
        off since.

        A conversation that goes on resumes from its last state; the one before it serves nobody but a
        branch, and a branch point that was met has two children. Without this, a pool that holds one
        state a conversation keeps two of every second one under plain LRU.
        """
        aux = self.components[number - 1]
        above = node.parent
        for part in aux.needs(node):
            above = part.parent
        while above is not None and above.parent is not None and len(above.children) == 1:
            if self._age(above, number):
                return
            above = above.parent

    def _age(self, node: Node, number: int) -> bool:
        """Put a node's slots where they go first; whether that is all: a state is one, and what lies
        before a window that has aged has aged with it."""
        places = (place(number, Tier.DEVICE), place(number, Tier.HOST))
        if not any(node.slots[at] for at in places):
            return False
        aged = not node.used[number]
        node.used[number] = 0
        for at in places:  # both: an entry may wait there for slots to come
            self.queues[at].hurry(node)
        return aged or not self.components[number - 1].paged

    def count_hit(self, node: Node) -> list[Node]:
        """One more request met the path to `node`; returns the path, parents first."""
        path = []
        while node.parent is not None:
            node.hits += 1
            path.append(node)
            node = node.parent
        path.reverse()
        return path


def _parts(node: Node, start: int) -> list[Node]:
    """The nodes that one node is now, which began at page `start` before it was cut, parents first."""
    found = [node]
    while (above := found[-1].parent) is not None and above.end > start:
        found.append(above)
    found.reverse()
    return found


def device_end(node: Node) -> Node:
    """The last node of the path to `node` whose full pages are on the device, or the root."""
    while node.residency[FULL_DEVICE] == ABSENT:
        assert node.parent is not None, "a root counts as there"
        node = node.parent
    return node
