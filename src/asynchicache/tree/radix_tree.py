"""The unified radix tree: one tree of pages for every pool of a hybrid model.

It follows SGLang's UnifiedRadixTree (sgl-project/sglang#23316) with other mechanics: `match` changes
nothing, `lock` returns a lease, `insert` is one transaction that reports what became of every slot, and
slots whose bytes are in flight are marked as such instead of being committed early.

The tree decides and counts; it never allocates, frees or copies. The caller owns the slots that the
tree returns. Slots of a node change in `fill_slots`, `mark_resident`, `relocate` and `clear_slots` only, and
the structure in `add_child`, `split`, `trim` and `remove` only: child counts, eviction queues and versions
are kept there.
Copies between tiers are in `tree.tier_copies`, eviction is in `tree.eviction`, what is lost with a node's
slots in `tree.value`.

More than 900 lines, because the parts of the tree change each other's fields: a split
divides slots, locks, copies in flight and digests in one step, and can be checked only as a whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import NamedTuple, Protocol

from asynchicache.errors import InternalError
from asynchicache.hashing import PlacedPage, naming_page, page_digests, placed_pages
from asynchicache.leases import Lease
from asynchicache.tree.components import Component, End, WindowComponent, make_component, prefix_locks
from asynchicache.tree.ghosts import Ghosts
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    SAVING,
    Keep,
    Locks,
    Node,
    NodeSlots,
    SlotPlace,
    all_places,
    component_of,
    is_full,
    place_of,
)
from asynchicache.tree.policies import EVICTION, NOBODY, EvictionQueue, Policy, Use, ValueQueue, policy
from asynchicache.tree.value import PrefixValue
from asynchicache.types import TOKEN_BYTES, Coverage, Tier


class SlotWatcher(Protocol):
    """Receives every change of what nodes have. It must not change the tree."""

    def on_arrive(self, node: Node, place: SlotPlace) -> None:
        """The slots of a place can be read from now on."""
        ...

    def on_evict(self, node: Node, place: SlotPlace, pages: int) -> None:
        """The last `pages` pages of a place, or its state, are about to be removed."""
        ...

    def on_store(self, node: Node, component_id: int) -> None:
        """Storage has this component of the node."""
        ...

    def on_clear(self, *tiers: Tier) -> None:
        """These tiers were cleared without an `on_evict` per page; what the tree still has in them stays."""
        ...


class SlotObserver(Protocol):
    """As of `planner.observer.Observer`."""

    def leaving(self, node: Node, place: SlotPlace, pages: int) -> None: ...


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


class HeldBack(NamedTuple):
    """Why a match is shorter than its full pages: the component, and whether what is missing was there
    once and had to make room."""

    component_id: int
    dropped: bool


class PathLease(Lease):
    """Keeps one prefix: the path to `node` where it is, and what its end needs of the other pools."""

    __slots__ = ("locked", "node", "use")
    _words = "a request was lost, not closed: leave it by `async with`, or call its close()"

    def __init__(self, tree: UnifiedRadixTree, node: Node, locked: Locks, use: Use) -> None:
        super().__init__(lambda: tree.unlock_all(locked))  # not through `self`: a lost lease ends at once
        self.node = node
        self.locked = locked
        self.use = use


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
        accepted: how many offered page slots are the tree's own now.
        windows: by component id and page, the offered slots that stay the caller's.
        filled: nodes that hold newly taken pages, parents first.
    """

    node: Node
    duplicates: list[int] = field(default_factory=list)
    accepted: int = 0
    windows: dict[int, dict[int, int]] = field(default_factory=dict)
    filled: list[Node] = field(default_factory=list)


