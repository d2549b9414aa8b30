"""Writes to storage: bounded in bytes, shed beyond that. Also attaches, detaches and clears storage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from asynchicache.controller.digests import complete_digests, sliced_digests
from asynchicache.controller.executor import Executor
from asynchicache.controller.presence_queries import PresenceQueries
from asynchicache.controller.storage_pools import SLICE_PAGES, AttachedStorage, Presence, StoragePools, linger
from asynchicache.controller.write_budget import WriteBudget
from asynchicache.errors import UsageError
from asynchicache.hashing import placed_pages
from asynchicache.planner.actions import StorageWrite
from asynchicache.planner.planner import Planner
from asynchicache.planner.promises import PromisedPrefix
from asynchicache.planner.request_state import RequestState
from asynchicache.storage.limits import BatchResult
from asynchicache.tracing import Tracer
from asynchicache.tree.node import FULL, FULL_HOST, RESIDENT, Locks, Node, place_of
from asynchicache.types import MissReason, Outcome, ShedReason, Tier

_URGENT_WRITES = 2
"""Failed writes after which `durable` gives up a path that lacks room: one may have begun before."""

_WRITERS = 8
"""Paths that `sync` writes at a time."""

_REFUSALS = 32
"""Paths in a row of which storage took nothing, after which `sync` gives up."""

_SHED = {
    Outcome.REJECTED: ShedReason.REJECTED,
    Outcome.FAILED: ShedReason.FAILED,
    Outcome.TIMEOUT: ShedReason.TIMEOUT,
}

_FIRST_LOOK = 0.05
_LOOKS = 0.4
"""Seconds until the first look whether others have sent what they had claimed; and most between two looks."""

_LEAST_PAUSE = 1.0
"""The least seconds between two touches of storage; each write also sends one first."""

_USES_A_SECOND = 20_000
"""The most pages touched per second: costs about one percent of a CPU."""

_COUNTED = (Outcome.STORED, Outcome.EXISTS, Outcome.CLAIMED, *_SHED)


@dataclass(slots=True, eq=True)
class WriteCounters:
    """Writes since the start, in pages and states unless noted otherwise.

    Attributes:
        stored: pages written, or already in storage.
        shed: pages not written, by reason.
        copies_failed: copies between device and host that failed.
    """

    stored: int = 0
    shed: Counter[ShedReason] = field(default_factory=Counter)
    copies_failed: int = 0

    def copy(self) -> Self:
        return replace(self, shed=Counter(self.shed))


class StorageWriter:
    """Writes what is on the host to storage.

    Attributes:
        clearing: clears in flight. Pages stored meanwhile may be gone when they end.
        tracer: receives writes, if set.
    """

    def __init__(
        self,
        planner: Planner,
        executor: Executor,
        stored: StoragePools,
        presence: PresenceQueries,
        *,
        limit_bytes: int,
    ) -> None:
        """
        Args:
            limit_bytes: the most bytes in flight; writes beyond it are shed. A single write may exceed it.
        """
        self.traffic = WriteCounters()
        self.tracer: Tracer | None = None
        self._executor = executor
        self._planner = planner
        self._backups = planner.backups
        self._inventory = planner.inventory
        self._storage = stored
        self._presence = presence
        self._budget = WriteBudget(limit_bytes)
        self.clearing = 0
        self._detaching = False
        self._used: dict[Node, bool] = {}  # ends of paths, the most recently used last; whether by a request
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._pause = _LEAST_PAUSE
        self._awaited: Counter[Node] = Counter()  # ends of paths that callers of `durable` wait for
        executor.on_backed_up = self._backed_up
        stored.on_unused = self._unused

    def use(self, node: Node, *, written: bool = False) -> None:
        """Record a use of the path to `node`: storage gets a touch soon, and before the next write.

        Args:
            written: it was just written, and no request used it. Storage is not asked whether it has it, as
                one that never does would be sent it again for ever.
        """
        if self._stopped or node.parent is None or not self._storage.touchable:
            return
        for end in (node.parent, node) if node.tail else (node,):  # the tail may be dropped until then
            self._used[end] = self._used.pop(end, False) or not written
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._flush_touches_later)

    def _flush_touches_later(self) -> None:
        self._timer = None
        self._executor.call(self.flush_touches())

    async def flush_touches(self) -> None:
        """Touch in storage the paths used since the last touch."""
        if not self._used:
            return
        used, self._used = self._used, {}
        uses = self._backups.pages_to_touch(used)
        self._pause = max(_LEAST_PAUSE, sum(map(len, uses.values())) / _USES_A_SECOND)
        await self._storage.touch(uses)
        ends = [node for node, by_request in used.items() if by_request]
        if ends and not self._executor.stopped:
            self._executor.call(self._look_at(ends))

    async def _look_at(self, ends: Sequence[Node]) -> None:
        """Rewrite used paths of which storage, or a stage of it, has not even the beginning any more."""
        beginnings = self._backups.beginnings(ends)  # now: some may have been evicted since they were used
        found = await self._storage.exists(FULL, list(beginnings), everywhere=True)
        if found.reason is not MissReason.NONE or self._executor.stopped:
            return
        for nodes, there in zip(beginnings.values(), found.flags, strict=True):
            for end in () if there else nodes:
                self.write_lost(end)

    def forget_uses(self) -> None:
        """Touch nothing of what was used before."""
        self._used.clear()

    def stop(self) -> None:
        """Stop touching storage; a write that ends later does not begin again."""
        self._stopped = True
        self._used.clear()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def storing_bytes(self) -> int:
        """Bytes of writes in flight."""
        return self._budget.used

    def store(
        self, node: Node, *, period: int | None = None, wait: bool = False, pause: float = _FIRST_LOOK
    ) -> None:
        """Write what the path to `node` has on the host and not in storage, or shed it.

        Args:
            period: the `Activity` period of the work that this follows from. Default: the current period.
            wait: a caller waits for the write: over the byte limit it is delayed, not shed.
            pause: seconds until it is repeated if another process is sending some of it.
        """
        if not self._storage:
            return
        if _removed(node):  # room for the copies of its path may have been made with it
            return
        if self._inventory.tree.pages_without_digests(node) > SLICE_PAGES:
            period = self._planner.activity.period if period is None else period
            self._executor.call(self._store_later(node, period, wait), period)
            return
        work = self._backups.store(node)
        if work is None:
            return
        sizes = self._storage.page_sizes(work)
        size = sum(len(slots) * each for (_, slots), each in zip(work.pages.values(), sizes, strict=True))
        begun = self._budget.take(size)
        if not (begun or wait):
            self.traffic.shed[ShedReason.BUDGET] += sum(len(slots) for _, slots in work.pages.values())
            self._backups.write_finished(work, stored=False)
            return
        period = self._planner.activity.period if period is None else period
        again = partial(self._look_again, node, period, wait, pause)
        self._executor.call(self._write(work, size, sizes, again, begun=begun), period)

    def _backed_up(self, node: Node, period: int | None) -> None:
        # If an awaited write were shed, the pages of two awaited paths could evict each other from the host
        # forever, each before it is written.
        wait = any(_on_one_path(node, end) for end in self._awaited)
        self.store(node, period=period, wait=wait)

    async def _store_later(self, node: Node, period: int, wait: bool) -> None:
        """Write a long path whose digests must be computed first, over many loop iterations."""
        kept: Locks = [(node, FULL_HOST)] if node.residency[FULL_HOST] == RESIDENT else []
        self._inventory.lock(kept)
        self._backups.preparing.append(node)
        try:
            await complete_digests(self._inventory.tree, node)
        finally:
            self._backups.preparing.remove(node)
            self._inventory.unlock(kept)
        if node.parent is not None:
            self.store(node, period=period, wait=wait)

    def _look_again(self, node: Node, period: int, wait: bool, pause: float) -> None:
        """Another process is sending pages of the path to `node`: write what it has not sent soon. Until then
        host memory may evict them."""
        self._backups.preparing.append(node)  # at once: who waits for these pages must not find them at rest
        self._executor.call(self._store_again(node, period, wait, pause), period)

    async def _store_again(self, node: Node, period: int, wait: bool, pause: float) -> None:
        try:
            await asyncio.sleep(pause)
        finally:
            self._backups.preparing.remove(node)
        if node.parent is not None and not self._stopped:
            self.store(node, period=period, wait=wait, pause=min(2 * pause, _LOOKS))

    async def _write(
        self,
        work: StorageWrite,
        size: int,
        page_sizes: Sequence[int],
        again: Callable[[], object],
        *,
        begun: bool,
    ) -> None:
        stored, late, claimed, left = False, False, False, 0
        span = None
        try:
            if not begun:
                await self._budget.wait(size)
                begun = True
            if self.tracer is not None:
                span = self.tracer.storing({pool: len(slots) for pool, (_, slots) in work.pages.items()})
            await self.flush_touches()
            batches = await self._storage.put(work)
            stored = self._count(batches)
            # Storage should keep the ancestors longer than these pages.
            self.use(work.marks[-1].node, written=True)
            late = any(batch.lingering is not None for batch in batches)
            claimed = any(Outcome.CLAIMED in batch.outcomes for batch in batches) and not self._stopped
            left = _late_bytes(batches, page_sizes)
        finally:
            self._backups.write_finished(work, stored=stored, late=late, again=claimed)
            if claimed:
                again()
            if begun:
                self._budget.end(size, late=left)
            if span is not None:
                span.finish(bytes=size, stored=stored)
        if late:
            self._executor.call_late(self._finish_late(work, left, batches))

    async def _finish_late(self, work: StorageWrite, size: int, batches: Sequence[BatchResult]) -> None:
        safe = False
        try:
            safe = await linger(batches)
        finally:
            self._budget.end_late(size)
            if safe:  # else the slots stay locked: a late read would store new content under these keys
                self._backups.finish(work)

    async def confirm(
        self,
        node: Node,
        earlier: Sequence[Node] = (),
        promise: PromisedPrefix | None = None,
        *,
        everywhere: bool = False,
    ) -> bool | None:
        """Whether storage has everything marked stored on the path to `node`, and all that `promise` needs;
        None without an answer.

        Clears the marks of lost pages, so that they are written again.

        Args:
            everywhere: as of `StoragePools.exists`. Default: what promises nothing is not asked.
        """
        forgotten = self._backups.forgotten
        digests, claims = self._backups.pages_marked_stored(node, earlier)
        with self._backups.noting_writes() as written:
            if promise is not None:
                digests = await self._with_promised(digests, promise)
                claims = _both(claims, promise.needed)
            found = [await self._ask(one, digests, pages, everywhere) for one, pages in claims.items()]
        if self._backups.forgotten != forgotten or self.clearing:
            return False  # all marks were cleared meanwhile, or will be: what is there may be gone then
        there = True
        for (component_id, pages), (flags, reason) in zip(claims.items(), found, strict=True):
            if reason is not MissReason.NONE:
                return None
            if not all(flags):
                answers = {page: bool(flag) for page, flag in zip(pages, flags, strict=True)}
                self._backups.unmark(node, component_id, answers, written=written)
                there = False
        return there

    async def _with_promised(self, digests: list[bytes], promise: PromisedPrefix) -> list[bytes]:
        """The digests of all pages of a promise, given those that are in memory."""
        size = self._inventory.tree.page_size
        rest = memoryview(promise.words)[len(digests) * size : promise.pages * size]
        return digests + await sliced_digests(rest, size, digests[-1] if digests else promise.seed)

    async def _ask(
        self, component_id: int, digests: Sequence[bytes], pages: Sequence[int], everywhere: bool
    ) -> Presence:
        if isinstance(pages, range):
            return await self._presence.ask(component_id, digests, pages, fresh=True, everywhere=everywhere)
        placed = placed_pages(digests, pages)
        return await self._storage.exists(component_id, placed, fresh=True, everywhere=everywhere)

    def write_lost(self, node: Node) -> None:
        """Rewrite what storage has lost of the path to `node`, though it is marked stored."""
        self._executor.call(self._write_lost(node))

    async def _write_lost(self, node: Node) -> None:
        if await self.confirm(node, everywhere=True) is False and not self._executor.stopped:
            self._storage.renew_labels()  # they may be lost too
            self._executor.run(self._backups.backup(node))
            self.store(node)

    async def durable(self, request: RequestState) -> bool:
        """Wait until storage has what a request published; see `Request.durable`.

        Waits only for work in flight on the request's own path. Storage is asked before returning True.
        Pages that it has lost, or that were not written for lack of room, are written once more.
        """
        promise = self._planner.promise(request)
        *earlier, last = self._planner.published_ends(request, promise)
        with self._awaiting(last):
            for _ in range(2):  # what storage has lost is written anew once
                written = True
                for node in (*earlier, last):
                    written = await self._path_written(node) and written
                if not self._storage or self._executor.stopped or request.published.lost:
                    return False
                there = await self._has(promise, last, earlier)
                if there is not False or not written:
                    return bool(there) and promise.resumable and not request.published.lost
        return False

    @contextmanager
    def _awaiting(self, node: Node) -> Iterator[None]:
        """During the body, the path to `node` is kept, so that no eviction overtakes the wait for its writes,
        and these are not shed."""
        self._awaited[node] += 1
        try:
            with self._inventory.keeping(node):
                yield
        finally:
            self._awaited[node] -= 1
            self._awaited += Counter()  # drops what is no longer awaited
            self._executor.notify()

    async def sync(self, *, ask: bool) -> bool:
        """Write to storage what only memory has, the hottest paths first, some at a time.

        Args:
            ask: ask storage first whether it has what is marked stored.

        Returns:
            False if storage refused a part, or does not answer, or memory has no room to copy it through, or
            storage ended.
        """
        complete = bool(self._storage) and (not ask or await self._ask_for_all())
        ends, refused = iter(self._backups.unstored_ends()), 0

        async def write() -> None:
            nonlocal refused, complete
            for node in ends:
                if refused >= _REFUSALS or self._executor.stopped or not self._storage:
                    complete = False
                    return
                before = self.traffic.stored
                if not _removed(node):  # it may have made room for another path meanwhile
                    part = self._backups.part_on_host(node)
                    with self._awaiting(part):
                        await self._path_written(part)
                written = self._backups.is_stored(node)
                complete &= written
                refused = 0 if written or self.traffic.stored > before else refused + 1
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for _ in range(_WRITERS):
                group.create_task(write())
        return complete

    async def _ask_for_all(self) -> bool:
        """Clear the marks of all pages in memory that storage has lost; False if it does not answer, or is
        being cleared."""
        for component_id, nodes in self._backups.marked_stored(SLICE_PAGES):
            forgotten = self._backups.forgotten
            with self._backups.noting_writes() as written:
                spans = [self._backups.stored_pages(node, component_id) for node in nodes]
                pages = [page for span in spans for page in span.values()]
                found = await self._storage.exists(component_id, pages, everywhere=True)
            if found.reason is not MissReason.NONE or self._backups.forgotten != forgotten or self.clearing:
                return False
            flags = iter(found.flags)
            for node, span in zip(nodes, spans, strict=True):
                answers = {number: bool(next(flags)) for number in span}
                if not all(answers.values()):
                    self._backups.unmark(node, component_id, answers, written=written)
                    self._storage.renew_labels()
        return True

    async def _has(self, promise: PromisedPrefix, last: Node, earlier: Sequence[Node]) -> bool | None:
        """Whether storage says that it has what is promised; None without an answer."""
        with self._executor.busy():  # who waits for room that this wait keeps must not give up
            await complete_digests(self._inventory.tree, last)
            return await self.confirm(last, earlier, promise)

    async def _path_written(self, node: Node) -> bool:
        """Wait until the path to `node` is marked stored, with the window and state that its end needs."""
        tried = waits = False
        try:
            # No branch may come round twice without a wait, or this loop spins. Their order counts: a write
            # in flight says more than a mark.
            while self._storage and not (self._executor.stopped or _removed(node)):
                if waits and self._backups.failures[node] >= _URGENT_WRITES:
                    return False  # parts that evict each other would be copied and written for ever
                if self.clearing or self._backups.in_flight(node):
                    await self._executor.next_progress()
                elif self._backups.is_stored(node):
                    return True
                elif self._executor.failure is not None:
                    return False  # no copy will ever bring these pages to the host
                elif self._backups.lacks_room(node) and (
                    waits or self._backups.urgent or self._executor.in_flight()
                ):
                    if not waits:  # until it is stored: paths that take turns could evict each other for ever
                        waits = True
                        self._backups.urgent.append(node)
                    if not await self._back_up_in_turn(node):
                        return False
                elif tried:
                    return False  # storage refused it: asking again would hold the caller for ever
                else:
                    tried = True
                    self._executor.run(self._backups.backup(node))
                    self.store(node, wait=True)
            return False
        finally:
            if waits:  # also when cancelled: a path that stays urgent keeps room from all others
                self._backups.urgent.remove(node)
                if node not in self._backups.urgent:
                    del self._backups.failures[node]
                self._executor.progress.set()  # the next has its turn

    async def _back_up_in_turn(self, node: Node) -> bool:
        """Copy to the host what there is room for, if it is the turn of this path, or wait for progress.

        Returns:
            False if there is no room, and nothing is under way that could free some.
        """
        self._executor.run(self._backups.backup(node))
        if self._backups.in_flight(node):
            return True
        # Only the first may give up: those behind it wait for its end, which frees what they need.
        if self._backups.urgent[0] is node and not self._executor.in_flight():
            return False
        await self._executor.next_progress()
        return True

    def _count(self, batches: Sequence[BatchResult]) -> bool:
        """Count the outcomes of a write; returns whether all of it is in storage."""
        # list.count compares identities in C; an Enum's hash, which a Counter needs, is Python code.
        counts = {one: sum(batch.outcomes.count(one) for batch in batches) for one in _COUNTED}
        self.traffic.stored += counts[Outcome.STORED] + counts[Outcome.EXISTS]
        shed = {reason: counts[outcome] for outcome, reason in _SHED.items() if counts[outcome]}
        self.traffic.shed.update(shed)
        return not shed and not counts[Outcome.CLAIMED]

    def check_none(self) -> None:
        """
        Raises:
            UsageError: there is storage already, or storage is being detached.
        """
        if self._detaching:
            raise UsageError("storage is being detached; wait for that")
        if self._storage:
            raise UsageError("the cache has storage already; detach_storage() comes first")

    def attach(self, attachment: AttachedStorage) -> None:
        """Attach storage.

        Raises:
            UsageError: as `check_none`.
        """
        self.check_none()
        self._storage.attach(attachment)

    async def detach(self) -> bool:
        """Detach storage; requests continue, and miss its pages. False if there was none.

        Calls that hang keep their slots until they end: those of reads are in quarantine.
        """
        await self.flush_touches()
        attachment = self._storage.detach()
        if attachment is None:
            return False
        self._detaching = True
        try:
            await attachment.aclose()
            # Their results are about the old storage: a new one must not be attached before they are in.
            running = [task for task in self._executor.calls if not task.done()]
            if running:
                await asyncio.wait(running)
        finally:
            self._backups.forget_stored()
            self._detaching = False
            self._executor.notify()
        return True

    def _unused(self, detached: AttachedStorage, pool: str, slots: frozenset[int]) -> None:
        """A read of `pool` has ended that outlived its storage: its slots can be used again, unless calls of
        pools that share them go on."""
        for component_id in range(len(self._inventory.names)):
            names = self._inventory.sharing(component_id)
            if pool in names:
                unused = slots - detached.used(names, slots)
                self._inventory.free[place_of(component_id, Tier.HOST)].readmit(unused)
        self._executor.notify()

    async def clear(self) -> int:
        """Remove what storage has of this model with these weights; returns the number of pages.

        Raises:
            StorageError: an engine failed.
        """
        self.clearing += 1
        try:
            return await self._storage.clear()
        finally:
            self.clearing -= 1
            self._backups.forget_stored()  # also after a failure: it may have removed some pages
            self._executor.notify()


def _both(
    marked: Mapping[int, Sequence[int]], promised: Mapping[int, Sequence[int]]
) -> dict[int, Sequence[int]]:
    """By component, the numbers of pages that are in either."""
    claims = dict(marked)
    for component_id, pages in promised.items():
        before = claims.get(component_id, ())
        if pages or before:
            claims[component_id] = pages if set(before) <= set(pages) else sorted({*before, *pages})
    return claims


def _removed(node: Node) -> bool:
    """Whether a node is no longer in the tree; roots have no parent either, but no pages."""
    return node.parent is None and node.pages > 0


def _on_one_path(node: Node, other: Node) -> bool:
    """Whether one of the nodes is an ancestor of the other, or they are the same."""
    upper, lower = sorted((node, other), key=lambda one: one.end)
    while lower.end > upper.end and lower.parent is not None:
        lower = lower.parent
    return lower is upper


def _late_bytes(batches: Sequence[BatchResult], page_sizes: Sequence[int]) -> int:
    """Bytes of the pages that engines may still read, from batches with lingering calls only."""
    return sum(
        batch.outcomes.count(Outcome.TIMEOUT) * each
        for batch, each in zip(batches, page_sizes, strict=True)
        if batch.lingering is not None
    )
