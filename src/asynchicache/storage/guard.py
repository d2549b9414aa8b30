"""Batching, concurrency limits, deadlines, a circuit breaker, checks and counters around every engine.

Engines need none of these themselves. An engine that is slow, fails, hangs or lies costs a miss, never more.
`exists` has permits of its own: a question does not wait for the bytes of others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from asynchicache.errors import ClosedError, StorageError, UsageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.breaker import BreakerState, CircuitBreaker
from asynchicache.storage.deadlines import (
    ConcurrencyLimit,
    SlidingDeadline,
    as_storage_error,
    close,
    failure,
    run_immediate,
    with_deadline,
)
from asynchicache.storage.labels import KeptLabel
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.presence import PresenceCache
from asynchicache.storage.protocol import (
    Capabilities,
    OptionalVerbs,
    PoolBinding,
    PoolEngine,
    StorageBackend,
    has_verb,
)
from asynchicache.storage.statistics import CallCounters, PoolStatistics
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_MOST_REFUSED = 1 << 16


# The five kinds of engine call: how to make each one, and which outcomes are valid.

_GuardedMethod = Callable[[PoolEngine, Sequence[ObjectKey], Sequence[int]], Awaitable[object]]


class EngineCall(NamedTuple):
    """One kind of call.

    Attributes:
        name: the engine's method.
        ask: calls that method; ignores the slots if the method takes none.
        read: turns the return value, for the given number of pages, into outcomes.
        answers: valid outcomes.
        refused: the outcome of pages that the engine was not asked for.
        moves_pages: whether the call moves pages between slots and storage.
        updates_presence: whether the outcomes say which pages exist.
        repeatable: whether a failed call can safely be retried.
        feeds_breaker: whether failures open the breaker. If False, calls are made only while it is closed.
    """

    name: str
    ask: _GuardedMethod
    read: Callable[[Any, int], list[Outcome]]
    answers: tuple[Outcome, ...]
    refused: Outcome
    moves_pages: bool
    updates_presence: bool = True
    repeatable: bool = True
    feeds_breaker: bool = True

    @property
    def is_put(self) -> bool:
        """Whether the call stores pages."""
        return self.name == PUT.name

    @property
    def is_lookup(self) -> bool:
        """Whether the call asks which pages exist."""
        return self.name == EXISTS.name

    def tally(self, outcomes: list[Outcome]) -> Mapping[Outcome, int]:
        """Count the pages by outcome."""
        # list.count compares identities in C; an Enum's hash, which a Counter needs, is Python code.
        return {outcome: outcomes.count(outcome) for outcome in self.answers}

    def check(self, outcomes: list[Outcome], pages: int) -> None:
        """Check that there is one valid outcome per page.

        Raises:
            StorageError: the number of outcomes is wrong, or one is not valid for this call.
        """
        if len(outcomes) != pages:
            raise StorageError(f"{len(outcomes)} outcomes for {pages} keys")
        if sum(map(outcomes.count, self.answers)) != pages:
            invalid = next(outcome for outcome in outcomes if outcome not in self.answers)
            raise StorageError(f"{invalid} is no answer to {self.name}")


def _outcomes(answer: Iterable[Outcome], _: int) -> list[Outcome]:
    return list(answer)


def _read_bits(answer: bytes | bytearray, _: int) -> list[Outcome]:
    outcomes = (Outcome.MISS, Outcome.HIT, Outcome.FAILED)  # to look up an Enum member costs most here
    return [outcomes[there] for there in _check_bits(answer)]


def _check_bits(answers: bytes | bytearray) -> bytes | bytearray:
    """Check that every byte is 0, 1 or 2.

    Raises:
        StorageError: one is not, e.g. because the engine returned outcomes, which are all true.
    """
    binary = isinstance(answers, bytes | bytearray)  # checked in C
    invalid = (
        answers.translate(None, b"\0\1\2") if binary else [bit for bit in answers if bit not in (0, 1, 2)]
    )
    if invalid:
        raise StorageError(f"{invalid[0]!r} is no answer to exists, which is 0, 1 or 2")
    return answers


EXISTS = EngineCall(
    "exists",
    lambda engine, keys, _: engine.exists(keys),
    _read_bits,
    (Outcome.HIT, Outcome.MISS, Outcome.FAILED),
    Outcome.FAILED,
    moves_pages=False,
)
CONFIRM = EXISTS._replace(ask=lambda engine, keys, _: OptionalVerbs(engine).confirm(keys))
"""`exists` of what a restart would find; counted with it."""
GET = EngineCall(
    "get",
    lambda engine, keys, slots: engine.get(keys, slots),
    _outcomes,
    (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED),
    Outcome.FAILED,
    moves_pages=True,
)
PUT = EngineCall(
    "put",
    lambda engine, keys, slots: engine.put(keys, slots),
    _outcomes,
    (Outcome.STORED, Outcome.EXISTS, Outcome.REJECTED, Outcome.FAILED),
    Outcome.REJECTED,
    moves_pages=True,
    repeatable=False,  # the failed put may be half written, and a full disk stays full
)
_CLAIM_ANSWERS = {Outcome.MISS, Outcome.EXISTS, Outcome.CLAIMED}
DELETE = EngineCall(
    "delete",
    lambda engine, keys, _: engine.delete(keys),
    _outcomes,
    (Outcome.HIT, Outcome.MISS, Outcome.REJECTED, Outcome.FAILED),
    Outcome.FAILED,
    moves_pages=False,
    updates_presence=False,
)
TOUCH = EngineCall(
    "touch",
    lambda engine, keys, _: OptionalVerbs(engine).touch(keys),
    lambda _, pages: [Outcome.HIT] * pages,
    (Outcome.HIT, Outcome.FAILED),
    Outcome.FAILED,
    moves_pages=False,
    updates_presence=False,
    repeatable=False,  # the next use reports it again
    feeds_breaker=False,  # an engine whose `touch` fails can still read and write
)
ENGINE_CALLS = (EXISTS, GET, PUT, DELETE, TOUCH)


def failed(outcomes: Sequence[Outcome] | None, pages: int) -> list[int]:
    """Indices of the pages that failed: all of them if `outcomes` is None, i.e. the engine gave no answer."""
    if outcomes is None:
        return list(range(pages))
    if Outcome.FAILED not in outcomes:  # checked in C; the usual case
        return []
    return [index for index, outcome in enumerate(outcomes) if outcome is Outcome.FAILED]


def _merged(
    outcomes: list[Outcome] | None, asked: Sequence[int], fresh: list[Outcome], pages: int
) -> list[Outcome]:
    """The outcomes of all pages after a retry of the pages `asked` gave the outcomes `fresh`."""
    if len(asked) == pages:
        return fresh
    merged = outcomes or [Outcome.FAILED] * pages
    for index, outcome in zip(asked, fresh, strict=True):
        merged[index] = outcome
    return merged


# Verification of reads: what the core checks, and what it trusts the engine with.


class ReadVerifier:
    """The checks that an engine leaves to the core.

    Args:
        capabilities: `checks` and `shared` decide which checks the core does.
        port: threads; pages are hashed in one.
    """

    def __init__(self, binding: PoolBinding, capabilities: Capabilities, port: Port) -> None:
        self._binding = binding
        self._capabilities = capabilities
        self._port = port

    async def verify(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """The outcomes of a read, with CORRUPT for hits that do not match what was sealed."""
        if Outcome.HIT not in outcomes:  # checked in C
            return outcomes
        if not self._capabilities.checks:
            return await self._port.run_blocking(
                partial(_check_each, self._binding.check, keys, slots, outcomes)
            )
        if self._capabilities.shared:  # other writers may have stored a page under a wrong key
            return _check_each(self._check_header, keys, slots, outcomes)
        return outcomes

    def _check_header(self, slot: int, key: ObjectKey) -> Outcome:
        """HIT if the header in `slot` is that of `key`. Takes microseconds, whatever the page size."""
        found = self._binding.identify(self._binding.header(slot))
        return Outcome.HIT if found == key else Outcome.CORRUPT


def _check_each(
    check: Callable[[int, ObjectKey], Outcome],
    keys: Sequence[ObjectKey],
    slots: Sequence[int],
    outcomes: list[Outcome],
) -> list[Outcome]:
    return [
        check(slot, key) if outcome is Outcome.HIT else outcome
        for key, slot, outcome in zip(keys, slots, outcomes, strict=True)
    ]


# The guarded pool.

_IDENTITY = attrgetter("fingerprint", "pool", "shard")


@dataclass(slots=True, eq=False)
class _RunningCall:
    """An engine call in flight.

    Attributes:
        permit: released when the call ends or its deadline passes. Cancelling the caller does not release
            it, because the engine is still busy.
        answer: what the caller awaits; done before the call ends if the deadline passes first.
        late: the deadline has passed, so the result of the call is ignored.
    """

    kind: EngineCall
    pages: int
    slots: frozenset[int]
    started: float
    permit: ExitStack
    task: asyncio.Task[list[Outcome] | None]
    answer: asyncio.Future[list[Outcome]]
    timer: asyncio.TimerHandle | None = None
    late: bool = False


class GuardedPool:
    """One pool's engine, made safe to call.

    A call is split into engine calls. Each waits for a permit and then has its own deadline
    (`PoolLimits.deadline`). If the deadline passes or the caller is cancelled, the engine call keeps running
    and bytes may still move. `BatchResult.lingering` (after a cancellation: `lingering`) is done when they
    no longer do.

    Args:
        engine: the engine to guard; `aclose` closes it.
        binding: the pool's slots, for checks that the engine does not do.
        limits: deadlines and limits; the defaults if None.
        stage: of a chain of stores, for the log.
    """

    def __init__(
        self,
        engine: PoolEngine,
        binding: PoolBinding,
        port: Port,
        limits: PoolLimits | None = None,
        stage: str = "",
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._logged_as = f"{binding.pool} in stage {stage}" if stage else binding.pool
        self._port = port
        self._limits = limits or PoolLimits()
        self._capabilities = engine.capabilities
        self.touchable = OptionalVerbs(engine).evicts
        """Whether the engine wants `touch` calls."""
        self.claims = has_verb(engine, "claim")
        """Whether the engine knows what other processes are sending."""
        self._claiming_put = PUT._replace(ask=self._claim_and_put, answers=(*PUT.answers, Outcome.CLAIMED))
        self._refused: dict[ObjectKey, float] = {}
        """Pages that others have claimed, and since when we know that, the longest first."""
        self._verifier = ReadVerifier(binding, self._capabilities, port)
        self._identities = {(binding.fingerprint, binding.pool, binding.shard)}
        self._breaker = CircuitBreaker(self._limits.failures, self._limits.cooldown, port.now)
        self._pages = ConcurrencyLimit(self._capabilities.concurrency)
        self._lookups = ConcurrencyLimit(self._capabilities.concurrency)  # a question never waits for bytes
        self._presence = PresenceCache(self._limits, shared=self._capabilities.shared, now=port.now)
        self._calls: dict[_RunningCall, None] = {}  # in the order they began
        self._watchers: list[tuple[frozenset[int], asyncio.Future[None]]] = []
        self._failures = FailureLog(logger)
        self._told_open = False
        self._counters = {
            kind.name: CallCounters(binding.page_bytes if kind.moves_pages else 0) for kind in ENGINE_CALLS
        }
        write = OptionalVerbs(engine).label if has_verb(engine, "label") else None
        self._label = KeptLabel(write, self._logged_as, self._limits, port)
        self._closed = False
        self._engine_closed = False
        self._abandoned_calls = False
        self._on_unused: Callable[[frozenset[int]], object] | None = None

    @property
    def answering(self) -> bool:
        """Whether calls are made now: the pool is open, and its breaker closed."""
        return not self._closed and self._breaker.state is BreakerState.CLOSED

    @property
    def durable(self) -> bool:
        """Whether stored pages survive the end of this process."""
        return self._capabilities.durable

    @property
    def read_limits(self) -> tuple[int, int]:
        """The most concurrent reads, and the most pages of one."""
        calls = 1 if self._capabilities.immediate else self._capabilities.concurrency
        return calls, self._batch_size(GET)

    @property
    def object_pages(self) -> int:
        """The most pages that the engine keeps in one object."""
        return self._capabilities.object_pages

    async def exists(
        self, keys: Sequence[ObjectKey], *, fresh: bool = False, everywhere: bool = False
    ) -> BatchResult:
        """HIT, MISS, FAILED or TIMEOUT for each key.

        For a page of a shared engine that was seen recently the answer comes from memory, unless `fresh`. A
        page that was found damaged is a miss until it is stored again. `everywhere`: as `fresh`.

        Raises:
            UsageError: a key belongs to another pool.
            ClosedError: the pool is closed; every call may raise this.
        """
        kind = CONFIRM if (fresh := fresh or everywhere) else EXISTS
        if not self._presence:
            return await self._call(kind, keys, ())
        self._check_keys(keys)
        known = [self._presence.recall(key, damaged_only=fresh) for key in keys]
        asked = [key for key, outcome in zip(keys, known, strict=True) if outcome is None]
        answer = iter((await self._call(kind, asked, ())).outcomes)
        return BatchResult([next(answer) if outcome is None else outcome for outcome in known])

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """Read page `i` into `slots[i]`: HIT (verified), MISS, CORRUPT, FAILED or TIMEOUT.

        Raises:
            UsageError: a key belongs to another pool, or the numbers of keys and slots differ.
        """
        return await self._call(GET, keys, self._check_lengths(keys, slots))

    async def put(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], *, yields: bool = False
    ) -> BatchResult:
        """Store `slots[i]` as page `i`: STORED, EXISTS, REJECTED, FAILED, TIMEOUT or CLAIMED.

        Pages that were found damaged are deleted first: an engine may keep an existing page.

        Args:
            keys: the pages, in path order.
            slots: where they are.
            yields: leave to others what they are sending: CLAIMED. The caller shall put these pages again
                soon, to find them stored, or to send them if that takes `PoolLimits.claim_seconds`.

        Raises:
            UsageError: a key belongs to another pool, or the numbers of keys and slots differ.
        """
        slots = self._check_lengths(keys, slots)
        damaged = self._presence.damaged(keys)
        if damaged and Outcome.TIMEOUT in (await self._call(DELETE, damaged, ())).outcomes:
            return BatchResult([Outcome.REJECTED] * len(keys))  # the late delete could remove the new pages
        yields &= self.claims and not damaged
        batch = await self._call(self._claiming_put if yields else PUT, keys, slots)
        for index, outcome in enumerate(batch.outcomes) if damaged else ():
            if outcome is Outcome.EXISTS and keys[index] in damaged:
                batch.outcomes[index] = Outcome.REJECTED  # the delete failed: the damaged page is still there
        return batch

    async def _claim_and_put(
        self, engine: PoolEngine, keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> list[Outcome]:
        seconds, now = self._limits.claim_seconds, self._port.now()
        outcomes = list(await OptionalVerbs(engine).claim(keys, seconds))
        if len(outcomes) != len(keys) or not _CLAIM_ANSWERS.issuperset(outcomes):
            raise StorageError(f"{outcomes!r:.80} is no answer to a claim of {len(keys)} pages")
        mine = []
        for place, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            # A claim may be there for ever: its owner died, and the store's clock was set back.
            if outcome is Outcome.CLAIMED and now - self._refused.setdefault(key, now) < seconds:
                continue
            self._refused.pop(key, None)
            if outcome is not Outcome.EXISTS:
                mine.append(place)
        while len(self._refused) > _MOST_REFUSED:  # pages that were evicted before they were put again
            del self._refused[next(iter(self._refused))]
        if mine:
            sent = await engine.put([keys[place] for place in mine], [slots[place] for place in mine])
            outcomes = _merged(outcomes, mine, sent, len(keys))
        return outcomes

    def repaired(self, keys: Sequence[ObjectKey]) -> None:
        """Another rank stores these pages: ask the engine for them again, also if they were found damaged."""
        self._presence.repaired(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> BatchResult:
        """Delete pages: HIT if the page existed, MISS if not, REJECTED, FAILED or TIMEOUT.

        Raises:
            UsageError: a key belongs to another pool.
        """
        batch = await self._call(DELETE, keys, ())
        self._presence.forget(keys)
        return batch

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Tell the engine that pages were used in memory, in this order, the last one most recently.

        Does nothing if the engine has no `touch`, while the breaker is not closed, or while an earlier touch
        is late. Failures are counted and logged; they are not raised and do not open the breaker.

        Raises:
            UsageError: a key belongs to another pool.
        """
        if self.touchable:
            await self._call(TOUCH, keys, ())
        else:
            self._check_keys(keys)

    def labelled(self, label: Callable[[float], bytes]) -> None:
        """Keep a label beside the pool's pages, and renew it while the pool is used.

        Args:
            label: makes it, for the seconds that it holds.
        """
        self._label.begin(label)

    def renew_label(self) -> None:
        """Write the label with the next call: the store may have lost it."""
        self._label.due_now()

    async def leaving(self, pages: int) -> list[ObjectKey]:
        """What the engine would evict to take `pages` more pages, of any pool; nothing if it does not say."""
        try:
            call = OptionalVerbs(self._engine).leaving(pages)
            return list(await with_deadline(call, self._limits.deadline, "leaving"))
        except Exception as error:  # noqa: BLE001 - the boundary to the backend's engine
            message = "pool %s: leaving of %d pages failed: %r"
            self._failures.warning("leaving", message, self._logged_as, pages, error, pages=pages)
            return []

    async def clear(self) -> int:
        """Delete every page of this pool, fingerprint and shard; returns how many there were.

        Raises:
            StorageError: the engine failed, or did not answer within `PoolLimits.clearing` seconds.
            ClosedError: the pool was closed before the engine answered.
        """
        self._check_keys(())
        try:
            gone = await with_deadline(self._engine.clear(), self._limits.clearing, "clear")
        except Exception as error:
            if self._closed:  # during the call, which `aclose` does not wait for: not the engine's fault
                raise ClosedError(f"storage of pool {self._binding.pool!r} was closed") from error
            raise StorageError(f"pool {self._binding.pool!r} could not be cleared: {error!r}") from error
        finally:
            self._presence.invalidate()  # only now: concurrent calls may have learnt of pages that are gone
        if not isinstance(gone, int) or gone < 0:
            raise StorageError(f"pool {self._binding.pool!r}: {gone!r} is no answer to clear, but a count is")
        self._presence.clear()
        return gone

    def lingering(self, slots: Sequence[int]) -> asyncio.Future[None] | None:
        """A future that is done when no engine call can touch `slots` any more; None if none can now.

        It is cancelled if the pool is closed first: the slots are then never safe to reuse. If the pool is
        retired first, that holds for slots that a read may still write to, until `retire` says otherwise.
        """
        wanted = frozenset(slots)
        if not self._in_use(wanted):
            return None
        free = asyncio.get_running_loop().create_future()
        if self._abandoned_calls or self._may_be_written(wanted):
            free.cancel()
        else:
            self._watchers.append((wanted, free))
        return free

    def statistics(self) -> PoolStatistics:
        counts = {name: tally.snapshot() for name, tally in self._counters.items()}
        return PoolStatistics(
            pool=self._binding.pool,
            running=len(self._calls),
            lingering=self._lingering,
            breaker=self._breaker.state,
            opened=self._breaker.opened,
            known=self._presence.statistics(),
            full=OptionalVerbs(self._engine).full,
            shed=0,
            **counts,
        )

    async def stop(self) -> None:
        """Refuse further calls, and wait for running ones, for a limited time."""
        self._closed = True
        await self._label.wait_written()
        await self._wait_for_calls()

    def retire(self, on_unused: Callable[[frozenset[int]], object] | None) -> None:
        """After `stop`: a call that has not ended is late now, and runs on, until `aclose` gives it up.

        Args:
            on_unused: called with the slots of such a read when it has ended: no call writes to them now. Who
                waits for them otherwise (`lingering`) is told at once that this may last; not if it is None.
        """
        for call in [call for call in self._calls if not call.late]:
            self._deadline_passed(call)
        self._on_unused = on_unused
        unsafe = [free for wanted, free in self._watchers if self._may_be_written(wanted)]
        for free in unsafe:
            free.cancel()
        self._watchers = [pair for pair in self._watchers if not pair[1].done()]

    def used(self, slots: frozenset[int]) -> frozenset[int]:
        """Those of `slots` that a running call uses."""
        return slots.intersection(frozenset().union(*(call.slots for call in self._calls)))

    def _may_be_written(self, slots: frozenset[int]) -> bool:
        """Whether the pool is retired, and a read that has not ended uses some of the slots."""
        reads = (call for call in self._calls if call.kind is GET)
        return self._on_unused is not None and any(not slots.isdisjoint(call.slots) for call in reads)

    async def aclose(self) -> frozenset[int]:
        """Wait for running calls, for a limited time, then close the engine; closing twice is harmless.

        Returns:
            Slots that the engine may still touch because a call did not end in time; usually none.
        """
        await self.stop()
        for call in self._calls:
            call.task.cancel()
        await self._wait_for_calls()
        for call in [call for call in self._calls if call.task.done()]:
            self._call_ended(call, call.task)  # its done callback has not run yet
        self._abandoned_calls = True  # only now: slots of calls that ended while `aclose` waited are safe
        for _, free in self._watchers:
            free.cancel()
        self._watchers.clear()
        await self.close_engine()
        return frozenset().union(*(call.slots for call in self._calls))

    async def close_engine(self) -> None:
        """Close the engine, once."""
        if not self._engine_closed:
            await close(self._engine, self._limits.closing, f"the engine of pool {self._binding.pool!r}")
            self._engine_closed = True

    async def _wait_for_calls(self) -> None:
        tasks = [call.task for call in self._calls if not call.task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._limits.closing)

    def _check_lengths(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> Sequence[int]:
        if len(keys) != len(slots):
            raise UsageError(f"pool {self._binding.pool!r}: {len(keys)} keys for {len(slots)} slots")
        return slots

    def _check_keys(self, keys: Sequence[ObjectKey]) -> None:
        if self._closed:
            raise ClosedError(f"storage of pool {self._binding.pool!r} is closed")
        if set(map(_IDENTITY, keys)) <= self._identities:
            return
        foreign_key = next(key for key in keys if _IDENTITY(key) not in self._identities)
        pool, shard = self._binding.pool, self._binding.shard
        raise UsageError(f"{foreign_key.text()} is no page of pool {pool!r}, shard {shard!r}")

    async def _call(self, kind: EngineCall, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """Call the engine in batches, and return the outcomes of all pages."""
        self._check_keys(keys)
        if self.answering:
            self._label.renew()
        cuts = self._batches(kind, keys)
        immediate = self._capabilities.immediate
        # Puts have no deadline here: no request waits for them, and the bytes in flight bound them.
        deadline = SlidingDeadline(None if kind.is_put else self._limits.deadline)
        outcomes: list[Outcome] = []
        if len(cuts) > 1 and not immediate and kind is not TOUCH:  # a touch reports an order
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._call_engine(kind, keys[c], slots[c], deadline)) for c in cuts
                ]
            outcomes = [outcome for task in tasks for outcome in task.result()]
        else:
            for cut in cuts:
                if outcomes and immediate:
                    await asyncio.sleep(0)  # let other tasks run: the engine copies on the loop
                outcomes += await self._call_engine(kind, keys[cut], slots[cut], deadline)
        batch = BatchResult(outcomes, self.lingering(slots))
        if kind.updates_presence:
            self._presence.learn(keys, batch)
        return batch

    def _batches(self, kind: EngineCall, keys: Sequence[ObjectKey]) -> list[slice]:
        """The keys of each engine call. A call ends where an object does, if the next one may not fit."""
        step = self._batch_size(kind)
        if self.object_pages == 1 or not kind.moves_pages:
            return [slice(start, start + step) for start in range(0, len(keys), step)]
        sizes = [len(list(pages)) for _, pages in groupby(keys, self._capabilities.object_of)]
        cuts, start, stop = list[slice](), 0, 0
        for size in sizes:
            if start < stop and stop + size > start + step:
                cuts.append(slice(start, stop))
                start = stop
            stop += size
            while stop > start + step:
                cuts.append(slice(start, start + step))
                start += step
        return [*cuts, slice(start, stop)] if start < stop else cuts

    def _batch_size(self, kind: EngineCall) -> int:
        """Most keys of one engine call."""
        if not kind.moves_pages:
            return self._capabilities.batch_keys
        pages = self._limits.batch_bytes // self._binding.slot_bytes
        return max(1, min(self._capabilities.batch_pages, pages))

    async def _call_engine(
        self, kind: EngineCall, keys: Sequence[ObjectKey], slots: Sequence[int], deadline: SlidingDeadline
    ) -> list[Outcome]:
        """Make one engine call: wait for a permit, run it in its own task, answer by the deadline."""
        if self._capabilities.immediate:  # it never suspends: no permit, no task, no deadline
            if not self._may_call(kind):
                return self._reject(kind, len(keys), kind.refused)
            started = self._port.now()
            return self._record(kind, len(keys), await self._attempt(kind, keys, slots), started)
        try:
            # A touch does not queue with the puts: it must reach the engine before them.
            lane = self._lookups if kind.is_lookup else self._pages
            acquired = await lane.acquire(deadline, put=kind.is_put)
        except TimeoutError:  # other calls kept the engine busy: not its failure
            return self._reject(kind, len(keys), Outcome.TIMEOUT)
        with acquired as permit:
            if self._hangs(kind) or not self._may_call(kind):
                return self._reject(kind, len(keys), kind.refused)
            call = self._start_call(kind, keys, slots, permit.pop_all())
        outcomes = await call.answer
        if not call.late:
            deadline.renew()
        return outcomes

    def _hangs(self, kind: EngineCall) -> bool:
        """Whether the engine is stuck: the lane of `kind` has `concurrency` late calls, or the pool is
        closed."""
        lookup = kind.is_lookup
        late = sum(
            call.late for call in self._calls if call.kind.feeds_breaker and call.kind.is_lookup is lookup
        )
        return self._closed or late >= self._capabilities.concurrency

    def _may_call(self, kind: EngineCall) -> bool:
        """Whether the breaker allows a call.

        A call that does not feed the breaker cannot be the trial of a half-open one. It does not start while
        another of its kind is late either, because it would take a permit from other calls.
        """
        if kind.feeds_breaker:
            return self._breaker.allow()
        late = any(call.late for call in self._calls if call.kind is kind)
        return self._breaker.state is BreakerState.CLOSED and not late

    @property
    def _lingering(self) -> int:
        """Number of running calls without a waiter: late ones, and those whose caller was cancelled."""
        return sum(call.answer.done() for call in self._calls)

    def _reject(self, kind: EngineCall, pages: int, outcome: Outcome) -> list[Outcome]:
        """Count and return the outcomes of pages that the engine is not asked for."""
        self._counters[kind.name].count_refused({outcome: pages})
        return [outcome] * pages

    def _start_call(
        self, kind: EngineCall, keys: Sequence[ObjectKey], slots: Sequence[int], permit: ExitStack
    ) -> _RunningCall:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._attempt(kind, keys, slots), name=f"storage-{kind.name}")
        answer = loop.create_future()
        call = _RunningCall(kind, len(keys), frozenset(slots), self._port.now(), permit, task, answer)
        call.timer = loop.call_later(self._limits.deadline, self._deadline_passed, call)
        self._calls[call] = None
        task.add_done_callback(partial(self._call_ended, call))
        return call

    def _deadline_passed(self, call: _RunningCall) -> None:
        """Answer TIMEOUT to the caller, and let the engine call run on."""
        call.late = True
        if call.timer is not None:
            call.timer.cancel()
        if call.kind.feeds_breaker:
            self._call_failed(call.kind, call.pages, f"took longer than {self._limits.deadline:g} s")
        tally = self._counters[call.kind.name]
        tally.late += 1
        tally.count_answered({Outcome.TIMEOUT: call.pages}, self._port.now() - call.started)
        if not call.answer.done():
            call.answer.set_result([Outcome.TIMEOUT] * call.pages)
        call.permit.close()

    def _call_ended(self, call: _RunningCall, task: asyncio.Task[list[Outcome] | None]) -> None:
        if call not in self._calls:
            return  # `aclose` has handled it
        if call.timer is not None:
            call.timer.cancel()
        call.permit.close()
        if task.cancelled() and task.cancelling():  # by `aclose`; bytes may still move, so it stays
            if not call.answer.done():
                call.answer.set_result([Outcome.TIMEOUT] * call.pages)
            return
        self._calls.pop(call, None)
        error = failure(task)
        if error is not None:
            self._count_error(call.kind, call.pages, error)
        if not call.late:
            answer = task.result() if error is None else None
            outcomes = self._record(call.kind, call.pages, answer, call.started)
            if not call.answer.done():  # else its caller was cancelled
                call.answer.set_result(outcomes)
        self._notify_watchers()
        if self._on_unused is not None and call.kind is GET:
            self._on_unused(call.slots - self.used(call.slots))

    def _notify_watchers(self) -> None:
        """Complete the futures whose slots no call touches any more."""
        waiting = []
        for wanted, free in self._watchers:
            if self._in_use(wanted):
                waiting.append((wanted, free))
            elif not free.done():
                free.set_result(None)
        self._watchers = waiting

    def _in_use(self, slots: frozenset[int]) -> bool:
        return any(not slots.isdisjoint(call.slots) for call in self._calls)

    async def _attempt(
        self, kind: EngineCall, keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> list[Outcome] | None:
        """The engine's answer, verified; failed pages are retried if that is safe. None if the engine raised
        or gave an invalid answer."""
        until = self._port.now() + self._limits.deadline
        outcomes: list[Outcome] | None = None
        asked: Sequence[int] = range(len(keys))
        some, places = keys, slots
        for retry in range(1 + (self._limits.retries if kind.repeatable else 0)):
            if retry:
                asked = failed(outcomes, len(keys))
                if not asked or not self.answering or self._port.now() >= until:
                    break
                some, places = [keys[i] for i in asked], [slots[i] for i in asked if slots]
            try:
                call = kind.ask(self._engine, some, places)
                answer = run_immediate(call) if self._capabilities.immediate else await call
                fresh = kind.read(answer, len(some))
                kind.check(fresh, len(some))
                if kind is GET:
                    fresh = await self._verifier.verify(some, places, fresh)
            except Exception as error:  # noqa: BLE001 - the task boundary to the backend's engine
                self._count_error(kind, len(some), error)
                if retry:
                    break
                continue
            outcomes = _merged(outcomes, asked, fresh, len(keys))
        return outcomes

    def _count_error(self, kind: EngineCall, pages: int, error: BaseException) -> None:
        tally = self._counters[kind.name]
        level = logging.WARNING if kind.feeds_breaker or not tally.errors else logging.DEBUG
        tally.errors += 1
        message = "pool %s: %s of %d pages failed: %r"
        kind_of = (kind.name, type(error))
        self._failures.warning(
            kind_of, message, self._logged_as, kind.name, pages, error, pages=pages, level=level
        )

    def _record(
        self, kind: EngineCall, pages: int, answer: list[Outcome] | None, started: float
    ) -> list[Outcome]:
        """Report the result of a call to the breaker and the counters."""
        outcomes = answer if answer is not None else [Outcome.FAILED] * pages
        counts = kind.tally(outcomes)
        lost = counts.get(Outcome.FAILED, 0)
        if answer is not None and lost:  # the engine did not raise
            self._failures.warning(
                (kind.name, Outcome.FAILED),
                "pool %s: %s of %d pages failed, of %d: the engine answers 'failed', its log may say why",
                self._logged_as,
                kind.name,
                lost,
                pages,
                pages=lost,
            )
        if damaged := counts.get(Outcome.CORRUPT, 0):
            message = (
                "pool %s: %d of %d pages came back with other bytes than were written; they are not used"
            )
            self._failures.warning(Outcome.CORRUPT, message, self._logged_as, damaged, pages, pages=damaged)
        if kind.feeds_breaker and lost == pages:
            if not OptionalVerbs(self._engine).degraded:  # else the lost part alone is not asked
                self._call_failed(kind, pages, "failed")
        elif kind.feeds_breaker:
            self._call_succeeded(kind)
        self._counters[kind.name].count_answered(counts, self._port.now() - started)
        return outcomes

    def _call_failed(self, kind: EngineCall, pages: int, how: str) -> None:
        """Tell the breaker, and the log if it opens: once, then once a minute as long as trial calls fail."""
        before = self._breaker.opened
        self._breaker.failed()
        if self._breaker.opened > before:
            message = (
                "pool %s: storage is not asked now, its breaker is open: %s of %d pages %s; tried in %g s"
            )
            named, seconds = self._logged_as, self._limits.cooldown
            self._told_open |= self._failures.warning(
                BreakerState.OPEN, message, named, kind.name, pages, how, seconds, pages=pages
            )

    def _call_succeeded(self, kind: EngineCall) -> None:
        """Tell the breaker, and the log if it closes and the log said that it was open."""
        self._breaker.succeeded(weak=not kind.moves_pages)
        if self._told_open and self._breaker.state is BreakerState.CLOSED:
            self._told_open = False
            logger.warning("pool %s: storage answers, and is asked again", self._logged_as)

    def __repr__(self) -> str:
        return (
            f"<GuardedPool {self._binding.pool}: {len(self._calls)} running, "
            f"{self._lingering} lingering, breaker {self._breaker.state.value}>"
        )


# Opening.


async def open_guarded(
    backend: StorageBackend, binding: PoolBinding, port: Port, limits: PoolLimits, stage: str = ""
) -> GuardedPool:
    """Open the backend's engine for a pool and guard it. If that fails, the engine is closed.

    Args:
        limits: deadlines and limits; opening may take `opening` seconds.
        stage: of a chain of stores, for the log.

    Raises:
        StorageError: the backend cannot be used, took too long, raised, or did not return an engine.
    """
    what = f"storage {backend.name!r}: opening pool {binding.pool!r}"
    unused = f"an engine of pool {binding.pool!r} that is not used"
    on_unwanted = partial(close, seconds=limits.closing, what=unused)
    with as_storage_error(what):
        engine = await with_deadline(
            backend.open_pool(binding), limits.opening, what, on_unwanted=on_unwanted
        )
        try:
            return GuardedPool(engine, binding, port, limits, stage)
        except BaseException:
            await on_unwanted(engine)
            raise
