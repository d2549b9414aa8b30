"""Random operations on a tree that is always short of room, each of them on a model as well.

After every operation the tree must be well, hold exactly what the model holds, slot for slot, and
every slot must have one owner. More than 400 lines: the operations and their counterparts on the
model are read side by side.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from asynchicache.pools.allocator import SlotAllocator
from asynchicache.tree import invariants, tier_copies
from asynchicache.tree.eviction import evict
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    SAVING,
    TIERS,
    Locks,
    Node,
    component_of,
    is_full,
    place_of,
    tier_of,
)
from asynchicache.tree.radix_tree import Inserted, Pages, PathLease, UnifiedRadixTree
from asynchicache.tree.tier_copies import CopyRequest, TierCopy
from asynchicache.types import Tier, trailing_pages
from tree.model import PAGE, Copy, Key, Lock, Model, Page, Slots

ALPHABET = 2  # four different pages, so that sequences share, diverge and split all the time
LONGEST = 7
SEEDS = (b"", b"n" * 32)
PAGES = {Tier.DEVICE: 11, Tier.HOST: 17}
STATES = {Tier.DEVICE: 3, Tier.HOST: 4}
OPERATIONS = 850


@dataclass(eq=False)
class Held:
    """A lease in the model: the prefix, and the locks that it holds."""

    lease: PathLease
    key: Key
    locks: list[Lock]


@dataclass(eq=False)
class Offer:
    """What is about to be inserted: a continuation of a lease's prefix, and slots for it."""

    tier: Tier
    held: Held
    key: Key
    slots: list[int]
    states: dict[int, int]
    windows: dict[int, Pages]


