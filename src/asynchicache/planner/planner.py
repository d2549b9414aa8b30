"""Decisions for requests: match, load, room, publication. The controller carries them out.

Pure and synchronous: each method changes the tree and the allocators at one point and returns the copies to
carry out. `copy_finished` takes the result of a copy. `planner.backup` plans copies down to host and storage,
`planner.prefetch` reads from storage.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from asynchicache.errors import CapacityError, CopyEndedError
from asynchicache.planner.actions import Copy, PoolTransfers
from asynchicache.planner.activity import Activity
from asynchicache.planner.backup import BackupPlanner
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.planner.engine_pages import EnginePlanner
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.load import LoadPlanner, by_place
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.prefetch import PrefetchPlanner
from asynchicache.planner.promises import PromisedPrefix, promise_of
from asynchicache.planner.request_state import RequestState
from asynchicache.planner.tail_ends import TailPlanner
from asynchicache.planner.windows import WindowPlanner
from asynchicache.pools.extents import ExtentPlan
from asynchicache.specs import ModelSpec
from asynchicache.tree import tails, tier_copies
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    RESIDENT,
    Keep,
    Node,
    SlotPlace,
    component_of,
    place_of,
    tier_of,
)
from asynchicache.tree.policies import Use
from asynchicache.tree.radix_tree import Match
from asynchicache.types import Direction, MissReason, Tier, WritePolicy

_DEFAULTS = PlannerOptions()


class Planner:
    """Decides for one model's cache.

    Attributes:
        inventory: the tree, the allocators, and the holders of slots.
        loads: plans loads to the device.
        engine: plans copies from and to pages that an engine owns.
        prefetches, backups: plan reads from storage, and copies down to host and storage.
        checkpoints: the lengths at which to keep states.
        windows: the pages of sliding windows that requests hold.
        ends: publishes ends inside a page.
        activity: the work in flight, by when it began.
        changes_weights: changes of weights in flight.
    """

    def __init__(
        self,
        spec: ModelSpec,
        slots: Mapping[str, tuple[int, int]],
        options: PlannerOptions = _DEFAULTS,
        *,
        engine_pages: Mapping[str, int] | None = None,
        memory: Mapping[Tier, int] | None = None,
        extents: ExtentPlan | None = None,
    ) -> None:
        """
        Args:
            slots: device and host slots of each pool that owns slots; 0 host slots: not on the host.
            engine_pages, memory, extents: as for `SlotInventory`.
        """
        self.checkpoints = CheckpointPolicy.parse(options.checkpoints)
        self.checkpoints.check(spec.page_size)
        self.inventory = SlotInventory(
            spec, slots, options, engine_pages=engine_pages, memory=memory, extents=extents
        )
        self.activity = Activity()
        self.backups = BackupPlanner(self.inventory, self.activity)
        self.prefetches = PrefetchPlanner(self.inventory, self.backups)
        self._tree = self.inventory.tree
        self.windows = WindowPlanner(self.inventory)
        self.ends = TailPlanner(self.inventory, self.windows)
        self.loads = LoadPlanner(self.inventory, self.windows)
        self.engine = EnginePlanner(self.inventory, self.backups)
        self._states = [component.id for component in self._tree.components if not component.paged]
        self.changes_weights = 0

    # Requests

    def open(
        self,
        tokens: array[int],
        seed: bytes,
        prompt: int | None = None,
        hint: CacheHint = NO_HINT,
    ) -> RequestState:
        """Match and lock a prefix. At least one token is left to compute, so that there are logits.

        Args:
            tokens: of the prompt; or the words of its page keys, and one word more if it goes on behind them.
            seed: the digest of the namespace.
            prompt: tokens of the prompt. Default: the length of `tokens`.
            hint: what the client knows about the request's pages.

        Raises:
            CapacityError: the tokens do not fit on the device even if it is empty.
        """
        prompt = len(tokens) if prompt is None else prompt
        self._check_capacity(prompt)
        match = self._match(tokens, seed)
        held_back = self._tree.held_back(tokens, match)
        use, favoured = self._asked(tokens, seed, match, hint)
        lease = self._tree.lock(match, use)
        request = RequestState(tokens, seed, lease, match, held_back, prompt=prompt, hint=hint)
        request.epoch, request.favoured = self._tree.epoch, favoured
        request.known_pages = self._tree.count_known(tokens, match)
        if hint.keep_seconds:
            request.keep = Keep(self._tree.now + hint.keep_seconds, seed)
        self.inventory.keep(request, lease.node)
        self.inventory.requests.add(request)
        self.loads.keep_tail(request)
        return request

    def set_time(self, now: float) -> None:
        """Say what time it is, in seconds of a clock that never goes back; hints keep pages by it."""
        self._tree.now = now

    def reopen(self, before: RequestState) -> RequestState:
        """The state in which a suspended request goes on: all its tokens are its prompt, and it rests.

        Raises:
            CapacityError: as `open`.
        """
        request = self.open(before.tokens, before.seed)
        self.rest(request)
        request.made_at, request.streams, request.resumed = before.made_at, dict(before.streams), True
        request.hint, request.keep, request.favoured = before.hint, before.keep, before.favoured
        if before.hint.halves:
            request.lease.use = before.lease.use
        request.known_pages = before.known_pages
        request.published = before.published
        return request

    def _asked(self, tokens: array[int], seed: bytes, match: Match, hint: CacheHint) -> tuple[Use, int]:
        """Who a request is for the policy, and how many pages its hint favours."""
        tree, pages = self._tree, len(tokens) // self._tree.page_size
        use = tree.asked(tokens, match, seed, hint.halves)
        if not hint.continues:
            return use, 0
        if self.inventory.favour(seed, pages, max(use.credit, 1.0)):
            return use, pages
        use.credit = min(use.credit, 0.0)
        return use, 0

    def _check_capacity(self, tokens: int) -> None:
        pages, inventory = -(-tokens // self.inventory.page_size), self.inventory
        capacity = (inventory.engine_pages or {}).get(
            inventory.names[FULL], inventory.free[FULL_DEVICE].capacity
        )
        if pages > capacity:
            raise CapacityError(
                f"{tokens} tokens need {pages} pages of {inventory.page_size}; "
                f"the device holds {capacity}: raise the device pages of {inventory.names[FULL]!r}"
            )

    def _match(self, tokens: array[int], seed: bytes) -> Match:
        match = self._tree.match(tokens, seed, limit=(len(tokens) - 1) // self._tree.page_size)
        if not self.loads.takes_tails(tokens):
            return match  # what it would reach can be restored with its tail only
        return tails.reach(self._tree, match, tokens, len(tokens) - 1)

    def rematch(self, request: RequestState, *, prefetched: bool = True) -> None:
        """Match again, and lock the new prefix before releasing the old one.

        `prefetched`: the call is after the request's own prefetch, so what the match gains came from storage.
        """
        match = self._match(request.tokens, request.seed)
        request.held_back = self._tree.held_back(request.tokens, match)
        had = (request.matched_pages, request.tail_tokens)
        before, request.match = request.lease, match
        request.lease = self._tree.lock(match, before.use)
        request.epoch = self._tree.epoch
        request.resting = False
        self.inventory.keep(request, request.lease.node)
        self.loads.keep_tail(request)
        if prefetched:
            self._count_prefetched(request, *had)
        self.inventory.unlock(request.kept)
        before.close()

    @staticmethod
    def _count_prefetched(request: RequestState, pages: int, tail_tokens: int) -> None:
        """Count what a match has beyond `pages` pages, and `tail_tokens` of a tail, as prefetched."""
        match, has_tail = request.match, request.tail_tokens > 0
        more = max(match.pages - pages, 0)
        more += has_tail and (match.pages, request.tail_tokens) > (pages, tail_tokens)
        request.prefetched_pages = min(request.prefetched_pages + more, match.pages + has_tail)

    def rest(self, request: RequestState) -> None:
        """Release the prefix until `rematch`, except what was read from storage for it."""
        before, root = request.lease, self._tree.root(request.seed)
        if self.prefetches.was_read_for(request) and not request.resting:
            request.kept = [(node, place) for node, place in before.locked if tier_of(place) is Tier.HOST]
            self.inventory.lock(request.kept)
        request.lease = self._tree.lease(root, before.use)
        request.resting = True
        self.loads.drop_tail(request)
        before.close()

    def count_hit(self, request: RequestState) -> list[Copy]:
        """Count a hit on the matched path; return the backups it triggers (write-through-selective)."""
        selective = self.inventory.options.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        if not selective:
            return []
        path = self._tree.count_hit(request.lease.node)
        if request.tail is not None and request.tail.node.tail:
            request.tail.node.hits += 1
            path.append(request.tail.node)
        due = [node for node in path if self.backups.due(node)]
        return self.backups.backup(due[-1]) if due else []

    def due_in_storage(self, request: RequestState) -> Node | None:
        """The end of the matched path if it is to be written to storage now: an engine's pages are on the
        host before the policy wants them in storage (write-through-selective). Else None."""
        node = request.lease.node
        selective = self.inventory.options.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        return node if selective and node.pages and self.backups.due(node) else None

    def release(self, request: RequestState, error: BaseException | None = None) -> None:
        """Drop one user (the request, a copy, or a stream); the last one frees the request's slots.

        Args:
            error: a device failure. The device may still write to the slots, so they are not reused.
        """
        request.poisoned |= error is not None
        request.references -= 1
        if request.references:
            return
        inventory, poisoned = self.inventory, request.poisoned
        inventory.requests.discard(request)
        request.lease.close()
        inventory.unlock(request.kept)
        self.ends.release(request)
        inventory.give_back(FULL_DEVICE, request.own_pages(), poisoned=poisoned)
        for slots in (request.states, request.snapshots):
            for component_id, slot in slots.items():
                inventory.give_back(place_of(component_id, Tier.DEVICE), [slot], poisoned=poisoned)
        for component_id, window in request.windows.items():
            inventory.give_back(place_of(component_id, Tier.DEVICE), sorted(window.own), poisoned=poisoned)

    def abandon(self) -> None:
        """Close the leases of closed requests whose copies or forwards will never be reported, because the
        cache is closed. Their own slots stay allocated: the device may still write to them."""
        for request in self.inventory.requests:
            if request.closed:
                request.lease.close()

    def reason(self, request: RequestState) -> MissReason:
        """Why a request did not get all but the last page of its prompt."""
        pages = request.hit_pages if request.loaded else request.matched_pages
        if pages >= (request.prompt - 1) // self.inventory.page_size:
            return MissReason.NONE
        if request.reason is not MissReason.NONE and pages < request.cut_below:
            return request.reason
        held = request.held_back_by
        if held is None:
            return MissReason.COLD
        return MissReason.STATE if held.component_id in self._states else MissReason.WINDOW

    def held_back_by(self, request: RequestState) -> str:
        """The pool that limits a hit; the first pool if no other does."""
        limit = request.held_back_by
        return self.inventory.names[limit.component_id if limit is not None else FULL]

    def cuts(self, request: RequestState) -> tuple[int, ...]:
        """Where the prefill of a prompt should end a forward; see `Request.cuts`."""
        size = self.inventory.page_size
        start = request.hit_tokens(size)
        branch = (request.branching_pages or 0) * size
        host = self._host_end(request) if self.checkpoints.branch else 0
        if not self._states:  # every publication has its window pages
            ends = {branch, host} if self.checkpoints.branch else set()
            return tuple(sorted(end for end in ends if end > start))
        end = request.prompt // size * size
        repeated = [self._resumable_end(request, length) for length in request.hint.repeats]
        # Asked again, a prompt computes its last token again: that needs a state before it.
        if request.prompt in repeated:
            repeated.append((request.prompt - 1) // size * size)
        cuts = self.checkpoints.cuts(start, end, branch, repeated)
        return tuple(sorted({*cuts, host})) if host > start else cuts

    def _host_end(self, request: RequestState) -> int:
        """Tokens of a prompt that is longer than the host: no longer prefix can be resumed there, and this
        one only if what ends it is kept. 0: all of the prompt fits."""
        host, size = self.inventory.host_pages, self.inventory.page_size
        ends_need_more = bool(self._tree.components)
        return host * size if ends_need_more and host < request.prompt // size else 0

    def _resumable_end(self, request: RequestState, length: int) -> int:
        """The last length up to `length` tokens of a prompt that a state can be kept at."""
        length = min(length, request.prompt)
        return length if self.ends.keeps_states_inside else length - length % self.inventory.page_size

    def hit_advice(self, request: RequestState) -> tuple[str, str]:
        """The pool that keeps a hit short, and advice; empty if there is none."""
        reason = self.reason(request)
        if reason is MissReason.HOST_CAPACITY:
            name = self.inventory.names[FULL]
            holds = f"the host holds {self.inventory.host_pages} pages of {name!r}"
            return name, f"{holds}: raise them, or let fewer prompts wait at once"
        if reason not in (MissReason.STATE, MissReason.WINDOW):
            return "", ""
        held, full = request.held_back_by, request.branching_pages
        if held is None or full is None or (request.loaded and request.hit_pages >= full):
            return "", ""
        name, size = self.inventory.names[held.component_id], self.inventory.page_size
        if held.dropped:
            return name, f"{name!r} had to make room for others: raise its device or host slots"
        return name, (
            f"publish {name!r} at {full * size} tokens: stop a prefill there (request.cuts); where a chat "
            "template rewrites what it repeats, say so with CacheHint(repeats=...)"
        )

    # Room

    def extend(self, request: RequestState, tokens: int) -> dict[str, list[int]]:
        """Allocate slots for `tokens` more tokens in every pool with pages, and missing working states.

        Raises:
            CapacityError: too few slots, even after evicting everything evictable.
        """
        inventory = self.inventory
        target, count = request.reserved + tokens, self.new_pages(request, tokens)
        self._need(request, {FULL_DEVICE: count} | {place_of(n, Tier.DEVICE): count for n in request.windows})
        slots = inventory.free[FULL_DEVICE].allocate(count)
        request.pages += slots
        request.reserved = target
        return {name: list(slots) for name in inventory.sharing(FULL)} | self.windows.extend(request, count)

    def new_pages(self, request: RequestState, tokens: int) -> int:
        """The new pages that a request needs for `tokens` more tokens."""
        target = request.reserved + tokens
        return max(-(-target // self.inventory.page_size) - len(request.pages), 0)

    def admit(self, request: RequestState) -> None:
        """Make room on the device for `load`: allocate working states, free slots for missing pages.

        Raises:
            CapacityError: not enough can be evicted.
        """
        node = request.lease.node
        missing = by_place(tier_copies.missing_on_device(self._tree, node))
        if request.tail is not None:
            missing = self.loads.with_tail(missing)
        kept = self.loads.on_device(node)  # others may have loaded it since the match, and released it
        self.inventory.lock(kept)
        try:
            self._need(request, missing)
        finally:
            self.inventory.unlock(kept)

    def _need(self, request: RequestState, counts: Mapping[SlotPlace, int]) -> None:
        if not self.loads.take_states(request):
            missing = next(
                component_id for component_id in self._states if component_id not in request.states
            )
            raise self._short(1, place_of(missing, Tier.DEVICE))
        short = self.inventory.make_room_for_all(counts)
        if short is not None and self._hand_over_duplicates():
            short = self.inventory.make_room_for_all(counts)
        if short is not None:
            raise self._short(counts[short], short)

    def _hand_over_duplicates(self) -> bool:
        """Leave one copy of pages that the tree and a request have on the device; whether that freed any."""
        requests = [one for one in self.inventory.requests if not (one.void or one.poisoned)]
        return sum(self._hand_over(one) for one in requests if one.duplicates) > 0

    def _hand_over(self, request: RequestState) -> int:
        """Give the tree a request's duplicates for its own slots, of nodes that nobody else uses; the number
        of slots that are free now. The request keeps its table of pages: a forward may be reading them."""
        inventory, own, below = self.inventory, set(request.duplicates), 0
        kept = Counter(node for node, place in request.lease.locked if place == FULL_DEVICE)
        for node in request.lease.node.path():
            # A lock or a page on the device below it says that others use the slots of the node.
            if node.locks[FULL_DEVICE] > kept[node] or node.device_children > below:
                break
            pages = request.pages[node.end - node.pages : node.end]
            if node.residency[FULL_DEVICE] == RESIDENT and own.issuperset(pages):
                slots = node.slots_at(FULL_DEVICE)
                self._tree.relocate(node, FULL_DEVICE, dict(zip(slots, pages, strict=True)))
                inventory.give_back(FULL_DEVICE, slots, poisoned=False)
                own.difference_update(pages)
            below = 1
        freed = len(request.duplicates) - len(own)
        request.duplicates = [slot for slot in request.duplicates if slot in own]
        return freed

    def _short(self, count: int, place: SlotPlace) -> CapacityError:
        free = self.inventory.free[place]
        available = f"{free.available} of {free.capacity} are free and the rest in use"
        return CapacityError(f"{count} more {free.name} wanted, {available}")

    # Publication

    def snapshot(self, request: RequestState, length: int) -> list[Copy]:
        """Copy the working states, which are at `length` tokens, to snapshot slots of the request."""
        # Set even without room: otherwise `publish` would take a later working state for this length's.
        request.snapshot_tokens = length
        if not self._take_snapshots(request):
            self.inventory.counters.states_skipped += 1
            return []
        forks: PoolTransfers = []
        for component_id, slot in request.snapshots.items():
            forks += self.inventory.transfers(component_id, [request.states[component_id]], [slot])
        if not forks:
            return []
        return [Copy(Direction.FORK, forks, self.inventory.begin(Tier.DEVICE, [])).serve(request)]

    def _take_snapshots(self, request: RequestState) -> bool:
        """Allocate a snapshot slot for every working state, all or nothing."""
        new = [component_id for component_id in request.states if component_id not in request.snapshots]
        counts = {place_of(component_id, Tier.DEVICE): 1 for component_id in new}
        if self.inventory.make_room_for_all(counts) is not None:
            return False
        for component_id in new:
            free = self.inventory.free[place_of(component_id, Tier.DEVICE)]
            request.snapshots[component_id] = free.allocate(1)[0]
        return True

    def publish(
        self, request: RequestState, length: int, *, final: bool = False, states: bool = True
    ) -> list[Copy]:
        """Insert the whole pages up to `length` tokens into the tree, and a state if there is one; with
        tails, also the page that ends there.

        The state is the snapshot taken at that length; else the working state, if `length` is a whole number
        of pages, or final and a tail. The caller guarantees that a forward ended there. `final`: the request
        computes nothing more, so the tree takes the working state itself, without a copy or another slot.
        `states`: False for whole pages alone, where a state would be of no use.
        """
        states |= not self._states
        published = request.published
        if request.epoch != self._tree.epoch:
            published.lost = True  # its pages are of other weights than those served now
            return []
        if request.void or request.lease.node.residency[FULL_DEVICE] == ABSENT:
            published.lost = True  # a failed load took the prefix away
            return []
        pages = length // self.inventory.page_size
        if pages < request.borrowed:
            return []
        self.inventory.bound_hint(request, pages)
        offers = self.windows.offered(request, pages)
        result = self._tree.insert(
            request.lease, request.tokens, request.pages[request.borrowed : pages], windows=offers
        )
        self.windows.handed_over(request, offers, result)
        request.duplicates += result.duplicates
        request.borrowed = pages
        published.pages.add(pages)
        published.tail = 0
        if states and length % self.inventory.page_size == 0:
            published.resumable = max(published.resumable, pages)
        for node in result.filled:
            node.hits = max(node.hits, 1)  # it may already be on the host with hits: the count never falls
        self.backups.count_seen(request, pages)
        request.finished = final
        copy = self._end_states(request, result.node, length, final=final) if states else None
        forks = [] if copy is None else [copy]
        end = result.node
        if self.inventory.tails and states:
            tail, fork = self.ends.publish(request, end, length, final=final)
            if tail is not None and final:
                tail.hits = max(tail.hits, 1)
                self._give_states(request, tail, tail.end * self.inventory.page_size)
                self.inventory.keep(request, tail)
                end = tail if self.backups.due(tail) else end
            if self.ends.stores(request, length, tail, final=final):
                published.tail = length % self.inventory.page_size
            if tail is not None and fork is not None:
                forks += self._publish_copied_tail(request, tail, fork)
            self.ends.set_last_tail(request, end, tail)
        self.inventory.keep(request, result.node)
        due = self.backups.last_due(end)
        if due is None or (copy is not None and due is end):  # else once the state has arrived
            return forks
        return [*self.backups.backup(due), *forks]

    def _publish_copied_tail(self, request: RequestState, tail: Node, fork: Copy) -> list[Copy]:
        """Publish a tail whose page is a copy of the request's, with its states: prompts go on there."""
        if self._states:
            tail.hits = max(tail.hits, 1)
        states = self._publish_states(request, tail, tail.end * self.inventory.page_size)
        fork.publishes = tail if self.backups.due(tail) else None
        return [fork] if states is None else [states, fork]

    def promise(self, request: RequestState) -> PromisedPrefix:
        """What `durable` vouches for."""
        return promise_of(request, self._tree)

    def published_ends(self, request: RequestState, promise: PromisedPrefix) -> list[Node]:
        """The ends of the request's checkpoints that can be resumed from memory, first to last, and then the
        end of what memory has of its promise.

        Each checkpoint has a window of its own; the last window does not include the earlier ones.
        """
        last = node = self._tree.known_end(promise.words, promise.seed, promise.pages)
        ends = [last]
        while (above := node.parent) is not None and self._tree.windows:
            kept = node.end in request.published.pages and not node.tail
            if kept and node is not last and self._tree.restorable(node):
                ends.append(node)
            node = above
        return ends[::-1]

    def _end_states(self, request: RequestState, node: Node, length: int, *, final: bool) -> Copy | None:
        """Publish the states at the end of the whole pages; return their copy, if there is one."""
        if not final or request.snapshot_tokens == length:
            return self._publish_states(request, node, length)
        self._give_states(request, node, length)
        return None

    def _give_states(self, request: RequestState, node: Node, length: int) -> None:
        """Hand the working states over to `node`, for components where it has none."""
        if length % self.inventory.page_size or node.parent is None:
            return
        for component_id, slot in list(request.states.items()):
            if self._tree.take_state(node, component_id, Tier.DEVICE, slot):
                del request.states[component_id]
                # The forward that writes it may be in flight, until the request is released.
                self._tree.lock_for(request.lease.locked, node, place_of(component_id, Tier.DEVICE))
                self._tree.supersede(node, component_id)
            else:
                self._tree.touch(node, component_id)

    def _publish_states(self, request: RequestState, node: Node, length: int) -> Copy | None:
        kept = request.snapshots if request.snapshot_tokens == length else request.states
        if length % self.inventory.page_size or node.parent is None:
            return None
        forks: PoolTransfers = []
        taken = []
        for component_id, source in kept.items():
            slot = self._state_slot(node, component_id)
            if slot is not None:
                forks += self.inventory.transfers(component_id, [source], [slot])
                taken.append(component_id)
        if not taken:
            return None
        tier_copy = tier_copies.begin_arrival(self._tree, node, taken)
        self.inventory.tier_copies.append(tier_copy)
        publishes = node if self.backups.due(node) else None
        return Copy(Direction.FORK, forks, tier_copy, publishes=publishes).serve(request)

    def _state_slot(self, node: Node, component_id: int) -> int | None:
        """Allocate a slot in the tree for a state at `node`; None if it has one or there is no room."""
        place = place_of(component_id, Tier.DEVICE)
        if node.residency[place] != ABSENT:
            self._tree.touch(node, component_id)
            return None
        if not self.inventory.make_room(place, 1):
            self.inventory.counters.states_skipped += 1
            return None
        slot = self.inventory.free[place].allocate(1)[0]
        self._tree.take_state(node, component_id, Tier.DEVICE, slot, arriving=True)
        self._tree.supersede(node, component_id)
        return slot

    # How copies ended

    def copy_finished(self, copy: Copy, error: BaseException | None) -> Node | None:
        """Settle or undo a copy; return the node whose path is due for the next tier, or None."""
        for observer in self.inventory.observers:
            observer.copy_ended(copy, error)
        self.inventory.tier_copies.remove(copy.tier_copy)
        ended = error is None or isinstance(error, CopyEndedError)
        if not ended:
            self.inventory.condemn(copy.direction.destination, copy.transfers)
        lost = tier_copies.finish(self._tree, copy.tier_copy, arrived=error is None)
        written = self.inventory.by_place(copy.direction.destination, copy.transfers)
        for place, slots in lost.items():
            # Others were on top of those that it was to fill: a write to storage may be reading them.
            if self.inventory.host_only:
                unread = set(slots) - self.backups.slots_in_flight(component_of(place))
            else:
                unread = written.get(place, set()).intersection(slots)
            free = unread if ended else set[int]()
            self.inventory.give_back(place, sorted(free), poisoned=False)
            self.inventory.give_back(place, sorted(set(slots) - free), poisoned=True)
        if self.inventory.host_only and copy.direction is Direction.LOAD:
            self.engine.load_ended(copy)
        if copy.user is not None:
            # A copy of its own slots to those of the tree loses nothing but these.
            own = copy.direction is Direction.LOAD or not copy.tier_copy.pending
            copy.user.void |= error is not None and own
            self.release(copy.user, None if ended else error)
        return copy.publishes if error is None else None

    def reset(self) -> None:
        """Forget all pages, because the weights change: requests that hold some publish nothing more."""
        self._tree.reset()
        for request in self.inventory.requests:
            request.published.lost |= request.loaded or bool(request.published.pages)
        self.flush()
        for node in self._tree.nodes():  # in use for now, and of no use to later requests
            node.keep = None

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """During the body, nothing is restored or published: nobody knows whose weights that would be."""
        self.changes_weights += 1
        self.reset()
        try:
            yield
        finally:
            self.changes_weights -= 1

    def flush(self) -> None:
        """Evict everything that is not locked, on device and host."""
        watcher, self._tree.watcher = self._tree.watcher, None  # one event instead of one per page
        for place, free in zip(self.inventory.tree.places, self.inventory.free, strict=True):
            self.inventory.evict(place, free.capacity, dirty=True)
        self._tree.watcher = watcher
        if watcher is not None:
            watcher.on_clear(Tier.DEVICE, Tier.HOST)
