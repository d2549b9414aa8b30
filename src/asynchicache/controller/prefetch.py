"""Prefetch: presence queries and reads from storage to the host, shared by requests for the same pages."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from asynchicache.controller.digests import sliced_digests
from asynchicache.controller.executor import Executor
from asynchicache.controller.presence_queries import PresenceQueries, PresenceQuery
from asynchicache.controller.storage_pools import StoragePools, linger
from asynchicache.controller.storage_writer import StorageWriter
from asynchicache.histograms import Histogram
from asynchicache.planner.costs import LoadCosts
from asynchicache.planner.options import PrefetchOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.prefetch import Outcomes, ReadResult, StorageQuery, StorageRead
from asynchicache.planner.request_state import RequestState
from asynchicache.storage.limits import BatchResult
from asynchicache.tree.node import FULL, FULL_HOST, place_of
from asynchicache.types import MissReason, Outcome, PrefetchPolicy, Tier

_log = logging.getLogger(__name__)

_JOINS = 2
"""Times that a request waits in vain for reads of other requests before it reads those pages itself."""


_REASONS_OF_THE_MATCH = (MissReason.COLD, MissReason.STATE, MissReason.WINDOW)


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One request's wait for storage.

    Attributes:
        request: the request.
        done: set when all reads have ended; the reason why they brought no more.
        awaited: whether the request still waits.
    """

    request: RequestState
    done: asyncio.Future[MissReason]
    awaited: bool = True

    @property
    def settled(self) -> bool:
        """Whether the request no longer waits, so its prefix must not change."""
        return not self.awaited or self.request.closed or self.request.loaded