class Twins:
    """A tree, its model and its pools; every method is one operation on all of them."""

    def __init__(self, seed: int, states: int, windows: Sequence[int] = ()) -> None:
        """`windows`: trailing pages of each window; their components are numbered behind the states."""
        self.random = random.Random(seed)
        self.windows = dict(enumerate(windows, start=states + 1))
        coverages = [trailing_pages(pages) for pages in (*[1] * states, *windows)]
        self.tree = UnifiedRadixTree(PAGE, coverages, windows=self.windows)
        self.model = Model(self.tree.width, self.windows)
        self.pools = [
            SlotAllocator((PAGES if at in self.model.paged else STATES)[tier_of(at)], name=f"place {at}")
            for at in range(TIERS * self.tree.width)
        ]
        self.leases: list[Held] = []
        self.tier_copies: list[tuple[TierCopy, Copy]] = []

    # Choices

    def sequence(self, prefix: Key | None = None) -> Key:
        """A random sequence, or a random continuation of one; half of them of what is known."""
        seed, tokens = prefix or (self.random.choice(SEEDS), ())
        known = [key for key in self.model.pages if key[0] == seed and key[1][: len(tokens)] == tokens]
        if known and self.random.random() < 0.5:
            tokens = self.random.choice(sorted(known))[1]
        room = LONGEST - len(tokens) // PAGE
        more = self.random.randint(0, min(3, room)) * PAGE
        return seed, tokens + tuple(self.random.randrange(ALPHABET) for _ in range(more))

    def holder(self, suits: Callable[[Held], bool]) -> Held | None:
        fit = [held for held in self.leases if self.alive(held) and suits(held)]
        return self.random.choice(fit) if fit else None

    def alive(self, held: Held) -> bool:
        """Whether a failed copy has left the lease what it holds; if not, its request must match again."""
        return all(page.at(lock.at) != ABSENT for lock in held.locks for page in lock.pages)

    # Operations

    def match(self) -> None:
        key = self.sequence()
        limit = self.random.choice([LONGEST, self.random.randint(0, LONGEST)])
        match = self.tree.match(tokens_of(key), key[0], limit=limit)
        pages, full = self.model.match(key, limit)

        assert (match.pages, match.full_pages) == (pages, full)
        assert match.branching_pages == (full if full > pages else None)

    def lock(self) -> None:
        if len(self.leases) == 4:
            return
        key = self.sequence()
        match = self.tree.match(tokens_of(key), key[0])
        lease = self.tree.lock(match)
        end = key[0], key[1][: match.pages * PAGE]
        assert prefix_of(lease.node) == end
        locks = self.model.anchors(end) + self.model.state_locks(end) + self.window_locks(end)
        self.model.lock(locks)
        self.leases.append(Held(lease, end, locks))

    def unlock(self) -> None:
        if self.leases:
            held = self.leases.pop(self.random.randrange(len(self.leases)))
            held.lease.close()
            self.model.lock(held.locks, -1)

    def insert(self) -> None:
        if offer := self.offer(Tier.DEVICE):
            arriving = self.random.random() < 0.3
            result = self.tree.insert(
                offer.held.lease,
                tokens_of(offer.key),
                offer.slots,
                windows=offer.windows,
            )
            self.check_inserted(result, offer)
            taken = self.take_states(result.node, offer, arriving=arriving)
            self.relocked(offer.held, offer.key)
            for component_id in (*taken, *offer.windows):
                self.tree.supersede(result.node, component_id)
            if arriving and taken:
                self.arrive(result.node, offer.key, taken)

    def insert_host(self) -> None:
        if offer := self.offer(Tier.HOST):
            node = offer.held.lease.node
            result = self.tree.insert_host(node, tokens_of(offer.key), offer.slots)
            self.check_inserted(result, offer)
            self.take_states(result.node, offer)

    def arrive(self, node: Node, key: Key, component_ids: list[int]) -> None:
        copy = Copy(
            filled=[(key, place_of(component_id, Tier.DEVICE)) for component_id in component_ids],
            locks=[Lock((self.model.page(key),), FULL_DEVICE)] * len(component_ids),
        )
        self.launch(tier_copies.begin_arrival(self.tree, node, component_ids), copy)

    def save(self) -> None:
        held = self.holder(lambda held: any(self.unsaved(held.key)))
        if held is None:
            return
        wanted = tier_copies.missing_on_host(self.tree, held.lease.node)
        for component_id in range(self.tree.width):
            self.make_room(
                place_of(component_id, Tier.HOST),
                sum(w.size for w in wanted if w.component_id == component_id),
            )
        if self.alive(held):  # a lease on the device does not keep host copies: ask again
            wanted = tier_copies.missing_on_host(self.tree, held.lease.node)
            assert self.pages_of(wanted) == list(self.unsaved(held.key))
            self.begin(Tier.HOST, wanted)

    def load(self) -> None:
        held = self.holder(lambda held: any(self.unloaded(held.key)))
        if held is None:
            return
        node = held.lease.node
        wanted = tier_copies.missing_on_device(self.tree, node)
        wanted += [
            CopyRequest(node, component.id)
            for component in self.tree.components
            if not component.paged and component.tier(node) is Tier.HOST
        ]
        assert sorted(self.pages_of(wanted)) == sorted(self.unloaded(held.key))
        self.begin(Tier.DEVICE, wanted)
        self.tree.relock(held.lease, node)  # from here on the request needs them on the device
        self.relocked(held, held.key)

    def relocked(self, held: Held, key: Key) -> None:
        devices = [place_of(component_id, Tier.DEVICE) for component_id in self.windows]
        kept = [lock for lock in held.locks if lock.at in devices]
        covered = {(page, lock.at) for lock in kept for page in lock.pages}
        again = [
            Lock((page,), lock.at)
            for lock in self.window_locks(key, Tier.DEVICE)
            for page in lock.pages
            if (page, lock.at) not in covered
        ]
        self.model.lock(held.locks, -1)
        held.key = key
        held.locks = [*self.model.anchors(key), *kept, *again]
        self.model.lock(held.locks)

    def window_locks(self, key: Key, tier: Tier | None = None) -> list[Lock]:
        """Node by node, the pages of windows that a prefix needs: where they are nearest, with the full
        pages that they would go with, or in one tier."""
        locks = []
        for component_id in self.windows if key[1] else ():
            needed = self.model.needs(key, component_id)
            for node in path_of(self.tree, key):
                keys = [k for k in Model.path(prefix_of(node), node.end - node.pages) if k in needed]
                pages = tuple(map(self.model.page, keys))
                nearest = self.model.nearest(pages[-1], component_id) if pages and tier is None else tier
                if not pages or nearest is None or pages[-1].at(place_of(component_id, nearest)) == ABSENT:
                    continue
                locks.append(Lock(pages, place_of(component_id, nearest)))
                if tier is None and (keys[-1] == key or nearest is Tier.HOST):
                    locks.append(Lock(pages[-1:], place_of(FULL, nearest)))
        return locks

    def move_on(self) -> None:
        """A request has passed its windows."""
        held = self.holder(lambda held: bool(self.windows))
        if held is None:
            return
        behind: Locks = []
        for component_id in self.windows:
            self.tree.drop_behind(held.lease, component_id, LONGEST, behind)
        self.check_leases(behind)
        self.tree.unlock_all(behind)
        gone = [lock for lock in held.locks if component_of(lock.at) in self.windows]
        held.locks = [lock for lock in held.locks if lock not in gone]
        self.model.lock(gone, -1)

    def unsaved(self, key: Key) -> Iterator[tuple[Key, int]]:
        """In the order of the tree's nodes: each with its full pages first."""
        needed = {component_id: set(self.model.keeps(key, component_id)) for component_id in self.windows}
        for node in path_of(self.tree, key):
            pages = self.model.path(prefix_of(node), node.end - node.pages)
            if self.model.page(pages[-1]).at(FULL_HOST) == ABSENT:
                if self.model.page(pages[-1]).at(FULL_DEVICE) != RESIDENT:
                    return
                yield from ((page, FULL) for page in pages)
            for component_id in range(1, self.model.width):
                device, host = place_of(component_id, Tier.DEVICE), place_of(component_id, Tier.HOST)
                for page in pages:
                    wanted = page in needed.get(component_id, (page,))
                    at = self.model.page(page)
                    if wanted and at.at(device) == RESIDENT and at.at(host) == ABSENT:
                        yield page, component_id

    def unloaded(self, key: Key) -> Iterator[tuple[Key, int]]:
        """The page that is kept before a window comes with the node that it is in."""
        for prefix in self.model.path(key):
            if self.model.page(prefix).at(FULL_DEVICE) == ABSENT:
                yield prefix, FULL
        for component_id in range(1, self.model.width) if key[1] else ():
            wanted = needed = self.model.needs(key, component_id)
            if component_id in self.windows:
                parts = [self.model.path(prefix_of(n), n.end - n.pages) for n in path_of(self.tree, key)]
                wanted = [page for part in parts if part[-1] in needed for page in part]
            for prefix in wanted:
                if self.model.nearest(self.model.page(prefix), component_id) is Tier.HOST:
                    yield prefix, component_id

    def begin(self, tier: Tier, wanted: list[CopyRequest]) -> None:
        given: list[tuple[CopyRequest, list[int]]] = []
        for want in wanted:
            slots = self.allocate(place_of(want.component_id, tier), want.size, evicting=tier is Tier.DEVICE)
            if slots is None:
                break  # parents come first, so what was given slots so far can go alone
            given.append((want, slots))
        if not given:
            return
        copy = Copy()
        state = LOADING if tier is Tier.DEVICE else SAVING
        other = Tier(1 - tier)
        for want, slots in given:
            at, end = place_of(want.component_id, tier), self.model.page(prefix_of(want.node))
            keys = [key for key, _ in self.pages_of([want])]
            sources = tuple(map(self.model.page, keys))
            for key, slot in zip(keys, slots, strict=True):
                assert self.model.offer(key, at, slot, state)
                copy.filled.append((key, at))
            copy.locks.append(
                Lock(sources if want.component_id else (end,), place_of(want.component_id, other))
            )
            if want.component_id:
                copy.locks += [Lock((end,), FULL_DEVICE), Lock((end,), FULL_HOST)]
        self.launch(tier_copies.begin(self.tree, tier, given), copy)

    def launch(self, tier_copy: TierCopy, copy: Copy) -> None:
        self.model.lock(copy.locks)
        self.model.copies.append(copy)
        self.tier_copies.append((tier_copy, copy))

    def finish(self) -> None:
        if not self.tier_copies:
            return
        tier_copy, copy = self.tier_copies.pop(self.random.randrange(len(self.tier_copies)))
        arrived = self.random.random() < 0.6
        lost = tier_copies.finish(self.tree, tier_copy, arrived=arrived)
        assert as_sets(lost) == as_sets(self.model.end(copy, arrived=arrived))
        self.release(lost)

    def evict(self) -> None:
        at = self.random.choice([FULL_DEVICE, self.random.randrange(len(self.pools))])
        self.evict_at(at, self.random.randint(1, 5), dirty=self.random.random() < 0.7)

    def digests(self) -> None:
        if held := self.holder(lambda held: True):
            self.tree.digests(held.lease.node)

    # Parts of operations

    def evict_at(self, at: int, count: int, *, dirty: bool = True) -> None:
        owner = {(w, slot): key for key, page in self.model.pages.items() for w, slot in page.slots.items()}
        before = len(self.model.pages)
        freed = evict(self.tree, at, count, dirty=dirty)

        if at not in self.model.paged or is_full(at):
            assert freed.count(at) <= count or len(freed.slots) > 1, "only a state's node may not be cut"
        gone = [(owner[where, slot], where) for where, slots in freed.slots.items() for slot in slots]
        for key, where in gone:
            page = self.model.pages[key]
            assert page.at(where) == RESIDENT
            # What a lease lost to a failed copy protects nothing above it either: see `alive`.
            assert not page.locks[where] or not all(map(self.alive, self.leases))
        for key, where in sorted(gone, key=lambda one: (-len(one[0][1]), -one[1])):
            self.model.clear_slots(key, where)
        assert freed.lost == before - len(self.model.pages)
        assert freed.lost + freed.demoted == (len(freed.slots.get(at, ())) if is_full(at) else 0)
        if freed.count(at) < count:
            left = [key for key in self.model.pages if self.model.evictable(key, at, dirty=dirty)]
            assert not left or component_of(at) in self.windows, "there was more to evict"
        self.release(freed.slots)

    def make_room(self, at: int, count: int) -> None:
        missing = count - self.pools[at].available
        if missing > 0:
            self.evict_at(at, missing)

    def allocate(self, at: int, count: int, *, evicting: bool = True) -> list[int] | None:
        if evicting:
            self.make_room(at, count)
        return self.pools[at].allocate(count) if count <= self.pools[at].available else None

    def release(self, slots: Slots) -> None:
        for at, given in slots.items():
            self.pools[at].release(given)

    def offer(self, tier: Tier) -> Offer | None:
        """A lease, a continuation of it, and slots for its pages and states; None if there is no room."""
        at = place_of(FULL, tier)
        held = self.holder(lambda held: self.model.page(held.key).at(at) != ABSENT)
        if held is None:
            return None
        key = self.sequence(held.key)
        slots = self.allocate(at, (len(key[1]) - len(held.key[1])) // PAGE)
        states: dict[int, int] = {}
        for component_id in range(1, self.tree.width):
            if component_id in self.windows or self.random.random() > 0.7:
                continue
            if state := self.allocate(place_of(component_id, tier), 1):
                states[component_id] = state[0]
        windows = self.offered_windows(key) if tier is Tier.DEVICE else {}
        if slots is not None and self.model.page(held.key).at(at) != ABSENT:
            return Offer(tier, held, key, slots, states, windows)
        self.release({at: slots or []})  # the room that was made may be the prefix itself
        self.release(
            {place_of(component_id, tier): list(pages.slots) for component_id, pages in windows.items()}
        )
        self.release({place_of(component_id, tier): [state] for component_id, state in states.items()})
        return None

    def offered_windows(self, key: Key) -> dict[int, Pages]:
        """Of each window, slots of some of the last pages: the tree may have them already."""
        offered: dict[int, Pages] = {}
        pages = len(key[1]) // PAGE
        for component_id in self.windows:
            count = self.random.randint(0, pages)
            if count and (slots := self.allocate(place_of(component_id, Tier.DEVICE), count)):
                offered[component_id] = Pages(pages - count, slots)
        return offered

    def take_states(self, node: Node, offer: Offer, *, arriving: bool = False) -> list[int]:
        """Offer states to the tree and the model; the components whose states were taken."""
        taken = []
        for component_id, slot in offer.states.items():
            at = place_of(component_id, offer.tier)
            residency = LOADING if arriving else RESIDENT
            took = self.tree.take_state(node, component_id, offer.tier, slot, arriving=arriving)
            assert took == (bool(offer.key[1]) and self.model.offer(offer.key, at, slot, residency))
            if took:
                taken.append(component_id)
            else:
                self.release({at: [slot]})
        return taken

    def check_inserted(self, result: Inserted, offer: Offer) -> None:
        """Offer the same to the model."""
        at = place_of(FULL, offer.tier)
        fresh = self.model.path(offer.key, len(offer.held.key[1]) // PAGE)
        pairs = zip(fresh, offer.slots, strict=True)
        refused = [slot for key, slot in pairs if not self.model.offer(key, at, slot)]
        assert prefix_of(result.node) == offer.key
        assert result.duplicates == refused
        assert result.accepted == len(fresh) - len(refused) == sum(node.pages for node in result.filled)
        self.release({at: refused})
        for component_id, pages in offer.windows.items():
            at = place_of(component_id, Tier.DEVICE)
            offered = zip(self.model.path(offer.key, pages.first), pages.slots, strict=True)
            kept = [slot for key, slot in offered if not self.model.offer(key, at, slot)]
            assert sorted(result.windows[component_id].values()) == sorted(kept)
            self.release({at: kept})

    # Checks

    def check(self) -> None:
        tree, model = self.tree, self.model
        self.check_leases()
        assert {key: self.seen(page) for key, page in model.pages.items()} == dict(self.seen_in())
        for node in tree.nodes():
            pages = [model.page(key) for key in model.path(prefix_of(node), node.end - node.pages)]
            for at in model.paged - {FULL_DEVICE, FULL_HOST}:
                # A lease keeps whole nodes, and both halves of one that is split: never less than it needs.
                assert node.locks[at] >= max(page.locks[at] for page in pages)
        for at, pool in enumerate(self.pools):
            owned = [page.slots[at] for page in model.pages.values() if at in page.slots]
            owned += [slot for copy in model.copies for slot in copy.orphans.get(at, ())]
            assert pool.problems() == []
            assert pool.audit(owned) == []
        assert all(root.children or any(root.locks) for root in tree.roots.values())

    def check_leases(self, behind: Locks | None = None) -> None:
        leases = [held.lease for held in self.leases]
        tier_copies = [tier_copy for tier_copy, _ in self.tier_copies] + [
            TierCopy(Tier.HOST, {}, behind or [])
        ]
        assert invariants.problems(self.tree, leases, tier_copies) == []

    def seen(self, page: Page) -> dict[int, tuple[int, int | None, int]]:
        locks = {
            at: count for at, count in page.locks.items() if count and component_of(at) not in self.windows
        }
        return {at: (page.at(at), page.slots.get(at), locks.get(at, 0)) for at in {*page.slots, *locks}}

    def seen_in(self) -> Iterator[tuple[Key, dict[int, tuple[int, int | None, int]]]]:
        """The tree's nodes, cut into pages. States and locks are at the last page of a node."""
        for node in self.tree.nodes():
            for index, key in enumerate(Model.path(prefix_of(node), node.end - node.pages)):
                last = index == node.pages - 1
                at_page = {}
                for at, slots in enumerate(node.slots):
                    paged = at in self.model.paged
                    here = slots is not None and (last or paged)
                    slot = node.slots_at(at)[index if paged else 0] if here else None
                    locks = node.locks[at] if last and component_of(at) not in self.windows else 0
                    if slot is not None or locks:
                        at_page[at] = (ABSENT if slot is None else node.residency[at], slot, locks)
                yield key, at_page

    def pages_of(self, wanted: list[CopyRequest]) -> list[tuple[Key, int]]:
        return [
            (key, component_id)
            for node, component_id in wanted
            for key in Model.path(
                prefix_of(node),
                node.end - (1 if component_id and component_id not in self.windows else node.pages),
            )
        ]

    def settle(self) -> None:
        """End everything: nothing may be locked or in flight then, and all of it can be evicted."""
        while self.tier_copies:
            self.finish()
        while self.leases:
            self.unlock()
        for at, pool in enumerate(self.pools):
            self.evict_at(at, pool.capacity)
        self.check()
        assert not self.model.pages
        assert not self.tree.roots


def tokens_of(key: Key) -> array[int]:
    return array("q", key[1])


def prefix_of(node: Node) -> Key:
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    assert node.digests is not None
    return node.digests[0], tuple(array("q", b"".join(reversed(keys))))


def path_of(tree: UnifiedRadixTree, key: Key) -> list[Node]:
    """The nodes of the tree that a sequence runs through, as far as they end within it."""
    node, found = tree.roots[key[0]], []
    while child := tree.child(node, tokens_of(key)):
        if child.end * PAGE > len(key[1]):
            break
        found.append(child)
        node = child
    return found


def as_sets(slots: Slots) -> dict[int, list[int]]:
    return {at: sorted(given) for at, given in slots.items() if given}


WEIGHTS = {
    Twins.match: 2, Twins.lock: 4, Twins.unlock: 3, Twins.insert: 4, Twins.insert_host: 2,
    Twins.save: 4, Twins.load: 4, Twins.finish: 4, Twins.evict: 3, Twins.digests: 1, Twins.move_on: 1,
}  # fmt: skip


SETS = [(0, ()), (1, ()), (2, ()), (0, (2,)), (0, (1,)), (1, (2,)), (1, (3, 1)), (2, (2,))]
"""States, and windows by trailing pages."""


@pytest.mark.parametrize(("states", "windows"), SETS)
@pytest.mark.parametrize("seed", range(3))
def test_tree_holds_what_the_model_holds(states: int, windows: tuple[int, ...], seed: int) -> None:
    search(seed, states, windows, OPERATIONS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("states", "windows"), SETS)
def test_tree_holds_what_the_model_holds_for_long(states: int, windows: tuple[int, ...]) -> None:
    for seed in range(100, 115):
        search(seed, states, windows, OPERATIONS)


def search(seed: int, states: int, windows: tuple[int, ...], count: int) -> None:
    twins = Twins(seed, states, windows)
    operations = twins.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    for operation in operations:
        operation(twins)
        twins.check()
    twins.settle()
