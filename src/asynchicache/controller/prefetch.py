"""Prefetch: presence to storage and reads to the host, shared by all who want the same pages."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sized
from dataclasses import dataclass

from asynchicache.controller.digests import sliced_digests
from asynchicache.controller.executor import Executor
from asynchicache.controller.presence_queries import PresenceQueries
from asynchicache.controller.storage_pools import StoragePools, linger
from asynchicache.controller.storage_writer import StorageWriter
from asynchicache.histograms import Histogram
from asynchicache.planner.fetch import Outcomes, ReadResult, StorageQuery, StorageRead
from asynchicache.planner.options import PrefetchOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.storage.limits import BatchResult
from asynchicache.tree.node import FULL
from asynchicache.types import MissReason, Outcome, PrefetchPolicy

_log = logging.getLogger(__name__)

_JOINS = 2
"""Times that a request waits for reads of others that then do not bring what it wants, before it reads by
itself what they read."""


_REASONS_OF_THE_MATCH = (MissReason.COLD, MissReason.STATE, MissReason.WINDOW)


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One request's wait for storage.

    Attributes:
        sequence: the request.
        done: why there was no more, when all that could be read has been.
        awaited: whether the request still waits.
    """

    sequence: RequestState
    done: asyncio.Future[MissReason]
    awaited: bool = True

    @property
    def settled(self) -> bool:
        """Whether the request went on without waiting for the end, and its prefix stays what it is."""
        return not self.awaited or self.sequence.closed or self.sequence.loaded


