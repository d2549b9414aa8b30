"""Plans loads to the device: the matched prefix, its windows, and the request's own working states. Pure.

A prefix that ends inside a page is loaded like a state: the page is copied, and the request fills its copy.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping

from asynchicache.planner.actions import Copy
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.request_state import RequestState
from asynchicache.planner.windows import WindowPlanner
from asynchicache.tree import tails, tier_copies
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    LOADING,
    RESIDENT,
    Locks,
    Node,
    SlotPlace,
    place_of,
    tier_of,
)
from asynchicache.tree.radix_tree import device_end
from asynchicache.tree.tier_copies import CopyRequest
from asynchicache.types import Direction, MissReason, Tier


class LoadPlanner:
    """Plans loads."""

    def __init__(self, inventory: SlotInventory, windows: WindowPlanner) -> None:
        self._inventory = inventory
        self._tree = inventory.tree
        self._windows = windows
        self._states = [component.id for component in inventory.tree.components if not component.paged]
        self._paged = [FULL, *(component.id for component in inventory.tree.windows)]

    def load_nothing(
        self, request: RequestState, reason: MissReason = MissReason.TRANSFER_FAILED
    ) -> list[Copy]:
        """Serve a request without the cache, e.g. after a device failure: one empty copy."""
        request.loaded = True
        request.epoch = self._tree.epoch
        self.drop_tail(request)
        self._shorten(request, self._tree.root(request.seed))
        self._windows.start(request, request.lease.node, {})
        request.cut(reason)
        return [Copy(Direction.LOAD, [], self._inventory.begin(Tier.DEVICE, [])).serve(request)]

    def load(self, request: RequestState) -> list[Copy]:
        """Plan the copies that bring the matched prefix to the device, with the request's own working states.

        Without room for the missing pages, falls back to the prefix on the device. The ticket of the last
        copy covers all copies.
        """
        request.loaded = True
        node = request.lease.node
        wanted = tier_copies.missing_on_device(self._tree, node)
        self._keep_on_device(request, device_end(node))  # another request may have loaded it since the match
        self.keep_tail(request)  # and more of it may be there
        has_states = self.take_states(request)
        if not has_states:
            self.drop_tail(request)
            node, wanted = self._shorten(request, self._tree.root(request.seed)), []
        elif not self._make_room(request, wanted):
            self.drop_tail(request)
            node, wanted = self._shorten(request, self._on_device(node)), []
        request.tier = self.tier(request, node)
        self._count_sources(request, node, wanted)
        own = self._take_tail_pages(request)
        plan = self._load_copies(request, node, wanted, own)
        request.hit_pages = request.borrowed = node.end
        request.pages = [*_path_slots(node), *([own.pop(FULL)] if own else [])]
        self._windows.start(request, node, own)
        request.reserved = request.hit_tokens(self._inventory.page_size)
        self._let_go(request)
        return plan

    def takes_tails(self, tokens: array[int]) -> bool:
        """Whether a prefix of a sequence may end inside a page. Not if the sequence needs all of the device:
        while the page is copied, there are two of it."""
        free = self._inventory.free
        windows = all(
            free[place_of(component.id, Tier.DEVICE)].capacity > component.kept + 1
            for component in self._tree.windows
        )
        return windows and -(-len(tokens) // self._inventory.page_size) < free[FULL_DEVICE].capacity

    def keep_tail(self, request: RequestState) -> None:
        """Find where the prefix goes on inside a page, and keep that page with the lease."""
        self.drop_tail(request)
        lease = request.lease
        if not self.takes_tails(request.tokens):
            return
        tail = tails.find(self._tree, lease.node, request.tokens, len(request.tokens) - 1)
        if tail is None:
            return
        request.tail, request.tail_tokens = tail, tail.tokens
        if request.whole_tail is not None:
            request.last_tail = request.whole_tail
            self._inventory.keep(request, tail.node)
        tails.use(self._tree, tail, lease.use)
        for node, place in tails.locks(self._tree, tail):
            self._tree.lock_for(lease.locked, node, place)

    def _let_go(self, request: RequestState) -> None:
        """The lease needs the page of a tail no more: its copy keeps it until it has ended."""
        locked = request.lease.locked
        for index in reversed(range(len(locked) if request.tail is not None else 0)):
            if request.tail is not None and locked[index][0] is request.tail.node:
                self._tree.unlock_for(locked, index)

    @staticmethod
    def drop_tail(request: RequestState) -> None:
        """Let the prefix end with a page."""
        request.tail, request.tail_tokens = None, 0

    def _make_room(self, request: RequestState, wanted: list[CopyRequest]) -> bool:
        """Free device slots for what a prefix needs, and for the page of its tail if possible."""
        counts = by_place(wanted)
        if request.tail is not None:
            if self._inventory.make_room_for_all(self.with_tail(counts)) is None:
                return True
            self.drop_tail(request)
        if not self._tree.restorable(request.lease.node):  # its states were those of the tail
            return False
        return self._inventory.make_room_for_all(counts) is None

    def with_tail(self, counts: Mapping[SlotPlace, int]) -> dict[SlotPlace, int]:
        """The slots of `counts`, and those of a request's own copy of a tail."""
        places = [place_of(component_id, Tier.DEVICE) for component_id in self._paged]
        return Counter(counts) + Counter(places)

    def _take_tail_pages(self, request: RequestState) -> dict[int, int]:
        """Allocate the request's own copy of its tail: by component, a slot; nothing if it has no tail."""
        free = self._inventory.free
        ids = self._paged if request.tail is not None else ()
        return {one: free[place_of(one, Tier.DEVICE)].allocate(1)[0] for one in ids}

    def _on_device(self, node: Node) -> Node:
        """The longest restorable prefix of the path to `node` whose pages and windows are on the device."""
        node = device_end(node)
        while node.parent is not None and not self._needs_no_page(node):
            node = node.parent
        return node

    def _needs_no_page(self, node: Node) -> bool:
        windows = all(component.tier(node) is Tier.DEVICE for component in self._tree.windows)
        return windows and self._tree.restorable(node)

    def _shorten(self, request: RequestState, node: Node) -> Node:
        if node is not request.lease.node:
            request.cut(MissReason.DEVICE_CAPACITY)
            before = request.lease
            request.lease = self._tree.lease(node, before.use)
            before.close()
        return node

    def tier(self, request: RequestState, node: Node | None = None) -> Tier:
        """The farthest tier that any pool of the prefix comes from."""
        node = node or request.lease.node
        if node.parent is None and request.tail is None:
            return Tier.DEVICE
        if request.prefetched and request.reason is not MissReason.DEVICE_CAPACITY:
            return Tier.STORAGE
        pages = Tier.HOST if node.residency[FULL_DEVICE] == ABSENT else Tier.DEVICE
        if request.tail is not None:
            return max(pages, tails.tier(self._tree, request.tail))
        return max([pages, *(component.tier(node) or Tier.DEVICE for component in self._tree.components)])

    def _count_sources(self, request: RequestState, node: Node, wanted: list[CopyRequest]) -> None:
        """Count by tier the pages and states of the prefix that ends at `node`, before copies move them."""
        end = self._end(request, node)
        if end.parent is None:
            return
        host: Counter[int] = Counter()
        for want in wanted:
            host[want.component_id] += want.size
        for component_id in self._paged if request.tail is not None else ():
            host[component_id] += tier_of(tails.place(end, component_id)) is Tier.HOST
        self._count(request, FULL, node.end + (request.tail is not None), host[FULL])
        for component in self._tree.components:
            if component.paged:
                pages = sum(part.pages for part in component.needs(end))
                self._count(request, component.id, pages, host[component.id])
            else:
                self._count(request, component.id, 1, int(component.nearest(end) is Tier.HOST))

    @staticmethod
    def _end(request: RequestState, node: Node) -> Node:
        """The node with the states of a prefix whose whole pages end at `node`."""
        return node if request.tail is None else request.tail.node

    def _count(self, request: RequestState, component_id: int, slots: int, host: int) -> None:
        """Count `slots` of a component. `host` of them are only on the host; the last of those came from the
        request's own prefetch."""
        name, stored = self._inventory.names[component_id], min(host, request.prefetched_pages)
        request.sources[name, Tier.DEVICE] += slots - host
        request.sources[name, Tier.HOST] += host - stored
        request.sources[name, Tier.STORAGE] += stored

    def _load_copies(
        self, request: RequestState, node: Node, wanted: list[CopyRequest], own: Mapping[int, int]
    ) -> list[Copy]:
        """One copy from the host, and one within the device if a state or a tail is already there.

        The first is made even if it is empty: it reads the slots that the second copy and other requests'
        loads write, so its ticket covers everything.

        `own`: by component, the request's own page for its tail.
        """
        inventory = self._inventory
        reads = self._arriving(node)
        batch = [
            (want, inventory.free[place_of(want.component_id, Tier.DEVICE)].allocate(want.size))
            for want in wanted
        ]
        load = Copy(Direction.LOAD, [], inventory.begin(Tier.DEVICE, batch), reads=reads)
        for want, slots in batch:
            load.transfers += inventory.transfers(
                want.component_id, want.node.slots_at(place_of(want.component_id, Tier.HOST)), slots
            )
        fork = Copy(Direction.FORK, [], tier_copies.TierCopy(Tier.DEVICE))
        end = self._end(request, node)
        for component_id, slot in request.states.items() if end.parent is not None else ():
            self._load_own(end, component_id, slot, load, fork)
            reads.append((inventory.names[component_id], [slot]))
        for component_id, slot in own.items():
            self._load_own(end, component_id, slot, load, fork)
            reads += [(name, [slot]) for name in inventory.sharing(component_id)]
        self._keep_on_device(request, node)
        if not fork.transfers:
            return [load.serve(request)]
        inventory.tier_copies.append(fork.tier_copy)
        return [fork.serve(request), load.serve(request)]

    def _load_own(self, node: Node, component_id: int, slot: int, load: Copy, fork: Copy) -> None:
        """Add a copy of the state at `node`, or of the first page of a tail there, into a slot of the request
        itself, which it goes on to change; and lock its source."""
        place = tails.place(node, component_id)
        tier = tier_of(place)
        copy = fork if tier is Tier.DEVICE else load
        copy.transfers += self._inventory.transfers(component_id, node.slots_at(place)[:1], [slot])
        tier_copies.keep(self._tree, copy.tier_copy, [(node, place), (node, place_of(FULL, tier))])

    def _keep_on_device(self, request: RequestState, node: Node) -> None:
        """Lock the prefix on the device with the lease: the request reads it there from now on."""
        locked = request.lease.locked
        if node.parent is not None and (node, FULL_DEVICE) not in locked:
            self._tree.lock_for(locked, node, FULL_DEVICE)
        self._tree.keep_windows(request.lease)

    def on_device(self, node: Node) -> Locks:
        """Locks for what a prefix ending at `node` has on the device, so that it is not evicted."""
        end = device_end(node)
        found: Locks = [(end, FULL_DEVICE)] if end.parent is not None else []
        for component in self._tree.windows:
            place = place_of(component.id, Tier.DEVICE)
            found += [(part, place) for part in component.needs(node) if part.residency[place] != ABSENT]
        return found

    def _arriving(self, node: Node) -> list[tuple[str, list[int]]]:
        """Slots of the path, by pool, that loads of other requests are still filling."""
        reads = []
        for component in self._tree.windows:
            place = place_of(component.id, Tier.DEVICE)
            for part in component.needs(node):
                if part.residency[place] == LOADING:
                    reads += [(name, part.slots_at(place)) for name in self._inventory.sharing(component.id)]
        for part in node.path():
            if part.residency[FULL_DEVICE] not in (ABSENT, RESIDENT):
                reads.append((self._inventory.names[FULL], part.slots_at(FULL_DEVICE)))
        return reads

    def take_states(self, request: RequestState) -> bool:
        """Allocate the request's missing working states; False if there is no room."""
        for component_id in self._states:
            place = place_of(component_id, Tier.DEVICE)
            if component_id not in request.states:
                if not self._inventory.make_room(place, 1):
                    return False
                request.states[component_id] = self._inventory.free[place].allocate(1)[0]
        return True


def by_place(wanted: Iterable[CopyRequest]) -> dict[SlotPlace, int]:
    """Device slots needed for `wanted`, by place."""
    counts: Counter[SlotPlace] = Counter()
    for want in wanted:
        counts[place_of(want.component_id, Tier.DEVICE)] += want.size
    return counts


def _path_slots(node: Node) -> list[int]:
    """Device slots of every page on the path to `node`, in order."""
    slots: list[int] = []
    for part in reversed([*node.path()]):
        slots += part.slots[FULL_DEVICE] or ()
    return slots
