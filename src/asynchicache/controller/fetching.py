"""Prefetch: reads from storage to the host, one at a time for the same pages, waited for by policy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from operator import itemgetter

from asynchicache.controller.actions import Copy
from asynchicache.controller.planner import Planner
from asynchicache.controller.reading import Outcomes, Query, Read
from asynchicache.controller.sequence import Sequence
from asynchicache.controller.stored import StoredPools, linger
from asynchicache.errors import ConfigError
from asynchicache.histograms import Histogram
from asynchicache.storage.limits import Batch
from asynchicache.tree.node import FULL
from asynchicache.types import MissReason, Outcome, PrefetchPolicy, check_number

_log = logging.getLogger(__name__)

_ATTEMPTS = 4
"""Times that a read looks again, after it waited for another one's, though that brought it nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOptions:
    """How long a request waits for storage.

    Attributes:
        policy: Default: `timeout`.
        base_seconds, seconds_per_ki_token: the deadline of `timeout`: the base, and so much more for each
            1,024 tokens asked for. Defaults: 2.0 and 0.1 (sgl-project/sglang#23309).
        max_seconds: never longer than this, under any policy. Default: 30.
    """

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    base_seconds: float = 2.0
    seconds_per_ki_token: float = 0.1
    max_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, PrefetchPolicy):
            raise ConfigError(f"prefetch policy {self.policy!r} must be a PrefetchPolicy")
        for name in ("base_seconds", "seconds_per_ki_token", "max_seconds"):
            check_number(f"prefetch {name}", getattr(self, name), whole=False)
            if not getattr(self, name) >= 0:
                raise ConfigError(f"prefetch {name} {getattr(self, name)} must be 0 or more")

    def deadline(self, tokens: int) -> float:
        """Seconds that a request for `tokens` more tokens waits."""
        if self.policy is PrefetchPolicy.WAIT_COMPLETE:
            return self.max_seconds
        return min(self.base_seconds + self.seconds_per_ki_token * tokens / 1024, self.max_seconds)


class _UnderWay:
    """A read, and those who wait for it because it covers some of what they want."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def wait(self, query: Query) -> None:
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((query.pages, done))
        await done

    def end(self) -> None:
        """Let those go on who wait: the longest first, so that its read covers the others'."""
        for _, done in sorted(self._waiting, key=itemgetter(0), reverse=True):
            if not done.done():
                done.set_result(None)


class Fetcher:
    """Runs the reads of one cache; each belongs to the cache, not to the request that asked.

    Attributes:
        pages_read: pages and states that came.
        waits: how long requests waited for storage.
    """

    def __init__(
        self,
        planner: Planner,
        stored: StoredPools,
        options: PrefetchOptions,
        *,
        carry_out: Callable[[list[Copy]], object],
        spawn: Callable[[Coroutine[object, object, None]], None],
        spawn_late: Callable[[Coroutine[object, object, None]], None],
    ) -> None:
        """`spawn` runs a read; `spawn_late` waits for calls that have outlived theirs."""
        self._planner = planner
        self._reader = planner.reader
        self._stored = stored
        self._options = options
        self._carry_out = carry_out
        self._spawn = spawn
        self._spawn_late = spawn_late
        self._reading: dict[bytes, _UnderWay] = {}
        self.pages_read = 0
        self.waits = Histogram()

    async def prefetch(self, sequence: Sequence) -> None:
        """Bring what storage has of a request's prefix to the host, for as long as the policy waits.

        When the request gives up, by its deadline or because it is cancelled, the read goes on for
        those who come later.
        """
        query = self._reader.ask(sequence.tokens, sequence.seed)
        if query is None:
            return
        done: asyncio.Future[MissReason] = asyncio.get_running_loop().create_future()
        self._spawn(self._run(query, done))
        if self._options.policy is PrefetchPolicy.BEST_EFFORT:
            return
        seconds = self._options.deadline((query.pages - query.base) * self._planner.books.page_size)
        reason = await self._wait(done, seconds)
        if sequence.closed or sequence.loaded:
            return  # it went on without us, and its prefix is settled
        sequence.reason = reason
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

    async def _run(self, query: Query, done: asyncio.Future[MissReason]) -> None:
        reason = MissReason.CLOSED
        try:
            reason = await self._read_or_wait(query)
        except Exception:  # noqa: BLE001  a task boundary: a failed read is a miss
            _log.exception("a read from storage failed")
            reason = MissReason.STORAGE_FAILED
        finally:
            if not done.done():
                done.set_result(reason)

    async def _read_or_wait(self, first: Query) -> MissReason:
        """Read for `first`; where another read covers some of it, wait for that and look again, for as long
        as that brings something."""
        query: Query | None = first
        best, left = (first.here, first.base), _ATTEMPTS
        while query is not None:
            other = self._covered_by(query)
            if other is None:
                return await self._read(query)
            self._reader.drop(query)
            if not left:
                return MissReason.DEADLINE
            await other.wait(query)
            query = self._reader.ask(first.tokens, first.seed)
            if query is not None and (query.here, query.base) > best:
                best, left = (query.here, query.base), _ATTEMPTS
            else:
                left -= 1
        return MissReason.NONE

    def _covered_by(self, query: Query) -> _UnderWay | None:
        if not self._reading:
            return None
        wanted = query.digests[query.base :]
        return next((self._reading[digest] for digest in wanted if digest in self._reading), None)

    async def _read(self, query: Query) -> MissReason:
        """Ask, choose, read and commit, while nobody else reads the same pages."""
        wanted = query.digests[query.base :]
        under_way = _UnderWay()
        self._reading.update(dict.fromkeys(wanted, under_way))
        read: Read | None = None
        try:
            present, trouble = await self._present(query)
            choice = self._reader.choose(query, present)
            self._carry_out(choice.backups)
            read = choice.read
            if read is not None:
                return await self._fill(read)
            return choice.reason if trouble is MissReason.NONE else trouble
        finally:
            if read is None:
                self._reader.drop(query)
            for digest in wanted:
                del self._reading[digest]
            under_way.end()

    async def _present(self, query: Query) -> tuple[dict[int, int], MissReason]:
        """By component, which pages storage has: the full one's first, then states as far as it reaches."""
        pages, reason = await self._stored.exists(FULL, query.digests[query.here :], query.here)
        reach = query.here
        while pages >> reach & 1:
            reach += 1
        found = {FULL: pages}
        for number in range(1, len(self._planner.books.names)):
            if self._reader.asks(number):
                first = self._reader.first_page(query, number)
                found[number], other = await self._stored.exists(number, query.digests[first:reach], first)
                reason = other if reason is MissReason.NONE else reason
        return found, reason

    async def _fill(self, read: Read) -> MissReason:
        late: list[Batch] = []
        # Until storage says otherwise its threads may write to the slots.
        outcomes: Outcomes = {
            number: [(slot, Outcome.TIMEOUT) for slot in slots] for number, slots in read.slots.items()
        }
        try:
            outcomes, late = await self._stored.get(read)
        finally:
            gained = self._reader.commit(read, outcomes)
            self.pages_read += gained.read
            if late:
                self._spawn_late(self._finish_late(read, late))
            else:
                self._reader.finish(read)
        return gained.reason

    async def _finish_late(self, read: Read, late: list[Batch]) -> None:
        safe = False
        try:
            safe = await linger(late)
        finally:
            self._reader.finish(read, safe=safe)
