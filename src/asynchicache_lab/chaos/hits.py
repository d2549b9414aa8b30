"""Check that each request hits everything available, and that the reason for a shorter hit is true.

The oracle reads the tree when a request matches, and the store while it waits. It expects neither pages that
leave memory or storage meanwhile, nor stored pages after a storage fault. Any correct cache must find the
rest.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asynchicache.cache import BaseCache
from asynchicache.config import PrefetchOptions
from asynchicache.controller.request import BaseRequest
from asynchicache.hashing import ObjectKey, page_digests, tail_digests
from asynchicache.planner.observer import Observer
from asynchicache.planner.readings import StorageRead
from asynchicache.tree import tails
from asynchicache.tree.keeps import HINTED_SHARE
from asynchicache.tree.node import FULL, FULL_HOST, Node, SlotPlace, component_of, place_of
from asynchicache.types import ALL_PAGES, MissReason, PrefetchPolicy, Tier
from asynchicache_lab.chaos.calls import CallListener
from asynchicache_lab.chaos.costs import CostOracle
from asynchicache_lab.chaos.faults import FaultDraws
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.presence import (
    PageFlags,
    in_memory,
    is_held,
    longest,
    nothing,
    reclaimable,
    shared_pages,
    span,
    tokens_in_memory,
    window_covers,
)
from asynchicache_lab.chaos.recency import RecencyOracle, StoredPath
from asynchicache_lab.chaos.storage import ChaosStorage
from asynchicache_lab.chaos.waste import WasteOracle

ROUNDS = 3
"""Questions and reads, one after the other, that a request may have to wait for: somebody else's, then its
own, and one more where the two overlap."""

NOISE_SECONDS = 0.003
"""Of waits, beside those for storage: turns of the loop, checks on another thread."""

_PAGES_AT_ONCE = 256
"""Of a long prompt, about; the rest of it has to wait for its turn."""

_TURN_SECONDS = 2e-4
"""Until somebody who was told to ask does: turns of the loop."""

LEAST = "least"
"""The kind of a violation: a request found less than its script says."""

_FAILURES = {
    MissReason.DEADLINE,
    MissReason.STORAGE_FAILED,
    MissReason.CORRUPT,
    MissReason.STATE,
    MissReason.WINDOW,
}
"""What trouble with storage may be reported as, beside a miss."""


@dataclass(slots=True, eq=False)
class HitCase:
    """The oracle's view of one request.

    Attributes:
        tokens, seed, limit: the requested sequence, and the maximum number of pages of a hit.
        digests: digests of those pages, set when the request queries storage.
        memory, stored: pages available ever since the request began to wait.
        furthest: longest gapless run of full pages that was available at any time, in any tier.
        allowed: reasons that would be true.
        refusals: allocations that were refused until it was opened.
        refused: an allocation was refused since the request began to wait.
        disturbed: a requested page was lost since then.
        held_back: at some time, full pages reached further than other pools allowed.
        admitted: the storage breakers let every call through when it began to wait.
        began: time at which it began to wait.
        readable: storage had a page that the request could use and memory had not, at some time.
        tails: where a tail may follow the pages that storage and memory had together when it began to wait:
            by digest, the tokens of the prefix. Only those in storage ever since.
        epoch: counts the changes of weights up to then; after another one it is not judged.
        least: pages that the script says the hit must have.
        reached: full pages that memory had at the match, or memory and storage together all the time while
            storage was asked without a fault: a shorter hit has another reason than that there were none.
        told: storage was asked without a fault.
        remembered: the most full pages that memory had when it was looked at.
    """

    tokens: array[int]
    seed: bytes
    limit: int
    digests: dict[bytes, int] = field(default_factory=dict)
    memory: PageFlags = field(default_factory=list)
    stored: PageFlags = field(default_factory=list)
    furthest: int = 0
    allowed: set[MissReason] = field(default_factory=set)
    refusals: int = 0
    refused: bool = False
    disturbed: bool = False
    held_back: bool = False
    admitted: bool = True
    began: float = 0.0
    readable: bool = False
    tails: dict[bytes, int] = field(default_factory=dict)
    least: int = 0
    reached: int = 0
    told: bool = False
    remembered: int = 0
    epoch: int = 0


class HitOracle(Observer):
    """Judges the requests of one cache."""

    def __init__(
        self,
        cache: BaseCache[Any],
        storage: ChaosStorage,
        options: PrefetchOptions,
        draws: FaultDraws,
        ledger: Ledger,
        excused: Callable[[], bool],
        recency: RecencyOracle | None,
    ) -> None:
        """
        Args:
            cache: the cache under test.
            storage: the layer between the cache and its store.
            options: the cache's prefetch policy.
            draws: counts allocations refused by fault injection.
            ledger: receives violations.
            excused: returns whether requests may get nothing, because the device failed or the cache closes.
            recency: the store's recency oracle, if the store is bounded.
        """
        self._inside = cache.inspect()
        self._planner = self._inside.planner
        self._inventory = self._planner.inventory
        self._tree = self._inventory.tree
        self._storage = storage
        self._options = options
        self._draws = draws
        self._ledger = ledger
        self._excused = excused
        self._size = cache.spec.page_size
        self._coverages = [ALL_PAGES, *(pool.coverage for pool in cache.spec.owners[1:])]
        self._windows = [n for n, pool in enumerate(cache.spec.owners) if n and pool.per_token]
        self._has = {
            MissReason.STATE: any(not pool.per_token for pool in cache.spec.owners),
            MissReason.WINDOW: any(pool.per_token for pool in cache.spec.owners[1:]),
        }
        self._waiting: list[HitCase] = []
        self._asking: list[tuple[BaseRequest, set[bytes]]] = []
        self._wanted: dict[bytes, float] = {}
        self.recency = recency
        self._pools = [pool.name for pool in cache.spec.pools]
        self._confirmed: Counter[bytes] = Counter()
        calm = storage.never_troubled
        self.costs = CostOracle(self._pools, ledger, calm, self._wanted_since, self._holds, self._confirmed)
        self._refused = 0
        self._changing = False
        self._favours: list[tuple[float, int]] = []  # until when how many pages
        self._clock = asyncio.get_running_loop().time

    @contextmanager
    def watching(self) -> Iterator[None]:
        """During the body, observe losses of pages in memory and storage, and refused allocations."""
        listeners: list[CallListener] = [self.costs]
        if self._options.policy is not PrefetchPolicy.BEST_EFFORT:  # which reads for later requests
            listeners.append(WasteOracle(self._ledger, self._awaited, self._storage.never_troubled))
        with (
            self._inside.observed_by(self),
            self._storage.store.watched(self._forgotten),
            self._storage.calls.told(listeners),
        ):
            yield

    @contextmanager
    def changing_weights(self) -> Iterator[None]:
        """During the body, the weights change: what storage has of others is of no interest any more."""
        self._changing = True
        self.costs.forget()
        try:
            yield
        finally:
            self._changing = False
            self.costs.forget()

    # Stages of a request

    def opened(self, request: BaseRequest, seed: bytes) -> HitCase:
        """A request has just matched."""
        tokens = array("q", request.tokens)  # a copy, because generated tokens are appended to the request's
        limit, refusals = (len(tokens) - 1) // self._size, self._refusals
        case = HitCase(tokens, seed, limit, epoch=self._tree.epoch, refusals=refusals)
        self.matched(request, case)
        return case

    def matched(self, request: BaseRequest, case: HitCase, *, now: bool = True) -> None:
        """Check that the match is in memory. `now`: the request just matched, so it must have matched all."""
        if self._is_over(case):
            return
        memory = in_memory(self._tree, case.tokens, case.seed, case.limit)
        there, got = self._seen(case, memory[FULL], memory), request.hit.tokens // self._size
        case.reached = _run(memory[FULL]) if now else 0
        case.remembered = max(case.remembered, _run(memory[FULL]))
        if self._tree.tails:
            self._matched_tokens(request, case, there, now=now)
        elif got > there or (now and got < there):
            self._violated(f"hit: {got} pages matched, and {there} of {case.limit} are in memory")

    def _is_over(self, case: HitCase) -> bool:
        """Whether the weights are changing, or have changed since the request began."""
        return self._changing or case.epoch != self._tree.epoch

    def _matched_tokens(self, request: BaseRequest, case: HitCase, whole: int, *, now: bool) -> None:
        """As `matched`, where prefixes may end inside a page."""
        got, there = request.hit.tokens, whole * self._size
        if self._uses_tails(case.tokens):
            there = tokens_in_memory(self._tree, self._coverages, case.tokens, case.seed, whole)
        if got > there or (now and got < there):
            self._violated(f"hit: {got} tokens matched, and {there} of {len(case.tokens)} are in memory")

    def _seen(self, case: HitCase, full: bytearray, pages: PageFlags) -> int:
        """Longest possible prefix of the available pages. What shortens it becomes an allowed reason."""
        there, reach = longest(self._coverages, pages), _run(full)
        case.held_back |= reach > there
        case.furthest = max(case.furthest, reach)
        return there

    @contextmanager
    def prefetching(self, request: BaseRequest, case: HitCase, *, patient: bool) -> Iterator[None]:
        """A request waits for storage. `patient`: as long as the policy allows."""
        self._asking.append((request, self._begin(case)))
        refusals, answered = self._refusals, False
        try:
            yield
            answered = True
        finally:
            self._waiting.remove(case)
            if not answered:
                case.allowed.add(MissReason.DEADLINE)  # that of its client
            if not (
                self._excused() or self._is_over(case)
            ):  # also if it gave up: it may have learned what storage has
                case.refused = self._refusals > refusals
                self._answered(request, case, patient=patient and answered)

    def _begin(self, case: HitCase) -> set[bytes]:
        """A request begins to wait; returns the digests of all pages and tails that it may read."""
        case.began = self._clock()
        case.admitted = self._storage.admits(self._inside)
        digests = page_digests(case.tokens[: case.limit * self._size], self._size, case.seed)
        case.digests = {digest: page for page, digest in enumerate(digests)}
        case.memory = in_memory(self._tree, case.tokens, case.seed, case.limit)
        case.stored = self._in_storage(digests)
        either = list(map(_either, case.memory, case.stored))
        for pages in (case.memory, either):
            self._seen(case, pages[FULL], pages)
        self._note_readable(case, case.memory, either)
        case.tails = self._tails_in_storage(case, digests, either)
        wanted = {*digests, *case.tails}
        self._waiting.append(case)
        self.wanted(digests)
        if self.recency is not None:
            self.recency.asked(digests)
        return wanted

    def _tails_in_storage(
        self, case: HitCase, digests: Sequence[bytes], either: PageFlags
    ) -> dict[bytes, int]:
        """The tails behind the full pages of memory and storage that storage has with all their states, and
        that the cache may ask for; by digest, the tokens of the prefix that ends there. None if a window
        before them is not there.

        `either`: the pages that one of both has.
        """
        if not self._uses_tails(case.tokens):
            return {}
        size, found, pages = self._size, {}, _run(either[FULL])
        windows = all(window_covers(self._coverages[n], either[n], pages) for n in self._windows)
        for whole in range(len(digests) + 1):
            rest = case.tokens[whole * size : len(case.tokens) - 1][: size - 1]
            for count in range(1, len(rest) + 1):
                page = rest[:count] + array("q", [-1] * (size - count))
                (digest,) = tail_digests([page.tobytes()], digests[whole - 1] if whole else case.seed)
                self.wanted([digest])
                if whole == pages and windows:
                    found[digest] = whole * size + count
        there = [self._in_storage([digest]) for digest in found]
        return {
            digest: tokens
            for (digest, tokens), flags in zip(found.items(), there, strict=True)
            if all(some[0] for some in flags)
        }

    def _uses_tails(self, tokens: array[int]) -> bool:
        """Whether a prefix of a sequence may end inside a page: its page is there twice for a while."""
        needs = {FULL: -(-len(tokens) // self._size) + 1}
        needs |= {n: self._coverages[n].kept + 2 for n in self._windows}
        room = all(
            self._inventory.free[place_of(n, Tier.DEVICE)].capacity >= need for n, need in needs.items()
        )
        return self._tree.tails and room

    def wanted(self, digests: Sequence[bytes]) -> None:
        """The cache queries storage for pages."""
        self._wanted.update(dict.fromkeys(digests, self._clock()))

    @contextmanager
    def confirming(self, digests: Sequence[bytes]) -> Iterator[None]:
        """During the body, `durable` asks for pages, again after it has written them once more."""
        self._confirmed.update(digests)
        yield
        # Not if it was cancelled: what it asks one pool, it asks the others all the same.
        self._confirmed -= Counter(digests)  # which drops those that are not any more

    def _wanted_since(self, digest: bytes, moment: float) -> bool:
        return self._wanted.get(digest, 0.0) > moment - _TURN_SECONDS

    def _holds(self, pool: str) -> set[bytes]:
        """The pages of a pool that are in memory."""
        component_id = next(n for n in range(self._tree.width) if pool in self._inventory.sharing(n))
        found: set[bytes] = set()
        for node in self._tree.nodes(current=True):
            if is_held(node, component_id):
                first, end = span(self._tree, node, component_id)
                found.update(self._tree.digests(node)[first - end :])
        return found

    def _awaited(self, digests: Sequence[bytes]) -> int:
        """How many of these pages a request has asked for that has not loaded yet."""
        self._asking = [(request, wanted) for request, wanted in self._asking if _is_waiting(request)]
        return sum(any(digest in wanted for _, wanted in self._asking) for digest in digests)

    @property
    def _asks(self) -> bool:
        """Whether the cache has memory to prefetch into."""
        return self._inventory.free[FULL_HOST].capacity > 0

    def _in_storage(self, digests: Sequence[bytes]) -> PageFlags:
        """The stored pages of pools that have memory to prefetch into."""
        component_ids = range(self._tree.width)
        found = nothing(len(component_ids), len(digests))
        for component_id in component_ids if self._asks else ():
            if self._inventory.free[place_of(component_id, Tier.HOST)].capacity:
                found[component_id] = self._storage.has(self._inventory.sharing(component_id), digests)
        return found

    def _answered(self, request: BaseRequest, case: HitCase, *, patient: bool) -> None:
        # Until one trial call has succeeded, however long after the fault, a breaker refuses all others. The
        # trial may be another request's, and have closed the breaker since.
        calm = case.admitted and self._storage.calm_since(case.began, self._inside)
        waited = self._clock() - case.began
        told = patient and calm and not self._storage.has_lied
        patient &= self._options.policy is not PrefetchPolicy.BEST_EFFORT and self._asks
        self.matched(request, case, now=patient and calm)
        case.told = told
        if told:
            case.reached = max(case.reached, _run(_either(case.memory[FULL], case.stored[FULL])))
        self._seen_in_storage(case)
        if not calm or self._storage.has_lied:  # for a while, the cache remembers what it was told
            case.allowed |= _FAILURES
        if waited >= self._options.deadline(0):
            case.allowed.add(MissReason.DEADLINE)
        if self._options.policy is PrefetchPolicy.BEST_EFFORT:  # what is read for others may keep the host
            case.allowed |= {MissReason.DEADLINE, MissReason.HOST_CAPACITY}
        wanted = case.furthest + bool(case.tails)
        case.refused |= wanted > self._inventory.host_pages  # not all of it fits at once
        unseen = self._storage.has_lied or self._storage.has_near  # it may have been told of more pages
        told_more = unseen and case.limit > self._inventory.host_pages
        if case.refused or told_more or not self._asks:
            case.allowed.add(MissReason.HOST_CAPACITY)
        if not (calm and patient):
            return
        # Else it may have waited for pages that were being saved, or for what was in flight to free slots.
        if not (self._tree.host_only or case.refused):
            self._check_wait(waited, case)
        if MissReason.DEADLINE in case.allowed:
            return
        there = longest(self._coverages, list(map(_either, case.memory, case.stored)))
        got = request.hit.tokens // self._size
        # States or windows read for a long prefix may not serve a shorter one.
        excused = case.refused or (case.disturbed and self._tree.width > 1)
        tail = max(case.tails.values(), default=0)
        state = request.inspect()
        # A tail alone is not asked for, except where there is no whole page.
        asked = got < case.limit or not case.limit or (state is not None and state.prefetched)
        if asked and request.hit.tokens < tail and not (case.refused or case.disturbed):
            self._violated(
                f"hit: {request.hit.tokens} tokens, though storage had a tail at {tail} of "
                f"{len(case.tokens)} all the time"
            )
        if got < there and not excused:
            reason = request.hit.reason.value
            self._violated(
                f"hit: {got} pages, reason {reason}, though memory and storage had {there} of {case.limit} "
                f"all the time; {len(self._waiting)} more requests wait for storage"
            )

    def _seen_in_storage(self, case: HitCase) -> None:
        """Allow reasons that follow from the store's contents now: the query ran after the wait began."""
        memory = in_memory(self._tree, case.tokens, case.seed, case.limit)
        either = list(map(_either, memory, self._in_storage(list(case.digests))))
        self._seen(case, either[FULL], either)
        self._note_readable(case, memory, either)

    def _note_readable(self, case: HitCase, memory: PageFlags, either: PageFlags) -> None:
        """Note whether storage could add something: more full pages, or a window or state for them."""
        case.readable |= _run(either[FULL]) > longest(self._coverages, memory) or bool(case.tails)

    def _check_wait(self, waited: float, case: HitCase) -> None:
        asks, reads = (self._storage.calls.slowest(verb, case.began) for verb in ("exists", "get"))
        parts = 1 + case.limit // _PAGES_AT_ONCE + self._tree.tails  # a tail is asked for behind the pages
        if case.readable and (self._storage.queues or waited >= self._options.deadline(0)):
            return  # its reads wait for others, or take longer than it does
        answers = len(self._pools) * asks + (reads if case.readable else 0.0)
        if waited > ROUNDS * parts * answers + NOISE_SECONDS:
            what = "storage, whose" if case.readable else "storage, which had nothing for it, and whose"
            self._violated(
                f"wait: a request waited {waited:.4f} s for {what} slowest answers took {asks:.4f} s "
                f"and {reads:.4f} s"
            )

    @contextmanager
    def loading(self, request: BaseRequest, case: HitCase) -> Iterator[None]:
        """The body loads the request's match, without awaiting anything."""
        matched, refusals = request.hit.tokens, self._refusals
        memory = in_memory(self._tree, case.tokens, case.seed, case.limit)
        self._seen(case, memory[FULL], memory)
        now = memory[FULL]
        if case.told and _run(now) >= case.remembered:  # else it was asked for what stands behind these only
            now = _either(now, self._in_storage(list(case.digests))[FULL])
        case.reached = min(case.reached, _run(now))  # memory may have lost it while it waited for room
        yield
        if self._excused() or self._is_over(case) or self._inside.failed:
            return
        if case.began and refusals > case.refusals:
            case.allowed.add(MissReason.HOST_CAPACITY)  # what is read for it goes on while it rests
        if self._refusals > refusals:
            case.allowed.add(MissReason.DEVICE_CAPACITY)
        elif request.hit.tokens < matched:
            self._violated(
                f"hit: {request.hit.tokens} of {matched} tokens that matched, though there was room"
            )
        if not self._storage.calm_since(case.began, self._inside):  # what it read on while it rested
            case.allowed |= _FAILURES
        self._check_reason(request, case)
        self._check_least(request, case)
        if self.recency is not None and request.hit.tokens:
            path = self.path(case.tokens, case.seed, request.hit.tokens // self._size)
            self.recency.restored(path, lambda key: self.costs.knows(key.pool, key.digest))

    def _check_least(self, request: BaseRequest, case: HitCase) -> None:
        hit = request.hit
        if hit.reason is MissReason.CHEAPER_TO_COMPUTE:
            return  # by choice
        if (pages := hit.tokens // self._size) < case.least:
            self._violated(
                f"{LEAST}: {pages} pages, reason {hit.reason.value}, though {case.least} of {case.limit} "
                f"must be there"
            )

    def path(self, tokens: array[int], seed: bytes, pages: int, *, ends: bool = True) -> StoredPath:
        """Keys of a prefix in the store, for pools that have memory to prefetch into; without the keys of its
        end if memory no longer holds what the end needs, or without `ends`."""
        digests = page_digests(tokens[: pages * self._size], self._size, seed)
        full = [self._keys(FULL, digest) for digest in digests]
        held = in_memory(self._tree, tokens, seed, pages)
        needs = []
        restorable = ends and longest(self._coverages, held) == pages
        for component_id in range(1, self._tree.width) if restorable else ():
            first = max(pages - (self._coverages[component_id].pages or 0), 0)
            needs += [key for digest in digests[first:] for key in self._keys(component_id, digest)]
        return StoredPath(digests, full, needs)

    def tail_keys(self, tokens: array[int], seed: bytes) -> list[ObjectKey]:
        """Keys of the page that `tokens` end in, with its states."""
        there = [n for n in range(self._tree.width) if self._inventory.free[place_of(n, Tier.HOST)].capacity]
        return [key for n in there for key in self._keys(n, self._tail_digest(tokens, seed))]

    def _tail_digest(self, tokens: array[int], seed: bytes) -> bytes:
        pages, count = divmod(len(tokens), self._size)
        *_, prior = [seed, *page_digests(tokens[: pages * self._size], self._size, seed)]
        rest = tokens[pages * self._size :].tobytes()
        return tail_digests([tails.padded(rest, count, self._tree)], prior)[0]

    def end_keys(self, tokens: array[int], seed: bytes) -> list[ObjectKey]:
        """Keys of the page that `tokens` end in, as a finished request of attention alone leaves it; none if
        that is full. Others leave one only if they have states or windows there."""
        if not len(tokens) % self._size or self._tree.components:
            return []
        return self._keys(FULL, self._tail_digest(tokens, seed))

    def _keys(self, component_id: int, digest: bytes) -> list[ObjectKey]:
        keys = [self._storage.key(pool, digest) for pool in self._inventory.sharing(component_id)]
        return [key for key in keys if key is not None]

    def _check_reason(self, request: BaseRequest, case: HitCase) -> None:
        pages, reason = request.hit.tokens // self._size, request.hit.reason
        if (reason is MissReason.NONE) != (pages >= case.limit):
            self._violated(f"reason: {reason.value}, with {pages} of {case.limit} pages")
        if reason is MissReason.COLD and pages < case.reached:
            self._violated(
                f"reason: cold, with {pages} of {case.limit} pages, though memory and storage had "
                f"{case.reached} full pages all the time"
            )
        if reason in case.allowed or reason in (MissReason.NONE, MissReason.COLD):
            return
        more = (
            case.held_back or case.furthest > pages or self._storage.has_near
        )  # whose pages are not looked at
        if not (self._has.get(reason) and more):
            self._violated(
                f"reason: {reason.value}, with {pages} of {case.limit} pages; "
                f"full pages reached {case.furthest}"
            )

    # Concurrent events

    @property
    def _refusals(self) -> int:
        """Number of refused allocations, including injected refusals."""
        return self._refused + self._draws.counted["allocation.refused"]

    def no_room(self, counts: Mapping[SlotPlace, int], *, shared: bool) -> None:
        self._refused += 1
        self.costs.forget()  # a planned read may be dropped and repeated by another request
        for place, count in counts.items() if not shared else ():
            free = self._inventory.free[place]
            could = free.available + reclaimable(self._tree, place)
            if could >= count:
                self._violated(f"room: {count} {free.name} refused, and {could} are free or could be")

    def held_back(self, node: Node) -> None:
        self._refused += 1  # host slots are kept for a path that another client waits for

    def read_chosen(self, read: StorageRead | None) -> None:
        self._refused += any(reading.lacks_room for reading in self._planner.prefetches.in_flight)

    def hint_weighed(self, pages: int, clock: float, until: float, *, counts: bool) -> None:
        self._favours = [one for one in self._favours if one[0] > clock] + [(until, pages)] * counts
        most = HINTED_SHARE * max(free.capacity for free in self._inventory.free[:2])
        if (total := sum(count for _, count in self._favours)) > most:
            self._violated(f"hint: {total} pages are favoured, {most:g} at most may be")

    def leaving(self, node: Node, place: SlotPlace, pages: int) -> None:
        component_id = component_of(place)
        if not is_held(node, component_id, without=place):
            first, end = span(self._tree, node, component_id)
            self._left(node, component_id, max(first, end - pages), end)

    def _left(self, node: Node, component_id: int, first: int, end: int) -> None:
        """Pages of a component have left all tiers of the tree, so waiting requests need not find them."""
        for digest in self._tree.digests(node)[first - node.end :] if first < end else ():
            for pool in self._inventory.sharing(component_id):
                self.costs.lost(digest, pool)
        if not self._waiting:
            return
        path = [node]
        while (above := path[-1].parent) is not None:
            path.append(above)
        for case in self._waiting:
            if self._tree.roots.get(case.seed) is path[-1]:
                common = min(_common(path[-2::-1], case, self._tree.page_bytes), end)
                if common > first:
                    case.disturbed = True
                    if component_id == FULL:  # it was all in memory, maybe for less time than the wait
                        case.furthest = max(case.furthest, common)
                    for there in (case.memory, case.stored):
                        there[component_id][first:common] = bytes(common - first)

    def _forgotten(self, digest: bytes, pool: str) -> None:
        """The store has lost a page."""
        self.costs.lost(digest, pool)
        self.costs.gap()
        for case in self._waiting:
            case.tails.pop(digest, None)
            if (page := case.digests.get(digest)) is not None:
                case.disturbed = True
                for component_id in range(self._tree.width):
                    if pool in self._inventory.sharing(component_id):
                        case.stored[component_id][page] = 0

    def _violated(self, words: str) -> None:
        self._ledger.violations.append(words)


def _is_waiting(request: BaseRequest) -> bool:
    """Whether a request may still use what is read for it: it is neither loaded nor closed."""
    state = request.inspect()
    return state is not None and not state.loaded


def _run(there: bytearray) -> int:
    end = there.find(0)
    return len(there) if end < 0 else end


def _either(one: bytearray, other: bytearray) -> bytearray:
    size = len(one)
    return bytearray((int.from_bytes(one) | int.from_bytes(other)).to_bytes(size))


def _common(path: Sequence[Node], case: HitCase, size: int) -> int:
    """Number of pages of a path, from its first node, that a request asks for."""
    view, at = memoryview(case.tokens).cast("B"), 0
    for node in path:
        count = shared_pages(node, view, at, case.limit, size)
        at += count
        if count < node.pages:
            break
    return at