class UnifiedRadixTree:
    """Match, lock, insert.

    Attributes:
        page_size, page_bytes: tokens (or words of its key) of a page, and bytes of them in a node's key.
        host_only: nothing is ever on the device.
        components: the pools beside the full one, numbered from 1 in this order.
        windows: those of them that have a slot for each page.
        places: every place of a node, in the order of its lists.
        page_places: those with a slot for each page.
        queues: by place, the nodes that may give up slots there.
        tails: whether paths may end inside a page.
        roots: by namespace seed, for as long as something stands on them.
        detached: roots of an earlier epoch, which no match begins from, until nothing stands on them.
        epoch: counts how often all roots were detached.
        version: changes whenever a match may no longer hold; one of another version is stale.
        ghosts: what was evicted lately.
        watcher: receives changes of slots; None costs nothing.
        observers: are told of all slots that leave, those of a flush too.
        pack: makes of some slots what a node keeps.
        now: seconds of any clock that never goes back, as the caller last said; for what hints keep.
    """

    def __init__(
        self,
        page_size: int,
        coverages: Sequence[Coverage] = (),
        *,
        windows: Collection[int] = (),
        eviction: str = EVICTION,
        capacity: int = 0,
        host_only: bool = False,
        costs: Sequence[float] = (),
        tails: bool = False,
    ) -> None:
        """
        Args:
            page_size: tokens of a page.
            coverages: of the pools beside the full one.
            windows: the numbers, from 1, of those that have a slot a page; the others have one a state.
            eviction: the policy that orders the full one's nodes, see `policies.policy`.
            capacity: pages that the larger tier holds, for the policy.
            host_only: nothing is ever on the device. Pages that are being copied to the host are then nowhere
                else, so a match ends before them.
            costs: by component, the bytes of a slot, or anything in proportion; all alike if empty.
            tails: a path may end inside a page, see `tree.tails`; not with `host_only`.
        """
        self.tails = tails
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.host_only = host_only
        self.components: list[Component] = [
            make_component(c, n, paged=n in windows) for n, c in enumerate(coverages, start=1)
        ]
        self.windows = [component for component in self.components if isinstance(component, WindowComponent)]
        self.width = 1 + len(self.components)
        paged = [FULL, *(component.id for component in self.windows)]
        self.places = all_places(self.width)
        self.page_places = tuple(place for place in self.places if component_of(place) in paged)
        self._window_places = frozenset(place for place in self.page_places if not is_full(place))
        self._device_windows = frozenset(place_of(window.id, Tier.DEVICE) for window in self.windows)
        self._inherited = sum(1 << component_id for component_id in paged)
        self.policy = policy(eviction)(capacity, page_size)
        self.policy.lower = self._lower
        self.tells_losses = type(self.policy).lost is not Policy.lost
        self.ghosts = Ghosts(capacity, page_size)
        self.costs = tuple(costs) or (1.0,) * self.width
        self._has_states = any(not component.paged for component in self.components)
        self.value = PrefixValue(self.components, self.costs, self.restorable)
        self.queues = [self._queue(place) for place in self.places]
        self.roots: dict[bytes, Node] = {}
        self.detached: list[Node] = []
        self.epoch = 0
        self.version = 0
        self.watcher: SlotWatcher | None = None
        self.observers: Sequence[SlotObserver] = ()
        self._holders: dict[SlotPlace, dict[int, Node]] = {}
        self.clock = 1
        self.uses = 1
        self.pack: Callable[[Sequence[int]], NodeSlots] = list
        self.now = 0.0
        self._serial = 0

    def _queue(self, place: SlotPlace) -> EvictionQueue:
        """The queue of a place. With states, pages and states are ordered by what is lost with them."""
        component_id = component_of(place)
        if self._has_states and (component_id == FULL or not self.components[component_id - 1].paged):
            return ValueQueue(component_id, place, partial(self.value.density, place=place))
        return EvictionQueue(component_id, place, 1.0 / self.costs[component_id])

    # --- structure ---

    def root(self, seed: bytes) -> Node:
        """The root of a namespace, made if it is new."""
        root = self.roots.get(seed)
        if root is None:
            root = self.roots[seed] = self.bare_root(seed)
        return root

    def bare_root(self, seed: bytes) -> Node:
        """A root outside the tree, so that a match of an unknown namespace changes nothing."""
        root = Node(None, b"", b"", 0, self.width)
        root.residency = [RESIDENT] * len(self.places)
        root.digests = [seed]
        return root

    def rooted(self, node: Node) -> Node:
        """`node`, or the tree's root of the same namespace if `node` is a root outside the tree."""
        return node if node.pages or node.digests is None else self.root(node.digests[0])

    def _prune(self, root: Node) -> None:
        """Drop an unused root: every request may bring a namespace of its own."""
        if root.children or any(root.locks) or root.digests is None:
            return
        if self.roots.get(root.digests[0]) is root:
            del self.roots[root.digests[0]]
        elif root in self.detached:
            self.detached.remove(root)

    def reset(self) -> None:
        """Begin a new epoch: no match finds what is in the tree now; nodes stay for those who hold them.

        Linear in the namespaces.
        """
        self.epoch += 1
        self.version += 1
        self.detached += [root for root in self.roots.values() if root.children or any(root.locks)]
        self.roots.clear()

    def is_current(self, node: Node) -> bool:
        """Whether a match may find `node`. Linear in its depth, if there are nodes of other epochs."""
        if not self.detached:
            return True
        while node.parent is not None:
            node = node.parent
        return node.digests is not None and self.roots.get(node.digests[0]) is node

    def add_child(self, parent: Node, key: bytes) -> Node:
        """Add a leaf without slots; `parent` must have no child that begins with the same page."""
        head = key[: self.page_bytes]
        node = Node(parent, key, head, len(key) // self.page_bytes, self.width)
        self._number(node)
        parent.children[head] = node
        if self.tails:
            self._note_head(parent, head)
        return node

    @staticmethod
    def _note_head(parent: Node, head: bytes) -> None:
        if parent.heads is None:
            parent.heads = []
        insort(parent.heads, head)

    def split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages` pages; returns the new first half, `node` stays the second.

        States, and the leases on a path, belong to the end of a node, so they stay with `node`. A lease
        on pages of a window locks both halves from now on.
        """
        parent = _parent(node)
        cut = pages * self.page_bytes
        upper = Node(parent, node.key[:cut], node.head, pages, self.width)
        self._number(upper)
        upper.worth = list(node.worth)
        upper.keep = node.keep
        upper.hits = node.hits
        upper.stored = node.stored & self._inherited
        upper.dropped = node.dropped & self._inherited
        parent.children[node.head] = upper
        node.key = node.key[cut:]
        node.head = node.key[: self.page_bytes]
        node.parent = upper
        node.pages -= pages
        upper.children[node.head] = node
        if self.tails:
            self._note_head(upper, node.head)
        if node.digests is not None:
            upper.digests, node.digests = node.digests[:pages], node.digests[pages:]
        self._divide(upper, node)
        for place in (FULL_DEVICE, FULL_HOST):
            shelf = self.queues[place].shelf
            if shelf.ends:
                shelf.split(upper, node)
        # A window is locked page by page, unlike a path, whose end locks all of it. So a node knows the lock
        # lists that name its windows, and the new half joins them. Walking the window again when the lease
        # closes would not do: the tree may have changed, and the walk would unlock other nodes.
        if node.holders:
            self._hold_both(upper, node)
        for component in self.windows:
            for place in (place_of(component.id, Tier.DEVICE), place_of(component.id, Tier.HOST)):
                self.refresh(upper, place)
        return upper

    def _divide(self, upper: Node, lower: Node) -> None:
        """Divide the slots of pages between both halves; copies in flight fill both from now on."""
        for place in self.page_places:
            slots = lower.slots[place]
            if slots is not None:
                upper.slots[place], lower.slots[place] = slots[: upper.pages], slots[upper.pages :]
                if place in self._holders:
                    self._hold(upper, place, upper.slots_at(place))
                upper.residency[place] = lower.residency[place]
        upper.device_children = int(lower.residency[FULL_DEVICE] != ABSENT)
        upper.host_children = int(lower.residency[FULL_HOST] != ABSENT)
        if lower.pending:
            divided = [copy for copy in lower.pending if copy.place in self.page_places]
            for copy in divided:
                copy.nodes.append(upper)
            upper.pending = divided or None

    def _hold_both(self, upper: Node, lower: Node) -> None:
        for locks in {id(locks): locks for locks in lower.holders or ()}.values():
            more = [(upper, place) for node, place in locks if node is lower and place in self._window_places]
            for node, place in more:
                self.lock_for(locks, node, place)

    def cut_window(self, node: Node, first: int) -> None:
        """Split the path to `node` so that a node begins with page `first`, where its window does.

        What precedes the window can then be evicted by itself.
        """
        while node.end - node.pages > first and node.parent is not None:
            node = node.parent
        if node.end - node.pages < first < node.end:
            self.split(node, node.pages - (node.end - first))

    def trim(self, node: Node, pages: int, place: SlotPlace) -> list[int]:
        """Cut the last pages off an unlocked leaf with slots at one place only; returns their slots.

        Does what `split` and `remove` of the second half would, without creating that half.
        """
        slots = node.slots[place]
        assert slots is not None, "what is cut off has slots"
        if self.watcher is not None:
            self.watcher.on_evict(node, place, pages)
        for observer in self.observers:
            observer.leaving(node, place, pages)
        node.pages -= pages
        node.end -= pages
        node.key = node.key[: node.pages * self.page_bytes]
        cut = list(slots[node.pages :])
        del slots[node.pages :]
        node.stored &= self._inherited
        if node.digests is not None:
            node.digests = node.digests[: node.pages]
        self.version += 1
        if place in self._holders:
            self._let_go(place, cut)
        return cut

    def remove(self, node: Node) -> None:
        """Remove a node without slots or children."""
        parent = _parent(node)
        del parent.children[node.head]
        if parent.heads is not None:
            del parent.heads[bisect_left(parent.heads, node.head)]
            parent.tails -= bool(node.tail)
        self.version += 1
        for queue in self.queues:
            queue.discard(node)
        node.parent = None
        # A use touches one node, not its whole path. The parent inherits the worth of a child that goes, so
        # that a node is never worth less than its descendants were.
        worth, gone = parent.worth, node.worth
        for component_id in range(self.width):
            if gone[component_id] > worth[component_id]:
                worth[component_id] = gone[component_id]
        if not parent.pages:
            self._prune(parent)

    def _number(self, node: Node) -> None:
        self.version += 1
        self._serial += 1
        node.serial = self._serial

    # --- slots ---

    def fill_slots(self, node: Node, place: SlotPlace, slots: Sequence[int], residency: int) -> None:
        """Fill an empty place of a node with slots."""
        node.slots[place] = self.pack(slots)
        node.residency[place] = residency
        if place in self._holders:
            self._hold(node, place, slots)
        if node.dropped:  # rarely; this is the hottest change of a node
            node.dropped &= ~(1 << component_of(place))
        if place == FULL_DEVICE:
            parent = _parent(node)
            parent.device_children += 1
            self.queues[FULL_DEVICE].discard(parent)
            if node.residency[FULL_HOST] == ABSENT:
                self.clock += node.pages
        elif place == FULL_HOST:
            parent = _parent(node)
            parent.host_children += 1
            self.queues[FULL_HOST].discard(parent)
            if node.residency[FULL_DEVICE] == ABSENT:
                self.clock += node.pages
        self.refresh(node, place)
        if place > FULL_HOST and self._has_states:
            self._revalue(node)
        if self.watcher is not None and residency == RESIDENT:
            self.watcher.on_arrive(node, place)

    def mark_resident(self, node: Node, place: SlotPlace) -> None:
        """Mark a place as resident: its bytes have arrived."""
        node.residency[place] = RESIDENT
        self.refresh(node, place)
        if self.watcher is not None:
            self.watcher.on_arrive(node, place)

    def clear_slots(self, node: Node, place: SlotPlace) -> list[int]:
        """Empty a place of a node and return its slots; the caller owns them now."""
        slots = node.slots_at(place)
        if self.watcher is not None and node.residency[place] == RESIDENT:
            self.watcher.on_evict(node, place, node.pages)
        for observer in self.observers:
            observer.leaving(node, place, node.pages)
        self.version += 1
        if place in self._holders:
            self._let_go(place, slots)
        node.slots[place] = None
        node.residency[place] = ABSENT
        self.queues[place].discard(node)
        if node.keep is not None:
            self.queues[place].shelf.discard(node)
        if place > FULL_HOST and self._has_states:
            self._revalue(node)
        if place == FULL_DEVICE:
            parent = _parent(node)
            parent.device_children -= 1
            self._inherit_worth(parent, node)
            self.refresh(parent, FULL_DEVICE)
        elif place == FULL_HOST:
            parent = _parent(node)
            parent.host_children -= 1
            self._inherit_worth(parent, node)
            self.refresh(parent, FULL_HOST)
        return slots

    # --- which node has a slot ---

    def watch_slots(self, places: Iterable[SlotPlace]) -> None:
        """Keep count of which node has each slot of these places; called while the tree is empty."""
        self._holders = {place: {} for place in places}

    def holder(self, place: SlotPlace, slot: int) -> Node | None:
        """The node that has a slot of a place, one of those that `watch_slots` names; None if no node has."""
        return self._holders[place].get(slot)

    def relocate(self, node: Node, place: SlotPlace, moves: Mapping[int, int]) -> None:
        """The bytes of some slots of a node are in others too, by `moves`. No match sees a difference."""
        slots = node.slots_at(place)
        if place in self._holders:
            self._let_go(place, slots)
        node.slots[place] = self.pack([moves.get(slot, slot) for slot in slots])
        if place in self._holders:
            self._hold(node, place, node.slots_at(place))

    @property
    def watched_places(self) -> Collection[SlotPlace]:
        """The places of `watch_slots`."""
        return self._holders

    def slots_held(self) -> Iterator[tuple[SlotPlace, int, Node]]:
        """The slots of watched places with the nodes that have them; for `verify`."""
        for place, nodes in self._holders.items():
            for slot, node in nodes.items():
                yield place, slot, node

    def _hold(self, node: Node, place: SlotPlace, slots: Sequence[int]) -> None:
        nodes = self._holders[place]
        for slot in slots:
            nodes[slot] = node

    def _let_go(self, place: SlotPlace, slots: Sequence[int]) -> None:
        nodes = self._holders[place]
        for slot in slots:
            del nodes[slot]

    @staticmethod
    def _inherit_worth(parent: Node, node: Node) -> None:
        if node.worth[FULL] > parent.worth[FULL]:
            parent.worth[FULL] = node.worth[FULL]
        if node.keep is not None:
            _keep(parent, node.keep)

    # --- eviction candidates and locks ---

    def refresh(self, node: Node, place: SlotPlace) -> None:
        """Add a node to the eviction queue of a place, or remove it, whichever is right now."""
        queue = self.queues[place]
        if node.locks[place] or not self.evictable(node, place):  # most are locked
            queue.discard(node)
        else:
            queue.add(node)

    @staticmethod
    def evictable(node: Node, place: SlotPlace) -> bool:
        """Whether the slots of a place can be evicted: resident, unlocked, and without dependent children."""
        # Full pages of a child depend on those of its parent in the same tier. So only ends of paths are
        # candidates, and locking the end locks the whole path in O(1): nothing walks to the root to lock and
        # unlock it. Evicting from the middle would leave children that no prefix reaches.
        if node.residency[place] != RESIDENT or node.locks[place] or node.parent is None:
            return False
        if place == FULL_DEVICE:
            return not node.device_children
        if place == FULL_HOST:
            return not node.host_children
        return True

    def _revalue(self, node: Node) -> None:
        """A state or window of a node came or went: its pages are worth more or less now."""
        for place in (FULL_DEVICE, FULL_HOST):
            if node in self.queues[place].members:
                self.queues[place].add(node)

    @property
    def step(self) -> float:
        """What the clock adds for a request: ages below that are noise."""
        return self.clock / self.uses

    def lock_for(self, locks: Locks, node: Node, place: SlotPlace) -> None:
        """Lock one place and add it to `locks`, which grows when the node is split."""
        locks.append((node, place))
        self._lock(locks, node, place)

    def lock_all(self, locks: Locks) -> None:
        """Lock everything in `locks` until `unlock_all` of the same list."""
        for node, place in locks:
            self._lock(locks, node, place)

    def unlock_all(self, locks: Locks) -> None:
        """Unlock everything in a list and empty it."""
        while locks:
            node, place = locks.pop()
            self._unlock(locks, node, place)

    def unlock_for(self, locks: Locks, index: int) -> None:
        """Unlock one entry of a list and remove it."""
        node, place = locks.pop(index)
        self._unlock(locks, node, place)

    def _lock(self, locks: Locks, node: Node, place: SlotPlace) -> None:
        held = node.locks[place] + 1
        node.locks[place] = held
        if held == 1:
            self.queues[place].discard(node)
        if place > FULL_HOST and place in self._window_places:
            if node.holders is None:
                node.holders = []
            node.holders.append(locks)

    def _unlock(self, locks: Locks, node: Node, place: SlotPlace) -> None:
        if place > FULL_HOST and place in self._window_places:
            _forget(node.holders or [], locks)
        held = node.locks[place] - 1
        node.locks[place] = held
        if not held:
            if node.pages:
                self.refresh(node, place)
            else:
                self._prune(node)

    def touch(self, node: Node, component_id: int) -> None:
        """Mark the slots of a component beside the full one as used now."""
        self.clock += 1
        node.worth[component_id] = self.clock
        node.superseded &= ~(1 << component_id)

    def touch_pages(self, node: Node, use: Use) -> None:
        self.clock += 1
        worth = self.policy.worth(node, self.clock, use)
        if worth > node.worth[0]:
            node.worth[0] = worth

    def _lower(self, node: Node, worth: float) -> None:
        """Make the pages of a node worth less, on behalf of the policy."""
        if worth < node.worth[0]:
            node.worth[0] = worth
            for place in (FULL_DEVICE, FULL_HOST):
                self.queues[place].requeue(node)

    def keep(self, node: Node, keep: Keep) -> None:
        """Keep what a prefix that ends at `node` needs, as far as the hint's share goes."""
        _keep(node, keep)
        for window in self.windows:
            for part in window.keeps(node):
                _keep(part, keep)

    # --- walks ---

    def nodes(self, *, current: bool = False) -> Iterator[Node]:
        """Every node but the roots, parents first; `current`: only those that a match may find."""
        roots = [*self.roots.values(), *(() if current else self.detached)]
        stack = [child for root in roots for child in root.children.values()]
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

    # --- matching ---

    def match(self, tokens: array[int], seed: bytes = b"", *, limit: int | None = None) -> Match:
        """The longest restorable prefix of `tokens`, `limit` pages at most. Changes nothing."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        pages = len(view) // size
        end = (pages if limit is None or limit > pages else limit) * size
        node = self.roots.get(seed)
        if node is None:
            return Match(self.bare_root(seed), 0, 0, 0, None, self.version)
        offset, partial, inside, host_only = 0, None, 0, self.host_only  # in bytes
        while offset < end:
            child = node.children.get(view[offset : offset + size].tobytes())
            if child is None or (host_only and child.residency[FULL_HOST] == SAVING):
                break
            key = child.key
            after = offset + len(key)
            if after <= end and key.startswith(view[offset:after]):
                node, offset = child, after
                continue
            partial, inside = child, self._common(key, view, offset, end)
            break
        return self._settle_match(node, partial, inside)

    def _settle_match(self, node: Node, partial: Node | None, inside: int) -> Match:
        full = node.end + inside
        if not self.components:
            return Match(node, inside, full, full, partial, self.version)
        pages, before = full, -1
        while pages != before:  # an end that one pool moved up may not suit the others
            before = pages
            for component in self.components:
                node, inside = component.longest(node, partial, inside)
            pages = node.end + inside
        return Match(node, inside, pages, full, partial if inside else None, self.version)

    def held_back(self, tokens: array[int], match: Match) -> HeldBack | None:
        """Which pool keeps a match below its full pages; None if nothing does."""
        if match.pages == match.full_pages:
            return None
        tip = self._tip(match.node, tokens, match.full_pages)
        node, partial = (tip, None) if tip.end == match.full_pages else (tip.parent, tip)
        assert node is not None, "a root has no pages beyond the match"
        inside = match.full_pages - node.end
        ends = [
            (component, _pages(component.longest(node, partial, inside))) for component in self.components
        ]
        component, _ = min(ends, key=itemgetter(1))
        # Of a window only what the full pages need at their end: with more slots they would have had that.
        needed = match.full_pages - component.pages if isinstance(component, WindowComponent) else 0
        if self._was_dropped(component, tip, max(match.pages, needed)):
            return HeldBack(component.id, dropped=True)
        for window in self.windows:  # a state goes with its window, which is to blame then
            if self._was_dropped(window, tip, max(match.pages, match.full_pages - window.pages)):
                return HeldBack(window.id, dropped=True)
        return HeldBack(component.id, dropped=False)

    @staticmethod
    def _was_dropped(component: Component, tip: Node, pages: int) -> bool:
        current = tip
        while current.parent is not None and current.end > pages:
            if current.dropped >> component.id & 1:
                return True
            current = current.parent
        return False

    def _tip(self, node: Node, tokens: array[int], pages: int) -> Node:
        """The node below `node`, on the way of `tokens`, that holds their page number `pages` - 1."""
        while node.end < pages:
            child = self.child(node, tokens)
            assert child is not None, "a match went that way"
            node = child
        return node

    def restorable(self, node: Node) -> bool:
        """Whether every pool beside the full one lets a prefix end at `node`."""
        for component in self.components:  # a loop: a generator costs more than the checks
            if component.tier(node) is None:
                return False
        return True

    def _common(self, key: bytes, view: memoryview, offset: int, end: int) -> int:
        """Whole pages that `key` and `view[offset:end]` share, by bisection over buffers."""
        size = self.page_bytes
        low, high = 1, min(len(key), end - offset) // size  # the first page matched: it was the lookup
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(view[offset : offset + middle * size]):
                low = middle
            else:
                high = middle - 1
        return low

    def reach(self, tokens: array[int], seed: bytes, pages: int) -> Node | None:
        """The node that ends after `pages` pages of `tokens`, by its full pages alone, cutting one if
        need be; None if the tree does not reach that far."""
        node, partial, common = self._walk(tokens, seed, pages)
        if node.end + common < pages:
            return None
        return node if partial is None else self.split(partial, common)

    def known_end(self, tokens: array[int], seed: bytes, pages: int) -> Node:
        """The last node whose pages are among the first `pages` pages of `tokens`, cutting one if need be."""
        node, partial, common = self._walk(tokens, seed, pages)
        return node if partial is None else self.split(partial, common)

    def known_pages(self, tokens: array[int], seed: bytes, pages: int) -> tuple[Node, int]:
        """How many of the first `pages` pages of `tokens` the tree has, in whatever state; and the node that
        contains the last of them. Changes nothing."""
        node, partial, common = self._walk(tokens, seed, pages)
        return (node if partial is None else partial), node.end + common

    def _walk(self, tokens: array[int], seed: bytes, pages: int) -> tuple[Node, Node | None, int]:
        """The last node that lies within the first `pages` pages of `tokens`; and its child that begins with
        the next of them and goes on differently or further, with the pages in common, if there is one."""
        size = self.page_bytes
        view = memoryview(tokens).cast("B")
        node, end = self.roots.get(seed) or self.bare_root(seed), pages * size
        while node.end < pages:
            start = node.end * size
            child = node.children.get(view[start : start + size].tobytes())
            if child is None:
                break
            common = self._common(child.key, view, start, end)
            if common < child.pages:
                return node, child, common
            node = child
        return node, None, 0

    def child(self, node: Node, tokens: array[int]) -> Node | None:
        """The child of `node`, which `tokens` run through, that holds their next page."""
        start = node.end * self.page_bytes
        return node.children.get(memoryview(tokens).cast("B")[start : start + self.page_bytes].tobytes())

    # --- digests ---

    def pages_without_digests(self, node: Node) -> int:
        """Pages of the path to `node` whose digests were not computed yet."""
        pages = 0
        while node.digests is None:
            pages += node.pages
            assert node.parent is not None, "roots have their seed"
            node = node.parent
        return pages

    def first_without_digests(self, node: Node) -> Node | None:
        """The first node of the path to `node` whose digests were not computed yet; None if all were."""
        found = None
        while node.digests is None:
            found = node
            assert node.parent is not None, "roots have their seed"
            node = node.parent
        return found

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

    def placed(self, node: Node) -> list[PlacedPage]:
        """The node's own pages, and where they lie on its path."""
        digests, first = self.digests(node), node.end - node.pages
        above, head = node, naming_page(first)
        while above.end - above.pages > head:
            assert above.parent is not None, "a path begins at page 0"
            above = above.parent
        named = {head: self.digests(above)[head - (above.end - above.pages)]}
        named.update((first + index, digest) for index, digest in enumerate(digests))
        return placed_pages(named, range(first, node.end))

    # --- leases ---

    def asked(self, tokens: array[int], match: Match, seed: bytes = b"", hint: float = 0.0) -> Use:
        """A request has come and was just matched: who it is for the policy; call it once a request.

        Args:
            seed: the digest of its namespace.
            hint: what the client knows, from -2 (the request's pages will not be asked for again) to 2.
        """
        use = Use(seed, len(tokens), self.ghosts.reach(tokens, match.full_pages), hint)
        use.credit = self.policy.credit(match.node, self.clock, use)
        return use

    def count_known(self, tokens: array[int], match: Match) -> int:
        """Pages of `tokens`, which were just matched, that the tree has in some tier or had lately."""
        return self.ghosts.reach(tokens, match.full_pages)

    def lock(self, match: Match, use: Use = NOBODY) -> PathLease:
        """Lock a match: nothing of its prefix can be evicted until the lease is closed.

        `use` is also who uses what is inserted behind the lease.

        Raises:
            InternalError: the tree changed since the match was made.
        """
        if match.version != self.version:
            raise InternalError("a match was locked after the tree had changed; match again")
        node = match.node
        if match.inside and match.partial is not None:
            partial = match.partial
            node = partial if match.inside == partial.pages else self.split(partial, match.inside)
        self.touch_pages(node, use)
        self.uses += 1
        for component in self.components:
            self.use(component, node)
        return self.lease(node, use)

    def use(self, component: Component, node: Node) -> None:
        """Mark as used now what a prefix that ends at `node` needs of a pool.

        Nodes nearer the root come last and so count as used more recently: more sequences may need them.
        """
        for part in component.needs(node):
            self.touch(part, component.id)

    def lease(self, node: Node, use: Use = NOBODY) -> PathLease:
        """Keep the path to `node`, and what a prefix needs there of the other pools."""
        node = self.rooted(node)
        locked = self._anchors(node)
        for component in self.components:
            locked += prefix_locks(component, node)
        self.lock_all(locked)
        return PathLease(self, node, locked, use)

    @staticmethod
    def _anchors(node: Node) -> Locks:
        """The ends of the path to `node`, in each tier that it needs."""
        if node.residency[FULL_DEVICE] != ABSENT:
            return [(node, FULL_DEVICE)]
        anchors = [(node, FULL_HOST)]
        above = device_end(node)
        if above.parent is not None:
            anchors.append((above, FULL_DEVICE))
        return anchors

    def relock(self, lease: PathLease, node: Node) -> None:
        """Move a lease to another end of the same sequence. It keeps the windows there, and those that it
        kept on the device: a forward that reads them may be in flight; `drop_behind` drops them."""
        lease.node = node
        locked = lease.locked  # always this list: it is what closing the lease gives back
        kept = self._device_windows
        old = [i for i, (_, place) in enumerate(locked) if place not in kept]
        for held, place in self._anchors(node):
            self.lock_for(locked, held, place)
        self.keep_windows(lease)
        for index in reversed(old):
            self.unlock_for(locked, index)

    def keep_windows(self, lease: PathLease) -> None:
        """Have a lease keep, on the device, the windows that its end needs."""
        for component in self.windows:
            place = place_of(component.id, Tier.DEVICE)
            for part in component.needs(lease.node):
                if part.residency[place] != ABSENT and (part, place) not in lease.locked:
                    self.lock_for(lease.locked, part, place)

    def drop_behind(self, lease: PathLease, component_id: int, page: int, locked: Locks) -> None:
        """Move the windows before a page from what a lease keeps to what `locked` does."""
        places = (place_of(component_id, Tier.DEVICE), place_of(component_id, Tier.HOST))
        for index in reversed(range(len(lease.locked))):
            node, place = lease.locked[index]
            if place in places and node.end <= page:
                self.lock_for(locked, node, place)
                self.unlock_for(lease.locked, index)

    # --- insertion ---

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
            windows: by component id, device slots of the last pages, as far back as there are any.

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
        if windows:
            self._insert_windows(result, windows)
        self.published(node, lease.use, fresh=bool(result.filled))
        self.relock(lease, node)
        for component_id, pages in (windows or {}).items():
            self._keep_taken(lease, component_id, pages.first, result.windows[component_id])
        return result

    def _insert_windows(self, result: Inserted, windows: Mapping[int, Pages]) -> None:
        """Take the windows behind pages that were just inserted; this may cut the nodes of those pages."""
        begun = [node.end - node.pages for node in result.filled]
        for component_id, pages in windows.items():
            self.cut_window(result.node, self._window(component_id).first_kept(result.node))
            result.windows[component_id] = self.take_pages(result.node, component_id, Tier.DEVICE, pages)
            self.use(self.components[component_id - 1], result.node)
        result.filled = [
            part for fresh, start in zip(result.filled, begun, strict=True) for part in _parts(fresh, start)
        ]

    def _window(self, component_id: int) -> WindowComponent:
        return next(component for component in self.windows if component.id == component_id)

    def published(self, node: Node, use: Use, *, fresh: bool) -> None:
        """A request published the path to `node`; `fresh`: it computed pages that the tree had not."""
        if fresh:
            self.policy.published(node, self.clock, use)
        self.touch_pages(node, use)

    def _keep_taken(
        self, lease: PathLease, component_id: int, first: int, refused: Mapping[int, int]
    ) -> None:
        """Have a lease keep the pages of a window that were taken from page `first` on, those too that its
        end needs no more: the forward that wrote them, or one that reads them, may be in flight."""
        place = place_of(component_id, Tier.DEVICE)
        for node in lease.node.path(first):
            if node.end - 1 not in refused and (node, place) not in lease.locked:
                self.lock_for(lease.locked, node, place)

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
        self.touch_pages(result.node, NOBODY)
        return result

    def _walk_in(self, node: Node, tokens: array[int], slots: Sequence[int], place: SlotPlace) -> Inserted:
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
                child = self.add_child(node, view[start:end].tobytes())
            else:
                common = self._common(child.key, view, start, end)
                child = child if common == child.pages else self.split(child, common)
            offered = slots[done : done + child.pages]
            if child.residency[place] == ABSENT:
                self.fill_slots(child, place, offered, RESIDENT)
                result.accepted += len(offered)
                result.filled.append(child)
            else:
                result.duplicates.extend(offered)
            done += child.pages
            node = child
        result.node = node
        return result

    def take_state(
        self, node: Node, component_id: int, tier: Tier, slot: int, *, arriving: bool = False
    ) -> bool:
        """Attach a state to the end of `node`; False if it has one there: the slot stays the caller's.

        `arriving`: it is still being copied; `copies.finish` marks it resident.
        """
        place = place_of(component_id, tier)
        if node.parent is None or node.residency[place] != ABSENT:
            return False
        self.touch(node, component_id)
        self.fill_slots(node, place, [slot], LOADING if arriving else RESIDENT)
        return True

    def take_pages(self, node: Node, component_id: int, tier: Tier, pages: Pages) -> dict[int, int]:
        """Fill the tombstones of a window with the slots of a run of pages that ends where `node` does;
        a node is cut where the run begins.

        Returns:
            By page number, the slots that stay the caller's: the tree has those pages already, or no
            full pages of them in that tier.
        """
        place = place_of(component_id, tier)
        refused: dict[int, int] = {}
        for part in node.path(pages.first):
            start = max(part.end - part.pages, pages.first)
            offered = pages.slots[start - pages.first : part.end - pages.first]
            if part.residency[place] != ABSENT or part.residency[place_of(FULL, tier)] == ABSENT:
                refused.update(zip(range(start, part.end), offered, strict=True))
            else:
                if len(offered) < part.pages:
                    self.split(part, part.pages - len(offered))
                self.fill_slots(part, place, offered, RESIDENT)
        return refused

    def supersede(self, node: Node, component_id: int) -> None:
        """Count the state before `node` little, and its window nothing, unless a sequence branched off since.

        A continued conversation resumes from its last state. The one before it serves only a branch, and a
        branch point that was matched has two children. Without this, a pool with room for one state per
        conversation keeps two of every second conversation under plain LRU.
        """
        component = self.components[component_id - 1]
        above = node.parent
        for part in component.keeps(node):
            above = part.parent
        while above is not None and above.parent is not None and len(above.children) - above.tails <= 1:
            if self.age(above, component_id):
                return
            above = above.parent

    def age(self, node: Node, component_id: int) -> bool:
        """Count a node's state little, or its window nothing.

        Returns:
            Whether nothing is left to age: a state is a single slot, and what precedes an aged window was
            aged with it.
        """
        places = (place_of(component_id, Tier.DEVICE), place_of(component_id, Tier.HOST))
        if not any(node.slots[place] for place in places):
            return False
        if not self.components[component_id - 1].paged:
            node.superseded |= 1 << component_id
            for place in places:
                self.refresh(node, place)
            return True
        aged = not node.worth[component_id]
        node.worth[component_id] = 0
        for place in places:  # both: an entry may wait there for slots to come
            self.queues[place].requeue(node)
        return aged

    def count_hit(self, node: Node) -> list[Node]:
        """One more request met the path to `node`; returns the path, parents first."""
        path = [*node.path()]
        for part in path:
            part.hits += 1
        path.reverse()
        return path


def _forget(holders: list[Locks], locks: Locks) -> None:
    """Remove one entry that is `locks` itself; an equal list may belong to another lease."""
    for index in range(len(holders) - 1, -1, -1):
        if holders[index] is locks:
            del holders[index]
            return


def _parent(node: Node) -> Node:
    assert node.parent is not None, "a root has no slots to change"
    return node.parent


def _keep(node: Node, keep: Keep) -> None:
    if node.parent is not None and (node.keep is None or node.keep.until < keep.until):
        node.keep = keep


def _pages(end: End) -> int:
    node, inside = end
    return node.end + inside


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