class Prefetcher:
    """Runs the reads of one cache; each belongs to the cache, not to the request that asked.

    Attributes:
        pages_read: pages and states that came.
        waits: how long requests waited for storage.
    """

    def __init__(
        self,
        planner: Planner,
        executor: Executor,
        stored: StoragePools,
        presence: PresenceQueries,
        storage_writer: StorageWriter,
        options: PrefetchOptions,
    ) -> None:
        """
        Args:
            planner: decides what is read.
            executor: runs reads and copies.
            stored: where it comes from.
            presence: asks storage what it has.
            storage_writer: writes anew what storage has lost.
            options: how long requests wait.
        """
        self._planner = planner
        self._fetches = planner.fetches
        self._storage = stored
        self._presence = presence
        self._options = options
        self._executor = executor
        self._storage_writer = storage_writer
        self._commits: dict[StorageRead, asyncio.Future[ReadResult]] = {}
        self._readers: dict[StorageRead, _Prefetch] = {}
        self._late: set[StorageRead] = set()  # an engine may still write to slots of theirs
        self.pages_read = 0
        self.waits = Histogram()

    async def prefetch(self, sequence: RequestState) -> None:
        """Bring what storage has of a request's prefix to the host, for as long as the policy waits.

        When the request gives up, by its deadline or because it is cancelled, the read goes on for
        those who come later.
        """
        if not self._storage or self._executor.failure is not None:
            return
        lacks = self._fetches.missing_pages(sequence.tokens, sequence.seed)
        if not lacks:  # by now: others may have published it since the request matched
            self._planner.rematch(sequence, fetched=False)
            return
        prefetch = _Prefetch(sequence, asyncio.get_running_loop().create_future())
        prefetch.awaited = self._options.policy is not PrefetchPolicy.BEST_EFFORT
        self._executor.call(self._run(prefetch))
        if not prefetch.awaited:
            return
        seconds = self._options.deadline(lacks * self._planner.state.page_size)
        try:
            reason = await self._wait(prefetch.done, seconds)
        finally:
            prefetch.awaited = False
        if sequence.closed or sequence.loaded:
            return  # it went on without us, and its prefix is settled
        # What others publish meanwhile may change these: the match says them.
        sequence.reason = MissReason.NONE if reason in _REASONS_OF_THE_MATCH else reason
        self._planner.rematch(sequence)

    async def _wait(self, done: asyncio.Future[MissReason], seconds: float) -> MissReason:
        """Why a read brought no more, or that it took too long."""
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(done)
        except TimeoutError:
            return MissReason.DEADLINE
        finally:
            self.waits.observe(clock() - started)

    async def _run(self, prefetch: _Prefetch) -> None:
        reason = MissReason.CLOSED
        try:
            reason = await self._read_all(prefetch)
        except Exception:  # noqa: BLE001  a task boundary: a failed read is a miss
            _log.exception("a read from storage failed")
            reason = MissReason.STORAGE_FAILED
        finally:
            if not prefetch.done.done():
                prefetch.done.set_result(reason)

    async def _read_all(self, prefetch: _Prefetch) -> MissReason:
        """Read what storage has; why it was not more.

        What other reads bring meanwhile is waited for. Where that fails the request looks again, first for
        whoever else reads it by then, and then reads all by itself: nobody gives up what storage has.
        """
        tokens, seed = prefetch.sequence.tokens, prefetch.sequence.seed
        digests = await self._digests(tokens, seed)
        known, joins, best = _KnownPresence(self._planner.state.names), _JOINS, -1
        while True:
            reason = await self._present(known, tokens, seed, digests)
            query = self._fetches.ask(tokens, seed, digests)
            if query is None:
                return MissReason.NONE
            gained, reason = await self._read(prefetch, query, known.flags, reason, join=joins > 0)
            if gained is None or gained.pages >= gained.read.target or not gained.read.joined:
                return reason
            if gained.pages <= best:
                joins -= 1
            best = max(best, gained.pages)

    async def _digests(self, tokens: array[int], seed: bytes) -> list[bytes]:
        """Of all pages that could be restored."""
        size = self._planner.state.page_size
        known = self._fetches.known_digests(tokens, seed)
        with memoryview(tokens) as view:
            rest = view[len(known) * size : (len(tokens) - 1) // size * size].tobytes()
        return known + await sliced_digests(memoryview(rest).cast("q"), size, known[-1] if known else seed)

    async def _read(
        self,
        prefetch: _Prefetch,
        query: StorageQuery,
        present: Mapping[int, bytes],
        trouble: MissReason,
        *,
        join: bool,
    ) -> tuple[ReadResult | None, MissReason]:
        """Choose, read and commit: what that brought, None if there was nothing to read, and why no more."""
        read: StorageRead | None = None
        try:
            choice = self._fetches.choose(query, present, join=join)
            read = choice.read
        finally:
            if read is None:
                self._fetches.release(query)
        if not prefetch.settled:
            prefetch.sequence.stored_full_pages = choice.full_pages
            prefetch.sequence.stored_limit = choice.limit
        self._executor.run(choice.backups)
        if read is None:
            return None, choice.reason if trouble is MissReason.NONE else trouble
        gained = await self._fill(prefetch, read)
        return gained, gained.reason if trouble is MissReason.NONE else trouble

    async def _present(
        self, known: _KnownPresence, tokens: array[int], seed: bytes, digests: list[bytes]
    ) -> MissReason:
        """Ask which pages storage has that are not here: the full one's first, then what goes with them, as
        far as they reach. What was answered before is not asked again."""
        query = self._fetches.ask(tokens, seed, digests)
        if query is None:
            return MissReason.NONE
        try:
            end = self._fetches.last_stored_node(query)
            reason = await self._ask(known, FULL, digests, range(query.here - (end is not None), query.pages))
            if end is not None and reason is MissReason.NONE and not known.flags[FULL][query.here - 1]:
                self._storage_writer.write_lost(end)
            reach = known.reach(query.here)
            for component_id in range(1, len(self._planner.state.names)):
                if self._fetches.can_read(component_id):
                    first = self._fetches.first_page(query, component_id)
                    other = await self._ask(known, component_id, digests, range(first, max(first, reach)))
                    reason = other if reason is MissReason.NONE else reason
        finally:
            self._fetches.release(query)
        return reason

    async def _ask(
        self, known: _KnownPresence, component_id: int, digests: list[bytes], pages: range
    ) -> MissReason:
        pages = known.unknown(component_id, pages)
        if not pages:
            return MissReason.NONE
        answer = await self._presence.ask(component_id, digests, pages)
        known.learn(component_id, pages, answer.flags)
        return answer.reason

    async def _fill(self, prefetch: _Prefetch, read: StorageRead) -> ReadResult:
        """Have storage read pages into their slots, and wait until they are in the tree."""
        commit = self._commits[read] = asyncio.get_running_loop().create_future()
        self._readers[read] = prefetch
        late: list[BatchResult] = []
        # Until storage says otherwise its threads may write to the slots.
        outcomes: Outcomes = {
            component_id: [Outcome.TIMEOUT] * len(slots) for component_id, slots in read.slots.items()
        }
        try:
            outcomes, late = await self._storage.get(read)
        finally:
            if late:
                self._late.add(read)
                self._executor.call_late(self._finish_late(read, commit, late))
            for gained in self._fetches.deliver(read, outcomes):
                self._committed(gained)
        return await asyncio.shield(commit)

    def _committed(self, gained: ReadResult) -> None:
        """What a read brought is in the tree: the request keeps it at once, before it can be evicted."""
        self.pages_read += gained.arrived
        self._executor.run(gained.backups)
        prefetch = self._readers.pop(gained.read)
        if not prefetch.settled:
            self._planner.rematch(prefetch.sequence)
        if gained.read not in self._late:
            self._fetches.finish(gained.read)
        self._commits.pop(gained.read).set_result(gained)

    async def _finish_late(
        self, read: StorageRead, commit: asyncio.Future[ReadResult], late: list[BatchResult]
    ) -> None:
        safe = False
        try:
            safe = await linger(late)
            await asyncio.shield(commit)
        finally:
            self._late.discard(read)
            self._fetches.finish(read, safe=safe)


class _KnownPresence:
    """What storage has answered for one sequence.

    Attributes:
        flags: by component, a byte for each page from the first one of the sequence, 1 if it is there.
    """

    def __init__(self, names: Sized) -> None:
        self.flags: dict[int, bytes] = dict.fromkeys(range(len(names)), b"")
        self._first = [0] * len(names)

    def unknown(self, component_id: int, pages: range) -> range:
        """Those of `pages` that were not asked for yet."""
        if not self.flags[component_id] or pages.start < self._first[component_id]:
            return pages
        return range(max(pages.start, len(self.flags[component_id])), pages.stop)

    def learn(self, component_id: int, pages: range, flags: bytes) -> None:
        """Storage has answered for `pages`."""
        before = self.flags[component_id]
        if not before or pages.start < self._first[component_id]:
            self._first[component_id] = pages.start
        self.flags[component_id] = (
            before[: pages.start].ljust(pages.start, b"\0") + flags + before[pages.stop :]
        )

    def reach(self, here: int) -> int:
        """How far full pages reach that are in storage or, the first `here`, in memory."""
        gap = self.flags[FULL].find(0, here)
        return max(gap if gap >= 0 else len(self.flags[FULL]), here)
