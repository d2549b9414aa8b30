"""The owners of slots: the tree, the allocators, requests, and locks for copies and calls in flight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Self

from asynchicache.errors import ConfigError
from asynchicache.planner.actions import PoolTransfers
from asynchicache.planner.hints import HintLedger
from asynchicache.planner.observer import Observer
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.request_state import RequestState
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.pools.budget import ByteBudget
from asynchicache.pools.extents import ExtentAllocator, ExtentMemory, ExtentPlan
from asynchicache.pools.sizing import pool_bytes
from asynchicache.specs import ModelSpec
from asynchicache.tracing import Tracer
from asynchicache.tree import eviction, tier_copies
from asynchicache.tree.components import WindowComponent
from asynchicache.tree.eviction import MAX_VICTIMS
from asynchicache.tree.invariants import problems
from asynchicache.tree.keeps import HintShare
from asynchicache.tree.node import (
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    RESIDENT,
    Locks,
    Node,
    SlotPlace,
    component_of,
    place_of,
    tier_of,
)
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.tree.tier_copies import CopyRequest, TierCopy
from asynchicache.types import KEY_WORDS, PoolTransfer, Tier, WritePolicy


def _tell_all(
    on_release: Callable[[str, Iterable[int]], object], pools: Iterable[str], slots: Iterable[int]
) -> None:
    for pool in pools:
        on_release(pool, slots)


def _may_move(node: Node, place: SlotPlace, protected: Collection[Node]) -> bool:
    """Whether nothing reads or writes the host slots of a node."""
    if node.residency[place] != RESIDENT or node.locks[place] or node.pending:
        return False
    return place != FULL_HOST or node not in protected


@dataclass(slots=True, eq=True)
class PlannerCounters:
    """Decisions since the start, in pages and states.

    Attributes:
        evicted: by place.
        demoted, lost: evicted pages with a copy in a lower tier of the tree, and those without.
        backed_up: pages and states copied to the host.
        host_pressure: pages and states not copied to the host for lack of host slots.
        states_skipped: states that were not kept for lack of a device slot.
        moved: pages and states moved within the host, so that another pool could have their extent.
    """

    evicted: list[int] = field(default_factory=list)
    demoted: int = 0
    lost: int = 0
    backed_up: int = 0
    host_pressure: int = 0
    states_skipped: int = 0
    moved: int = 0

    def copy(self) -> Self:
        return replace(self, evicted=list(self.evicted))


class SlotInventory:
    """Who holds which slot: what all decisions read and change.

    Attributes:
        names: pool name of each component; the first covers every page.
        options: what its planner decides by.
        page_size: tokens of a page.
        page_keys, page_words: whether prefixes are page keys, and the 64-bit words that name a page: its
            tokens, or its key.
        engine_pages: device pages of each pool that owns slots, if an engine owns them; else None.
        host_only: an engine owns the device pages, so the tree has none.
        slot_sharers: by pool, the pools that share its slots and are copied with it.
        free: by place, the allocator of that component and tier.
        hints: the pages that hints favour by their order; what they keep is known by the tree.
        requests, tier_copies, locked, private: all holders of locks or slots outside the tree.
        keepers: how many callers keep a path for a while (`keeping`).
        extents: the host memory that pools share, or None.
        on_move: called with a pool, host slots, and where their bytes go, before the slots are freed.
        tracer: receives evictions, if set.
        observers: are told what happens, see `Observer`; none in production.
    """

    def __init__(
        self,
        spec: ModelSpec,
        slots: Mapping[str, tuple[int, int]],
        options: PlannerOptions,
        *,
        engine_pages: Mapping[str, int] | None = None,
        memory: Mapping[Tier, int] | None = None,
        extents: ExtentPlan | None = None,
    ) -> None:
        """
        Args:
            slots: device and host slots of each pool that owns slots.
            engine_pages: device pages of each pool that owns slots, if an engine owns them; `slots` then has
                no device slots. None: the cache has device slots of its own.
            memory: bytes of the tiers whose memory all pools share; the others have slots of their own.
            extents: the host memory that the pools named there share.

        Raises:
            ConfigError: the pools do not fit each other, or one has no room for one request.
        """
        owners = spec.owners
        if any(not pool.coverage.trailing for pool in owners[1:]):
            raise ConfigError(f"model {spec.model!r}: a second pool covers every page and owns its slots")
        self.spec = spec
        self.page_size = spec.page_size
        self.options = options
        self.page_keys = options.page_keys
        self.page_words = KEY_WORDS if options.page_keys else spec.page_size
        self.engine_pages = engine_pages
        self.host_only = engine_pages is not None
        self.names = [pool.name for pool in owners]
        self.slot_sharers = {
            name: [pool.name for pool in spec.pools if pool.slots_of == name] for name in self.names
        }
        self.tree = self._empty_tree(max(slots[self.names[FULL]]))
        self.memory = {tier: ByteBudget(nbytes) for tier, nbytes in (memory or {}).items()}
        self._extent_plan = extents
        self.extents = None if extents is None else ExtentMemory(extents)
        self.on_move: Callable[[str, list[int], list[int]], object] | None = None
        self.free = self._allocators(slots, extents)
        self._shared = self._shared_places()
        self._share_out()
        self.hints = HintLedger(max(free.capacity for free in self.free[:2]))
        self._check_windows()
        self.counters = PlannerCounters(evicted=[0] * len(self.free))
        self.tracer: Tracer | None = None
        self.tree.observers = self.observers = list[Observer]()
        self.requests: set[RequestState] = set()
        self.tier_copies: list[TierCopy] = []
        self.locked: list[Locks] = []
        self.keepers = 0
        self.private: list[Callable[[], Mapping[SlotPlace, list[int]]]] = []

    @property
    def tails(self) -> bool:
        """Whether prefixes may end inside a page."""
        return self.tree.tails

    def _empty_tree(self, capacity: int) -> UnifiedRadixTree:
        others = self.spec.owners[1:]
        return UnifiedRadixTree(
            self.page_words,
            [pool.coverage for pool in others],
            windows=[component_id for component_id, pool in enumerate(others, start=1) if pool.per_token],
            eviction=self.options.eviction,
            capacity=capacity,
            host_only=self.host_only,
            costs=[self._slot_bytes(name) for name in self.names],
            tails=self.options.tails and self._can_end_inside_a_page(self.spec),
        )

    def _can_end_inside_a_page(self, spec: ModelSpec) -> bool:
        """Whether the first tokens of a page are worth something, and the page can be copied on the device.

        Where an entry serves several tokens, a page cannot end between them; an engine fills its own pages.
        """
        tensors = [tensor for pool in spec.pools if pool.per_token for tensor in pool.tensors]
        entries = any(tensor.tokens_per_entry > 1 for tensor in tensors)
        return not (entries or self.host_only or self.page_keys)

    def _allocators(
        self, slots: Mapping[str, tuple[int, int]], extents: ExtentPlan | None
    ) -> list[SlotAllocator]:
        """The allocators of all places, in the order of the places."""
        shared = {} if extents is None else extents.slot_bytes
        free: list[SlotAllocator] = []
        for name in self.names:
            for tier in (Tier.DEVICE, Tier.HOST):
                words = f"{name} {tier.name.lower()} slots"
                if tier is Tier.HOST and name in shared and self.extents is not None:
                    free.append(ExtentAllocator(self.extents, shared[name], name=words))
                    continue
                memory, slot_bytes = self.memory.get(tier), self._slot_bytes(name)
                free.append(
                    SlotAllocator(slots[name][tier], name=words, memory=memory, slot_bytes=slot_bytes)
                )
        return free

    def _shared_places(self) -> dict[Tier, list[SlotPlace]]:
        """By tier, the places whose slots are paid from a memory that other pools use too."""
        found: dict[Tier, list[SlotPlace]] = {Tier.DEVICE: [], Tier.HOST: []}
        for place, free in zip(self.tree.places, self.free, strict=True):
            if free.memory is not None or isinstance(free, ExtentAllocator):
                found[tier_of(place)].append(place)
        self.tree.watch_slots(found[Tier.HOST] if self.extents is not None else ())
        return found

    def _share_out(self) -> None:
        """Say how much of each memory hints may keep; pools that share one have one share together."""
        shared = {tier: HintShare(memory.nbytes) for tier, memory in self.memory.items()}
        if self.extents is not None:
            shared[Tier.HOST] = HintShare(self.extents.nbytes)
        for place, free, queue in zip(self.tree.places, self.free, self.tree.queues, strict=True):
            if place in self._shared[tier_of(place)]:
                queue.shelf.share, queue.shelf.slot_cost = shared[tier_of(place)], free.slot_bytes
            else:
                queue.shelf.share = HintShare(free.capacity)

    def keep(self, request: RequestState, node: Node) -> None:
        """Keep the path to `node` for as long as the request's hint asks."""
        if request.keep is not None:
            self.tree.keep(node, request.keep)

    def bound_hint(self, request: RequestState, pages: int) -> None:
        """A request is about to publish its first `pages` pages: its hint favours them within its share."""
        more, lease = pages - request.favoured, request.lease
        if request.hint.continues and more > 0 and lease.use.credit > 0:
            if self.favour(request.seed, more, lease.use.credit):
                request.favoured = pages
            else:
                lease.use.credit = 0.0

    def favour(self, seed: bytes, pages: int, credit: float) -> bool:
        """Whether a hint favours so many pages of a namespace more, for `credit` ticks."""
        clock = self.tree.clock
        counts = self.hints.allow(seed, pages, clock, clock + credit)
        for observer in self.observers:
            observer.hint_weighed(pages, clock, clock + credit, counts=counts)
        return counts

    def _slot_bytes(self, name: str) -> int:
        """Bytes of a slot of a pool, with those of the pools that share it."""
        pools = [self.spec.pool(sharing) for sharing in (name, *self.slot_sharers[name])]
        return sum(pool.slot_bytes(self.page_size) for pool in pools)

    def tokens_per_end(self) -> int:
        """Cached tokens for each end of a path, in the tier with more pages; 0 if nothing is cached.

        Each end needs a state where it can be resumed, so this is the split that the traffic asks for.
        """
        place = max(FULL_DEVICE, FULL_HOST, key=lambda place: self.free[place].capacity)
        ends = len(self.tree.queues[place])  # those of running requests have states of their own
        return self.free[place].held * self.page_size // ends if ends else 0

    def host_bytes(self) -> dict[str, int]:
        """By pool that shares host memory with others, the bytes that it has now."""
        owned = zip(self.names, self.free[Tier.HOST :: 2], strict=True)
        return {name: free.owned_bytes for name, free in owned if isinstance(free, ExtentAllocator)}

    def memory_bytes(self, tier: Tier) -> int:
        """Bytes of all slots of a tier, as they are laid out there; what pools share counts once."""
        plan = self._extent_plan if tier is Tier.HOST else None
        own = sum(
            pool_bytes(self.spec, name, free.capacity, host=tier is Tier.HOST)
            for name, free in zip(self.names, self.free[tier::2], strict=True)
            if plan is None or name not in plan.slot_bytes
        )
        return own + (plan.paid_bytes if plan is not None else 0)

    @cached_property
    def host_pages(self) -> int:
        """Pages of the longest prefix that the host holds together with what ends it."""
        full = self.free[FULL_HOST]
        if not isinstance(full, ExtentAllocator):
            return full.capacity
        extents = full.extents.extents
        for component in self.tree.components:
            free = self.free[place_of(component.id, Tier.HOST)]
            if isinstance(free, ExtentAllocator):
                slots = component.kept if isinstance(component, WindowComponent) else 1
                extents -= -(-slots // free.whole)
        return max(extents, 0) * full.whole

    def open_host(self, pool: str, slots: int) -> None:
        """Allow the first `slots` host slots of a pool; the memory of the others is not ready."""
        self.free[place_of(self.names.index(pool), Tier.HOST)].open_only(slots)

    def open_extents(self, extents: int) -> None:
        """Allow the first extents of the host memory that pools share; that of the others is not ready."""
        if self.extents is not None:
            self.extents.open_only(extents)

    def _check_windows(self) -> None:
        """
        Raises:
            ConfigError: a pool has no room for the window of one request.
        """
        for component in self.tree.windows:
            device, host = (
                self.free[place_of(component.id, tier)].capacity for tier in (Tier.DEVICE, Tier.HOST)
            )
            name, kept = self.names[component.id], component.kept
            window = f"a window of {component.pages} and the page kept before it"
            if device < kept + 1 and not self.host_only:
                raise ConfigError(
                    f"pool {name!r} has {device} device pages; one request needs {kept + 1}: {window}, and "
                    f"the page it writes: raise the device pages of {name!r}"
                )
            if host < kept and (host or self.host_only):
                cure = "no hit is possible without" if self.host_only else "0 keep it off the host"
                raise ConfigError(
                    f"pool {name!r} has {host} host pages; {window} need {kept}: raise the host pages of "
                    f"{name!r}; {cure}"
                )

    def make_room_for_all(self, counts: Mapping[SlotPlace, int]) -> SlotPlace | None:
        """Free `counts[place]` slots at each place, evicting if necessary.

        Returns the first place that stays short, or None on success.
        """
        shared: dict[Tier, dict[SlotPlace, int]] = {}
        for place, count in counts.items():
            tier = tier_of(place)
            if place not in self._shared[tier]:
                if not self.make_room(place, count):
                    return place
                continue
            wanted = shared.setdefault(tier, {})  # of one memory: each pool's slots beside the others'
            wanted[place] = count
            if not self.make_shared_room(tier, wanted):
                return place
        return None

    def has_room(self, counts: Mapping[SlotPlace, int]) -> bool:
        """Whether `counts[place]` slots are free at each place, beside each other, without evicting."""
        shared: dict[Tier, list[tuple[SlotAllocator, int]]] = {}
        for place, count in counts.items():
            if place in self._shared[tier_of(place)]:
                shared.setdefault(tier_of(place), []).append((self.free[place], count))
            elif count > self.free[place].available:
                return False
        return all(self._memory_of(tier).fits(wanted) for tier, wanted in shared.items())

    def _memory_of(self, tier: Tier) -> ByteBudget | ExtentMemory:
        """The memory that pools of a tier share."""
        memory = self.memory.get(tier) or self.extents
        assert memory is not None, "a place that is shared has a memory"
        return memory

    def watch_host(self, on_release: Callable[[str, Iterable[int]], object]) -> None:
        """Call `on_release` with each pool's host slots that are freed or quarantined."""
        for component_id in range(len(self.names)):
            self.free[place_of(component_id, Tier.HOST)].on_release = partial(
                _tell_all, on_release, self.sharing(component_id)
            )

    def make_room(self, place: SlotPlace, count: int) -> bool:
        """Have `count` slots free at `place`, evicting if necessary; False if it stays short."""
        if not self.observers:
            return self._make_room(place, count)
        return self._observed({place: count}, partial(self._make_room, place, count), shared=False)

    def _observed(self, counts: Mapping[SlotPlace, int], make: Callable[[], bool], *, shared: bool) -> bool:
        """Make room if all observers agree, and tell them if there is none."""
        if not all(observer.may_take(counts) for observer in self.observers):
            return False
        there = make()
        for observer in self.observers if not there else ():
            observer.no_room(counts, shared=shared)
        return there

    def _make_room(self, place: SlotPlace, count: int) -> bool:
        free, tier = self.free[place], tier_of(place)
        if place in self._shared[tier]:
            return self._evict_for(tier, {place: count})
        for dirty in self._passes:
            # Again if all that was asked for went: slots that a failed copy may write are quarantined.
            while (short := count - free.available) > 0:
                if self.evict(place, short, dirty=dirty) < short:
                    break
        return count <= free.available

    @property
    def _passes(self) -> tuple[bool, ...]:
        """Whether dirty slots may go, by round of an eviction: under write-back, clean ones go first."""
        return (False, True) if self.options.write_policy is WritePolicy.WRITE_BACK else (True,)

    def make_shared_room(self, tier: Tier, counts: Mapping[SlotPlace, int]) -> bool:
        """Have `counts[place]` slots free at each place of a tier's shared memory, beside each other; evict
        if necessary. False if they stay short."""
        return self._observed(counts, partial(self._evict_for, tier, counts), shared=True)

    def _evict_for(self, tier: Tier, counts: Mapping[SlotPlace, int]) -> bool:
        """Evict from whichever pool loses the fewest tokens a byte, until `counts` fit."""
        memory = self._memory_of(tier)
        wanted = [(self.free[place], count) for place, count in counts.items()]
        for dirty in self._passes:
            useless: set[SlotPlace] = set()
            while not memory.fits(wanted):
                if isinstance(memory, ExtentMemory) and self._empty_an_extent(counts, useless):
                    continue
                place = self._least_valuable(tier, useless)
                if place is None:
                    break
                if not self.evict(place, memory.short(wanted, self.free[place]), dirty=dirty, victims=1):
                    useless.add(place)
        return memory.fits(wanted)

    def _empty_an_extent(self, counts: Mapping[SlotPlace, int], useless: set[SlotPlace]) -> bool:
        """Move slots of a pool that has enough free ones elsewhere, so that one of its extents becomes free.

        Adds to `useless` the places of pools in which nothing can be moved: evicting more would not help.
        """
        protected: set[Node] | None = None
        for place in self._shared[Tier.HOST]:
            free, own = self.free[place], counts.get(place, 0)
            assert isinstance(free, ExtentAllocator)
            if place in useless or free.spare - own < free.whole:
                continue
            if protected is None:
                protected = self._read_nodes()
            for extent in free.emptiest():
                enough = free.spare - own >= len(free.slots_in(extent))
                if enough and self._move_out(place, free, extent, protected):
                    return True
            if free.spare - own > free.whole:  # each extent has room elsewhere, and none can move
                useless.add(place)
        return False

    def _read_nodes(self) -> set[Node]:
        """The nodes whose full pages on the host may be in use by a copy or a storage call: it locks the end
        of a path, and reads pages of the nodes above as well."""
        found: set[Node] = set()
        for locks in (*(tier_copy.locks for tier_copy in self.tier_copies), *self.locked):
            for node, place in locks:
                above: Node | None = node
                while place == FULL_HOST and above is not None and above not in found:
                    found.add(above)
                    above = above.parent
        return found

    def _move_out(self, place: SlotPlace, free: ExtentAllocator, extent: int, protected: set[Node]) -> bool:
        """Move the slots of an extent elsewhere; False if one is in use by a copy, a call, or a request."""
        sources = free.used_in(extent)
        nodes = [self.tree.holder(place, slot) for slot in sources]
        if not all(node is not None and _may_move(node, place, protected) for node in nodes):
            return False
        destinations = free.allocate_outside(extent, len(sources))
        if self.on_move is not None:
            for pool in self.sharing(component_of(place)):
                self.on_move(pool, sources, destinations)
        moves = dict(zip(sources, destinations, strict=True))
        for node in dict.fromkeys(node for node in nodes if node is not None):  # a set of nodes has no order
            self.tree.relocate(node, place, moves)
        free.release(sources)
        self.counters.moved += len(sources)
        return True

    def _least_valuable(self, tier: Tier, useless: Collection[SlotPlace] = ()) -> SlotPlace | None:
        """The place of a shared memory from which to evict next; none of `useless`."""
        clock, step, now = self.tree.clock, self.tree.step, self.tree.now
        best, least = None, 0.0
        for place in self._shared[tier]:
            if place in useless:
                continue
            score = self.tree.queues[place].score(clock, step, now)
            if score is not None:
                if not self.tree.components:
                    return place
                if best is None or score < least:
                    best, least = place, score
        return best

    def evict(self, place: SlotPlace, count: int, *, dirty: bool, victims: int = MAX_VICTIMS) -> int:
        """Evict from `victims` nodes at most; returns the slots that left `place`, freed or quarantined."""
        if count <= 0:
            return 0
        tracer = self.tracer
        span = tracer.evicting(*self._names_of(place), count) if tracer is not None else None
        freed = eviction.evict(self.tree, place, count, dirty=dirty, victims=victims)
        for where, slots in freed.slots.items():
            self.free[where].release(slots)
            self.counters.evicted[where] += len(slots)
        self.counters.demoted += freed.demoted
        self.counters.lost += freed.lost
        if span is not None:
            span.finish(freed=freed.count(place), demoted=freed.demoted, lost=freed.lost)
        return freed.count(place)

    def _names_of(self, place: SlotPlace) -> tuple[str, str]:
        """Names of the pool and tier of a place."""
        return self.names[component_of(place)], tier_of(place).name.lower()

    def sharing(self, component_id: int) -> list[str]:
        """The pools that use a component's slots."""
        name = self.names[component_id]
        return [name, *self.slot_sharers[name]]

    def free_slots(self) -> dict[tuple[str, Tier], list[int]]:
        """By pool and tier, the slots that are free. Linear in the slots."""
        found: dict[tuple[str, Tier], list[int]] = {}
        for component_id in range(len(self.names)):
            for tier in (Tier.HOST,) if self.host_only else (Tier.DEVICE, Tier.HOST):
                allocator = self.free[place_of(component_id, tier)]
                slots = [slot for slot in range(allocator.capacity) if allocator.is_free(slot)]
                found |= {(pool, tier): slots for pool in self.sharing(component_id)}
        return found

    def transfers(self, component_id: int, sources: list[int], destinations: list[int]) -> PoolTransfers:
        """Transfers of one component: one for each pool that uses its slots."""
        return [PoolTransfer(pool, sources, destinations) for pool in self.sharing(component_id)]

    def begin(self, tier: Tier, batch: list[tuple[CopyRequest, list[int]]]) -> TierCopy:
        tier_copy = tier_copies.begin(self.tree, tier, batch)
        self.tier_copies.append(tier_copy)
        return tier_copy

    def lock(self, locks: Locks) -> None:
        self.tree.lock_all(locks)
        self.locked.append(locks)

    def unlock(self, locks: Locks) -> None:
        self.locked[:] = [other for other in self.locked if other is not locks]
        self.tree.unlock_all(locks)

    @contextmanager
    def keeping(self, node: Node) -> Iterator[None]:
        """During the body, keep the path to `node` and what a prefix needs there, where they are."""
        lease = self.tree.lease(node)
        self.locked.append(lease.locked)
        self.keepers += 1
        try:
            yield
        finally:
            self.keepers -= 1
            self.locked[:] = [other for other in self.locked if other is not lease.locked]
            lease.close()

    def give_back(self, place: SlotPlace, slots: list[int], *, poisoned: bool) -> None:
        """Free slots, unless a failed device may still write to them."""
        if poisoned:
            self.free[place].quarantine(slots)
        else:
            self.free[place].release(slots)

    def by_place(self, tier: Tier, transfers: PoolTransfers) -> dict[SlotPlace, set[int]]:
        """The slots that copies to a tier write; none of an engine's own pages."""
        found: dict[SlotPlace, set[int]] = {}
        for pool, _, slots in () if self.host_only and tier is Tier.DEVICE else transfers:
            owner = self.spec.pool(pool).slots_of or pool
            found.setdefault(place_of(self.names.index(owner), tier), set()).update(slots)
        return found

    def condemn(self, tier: Tier, transfers: PoolTransfers) -> None:
        """Never reuse the destination slots of a failed copy: the device may still write to them.

        The owner may have changed: a state that a request loaded may belong to the tree by now.
        """
        for place, slots in self.by_place(tier, transfers).items():
            self.free[place].condemn(sorted(slots))

    def verify(self) -> list[str]:
        """Describe broken invariants; empty if there are none. Linear in the slots."""
        leases = [request.lease for request in self.requests if not request.lease.closed]
        tier_copies = [*self.tier_copies, *(TierCopy(Tier.HOST, {}, locks) for locks in self.locked)]
        found = problems(self.tree, leases, tier_copies)
        for place, free in zip(self.tree.places, self.free, strict=True):
            found += free.problems()
            found += free.audit(self._owned(place))
        return found

    def _owned(self, place: SlotPlace) -> Iterator[int]:
        for node in self.tree.nodes():
            yield from node.slots[place] or ()
        for tier_copy in self.tier_copies:
            yield from tier_copy.orphans(place)
        if place == FULL_DEVICE:
            for request in self.requests:
                yield from request.own_pages()
        elif tier_of(place) is Tier.DEVICE:
            component_id = component_of(place)
            for request in self.requests:
                for held in (request.states, request.snapshots):
                    if component_id in held:
                        yield held[component_id]
                if component_id in request.windows:
                    yield from request.windows[component_id].own
        for slots in self.private:
            yield from slots().get(place, [])
