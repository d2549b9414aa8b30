"""Prefetch: presence queries and reads from storage to the host, shared by requests for the same pages."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from sys import maxsize
from typing import NamedTuple, SupportsIndex

from asynchicache.controller.digests import sliced_digests
from asynchicache.controller.executor import Executor
from asynchicache.controller.presence_queries import PresenceQueries, PresenceQuery
from asynchicache.controller.storage_pools import StoragePools, linger
from asynchicache.controller.storage_writer import StorageWriter
from asynchicache.errors import UsageError
from asynchicache.histograms import Histogram
from asynchicache.planner.costs import LoadCosts
from asynchicache.planner.options import PrefetchOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.readings import Reading, ReadResult, StorageQuery, StorageRead
from asynchicache.planner.request_state import RequestState
from asynchicache.storage.limits import BatchResult
from asynchicache.tree.node import FULL, place_of
from asynchicache.types import MissReason, Outcome, PrefetchPolicy, Tier, as_count

_log = logging.getLogger(__name__)

_JOINS = 2
"""Times that a request asks again in vain, after reads that it shared with others fell short."""

_QUIET_TURNS = 8
"""Loop iterations after which no more room is expected, once what was in flight has ended: who was just
served needs a few to load what it got."""

_ROUNDS_FOR_ROOM = 3
"""Times that a request without room waits for what is in flight then; so its wait does not depend on later
traffic."""

_SHARE_OF_THE_WHOLE = 0.75
"""A prefix that needs a state or window at its end gets this share of the time; the rest is for those of a
shorter one, if it is late."""

_PAGES_AT_FIRST = 16
_SLOW_BYTES = 1 << 20
_FAST_SECONDS, _SLOW_SECONDS = 0.05, 0.2
"""A call for few pages comes back soon, for those who need only these; one for many costs less. So calls
begin small, double while they are fast, and halve while they are slow, down to `_SLOW_BYTES`."""


_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_PAUSE_SHARE = 1 / 8
"""Seconds between questions for a prefix that has not come; and as a share of the wait so far."""

_REASONS_OF_THE_MATCH = (MissReason.COLD, MissReason.STATE, MissReason.WINDOW)


@dataclass(slots=True, eq=False)
class _Prefetch:
    """What one request wants from storage.

    Attributes:
        known: storage's answers so far.
        period: the `Activity` period in which it was asked for; its calls belong to it.
        most: the most pages of the prefix to read.
        waiting: how many wait for it; the request may rest instead.
        task: finds out what storage has.
        news: set when nothing more is to be expected now: why there is no more.
        reading: what is read for it.
        reason, reach: why storage could not give more, and the pages that it could give with memory.
        ended: why nothing more comes; None: something may.
        joins, best: see `_JOINS`; the most pages that any reading gave.
        began, nbytes, queued: when the reading began, its bytes, and those of others before it.
        until, rounds: without room, the `Activity` period that it waits for, and see `_ROUNDS_FOR_ROOM`.
        crowded: there was no room for a while, so its time says nothing about storage.
    """

    request: RequestState
    known: _KnownPresence
    news: asyncio.Future[MissReason]
    period: int
    task: asyncio.Task[None] | None = None
    most: int | None = None
    waiting: int = 0
    reading: Reading | None = None
    reason: MissReason = MissReason.NONE
    reach: int = maxsize
    ended: MissReason | None = None
    joins: int = _JOINS
    best: int = -1
    began: float = 0.0
    nbytes: int = 0
    queued: int = 0
    until: int | None = None
    rounds: int = _ROUNDS_FOR_ROOM
    crowded: bool = False

    @property
    def gone(self) -> bool:
        """Whether the request went on, so its prefix must not change."""
        return self.request.closed or self.request.loaded

    @property
    def lacks_room(self) -> bool:
        """Whether it waits for host slots and for nothing else."""
        reading = self.reading
        return reading is not None and reading.lacks_room and not reading.unanswered

    def tell(self, reason: MissReason) -> None:
        """Wake those who wait."""
        if not self.news.done():
            self.news.set_result(reason)


class ReadPace:
    """How many calls of a component run at once, and how many pages each of them has."""

    def __init__(self, stored: StoragePools) -> None:
        self._storage = stored
        self._running: Counter[int] = Counter()
        self._pages: dict[int, int] = {}

    def most(self, component_ids: Iterable[int]) -> dict[int, int]:
        """By component, the most pages of a call that begins now; 0: none may."""
        found = {}
        for one in component_ids:
            calls, pages, _ = self._storage.read_limits(one)
            most = min(self._pages.get(one, _PAGES_AT_FIRST), pages)
            found[one] = most if self._running[one] < calls else 0
        return found

    def began(self, component_id: int) -> None:
        """A call begins."""
        self._running[component_id] += 1

    def ended(self, component_id: int, pages: int, seconds: float) -> None:
        """A call for some pages has ended."""
        self._running[component_id] -= 1
        _, limit, page_bytes = self._storage.read_limits(component_id)
        most = self._pages.get(component_id, _PAGES_AT_FIRST)
        if pages >= min(most, limit) and seconds < _FAST_SECONDS:
            self._pages[component_id] = min(2 * most, max(limit, _PAGES_AT_FIRST))
        elif seconds > _SLOW_SECONDS and pages * page_bytes > _SLOW_BYTES:
            self._pages[component_id] = max(min(pages, most) // 2, 1)


class Prefetcher:
    """Reads from storage for the requests of one cache.

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
            storage_writer: rewrites pages that storage has lost.
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
        self._open: dict[RequestState, _Prefetch] = {}
        self._readers: dict[Reading, _Prefetch] = {}
        self._pace = ReadPace(stored)
        self._quiet = 0  # turns of the loop since somebody without room has nothing to wait for
        self.pages_read = 0
        self.waits = Histogram()
        executor.on_progress = self.pump

    @property
    def waits_for_nobody(self) -> bool:
        """Whether reads go on though nobody waits for them: later requests will."""
        return self._options.policy is PrefetchPolicy.BEST_EFFORT

    def checked_wait(self, until: SupportsIndex, seconds: float | None) -> tuple[int, float]:
        """Check how much of a prefix to wait for, and how long; see `Request.prefetch`.

        Raises:
            UsageError: one of them is no number of 0 or more.
        """
        tokens = as_count("prefetch", until, "until=")
        most = self._options.max_seconds if seconds is None else seconds
        if isinstance(most, bool) or not isinstance(most, int | float) or not most >= 0:
            raise UsageError(f"prefetch(seconds={seconds!r}): 0 or more")
        if tokens < 0:
            raise UsageError(f"prefetch(until={until}): tokens, 0 or more")
        return tokens, most

    async def _arrival(self, request: RequestState, until: int, seconds: float) -> bool:
        """Wait until memory and storage together restore `until` tokens of a request, or all that could ever
        be restored of so many; for `seconds` at most. Reads nothing.

        Returns:
            False if that has not come: it is late, or there is no storage (any more).

        Raises:
            ClosedError: the cache is closing.
        """
        wanted, clock = self._prefetches.wanted(request.tokens, until), asyncio.get_running_loop().time
        began = clock()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                digests = await self._digests(request.tokens, request.seed)
                while not await self._has_come(request, digests, wanted):
                    if not self._storage or self._executor.failure or request.closed or request.loaded:
                        return False
                    pause = max((clock() - began) * _PAUSE_SHARE, _FIRST_PAUSE)
                    await asyncio.sleep(min(pause, _LONGEST_PAUSE))
                    self._executor.check_open()
                return True
        return False

    async def _has_come(self, request: RequestState, digests: list[bytes], wanted: tuple[int, int]) -> bool:
        """Whether a prefix can be restored now. Asks for its end first: mostly that is the last to come."""
        tokens, seed, (pages, _) = request.tokens, request.seed, wanted
        if self._prefetches.in_memory(tokens, seed) >= wanted:
            return True
        if not (self._storage and self._prefetches.can_read(FULL)):
            return False
        known = _KnownPresence(self._planner.inventory.names)
        with self._presence.listen(digests, known.answered):
            query = self._prefetches.make_query(tokens, seed, digests) if pages else None
            try:
                for component_id, some in self._prefetches.last_needed(query, pages) if query else ():
                    answer = await self._presence.ask(component_id, digests, some, answered=known.answered)
                    if 1 not in answer.flags:
                        return False
            finally:
                if query is not None:
                    self._prefetches.release(query)
            await self._present(known, tokens, seed, digests)
        known.digests = digests
        query, present = self._query(request, known)
        if query is None:
            return self._prefetches.in_memory(tokens, seed) >= wanted
        self._prefetches.release(query)
        return self._prefetches.reach(query, present) >= wanted

    async def prefetch(self, request: RequestState, until: int = 0, wait: float = 0.0) -> None:
        """Read a request's prefix from storage to the host, and wait as long as the policy says. Before that,
        wait for what another process computes: `until` tokens, for `wait` seconds at most.

        At its deadline the request has what arrived in order. If nobody waits for a page any more, it is read
        only if that has begun.
        """
        tokens, seed = request.tokens, request.seed
        tail = until > 0 and await self._arrival(request, until, wait)
        self._executor.check_open()
        if self._executor.failure is not None or request.closed or request.loaded:  # it went on meanwhile
            return
        if not (self._storage or self._prefetches.backup_in_flight(tokens, seed)):
            self._match_again(request)
            return
        lacks = self._prefetches.missing_tokens(tokens, seed, tail=tail)
        if not lacks:  # another request may have published it since the match
            self._match_again(request)
            if self._storage and not self._prefetches.can_read(FULL):
                request.cut(MissReason.HOST_CAPACITY)
            return
        prefetch = self._open.get(request)
        if prefetch is None or prefetch.ended is not None:
            prefetch = self._open[request] = self._begin(request)
            prefetch.task = self._executor.call(self._run(prefetch), prefetch.period)
        if self.waits_for_nobody:
            self._settle(prefetch)
            return
        clock = asyncio.get_running_loop().time
        started, seconds = clock(), self._options.deadline(lacks)
        try:
            reason = await self._wait_in_parts(prefetch, seconds)
            if prefetch.ended is not None and not prefetch.gone:
                # Another request may have published during the read: what was read gave way to its backup.
                await self._wait_for_backups(tokens, seed, seconds - (clock() - started))
        finally:
            self.waits.observe(clock() - started)
        if prefetch.gone:
            return  # it went on meanwhile
        if prefetch.ended is not None:
            self._planner.rematch(request)  # others may have published since it ended
            # They may not have saved it when the time was over.
            if self._prefetches.backup_in_flight(tokens, seed):
                request.cut(MissReason.DEADLINE)
            return
        self._settle(prefetch, reason)

    def _begin(self, request: RequestState) -> _Prefetch:
        known = _KnownPresence(self._planner.inventory.names)
        news = asyncio.get_running_loop().create_future()
        return _Prefetch(request, known, news, self._planner.activity.period)

    def _match_again(self, request: RequestState) -> None:
        self._planner.rematch(request, prefetched=self._prefetches.was_read_for(request))

    def _settle(self, prefetch: _Prefetch, reason: MissReason = MissReason.DEADLINE) -> None:
        """A request goes on with what has arrived, in order, of what is read for it.

        `reason`: why it waits no longer, if more would come.
        """
        request, reading = prefetch.request, prefetch.reading
        if reading is not None:
            self._executor.run(self._prefetches.settle(reading))
        self._planner.rematch(request)
        if prefetch.ended is not None:
            reason = prefetch.ended
        elif prefetch.lacks_room:
            reason = MissReason.HOST_CAPACITY
        # Other requests may have published meanwhile, so these reasons follow from the new match.
        derived = reason in _REASONS_OF_THE_MATCH
        request.cut(MissReason.NONE if derived else reason, prefetch.reach)

    async def _read_shorter(self, whole: _Prefetch, reason: MissReason, seconds: float) -> None:
        """Not all of a prefix comes in time, or there is no room: read also the states or windows of a
        shorter one, whose full pages have arrived."""
        request = whole.request
        if whole.reading is None:  # storage has not said what it has
            await self._wait(whole, seconds)
            return
        self._executor.run(self._prefetches.settle(whole.reading))
        query = self._prefetches.make_query(request.tokens, request.seed, whole.known.digests)
        if query is None:  # it lacks a tail, which nothing shorter can replace
            if reason is MissReason.DEADLINE:
                await self._wait(whole, seconds)
            return
        self._prefetches.release(query)
        shorter = self._begin(request)
        shorter.known, shorter.most, shorter.waiting = whole.known, query.memory_pages, 1
        shorter.joins = 0  # to ask again is the whole one's: nobody would drop what this one found then
        self._choose(shorter, MissReason.NONE)
        try:
            await self._wait(whole if reason is MissReason.DEADLINE else shorter, seconds)
        finally:
            shorter.waiting = 0
            self._drop(shorter)

    async def _wait_in_parts(self, prefetch: _Prefetch, seconds: float) -> MissReason:
        """Wait for a prefix, and near the end of the time for a shorter one too; as `_wait`."""
        share = _SHARE_OF_THE_WHOLE if self._planner.inventory.tree.components else 1.0
        reason = await self._wait(prefetch, seconds * share)
        if share < 1 and prefetch.ended is None and not prefetch.gone:
            await self._read_shorter(prefetch, reason, seconds * (1 - share))
        return reason  # had it room meanwhile, it was too late for this request

    async def _wait(self, prefetch: _Prefetch, seconds: float) -> MissReason:
        """Wait for a reading: why it brought no more, or `DEADLINE`."""
        if prefetch.news.done() and self._open.get(prefetch.request) is prefetch:
            prefetch.news = asyncio.get_running_loop().create_future()  # asked again, for what did not come
        prefetch.waiting += 1
        self._want(prefetch, wanted=True)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(prefetch.news)
        except TimeoutError:
            return MissReason.DEADLINE
        finally:
            prefetch.waiting -= 1
            self._want(prefetch, wanted=prefetch.waiting > 0 or prefetch.request.resting)

    def _want(self, prefetch: _Prefetch, *, wanted: bool) -> None:
        if prefetch.reading is not None:
            prefetch.reading.wanted = wanted or self.waits_for_nobody
            self.pump()

    def rest(self, request: RequestState) -> None:
        """A request waits for its turn, behind those that rest already: what was not read yet is read
        meanwhile."""
        self._prefetches.queue(request)
        prefetch = self._open.get(request)
        if prefetch is not None:
            self._want(prefetch, wanted=True)

    def rematch(self, request: RequestState) -> None:
        """Match again, with what has arrived of what is read for a request."""
        prefetch = self._open.get(request)
        if prefetch is None:
            self._match_again(request)
        else:
            self._settle(prefetch)

    def leave(self, request: RequestState) -> None:
        """A request has used what was read for it, or never will."""
        self._prefetches.used(request)
        prefetch = self._open.pop(request, None)
        if prefetch is not None:
            prefetch.tell(MissReason.CLOSED)
            if not self.waits_for_nobody:
                self._drop(prefetch)
                if prefetch.task is not None:
                    prefetch.task.cancel()
        self.pump()

    def _drop(self, prefetch: _Prefetch) -> None:
        for result in self._prefetches.abandon(prefetch.reading) if prefetch.reading is not None else ():
            self._read_ended(result)

    # What to read

    async def _run(self, prefetch: _Prefetch) -> None:
        try:
            await self._look_up(prefetch)
        except Exception:  # noqa: BLE001  a task boundary: a failed read is a miss
            _log.exception("a read from storage failed")
            self._end(prefetch, MissReason.STORAGE_FAILED)
        except asyncio.CancelledError:
            self._end(prefetch, MissReason.CLOSED)
            raise

    async def _look_up(self, prefetch: _Prefetch) -> None:
        """Ask what storage has, and choose what to read of it."""
        tokens, seed = prefetch.request.tokens, prefetch.request.seed
        digests = await self._digests(tokens, seed)
        with self._presence.listen(digests, prefetch.known.answered):
            await self._wait_for_backups(tokens, seed, self._options.deadline(len(tokens)))
            reason = await self._present(prefetch.known, tokens, seed, digests)
        prefetch.known.digests = digests
        if prefetch.gone and not self.waits_for_nobody:
            self._end(prefetch, MissReason.CLOSED)
            return
        self._choose(prefetch, reason)

    def _choose(self, prefetch: _Prefetch, presence_reason: MissReason) -> None:
        """Choose what to read, and begin; ends the prefetch if there is nothing."""
        request = prefetch.request
        query, present = self._query(request, prefetch.known)
        if query is None:
            self._end(prefetch, MissReason.NONE)
            return
        reach = prefetch.known.reach(min(query.memory_pages, query.whole_pages)) + (query.tail > 0)
        asks_first = prefetch.most is None and prefetch.best < 0 and not self.waits_for_nobody
        if asks_first and not self._pays(query, reach):
            self._prefetches.release(query)
            self._end(prefetch, MissReason.CHEAPER_TO_COMPUTE)
            return
        plan = self._prefetches.choose(query, present, request, most=prefetch.most)
        if not prefetch.gone and prefetch.most is None:
            request.stored_full_pages = min(plan.full_pages, query.whole_pages)
            request.stored_held_back = plan.limit
            request.stored_behind = min(query.memory_pages, query.whole_pages)
        self._executor.run(plan.backups)
        prefetch.reason, prefetch.reach = plan.reason, plan.reach
        if presence_reason is not MissReason.NONE:
            prefetch.reason, prefetch.reach = presence_reason, maxsize
        elif plan.reason is not MissReason.HOST_CAPACITY:
            prefetch.reach = maxsize
        if plan.reading is None:
            self._prefetches.release(query)
            self._end(prefetch, prefetch.reason)
            return
        prefetch.reading, self._readers[plan.reading] = plan.reading, prefetch
        self._measure(prefetch)
        self._want(prefetch, wanted=prefetch.waiting > 0 or request.resting)
        for result in self._prefetches.ready():
            self._read_ended(result)

    def _measure(self, prefetch: _Prefetch) -> None:
        """A reading begins: note how many bytes it brings, behind those of others."""
        assert prefetch.reading is not None, "it was just chosen"
        free = self._planner.inventory.free
        prefetch.nbytes = sum(
            len(pages) * free[place_of(component_id, Tier.HOST)].slot_bytes
            for component_id, pages in prefetch.reading.unbegun.items()
        )
        prefetch.began, prefetch.queued = asyncio.get_running_loop().time(), self._costs.reading_bytes
        self._costs.reading_bytes += prefetch.nbytes

    def _end(self, prefetch: _Prefetch, reason: MissReason) -> None:
        """Nothing more comes for a request: match what there is now, before it can be evicted."""
        request, prefetch.ended = prefetch.request, reason
        is_open, resting = self._open.get(request) is prefetch, request.resting
        if (prefetch.waiting or resting) and not prefetch.gone:
            if is_open:
                del self._open[request]
                self._settle(prefetch)
            else:  # of a shorter prefix
                self._planner.rematch(request)
            if resting:
                self._planner.rest(request)
        prefetch.tell(reason)

    def _query(
        self, request: RequestState, known: _KnownPresence
    ) -> tuple[StorageQuery | None, Mapping[int, bytes]]:
        """The query for a request's prefix, up to the tail that storage has behind its pages; and which of
        the query's pages storage has, by component."""
        end, digests = known.tail, known.digests
        if end is None:
            return self._prefetches.make_query(request.tokens, request.seed, digests), known.flags
        path = [*digests[: end.pages], end.digest]
        query = self._prefetches.make_tail_query(request.tokens, request.seed, path, end.tokens)
        present = {one: flags[: end.pages].ljust(end.pages, b"\0") for one, flags in known.flags.items()}
        return query, {one: flags + b"\1" for one, flags in present.items()}

    async def _wait_for_backups(self, tokens: array[int], seed: bytes, seconds: float) -> None:
        """Wait while pages of the prefix are copied from an engine's pages to the host; for `seconds` only.

        On a device that hangs they never end, and detaching storage waits for this.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._prefetches.backup_in_flight(tokens, seed) and not self._executor.stopped:
                    await self._executor.next_progress()

    def _pays(self, query: StorageQuery, reach: int) -> bool:
        """Whether to read full pages up to `reach`, with what they need: whether computing takes longer."""
        if not (self._options.load_or_compute or self._options.min_fetch_tokens):
            return True
        pages, nbytes = self._prefetches.estimate(query, reach)
        size = self._planner.inventory.page_size
        if not nbytes:
            return True
        if not self._options.load_or_compute:
            return pages * size >= self._options.min_fetch_tokens
        busy = float(self._is_busy())
        return self._costs.worth_loading(pages * size, query.matched_pages * size, nbytes, busy=busy)

    async def _digests(self, tokens: array[int], seed: bytes) -> list[bytes]:
        """Digests of all pages that could be restored."""
        size = self._planner.inventory.page_words
        known = self._prefetches.known_digests(tokens, seed)
        with memoryview(tokens) as view:
            rest = view[len(known) * size : (len(tokens) - 1) // size * size].tobytes()
        return known + await sliced_digests(memoryview(rest).cast("q"), size, known[-1] if known else seed)

    async def _present(
        self, known: _KnownPresence, tokens: array[int], seed: bytes, digests: list[bytes]
    ) -> MissReason:
        """Ask which missing pages storage has: full pages first, then the other components as far as full
        pages reach, and then the tails there."""
        reach, reason = 0, MissReason.NONE
        if digests:
            query = self._prefetches.make_query(tokens, seed, digests)
            if query is None:  # memory has them
                reach = len(digests)
            else:
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
        for component_id in range(1, len(self._planner.inventory.names)):
            if self._prefetches.can_read(component_id):
                first = self._prefetches.first_page(query, component_id)
                other = await self._ask(known, component_id, digests, range(first, max(first, reach)))
                reason = other if reason is MissReason.NONE else reason
        return reach, reason

    async def _stored_tail(
        self, known: _KnownPresence, tokens: array[int], seed: bytes, digests: list[bytes], pages: int
    ) -> _StoredTail | None:
        """The longest tail behind the first `pages` pages that storage has, with its states."""
        inventory = self._planner.inventory
        if not inventory.tails or not self._planner.loads.takes_tails(tokens):
            return None
        if pages in known.tails:
            return known.tails[pages]
        # Of two sequences, the shorter tails are the same as far as their tokens are: as with the pages of a
        # path, so questions about them are shared in the same way.
        ends = self._prefetches.tail_digests(tokens, seed, digests, pages)
        there: Sequence[int] = range(len(ends))
        for component_id in range(len(inventory.names)):
            if not (there and self._prefetches.can_read(component_id)):
                return None
            first, stop = there[0], there[-1] + 1
            answer = await self._presence.ask(
                component_id, ends, range(first, stop), answered=known.answered, before=digests[:pages]
            )
            there = [one for one in there if answer.flags[one - first]]
        found = _StoredTail(pages, there[-1] + 1, ends[there[-1]]) if there else None
        known.tails[pages] = found
        return found

    async def _ask(
        self, known: _KnownPresence, component_id: int, digests: list[bytes], pages: range
    ) -> MissReason:
        if not pages:
            return MissReason.NONE
        answer = await self._presence.ask(component_id, digests, pages, answered=known.answered)
        known.learn(component_id, pages, answer.flags)
        return answer.reason

    # Reads

    def pump(self) -> None:
        """Begin what can be read now, in order of turn."""
        if self._executor.stopped:
            for prefetch in self._open.values():
                prefetch.tell(MissReason.CLOSED)
            return
        if not self._readers:
            return
        components = range(len(self._planner.inventory.names))
        while (read := self._prefetches.next_read(self._pace.most(components))) is not None:
            self._pace.began(read.component_id)
            reader = self._readers[read.pages[0].waiters[0]]
            self._executor.call(self._get(read), reader.period)
        self._give_up_room()

    def _give_up_room(self) -> None:
        """Who waits for host slots gives up when what was in flight has ended, and freed none."""
        for prefetch in self._readers.values():
            if not prefetch.lacks_room:
                prefetch.until, prefetch.rounds = None, _ROUNDS_FOR_ROOM
            elif prefetch.until is None:
                prefetch.crowded, prefetch.until = True, self._executor.close_period()
        if self._hopeless() and not self._quiet:
            self._quiet = 1
            asyncio.get_running_loop().call_soon(self._still_quiet)

    def _hopeless(self) -> list[_Prefetch]:
        """Those who wait, and for whom what was in flight has freed no host slots."""
        in_flight, for_later = self._executor.in_flight, self.waits_for_nobody
        waiting = (
            one for one in self._readers.values() if for_later or (one.waiting and not one.news.done())
        )
        return [one for one in waiting if one.until is not None and not in_flight(one.until)]

    def _still_quiet(self) -> None:
        hopeless = self._hopeless()
        self._quiet = self._quiet + 1 if hopeless else 0
        if 0 < self._quiet <= _QUIET_TURNS:
            asyncio.get_running_loop().call_soon(self._still_quiet)
            return
        self._quiet = 0
        for prefetch in hopeless:
            prefetch.rounds -= 1
            if prefetch.rounds and self._executor.in_flight():
                prefetch.until = self._executor.close_period()
            else:
                prefetch.tell(MissReason.HOST_CAPACITY)
                if self.waits_for_nobody:  # no request's end would ever drop it, and free what it keeps
                    self._drop(prefetch)
        if hopeless and self.waits_for_nobody:
            self.pump()

    async def _get(self, read: StorageRead) -> None:
        """Read pages from storage into their slots, and end the readings that waited for the last of them."""
        clock, late = asyncio.get_running_loop().time, list[BatchResult]()
        # Until storage has answered, its threads may write to the slots.
        outcomes, began = [Outcome.TIMEOUT] * len(read.pages), clock()
        try:
            outcomes, late = await self._storage.get(read)
        finally:
            self._pace.ended(read.component_id, len(read.pages), clock() - began)
            self.pages_read += outcomes.count(Outcome.HIT)
            for result in self._prefetches.deliver(read, outcomes):
                self._read_ended(result)
            if late:
                self._executor.call_late(self._finish_late(read, late))
            else:
                self._prefetches.finish(read)
            self.pump()

    def _read_ended(self, result: ReadResult) -> None:
        """Everything was answered that a prefix needed: ask again if others' reads fell short, or end."""
        self._executor.run(result.backups)
        reading, prefetch = result.reading, self._readers.pop(result.reading)
        prefetch.reading = None
        self._costs.reading_bytes -= prefetch.nbytes
        complete = result.pages >= reading.target
        if complete and prefetch.nbytes and not prefetch.crowded:
            seconds = asyncio.get_running_loop().time() - prefetch.began
            self._costs.read(prefetch.nbytes, prefetch.queued, seconds)
        if complete or not (reading.joined and reading.wanted and prefetch.joins):
            if not complete:
                prefetch.reach = maxsize
            self._end(prefetch, prefetch.reason if complete else result.reason)
            return
        prefetch.joins -= result.pages <= prefetch.best
        prefetch.best = max(prefetch.best, result.pages)
        prefetch.task = self._executor.call(self._run(prefetch), prefetch.period)

    async def _finish_late(self, read: StorageRead, late: list[BatchResult]) -> None:
        safe = False
        try:
            safe = await linger(late)
        finally:
            self._prefetches.finish(read, safe=safe)