class Prefetcher:
    """Runs the storage reads of one cache. A read belongs to the cache, not to the request that asked.

    Attributes:
        pages_read: pages and states that arrived.
        waits: durations of waits for storage.
    """

    def __init__(
        self,
        planner: Planner,
        executor: Executor,
        stored: StoragePools,
        presence: PresenceQueries,
        storage_writer: StorageWriter,
        options: PrefetchOptions,
        costs: LoadCosts,
        is_busy: Callable[[], bool],
    ) -> None:
        """
        Args:
            planner: decides what to read.
            executor: runs reads and copies.
            stored: the storage.
            presence: asks storage which pages it has.
            storage_writer: rewrites pages that storage has lost.
            options: how long requests wait.
            costs: of reading and computing.
            is_busy: whether requests wait for room.
        """
        self._planner = planner
        self._prefetches = planner.prefetches
        self._storage = stored
        self._presence = presence
        self._options = options
        self._costs = costs
        self._is_busy = is_busy
        self._executor = executor
        self._storage_writer = storage_writer
        self._commits: dict[StorageRead, asyncio.Future[ReadResult]] = {}
        self._readers: dict[StorageRead, _Prefetch] = {}
        self._held: dict[RequestState, StorageRead] = {}  # for requests that compute the pages before
        self._late: set[StorageRead] = set()  # reads to whose slots an engine may still write
        self.pages_read = 0
        self.waits = Histogram()

    async def prefetch(self, request: RequestState) -> None:
        """Read a request's prefix from storage to the host, and wait as long as the policy says.

        If the request stops waiting, at its deadline or on cancellation, the read continues for later
        requests.
        """
        tokens, seed = request.tokens, request.seed
        prefetched = self.release(request)
        if self._executor.failure is not None or not (
            self._storage or self._prefetches.backup_in_flight(tokens, seed)
        ):
            return
        lacks = self._prefetches.missing_tokens(request.tokens, request.seed)
        if not lacks:  # another request may have published it since the match
            self._planner.rematch(request, prefetched=prefetched)
            return
        prefetch = _Prefetch(request, asyncio.get_running_loop().create_future())
        prefetch.awaited = self._options.policy is not PrefetchPolicy.BEST_EFFORT
        self._executor.call(self._run(prefetch))
        if not prefetch.awaited:
            return
        seconds = self._options.deadline(lacks)
        try:
            reason = await self._wait(prefetch.done, seconds)
        finally:
            prefetch.awaited = False
        if request.closed or request.loaded:
            return  # it went on meanwhile; its prefix must not change
        # Other requests may have published meanwhile, so these reasons follow from the new match.
        request.reason = MissReason.NONE if reason in _REASONS_OF_THE_MATCH else reason
        self._planner.rematch(request)

    def release(self, request: RequestState) -> bool:
        """Insert what was read for a request while it computed the pages before; whether any was."""
        read = self._held.pop(request, None)
        if read is not None:
            for result in self._prefetches.release_held(read):
                self._committed(result)
        return read is not None

    def pass_on(self, request: RequestState, resumed: RequestState) -> None:
        """A suspended request goes on as another one."""
        read = self._held.pop(request, None)
        if read is not None:
            self._held[resumed] = read
        resumed.split = request.split

    async def _wait(self, done: asyncio.Future[MissReason], seconds: float) -> MissReason:
        """Wait for `done`: why the reads brought no more, or `DEADLINE`."""
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
        """Read what storage has; returns why it was not more.

        Pages that other reads are bringing are waited for. If those reads fail, the request joins other
        reads again, a few times, and then reads all pages itself.
        """
        digests = await self._digests(prefetch.request.tokens, prefetch.request.seed)
        with self._presence.listen(digests) as answered:
            known = _KnownPresence(self._planner.state.names, answered)
            return await self._read_known(prefetch, digests, known)

    async def _read_known(
        self, prefetch: _Prefetch, digests: list[bytes], known: _KnownPresence
    ) -> MissReason:
        tokens, seed = prefetch.request.tokens, prefetch.request.seed
        joins, best = _JOINS, -1
        while True:
            await self._wait_for_backups(tokens, seed)
            reason = await self._present(known, tokens, seed, digests)
            query, present = self._query(prefetch.request, digests, known)
            if query is None:
                return MissReason.NONE
            if prefetch.awaited and best < 0:
                reach = known.reach(min(query.memory_pages, query.whole_pages)) + (query.tail > 0)
                if self._reads_ahead(prefetch, query, present, self._split(prefetch, query, reach)):
                    return MissReason.CHEAPER_TO_COMPUTE
                if not self._pays(query, reach):
                    self._prefetches.release(query)
                    return MissReason.CHEAPER_TO_COMPUTE
            result, reason = await self._read(prefetch, query, present, reason, join=joins > 0)
            if result is None or result.pages >= result.read.target or not result.read.joined:
                await self._wait_for_backups(tokens, seed)
                return reason
            if result.pages <= best:
                joins -= 1
            best = max(best, result.pages)

    def _query(
        self, request: RequestState, digests: list[bytes], known: _KnownPresence
    ) -> tuple[StorageQuery | None, Mapping[int, bytes]]:
        """The query for a request's prefix, up to the tail that storage has behind its pages; and which of
        the query's pages storage has, by component."""
        end = known.tail
        if end is None:
            return self._prefetches.make_query(request.tokens, request.seed, digests), known.flags
        path = [*digests[: end.pages], end.digest]
        query = self._prefetches.make_tail_query(request.tokens, request.seed, path, end.tokens)
        present = {one: flags[: end.pages].ljust(end.pages, b"\0") for one, flags in known.flags.items()}
        return query, {one: flags + b"\1" for one, flags in present.items()}

    async def _wait_for_backups(self, tokens: array[int], seed: bytes) -> None:
        """Wait while pages of the prefix are being copied from an engine's pages to the host."""
        while self._prefetches.backup_in_flight(tokens, seed) and not self._executor.stopped:
            await self._executor.next_progress()

    def _pays(self, query: StorageQuery, reach: int) -> bool:
        """Whether to read full pages up to `reach`, with what they need: whether computing takes longer."""
        if not (self._options.load_or_compute or self._options.min_fetch_tokens):
            return True
        pages, nbytes = self._prefetches.estimate(query, reach)
        size = self._planner.state.page_size
        if not nbytes:
            return True
        if not self._options.load_or_compute:
            return pages * size >= self._options.min_fetch_tokens
        busy = float(self._is_busy())
        return self._costs.worth_loading(pages * size, query.matched_pages * size, nbytes, busy=busy)

    def _split(self, prefetch: _Prefetch, query: StorageQuery, reach: int) -> int:
        """Pages of the prefix to compute while the rest, up to `reach`, is read; 0: none."""
        if not self._options.partial_loads or len(self._planner.state.names) > 1 or prefetch.request.split:
            return 0
        missing, nbytes = self._prefetches.estimate(query, reach)
        if not nbytes or missing > self._planner.state.free[FULL_HOST].capacity:
            return 0  # what is computed needs a place on the host too: pages stand on those before them
        size, page_bytes = self._planner.state.page_size, nbytes // missing
        computed = self._costs.split(
            missing, size, query.memory_pages * size, page_bytes, busy=float(self._is_busy())
        )
        return query.memory_pages + computed if computed else 0

    def _reads_ahead(
        self, prefetch: _Prefetch, query: StorageQuery, present: Mapping[int, bytes], split: int
    ) -> bool:
        """Begin to read the pages from `split` on, for when the request has computed those before; False if
        there is no split, or no room."""
        if not split or prefetch.settled:
            return False
        plan = self._prefetches.choose(query, present, computed=split)
        self._executor.run(plan.backups)
        if plan.read is None:
            return False
        prefetch.request.split = split * self._planner.state.page_size
        self._held[prefetch.request] = plan.read
        self._commits[plan.read] = asyncio.get_running_loop().create_future()
        self._readers[plan.read] = prefetch
        self._executor.call(self._get(plan.read))
        return True

    async def _digests(self, tokens: array[int], seed: bytes) -> list[bytes]:
        """Digests of all pages that could be restored."""
        size = self._planner.state.page_words
        known = self._prefetches.known_digests(tokens, seed)
        with memoryview(tokens) as view:
            rest = view[len(known) * size : (len(tokens) - 1) // size * size].tobytes()
        return known + await sliced_digests(memoryview(rest).cast("q"), size, known[-1] if known else seed)

    async def _read(
        self,
        prefetch: _Prefetch,
        query: StorageQuery,
        present: Mapping[int, bytes],
        presence_reason: MissReason,
        *,
        join: bool,
    ) -> tuple[ReadResult | None, MissReason]:
        """Choose, read and commit; returns the result, None if there was nothing to read, and the reason."""
        read: StorageRead | None = None
        try:
            plan = self._prefetches.choose(query, present, join=join)
            read = plan.read
        finally:
            if read is None:
                self._prefetches.release(query)
        if not prefetch.settled:
            prefetch.request.stored_full_pages = min(plan.full_pages, query.whole_pages)
            prefetch.request.stored_held_back = plan.limit
        self._executor.run(plan.backups)
        if read is None:
            return None, plan.reason if presence_reason is MissReason.NONE else presence_reason
        result = await self._fill(prefetch, read)
        return result, result.reason if presence_reason is MissReason.NONE else presence_reason

    async def _present(
        self, known: _KnownPresence, tokens: array[int], seed: bytes, digests: list[bytes]
    ) -> MissReason:
        """Ask which missing pages storage has: full pages first, then the other components as far as full
        pages reach, and then the tails there. Pages answered before are not asked again."""
        reach, reason = 0, MissReason.NONE
        if digests:
            query = self._prefetches.make_query(tokens, seed, digests)
            if query is None:
                return MissReason.NONE
            try:
                reach, reason = await self._whole_pages(known, query)
            finally:
                self._prefetches.release(query)
        if reason is MissReason.NONE:
            known.tail = await self._stored_tail(known, tokens, seed, digests, reach)
        return reason

    async def _whole_pages(self, known: _KnownPresence, query: StorageQuery) -> tuple[int, MissReason]:
        """Ask for the missing pages of a query; returns how far full pages reach, and why no answer came."""
        digests, end = query.digests, self._prefetches.last_stored_node(query)
        pages = range(query.memory_pages - (end is not None), query.pages)
        reason = await self._ask(known, FULL, digests, pages)
        if end is not None and reason is MissReason.NONE and not known.flags[FULL][query.memory_pages - 1]:
            self._storage_writer.write_lost(end)
        reach = known.reach(query.memory_pages)
        for component_id in range(1, len(self._planner.state.names)):
            if self._prefetches.can_read(component_id):
                first = self._prefetches.first_page(query, component_id)
                other = await self._ask(known, component_id, digests, range(first, max(first, reach)))
                reason = other if reason is MissReason.NONE else reason
        return reach, reason

    async def _stored_tail(
        self, known: _KnownPresence, tokens: array[int], seed: bytes, digests: list[bytes], pages: int
    ) -> _StoredTail | None:
        """The longest tail behind the first `pages` pages that storage has, with its states."""
        state = self._planner.state
        if not state.tails or not self._planner.loads.takes_tails(tokens):
            return None
        if pages in known.tails:
            return known.tails[pages]
        # Of two sequences, the shorter tails are the same as far as their tokens are: as with the pages of a
        # path, so questions about them are shared in the same way.
        ends = self._prefetches.tail_digests(tokens, seed, digests, pages)
        there: Sequence[int] = range(len(ends))
        for component_id in range(len(state.names)):
            if not (there and self._prefetches.can_read(component_id)):
                return None
            first, stop = there[0], there[-1] + 1
            answer = await self._presence.ask(
                component_id, ends, range(first, stop), answered=known.answered, for_all=True
            )
            there = [one for one in there if answer.flags[one - first]]
        found = _StoredTail(pages, there[-1] + 1, ends[there[-1]]) if there else None
        known.tails[pages] = found
        return found

    async def _ask(
        self, known: _KnownPresence, component_id: int, digests: list[bytes], pages: range
    ) -> MissReason:
        pages = known.unknown(component_id, pages)
        if not pages:
            return MissReason.NONE
        answer = await self._presence.ask(component_id, digests, pages, answered=known.answered)
        known.learn(component_id, pages, answer.flags)
        return answer.reason

    async def _fill(self, prefetch: _Prefetch, read: StorageRead) -> ReadResult:
        """Read pages from storage into their slots, and wait until they are in the tree."""
        commit = self._commits[read] = asyncio.get_running_loop().create_future()
        self._readers[read] = prefetch
        await self._get(read)
        return await asyncio.shield(commit)

    async def _get(self, read: StorageRead) -> None:
        """Read pages from storage into their slots, and commit what is ready then."""
        commit = self._commits[read]
        late: list[BatchResult] = []
        # Until storage has answered, its threads may write to the slots.
        outcomes: Outcomes = {
            component_id: [Outcome.TIMEOUT] * len(slots) for component_id, slots in read.slots.items()
        }
        try:
            with self._timed(read) as timed:
                outcomes, late = await self._storage.get(read)
                timed.arrived = all(one is Outcome.HIT for some in outcomes.values() for one in some)
        finally:
            if late:
                self._late.add(read)
                self._executor.call_late(self._finish_late(read, commit, late))
            for result in self._prefetches.deliver(read, outcomes):
                self._committed(result)

    @contextmanager
    def _timed(self, read: StorageRead) -> Iterator[_TimedRead]:
        """Measure a read, if all of it arrives."""
        state, clock = self._planner.state, asyncio.get_running_loop().time
        nbytes = sum(
            len(slots) * state.free[place_of(component_id, Tier.HOST)].slot_bytes
            for component_id, slots in read.slots.items()
        )
        began, queued, timed = clock(), self._costs.reading_bytes, _TimedRead()
        self._costs.reading_bytes += nbytes
        try:
            yield timed
        finally:
            self._costs.reading_bytes -= nbytes
            if timed.arrived:
                self._costs.read(nbytes, queued, clock() - began)

    def _committed(self, result: ReadResult) -> None:
        """A read is in the tree: rematch its request now, before the pages can be evicted."""
        self.pages_read += result.arrived
        self._executor.run(result.backups)
        prefetch = self._readers.pop(result.read)
        if not prefetch.settled:
            self._planner.rematch(prefetch.request)
        if result.read not in self._late:
            self._prefetches.finish(result.read)
        self._commits.pop(result.read).set_result(result)

    async def _finish_late(
        self, read: StorageRead, commit: asyncio.Future[ReadResult], late: list[BatchResult]
    ) -> None:
        safe = False
        try:
            safe = await linger(late)
            await asyncio.shield(commit)
        finally:
            self._late.discard(read)
            self._prefetches.finish(read, safe=safe)


@dataclass(slots=True, eq=False)
class _TimedRead:
    """Whether everything that a read asked for arrived."""

    arrived: bool = False


class _StoredTail(NamedTuple):
    """A tail that storage has: the pages before it, its tokens, and its digest."""

    pages: int
    tokens: int
    digest: bytes


class _KnownPresence:
    """Storage's answers for one sequence.

    Attributes:
        flags: by component, a byte per page from the first of the sequence, 1 if storage has it.
        tail: the tail behind the full pages in memory and storage.
        tails: by the pages before it, the tails that were asked for; None: storage has none there.
        answered: queries of other requests that storage answered while this one waited.
    """

    def __init__(self, names: Sized, answered: Sequence[PresenceQuery] = ()) -> None:
        self.answered = answered
        self.tail: _StoredTail | None = None
        self.tails: dict[int, _StoredTail | None] = {}
        self.flags: dict[int, bytes] = dict.fromkeys(range(len(names)), b"")
        self._first = [0] * len(names)

    def unknown(self, component_id: int, pages: range) -> range:
        """The part of `pages` without an answer yet."""
        if not self.flags[component_id] or pages.start < self._first[component_id]:
            return pages
        return range(max(pages.start, len(self.flags[component_id])), pages.stop)

    def learn(self, component_id: int, pages: range, flags: bytes) -> None:
        """Record the answer for `pages`."""
        before = self.flags[component_id]
        if not before or pages.start < self._first[component_id]:
            self._first[component_id] = pages.start
        self.flags[component_id] = (
            before[: pages.start].ljust(pages.start, b"\0") + flags + before[pages.stop :]
        )

    def reach(self, memory_pages: int) -> int:
        """How far full pages reach; the first `memory_pages` are in memory, later ones in storage."""
        gap = self.flags[FULL].find(0, memory_pages)
        return max(gap if gap >= 0 else len(self.flags[FULL]), memory_pages)
