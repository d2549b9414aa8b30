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

from asynchicache.errors import InternalError
from asynchicache.hashing import page_digests
from asynchicache.leases import Lease
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, LOADING, RESIDENT, Node, place
from asynchicache.tree.store import NodeStore
from asynchicache.types import Tier


class Match:
    """What of a sequence is in the tree; of the version of the tree that it was made from.

    Attributes:
        node: where the longest restorable prefix ends, or the node before, see `inside`.
        inside: pages of `node`'s child towards the sequence that the prefix takes; 0 if it ends at `node`.
        pages: length of the restorable prefix, in pages: every pool has what it needs, here or on the host.
        full_pages: how far the full component alone reaches; beyond `pages`, a state or window is missing.
        partial: the child of `node` that the prefix ends in, or None.
        version: of the tree, when the match was made.
    """

    __slots__ = ("full_pages", "inside", "node", "pages", "partial", "version")

    def __init__(
        self, node: Node, inside: int, pages: int, full_pages: int, partial: Node | None, version: int
    ) -> None:
        self.node = node
        self.inside = inside
        self.pages = pages
        self.full_pages = full_pages
        self.partial = partial
        self.version = version

    @property
    def branching_pages(self) -> int | None:
        """Where a state would make the whole full match restorable (`mamba_branching_seqlen`, in
        pages); None if nothing is held back."""
        return self.full_pages if self.full_pages > self.pages else None

    def __repr__(self) -> str:
        return f"<Match {self.pages} of {self.full_pages} pages>"


class PathLease(Lease):
    """Keeps one prefix: the path to `node` where it is, and what its end needs of the other pools."""

    __slots__ = ("node", "pinned")

    def __init__(self, tree: UnifiedRadixTree, node: Node, pinned: list[tuple[Node, int]]) -> None:
        super().__init__(lambda: tree.unpin_all(pinned))  # not through `self`: a lost lease ends at once
        self.node = node
        self.pinned = pinned


@dataclass(slots=True)
class Inserted:
    """What became of the slots that were offered to `insert` or `insert_host`.

    Attributes:
        node: where the inserted sequence ends.
        duplicates: offered page slots that the tree already had pages for; they stay the caller's.
        taken: how many offered page slots are the tree's own now.
        states: by component number, whether the tree took the offered state slot.
        fresh: nodes that hold newly taken pages, parents first.
    """

    node: Node
    duplicates: list[int] = field(default_factory=list)
    taken: int = 0
    states: dict[int, bool] = field(default_factory=dict)
    fresh: list[Node] = field(default_factory=list)