class _StoredTail(NamedTuple):
    """A tail that storage has: the pages before it, its tokens, and its digest."""

    pages: int
    tokens: int
    digest: bytes


class _KnownPresence:
    """What storage's answers say of one sequence.

    Attributes:
        flags: by component, a byte per page from the first of the sequence, 1 if storage has it.
        tail: the tail behind the full pages in memory and storage.
        tails: by the pages before it, the tails that were asked for; None: storage has none there.
        answered: the queries, of all requests, that storage answered while this one waited: none is repeated.
        digests: of its pages.
    """

    def __init__(self, names: Sized) -> None:
        self.answered: list[PresenceQuery] = []
        self.digests: list[bytes] = []
        self.tail: _StoredTail | None = None
        self.tails: dict[int, _StoredTail | None] = {}
        self.flags: dict[int, bytes] = dict.fromkeys(range(len(names)), b"")

    def learn(self, component_id: int, pages: range, flags: bytes) -> None:
        """Record the answer for `pages`."""
        before = self.flags[component_id]
        self.flags[component_id] = (
            before[: pages.start].ljust(pages.start, b"\0") + flags + before[pages.stop :]
        )

    def reach(self, memory_pages: int) -> int:
        """How far full pages reach; the first `memory_pages` are in memory, later ones in storage."""
        gap = self.flags[FULL].find(0, memory_pages)
        return max(gap if gap >= 0 else len(self.flags[FULL]), memory_pages)
