"""Bugs to be found: each replaces one real function of the library by one that is wrong in one way.

Most are bugs that caches of this kind have had, or that this one had before its first release.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from asynchicache.controller.executor import Executor
from asynchicache.controller.prefetcher import Prefetcher
from asynchicache.controller.presence_queries import PresenceQuery
from asynchicache.controller.request import BaseRequest, Request
from asynchicache.controller.storage_writer import StorageWriter
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import PlacedPage, namespace_seed, page_digests, pool_fingerprint
from asynchicache.planner import inventory
from asynchicache.planner.activity import Activity
from asynchicache.planner.backup import BackupPlanner
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.load import LoadPlanner
from asynchicache.planner.planner import Planner
from asynchicache.planner.prefetch import PrefetchPlanner
from asynchicache.planner.readings import Reading, StorageRead
from asynchicache.planner.request_state import RequestState
from asynchicache.planner.room_queue import RoomQueue
from asynchicache.pools.allocator import SlotAllocator
from asynchicache.pools.extents import ExtentAllocator
from asynchicache.pools.host import HostPool
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import BatchResult
from asynchicache.streams.base import Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.audit import AuditSample
from asynchicache.transfer.fences import Fence
from asynchicache.transfer.local import LocalTransfers
from asynchicache.tree import tails, tier_copies
from asynchicache.tree.keeps import HintShare
from asynchicache.tree.node import FULL, FULL_HOST, RESIDENT, Node, SlotPlace, place_of
from asynchicache.tree.radix_tree import PathLease, UnifiedRadixTree
from asynchicache.types import Coverage, MissReason, Outcome, Tier

Patch = pytest.MonkeyPatch


class Bug(NamedTuple):
    """One planted bug: its name, and what plants it."""

    name: str
    plant: Callable[[Patch], None]


BUGS: list[Bug] = []


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS.append(Bug(plant.__name__, plant))
    return plant


def nothing(*_: Any, **__: Any) -> None:
    """Done instead of what should be."""


# Order on the device


@bug
def fence_dropped(patch: Patch) -> None:
    patch.setattr(Fence, "wait_on", nothing)


@bug
def copies_do_not_wait_for_copies(patch: Patch) -> None:
    patch.setattr(LocalTransfers, "_wait_for_dependencies", nothing)


@bug
def backup_does_not_wait_for_the_forward(patch: Patch) -> None:
    patch.setattr(Executor, "order_after", nothing)


@bug
def loading_page_served_without_its_fence(patch: Patch) -> None:
    patch.setattr(LoadPlanner, "_arriving", lambda *_: [])


@bug
def lost_notification_is_not_looked_for(patch: Patch) -> None:
    patch.setattr(CompletionReactor, "_look_at", nothing)


# Who holds what


@bug
def freed_under_a_running_forward(patch: Patch) -> None:
    close = BaseRequest.close

    def at_once(self: BaseRequest, after: Stream | None = None) -> None:
        if self._state is not None:
            self._state.streams.clear()
        close(self)

    patch.setattr(BaseRequest, "close", at_once)


@bug
def freed_on_cancel_under_a_running_copy(patch: Patch) -> None:
    release = Planner.release

    def at_once(self: Planner, state: RequestState, error: BaseException | None = None) -> None:
        if state in self.inventory.requests:
            state.users = 1
            release(self, state, error)

    patch.setattr(Planner, "release", at_once)


@bug
def poisoned_page_is_handed_out_again(patch: Patch) -> None:
    patch.setattr(SlotAllocator, "condemn", nothing)
    patch.setattr(SlotAllocator, "quarantine", SlotAllocator.release)


@bug
def freed_twice(patch: Patch) -> None:
    give_back = SlotInventory.give_back

    def twice(self: SlotInventory, place: SlotPlace, slots: list[int], *, poisoned: bool) -> None:
        give_back(self, place, slots, poisoned=poisoned)
        if slots and place == place_of(FULL, Tier.HOST):
            self.free[place]._free.append(slots[0])

    patch.setattr(SlotInventory, "give_back", twice)


@bug
def extent_given_away_while_a_slot_lives(patch: Patch) -> None:
    freed = ExtentAllocator._freed

    def early(self: ExtentAllocator, slots: Sequence[int]) -> None:
        freed(self, slots)
        for extent in self.emptiest()[:1]:
            if self._live[extent] == 1 and self.extents.owners[extent] is self:
                self.extents.give_back(extent)

    patch.setattr(ExtentAllocator, "_freed", early)


@bug
def slots_are_moved_under_a_copy_that_reads_them(patch: Patch) -> None:
    def resident(node: Node, place: SlotPlace, protected: object) -> bool:
        return node.residency[place] == RESIDENT

    patch.setattr(inventory, "_may_move", resident)


@bug
def slots_are_moved_without_their_bytes(patch: Patch) -> None:
    patch.setattr(HostPool, "move", nothing)


@bug
def lock_not_released(patch: Patch) -> None:
    def keep(self: PathLease) -> None:
        self._release = None

    patch.setattr(PathLease, "close", keep)


@bug
def pinned_page_evicted(patch: Patch) -> None:
    evictable = UnifiedRadixTree.evictable

    def ignoring_locks(node: Any, place: SlotPlace) -> bool:
        locks, node.locks = node.locks, [0] * len(node.locks)
        try:
            return evictable(node, place)
        finally:
            node.locks = locks

    patch.setattr(UnifiedRadixTree, "evictable", staticmethod(ignoring_locks))
    patch.setattr(UnifiedRadixTree, "_lock", _pin_quietly)


def _pin_quietly(self: UnifiedRadixTree, locks: Any, node: Any, place: SlotPlace) -> None:
    """Without taking the node out of the queue."""
    node.locks[place] += 1
    if place in self._window_places:
        node.holders = [*(node.holders or ()), locks]


@bug
def window_freed_under_the_forward_that_reads_it(patch: Patch) -> None:
    retire = Request._retire
    patch.setattr(
        Request,
        "_retire",
        lambda self, state, length, after: retire(self, state, length, None),
    )


@bug
def published_window_is_anybodys(patch: Patch) -> None:
    patch.setattr(UnifiedRadixTree, "_keep_taken", nothing)


@bug
def duplicates_leak(patch: Patch) -> None:
    own = RequestState.own_pages
    patch.setattr(
        RequestState, "own_pages", lambda self: [slot for slot in own(self) if slot not in self.duplicates]
    )


@bug
def needless_quarantine_leaks(patch: Patch) -> None:
    finish = PrefetchPlanner.finish
    patch.setattr(PrefetchPlanner, "finish", lambda self, read, *, safe=True: finish(self, read, safe=False))


@bug
def waiter_that_gives_up_frees_the_read(patch: Patch) -> None:
    prefetch = Prefetcher.prefetch

    async def impatient(self: Prefetcher, state: RequestState, *wait: Any) -> None:
        try:
            await prefetch(self, state, *wait)
        except asyncio.CancelledError:
            for read in list(self._prefetches._begun.values()):
                if any(reading.request is state for reading in read.waiters) and read.outcome is None:
                    self._prefetches._inventory.free[FULL_HOST].release([read.slot])
            raise

    patch.setattr(Prefetcher, "prefetch", impatient)


# Names


@bug
def digest_chained_wrong(patch: Patch) -> None:
    def unchained(tokens: Any, page_size: int, prior: bytes = b"") -> list[bytes]:
        return page_digests(tokens, page_size, b"")

    patch.setattr("asynchicache.tree.radix_tree.page_digests", unchained)
    patch.setattr("asynchicache.planner.prefetch.page_digests", unchained)
    patch.setattr("asynchicache.tree.invariants.page_digests", unchained)


@bug
def namespace_ignored(patch: Patch) -> None:
    patch.setattr("asynchicache.controller.namespaces.namespace_seed", lambda *_: b"")


@bug
def fingerprint_without_weight_version(patch: Patch) -> None:
    def same(**parts: Any) -> bytes:
        return pool_fingerprint(**parts | {"weight_version": ""})

    patch.setattr("asynchicache.parts.pool_fingerprint", same)


@bug
def salt_of_requests_ignored(patch: Patch) -> None:
    patch.setattr("asynchicache.controller.namespaces.namespace_seed", lambda name, _: namespace_seed(name))


@bug
def fingerprint_without_layout_and_type(patch: Patch) -> None:
    def same(**parts: Any) -> bytes:
        return pool_fingerprint(**parts | {"layout": ""})

    patch.setattr("asynchicache.parts.pool_fingerprint", same)


@bug
def requests_publish_while_weights_change(patch: Patch) -> None:
    @contextmanager
    def only_reset(self: Planner) -> Iterator[None]:
        self.reset()
        yield

    patch.setattr(Planner, "changing_weights", only_reset)


@bug
def old_weights_stay_in_memory(patch: Patch) -> None:
    patch.setattr(UnifiedRadixTree, "reset", nothing)


@bug
def salt_ignored(patch: Patch) -> None:
    def same(**parts: Any) -> bytes:
        return pool_fingerprint(**parts | {"salt": ""})

    patch.setattr("asynchicache.parts.pool_fingerprint", same)


@bug
def shards_share_a_key(patch: Patch) -> None:
    key = SlotBinding.__init__
    patch.setattr(
        SlotBinding,
        "__init__",
        lambda self, memory, fingerprint, shard="", **others: key(self, memory, fingerprint, "", **others),
    )


@bug
def page_compared_one_page_too_short(patch: Patch) -> None:
    common = UnifiedRadixTree._common

    def generous(self: UnifiedRadixTree, key: bytes, view: memoryview, at: int, end: int) -> int:
        return min(common(self, key, view, at, end) + 1, min(len(key), end - at) // self.page_bytes)

    patch.setattr(UnifiedRadixTree, "_common", generous)


# Ends inside a page


@bug
def tail_compared_without_its_namespace(patch: Patch) -> None:
    find = tails.find

    def anywhere(tree: UnifiedRadixTree, node: Any, tokens: Any, limit: int) -> Any:
        alike = [node]
        for seed in tree.roots:
            alike += [one] if (one := tree.reach(tokens, seed, node.end)) is not None else []
        found = [tail for one in alike if (tail := find(tree, one, tokens, limit)) is not None]
        return max(found, key=lambda tail: tail.tokens, default=None)

    patch.setattr(tails, "find", anywhere)


@bug
def bytes_beyond_the_tail_count(patch: Patch) -> None:
    find = tails.find

    def generous(tree: UnifiedRadixTree, node: Any, tokens: Any, limit: int) -> Any:
        tail = find(tree, node, tokens, limit)
        if (
            tail is None
            or tail.tokens == tree.page_size - 1
            or node.end * tree.page_size + tail.tokens == limit
        ):
            return tail
        return tail._replace(tokens=tail.tokens + 1)

    patch.setattr(tails, "find", generous)


@bug
def page_of_a_tail_is_not_copied(patch: Patch) -> None:
    load_own = LoadPlanner._load_own

    def leave(self: LoadPlanner, node: Any, component_id: int, *rest: Any) -> None:
        if component_id not in self._paged:
            load_own(self, node, component_id, *rest)

    patch.setattr(LoadPlanner, "_load_own", leave)


@bug
def tails_in_storage_are_not_asked_for(patch: Patch) -> None:
    async def none(*_: Any) -> None:
        pass

    patch.setattr(Prefetcher, "_stored_tail", none)


@bug
def tail_is_stored_as_the_page_of_another(patch: Patch) -> None:
    digests = PrefetchPlanner.tail_digests

    def shifted(self: PrefetchPlanner, *args: Any) -> list[bytes]:
        found = digests(self, *args)
        return found[1:] + found[:1]

    patch.setattr(PrefetchPlanner, "tail_digests", shifted)


@bug
def durable_forgets_tails(patch: Patch) -> None:
    promise = Planner.promise

    def whole(self: Planner, request: RequestState) -> Any:
        request.published.tail = 0
        return promise(self, request)

    patch.setattr(Planner, "promise", whole)


# States and windows


@bug
def state_not_copied_on_write(patch: Patch) -> None:
    def lend(self: Planner, state: RequestState, node: Any, length: int) -> None:
        if length % self.inventory.page_size == 0 and node.parent is not None:
            for component_id, slot in state.states.items():
                self._tree.take_state(node, component_id, Tier.DEVICE, slot)

    patch.setattr(Planner, "_publish_states", lend)


@bug
def state_published_inside_a_page(patch: Patch) -> None:
    publish = Planner._publish_states

    def rounded(self: Planner, state: RequestState, node: Any, length: int) -> Any:
        return publish(self, state, node, length - length % self.inventory.page_size)

    patch.setattr(Planner, "_publish_states", rounded)


@bug
def old_snapshot_published_for_a_new_length(patch: Patch) -> None:
    take = Planner._take_snapshots

    def late(self: Planner, state: RequestState) -> bool:
        return bool(state.snapshots) or take(self, state)

    def without_copy(self: Planner, state: RequestState, length: int) -> list[Any]:
        had = bool(state.snapshots)
        planned = snapshot(self, state, length)
        if had and planned:
            self.inventory.tier_copies.remove(planned[0].tier_copy)
            tier_copies.finish(self._tree, planned[0].tier_copy, arrived=True)
            state.users -= 1
            return []
        return planned

    snapshot = Planner.snapshot
    patch.setattr(Planner, "snapshot", without_copy)


@bug
def tombstone_recovered_though_it_was_none(patch: Patch) -> None:
    take = UnifiedRadixTree.take_pages

    def over(self: UnifiedRadixTree, node: Any, component_id: int, tier: Tier, pages: Any) -> dict[int, int]:
        place = place_of(component_id, tier)
        if node.residency[place] == RESIDENT and node.pages == len(pages.slots):
            self.fill_slots(node, place, list(pages.slots), RESIDENT)
            return {}
        return take(self, node, component_id, tier, pages)

    patch.setattr(UnifiedRadixTree, "take_pages", over)


@bug
def minimum_instead_of_intersection(patch: Patch) -> None:
    settle = UnifiedRadixTree._settle_match

    def least(self: UnifiedRadixTree, node: Any, partial: Any, inside: int) -> Any:
        match = settle(self, node, partial, inside)
        ends = [component.longest(node, partial, inside) for component in self.components]
        if ends:
            match.node, match.inside = min(ends, key=lambda end: end[0].end + end[1])
            match.pages = match.node.end + match.inside
            match.partial = partial if match.inside else None
        return match

    patch.setattr(UnifiedRadixTree, "_settle_match", least)


# Residency


@bug
def committed_before_the_copy(patch: Patch) -> None:
    fill_slots = UnifiedRadixTree.fill_slots

    def resident(self: Any, node: Any, place: SlotPlace, slots: Any, residency: int) -> None:
        fill_slots(self, node, place, slots, RESIDENT)

    patch.setattr(UnifiedRadixTree, "fill_slots", resident)


@bug
def audit_sees_nothing(patch: Patch) -> None:
    patch.setattr(AuditSample, "finish", lambda *_: [])


@bug
def split_forgets_who_keeps_the_window(patch: Patch) -> None:
    patch.setattr(UnifiedRadixTree, "_hold_both", nothing)


@bug
def parent_evicted_before_its_child(patch: Patch) -> None:
    def anyone(node: Any, place: SlotPlace) -> bool:
        return node.residency[place] == RESIDENT and not node.locks[place] and node.parent is not None

    patch.setattr(UnifiedRadixTree, "evictable", staticmethod(anyone))


# Storage


@bug
def checksum_not_checked(patch: Patch) -> None:
    patch.setattr(SlotBinding, "check", lambda *_: Outcome.HIT)


@bug
def partial_read_counts_as_whole(patch: Patch) -> None:
    deliver = PrefetchPlanner.deliver

    def all_hits(self: PrefetchPlanner, read: StorageRead, outcomes: Sequence[Outcome]) -> Any:
        return deliver(self, read, [Outcome.HIT] * len(outcomes))

    patch.setattr(PrefetchPlanner, "deliver", all_hits)


@bug
def page_is_read_again_while_it_is_read(patch: Patch) -> None:
    begin = PrefetchPlanner._begin

    def alone(self: PrefetchPlanner, reading: Reading, component_id: int, pages: list[int]) -> StorageRead:
        others, self.in_flight = self.in_flight, [reading]
        try:
            return begin(self, reading, component_id, pages)
        finally:
            self.in_flight = others

    patch.setattr(PrefetchPlanner, "_begin", alone)


@bug
def index_not_asked_for(patch: Patch) -> None:
    patch.setattr("asynchicache.controller.storage_pools.worst_outcomes", lambda results: list(results[0]))


@bug
def acknowledged_before_it_is_durable(patch: Patch) -> None:
    wrote = BackupPlanner.write_finished
    patch.setattr(
        BackupPlanner,
        "write_finished",
        lambda self, work, *, stored, **others: wrote(self, work, stored=True, **others),
    )


@bug
def what_another_claimed_counts_as_stored(patch: Patch) -> None:
    count = StorageWriter._count

    def believing(self: StorageWriter, batches: Sequence[BatchResult]) -> bool:
        for batch in batches:
            batch.outcomes[:] = [Outcome.EXISTS if one is Outcome.CLAIMED else one for one in batch.outcomes]
        return count(self, batches)

    patch.setattr(StorageWriter, "_count", believing)


@bug
def stale_marks_after_storage_was_cleared(patch: Patch) -> None:
    patch.setattr(BackupPlanner, "forget_stored", nothing)


@bug
def slots_of_a_late_call_are_given_back(patch: Patch) -> None:
    patch.setattr(GuardedPool, "lingering", lambda *_: None)


@bug
def no_deadline(patch: Patch) -> None:
    patch.setattr(GuardedPool, "_deadline_passed", nothing)


@bug
def write_forgets_to_let_go(patch: Patch) -> None:
    patch.setattr(BackupPlanner, "finish", nothing)


@bug
def stored_pages_may_be_evicted_while_they_are_read(patch: Patch) -> None:
    store = BackupPlanner.store

    def unlocked(self: BackupPlanner, node: Any) -> Any:
        work = store(self, node)
        if work is not None:
            self._state.unlock(work.locks)
        return work

    patch.setattr(BackupPlanner, "store", unlocked)


# Value: what a user asks, beside right bytes


@bug
def prompts_with_one_head_read_one_after_the_other(patch: Patch) -> None:
    """Each waits for any read of its beginning, and after four of them gives up what storage has."""
    look_up = Prefetcher._look_up

    async def in_turn(self: Prefetcher, prefetch: Any) -> None:
        state, size = prefetch.request, self._planner.inventory.page_size
        busy = self.__dict__.setdefault("planted", {})
        head = (state.seed, state.tokens[:size].tobytes())
        for _ in range(4):
            if head not in busy:
                break
            await busy[head].wait()
        else:
            self._end(prefetch, MissReason.DEADLINE)
            return
        busy[head] = asyncio.Event()
        try:
            await look_up(self, prefetch)
            await asyncio.shield(prefetch.news)
        finally:
            busy.pop(head).set()

    patch.setattr(Prefetcher, "_look_up", in_turn)


@bug
def storage_is_not_told_of_uses_in_memory(patch: Patch) -> None:
    patch.setattr(StorageWriter, "use", nothing)


@bug
def beginnings_are_told_of_first(patch: Patch) -> None:
    uses = BackupPlanner.pages_to_touch

    def reversed_uses(self: BackupPlanner, ends: Any) -> dict[int, list[PlacedPage]]:
        return {component_id: pages[::-1] for component_id, pages in uses(self, ends).items()}

    patch.setattr(BackupPlanner, "pages_to_touch", reversed_uses)


@bug
def tails_are_asked_for_a_page_too_late(patch: Patch) -> None:
    placed = PresenceQuery.placed

    def later(self: PresenceQuery) -> list[PlacedPage]:
        return [page._replace(place=page.place + (self.before is not None)) for page in placed(self)]

    patch.setattr(PresenceQuery, "placed", later)


@bug
def durable_believes_its_marks(patch: Patch) -> None:
    async def yes(self: StorageWriter, *_: Any, **__: Any) -> bool:
        return True

    patch.setattr(StorageWriter, "confirm", yes)


@bug
def leaving_waits_for_no_stream_that_is_not_named(patch: Patch) -> None:
    close = BaseRequest.close

    def at_once(self: BaseRequest, after: Any = None) -> None:
        if after is None and self._state is not None:
            self._state.streams.clear()
        close(self, after)

    patch.setattr(BaseRequest, "close", at_once)


@bug
def waits_for_a_moment_when_nothing_is_in_flight(patch: Patch) -> None:
    running = Activity.running
    patch.setattr(Activity, "running", lambda self, until=None: running(self))


@bug
def a_line_for_each_page_of_a_failed_call(patch: Patch) -> None:
    def each(
        self: FailureLog,
        kind: object,
        message: str,
        *args: object,
        pages: int = 1,
        level: int = logging.WARNING,
    ) -> bool:
        for _ in range(pages):
            self._logger.log(level, message, *args)
        return True

    patch.setattr(FailureLog, "warning", each)


@bug
def lookups_wait_for_pages(patch: Patch) -> None:
    init = GuardedPool.__init__

    def one_lane(self: GuardedPool, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._lookups = self._pages

    patch.setattr(GuardedPool, "__init__", one_lane)


@bug
def cut_plan_forgets_why(patch: Patch) -> None:
    patch.setattr(RequestState, "cut", nothing)


@bug
def what_arrived_by_the_deadline_is_lost(patch: Patch) -> None:
    patch.setattr(PrefetchPlanner, "settle", lambda *_: [])


@bug
def reads_begin_for_nobody(patch: Patch) -> None:
    patch.setattr(Prefetcher, "_drop", nothing)


@bug
def what_is_read_ahead_is_lost_in_the_queue(patch: Patch) -> None:
    patch.setattr(Prefetcher, "rest", Prefetcher.leave)


@bug
def windows_keep_no_page_more(patch: Patch) -> None:
    patch.setattr(Coverage, "kept", property(lambda self: self.pages or 0))


@bug
def selective_forgets_what_was_evicted(patch: Patch) -> None:
    patch.setattr(BackupPlanner, "count_seen", nothing)


@bug
def hints_favour_without_bound(patch: Patch) -> None:
    take = HintShare.take

    def all_that_is_asked(self: HintShare, seed: bytes, amount: float) -> bool:
        with patch.context() as boundless:
            boundless.setattr(self, "most", float("inf"))
            return take(self, seed, amount)

    patch.setattr(HintShare, "take", all_that_is_asked)


@bug
def each_namespace_has_a_share_of_hints(patch: Patch) -> None:
    take = HintShare.take

    def of_its_own(self: HintShare, seed: bytes, amount: float) -> bool:
        others = self.used - self._by_seed.get(seed, 0)
        self.used -= others
        taken = take(self, seed, amount)
        self.used += others
        return taken

    patch.setattr(HintShare, "take", of_its_own)


@bug
def large_requests_wait_for_ever(patch: Patch) -> None:
    patch.setattr(RoomQueue, "blocks", lambda self, state: False)
    patch.setattr(RoomQueue, "is_next", lambda self, waiter: True)