class UnifiedRadixTree(NodeStore):
    """Match, pin, insert. Copies are in `tree.copies`, eviction in `tree.eviction`."""

    # Match

    def match(self, tokens: array[int], seed: bytes = b"", *, limit: int | None = None) -> Match:
        """The longest restorable prefix of `tokens`, `limit` pages at most. Changes nothing."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        pages = len(view) // size
        end = (pages if limit is None or limit > pages else limit) * size
        node = self.roots.get(seed)
        if node is None:
            return Match(self.bare_root(seed), 0, 0, 0, None, self.version)
        at, partial, inside = 0, None, 0
        while at < end:
            child = node.children.get(view[at : at + size].tobytes())
            if child is None:
                break
            key = child.key
            after = at + len(key)
            if after <= end and key.startswith(view[at:after]):
                node, at = child, after
                continue
            partial, inside = child, self._common(key, view, at, end)
            break
        return self._settle_match(node, partial, inside)

    def _settle_match(self, node: Node, partial: Node | None, inside: int) -> Match:
        full = node.end + inside
        if not self.components:
            return Match(node, inside, full, full, partial, self.version)
        while node.parent is not None and not self.restorable(node):
            node = node.parent
        return Match(node, 0, node.end, full, None, self.version)

    def restorable(self, node: Node) -> bool:
        """Whether every pool beside the full one lets a prefix end at `node`."""
        for aux in self.components:  # a loop: a generator costs more than the checks
            if aux.tier(node) is None:
                return False
        return True

    def _common(self, key: bytes, view: memoryview, at: int, end: int) -> int:
        """Whole pages that `key` and `view[at:end]` share, by bisection over buffers."""
        size = self.page_bytes
        low, high = 1, min(len(key), end - at) // size  # the first page matched: it was the lookup
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(view[at : at + middle * size]):
                low = middle
            else:
                high = middle - 1
        return low

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
        for number in range(self.width):
            self.touch(node, number)
        return self.lease(node)

    def lease(self, node: Node, *, aux: bool = True) -> PathLease:
        """Keep the path to `node`, and with `aux` what a prefix needs there of the other pools."""
        node = self.rooted(node)
        pinned = self._anchors(node)
        if aux and node.parent is not None:
            for component in self.components:
                pinned.extend(component.places(node))
        for held, at in pinned:
            self.pin_place(held, at)
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
        """Move a lease to another end of the same sequence; the full component's pages only."""
        before = list(lease.pinned)
        lease.node = node
        lease.pinned[:] = self._anchors(node)  # in place: it is what closing the lease gives back
        for held, at in lease.pinned:
            self.pin_place(held, at)
        self.unpin_all(before)

    def unpin_all(self, pinned: list[tuple[Node, int]]) -> None:
        for node, at in pinned:
            self.unpin_place(node, at)

    # Insertion

    def insert(
        self,
        lease: PathLease,
        tokens: array[int],
        slots: Sequence[int],
        *,
        states: Mapping[int, int] | None = None,
        arriving: bool = False,
    ) -> Inserted:
        """Publish computed pages behind a lease, and move the lease to their end.

        Args:
            lease: on the prefix that the pages follow; it must be on the device.
            tokens: the whole sequence, from its first token.
            slots: device slots of the pages after the lease's end, in order.
            states: by component number, a device slot with the state after the last page.
            arriving: the states are still being copied; `copies.finish` will settle them.

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
        for number, slot in (states or {}).items():
            result.states[number] = self.take_state(node, number, Tier.DEVICE, slot, arriving=arriving)
        self.touch(node, FULL)
        self.repin(lease, node)
        return result

    def insert_host(
        self,
        node: Node,
        tokens: array[int],
        slots: Sequence[int],
        *,
        states: Mapping[int, int] | None = None,
    ) -> Inserted:
        """Take pages that storage delivered into host slots, behind `node`, and states at their end.

        The path to `node` must have, or be about to have, its pages on the host: a child on the host
        stands on its parent's. Pages of a node that is on the device only become its host copy.

        Raises:
            InternalError: `node` is not on the host, or there are more slots than pages.
        """
        node = self.rooted(node)
        if node.residency[FULL_HOST] == ABSENT:
            raise InternalError(f"host pages inserted behind {node!r}, which is not on the host")
        result = self._walk_in(node, tokens, slots, FULL_HOST)
        for number, slot in (states or {}).items():
            result.states[number] = self.take_state(result.node, number, Tier.HOST, slot)
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
        """Attach a state to the end of `node`; False if it has one there: the slot stays the caller's."""
        at = place(number, tier)
        if node.parent is None or node.residency[at] != ABSENT:
            return False
        self.touch(node, number)
        self.occupy(node, at, [slot], LOADING if arriving else RESIDENT)
        return True

    def supersede(self, node: Node, number: int) -> None:
        """A state was published at `node`: let the one before it go first, if nothing branched off since.

        A conversation that goes on resumes from its last state; the one before it serves nobody but a
        branch, and a branch point that was met has two children. Without this, a pool that holds one
        state a conversation keeps two of every second one under plain LRU.
        """
        above = node.parent
        while above is not None and above.parent is not None and len(above.children) == 1:
            places = [place(number, tier) for tier in (Tier.DEVICE, Tier.HOST)]
            if any(above.slots[at] is not None for at in places):
                above.used[number] = 0
                for at in places:
                    self.queues[at].hurry(above)
                return
            above = above.parent

    def reach(self, tokens: array[int], seed: bytes, pages: int) -> Node | None:
        """The node that ends after `pages` pages of `tokens`, by its full pages alone, cutting one if
        need be; None if the tree does not reach that far."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        node, end = self.roots.get(seed) or self.bare_root(seed), pages * size
        while node.end < pages:
            start = node.end * size
            child = node.children.get(view[start : start + size].tobytes())
            if child is None:
                return None
            common = self._common(child.key, view, start, end)
            if common < child.pages and node.end + common < pages:
                return None
            node = child if common == child.pages else self.split(child, common)
        return node

    def child(self, node: Node, tokens: array[int]) -> Node | None:
        """The child of `node`, which `tokens` run through, that holds their next page."""
        start = node.end * self.page_bytes
        return node.children.get(memoryview(tokens).cast("B")[start : start + self.page_bytes].tobytes())

    def count_hit(self, node: Node) -> list[Node]:
        """One more request met the path to `node`; returns the path, parents first."""
        path = []
        while node.parent is not None:
            node.hits += 1
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    # Digests

    def digests(self, node: Node) -> list[bytes]:
        """Digests of the node's own pages; computed once, for the whole path that lacks them."""
        missing = []
        current = node
        while current.digests is None:
            missing.append(current)
            assert current.parent is not None, "roots have their seed"
            current = current.parent
        for below in reversed(missing):
            assert current.digests is not None, "the path above was just filled"
            below.digests = page_digests(memoryview(below.key), self.page_size, current.digests[-1])
            current = below
        assert node.digests is not None, "just filled"
        return node.digests


def device_end(node: Node) -> Node:
    """The last node of the path to `node` whose full pages are on the device, or the root."""
    while node.residency[FULL_DEVICE] == ABSENT:
        assert node.parent is not None, "a root counts as there"
        node = node.parent
    return node
