"""What the core wraps around every engine, so that none needs it: batches, turns, deadlines, a
breaker, checks, counts. A slow, failing, hanging or lying engine costs a miss, never more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

from asynchicache.errors import ClosedError, StorageError, UsageError
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
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.presence import PresenceCache
from asynchicache.storage.protocol import (
    Capabilities,
    PoolBinding,
    PoolEngine,
    StorageBackend,
    TouchableEngine,
)
from asynchicache.storage.statistics import CallCounters, PoolStatistics
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)


# The five kinds of call that an engine takes: how to ask, what may be answered.

Ask = Callable[[PoolEngine, Sequence[ObjectKey], Sequence[int]], Awaitable[object]]


class EngineCall(NamedTuple):
    """One kind of call.

    Attributes:
        name: the engine's method.
        ask: calls it; the slots are ignored where it takes none.
        read: makes outcomes of what it returned for so many pages.
        answers: outcomes that mean something.
        refused: the outcome of pages for which the engine was not asked.
        moves_pages: whether pages move between slots and storage.
        updates_presence: its outcomes say which pages are there.
        repeatable: asking again after a failure can do no harm.
        feeds_breaker: its failures open the breaker. Else it is only tried while the breaker is closed.
    """

    name: str
    ask: Ask
    read: Callable[[Any, int], list[Outcome]]
    answers: tuple[Outcome, ...]
    refused: Outcome
    moves_pages: bool
    updates_presence: bool = True
    repeatable: bool = True
    feeds_breaker: bool = True

    def tally(self, outcomes: list[Outcome]) -> Mapping[Outcome, int]:
        """How many pages came to which outcome."""
        # list.count compares identities in C; an Enum's hash, which a Counter needs, is Python code.
        return {outcome: outcomes.count(outcome) for outcome in self.answers}

    def check(self, outcomes: list[Outcome], pages: int) -> None:
        """
        Raises:
            StorageError: these are no answers, or not one a page.
        """
        if len(outcomes) != pages:
            raise StorageError(f"{len(outcomes)} outcomes for {pages} keys")
        if sum(map(outcomes.count, self.answers)) != pages:
            strange = next(outcome for outcome in outcomes if outcome not in self.answers)
            raise StorageError(f"{strange} is no answer to {self.name}")


def _outcomes(answer: Iterable[Outcome], _: int) -> list[Outcome]:
    return list(answer)


def _read_bits(answer: bytes | bytearray, _: int) -> list[Outcome]:
    hit, miss = Outcome.HIT, Outcome.MISS  # to look a member up costs more than all else a key does here
    return [hit if there else miss for there in _check_bits(answer)]


def _check_bits(answers: bytes | bytearray) -> bytes | bytearray:
    """
    Raises:
        StorageError: one is neither 0 nor 1: outcomes, say, all of which are true.
    """
    binary = isinstance(answers, bytes | bytearray)  # then it is looked at in C
    strange = answers.translate(None, b"\0\1") if binary else [bit for bit in answers if bit not in (0, 1)]
    if strange:
        raise StorageError(f"{strange[0]!r} is no answer to exists, which is 0 or 1")
    return answers


EXISTS = EngineCall(
    "exists",
    lambda engine, keys, _: engine.exists(keys),
    _read_bits,
    (Outcome.HIT, Outcome.MISS, Outcome.FAILED),
    Outcome.FAILED,
    moves_pages=False,
)
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
    repeatable=False,  # half of it may have been written, and a full disk gets no emptier
)
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
    lambda engine, keys, _: cast("TouchableEngine", engine).touch(keys),
    lambda _, pages: [Outcome.HIT] * pages,
    (Outcome.HIT, Outcome.FAILED),
    Outcome.FAILED,
    moves_pages=False,
    updates_presence=False,
    repeatable=False,  # the next use says it again
    feeds_breaker=False,  # an engine that cannot be told of uses can be read and written all the same
)
ENGINE_CALLS = (EXISTS, GET, PUT, DELETE, TOUCH)


def failed(outcomes: Sequence[Outcome] | None, pages: int) -> list[int]:
    """Numbers of the pages that failed; None is an engine that gave no answer."""
    if outcomes is None:
        return list(range(pages))
    if Outcome.FAILED not in outcomes:  # in C; nearly always so
        return []
    return [index for index, outcome in enumerate(outcomes) if outcome is Outcome.FAILED]


def _merged(
    outcomes: list[Outcome] | None, asked: Sequence[int], fresh: list[Outcome], pages: int
) -> list[Outcome]:
    """What is known of all pages after some were asked for, with their `fresh` outcomes."""
    if len(asked) == pages:
        return fresh
    merged = outcomes or [Outcome.FAILED] * pages
    for index, outcome in zip(asked, fresh, strict=True):
        merged[index] = outcome
    return merged


# What of a read is checked by the core, and what an engine is believed.


class ReadVerifier:
    """The checks that an engine leaves to the core.

    Args:
        binding: the pool's slots.
        capabilities: `checks` and `shared` say what the engine does itself.
        port: threads; a page is hashed in one.
    """

    def __init__(self, binding: PoolBinding, capabilities: Capabilities, port: Port) -> None:
        self._binding = binding
        self._capabilities = capabilities
        self._port = port

    async def verify(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], outcomes: list[Outcome]
    ) -> list[Outcome]:
        """The outcomes of a read; those of pages that are not what was sealed are CORRUPT."""
        if Outcome.HIT not in outcomes:  # in C
            return outcomes
        if not self._capabilities.checks:
            return await self._port.run_blocking(
                partial(_check_each, self._binding.check, keys, slots, outcomes)
            )
        if self._capabilities.shared:  # others write there too, under names and at places of their choice
            return _check_each(self._check_header, keys, slots, outcomes)
        return outcomes

    def _check_header(self, slot: int, key: ObjectKey) -> Outcome:
        """Whether the header in `slot` is that of `key`: some microseconds, whatever the size of the page."""
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


# The calls.

_IDENTITY = attrgetter("fingerprint", "pool", "shard")


@dataclass(slots=True, eq=False)
class _RunningCall:
    """One call of the engine that has not ended.

    Attributes:
        permit: ends with the call, or when its deadline has passed; not with its caller, because the engine
            is as busy as before.
        answer: what its caller waits for; done before the call has ended if the deadline came first.
        late: the deadline has passed; its end is no news.
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

    A call is cut into calls of the engine, each of which waits for its turn, and then has its deadline
    (`PoolLimits.deadline`). A cancelled caller, or one whose deadline has passed, leaves the engine's call
    running: bytes may still move. `BatchResult.lingering` (after a cancellation: `lingering`) tells when they
    no longer do.

    Args:
        engine: what is guarded; closed by `aclose`.
        binding: the pool's slots, for checks that the engine does not do.
        port: clock and threads.
        limits: patience; the defaults if None.
    """

    def __init__(
        self, engine: PoolEngine, binding: PoolBinding, port: Port, limits: PoolLimits | None = None
    ) -> None:
        self._engine = engine
        self._binding = binding
        self._port = port
        self._limits = limits or PoolLimits()
        self._capabilities = engine.capabilities
        self.touchable = isinstance(engine, TouchableEngine) and bool(getattr(engine, "evicts", True))
        """Whether the engine wants to be told of uses."""
        self._verifier = ReadVerifier(binding, self._capabilities, port)
        self._identities = {(binding.fingerprint, binding.pool, binding.shard)}
        self._breaker = CircuitBreaker(self._limits.failures, self._limits.cooldown, port.now)
        self._concurrency = ConcurrencyLimit(self._capabilities.concurrency)
        self._presence = PresenceCache(self._limits, shared=self._capabilities.shared, now=port.now)
        self._calls: set[_RunningCall] = set()
        self._watchers: list[tuple[frozenset[int], asyncio.Future[None]]] = []
        self._counters = {
            kind.name: CallCounters(binding.page_bytes if kind.moves_pages else 0) for kind in ENGINE_CALLS
        }
        self._closed = False
        self._abandoned_calls = False

    async def exists(self, keys: Sequence[ObjectKey], *, fresh: bool = False) -> BatchResult:
        """HIT, MISS, FAILED or TIMEOUT for each key.

        What a shared engine was seen to have lately, it is not asked for again, unless the answer is to be
        `fresh`; a page that was found damaged is a miss until it is written anew.

        Raises:
            UsageError: a key is of another pool.
            ClosedError: the pool is closed; as all calls.
        """
        if not self._presence:
            return await self._call(EXISTS, keys, ())
        self._check_keys(keys)
        known = [self._presence.recall(key, damaged_only=fresh) for key in keys]
        asked = [key for key, outcome in zip(keys, known, strict=True) if outcome is None]
        answer = iter((await self._call(EXISTS, asked, ())).outcomes)
        return BatchResult([next(answer) if outcome is None else outcome for outcome in known])

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """Read page `i` into `slots[i]`: HIT, checked; MISS, CORRUPT, FAILED or TIMEOUT.

        Raises:
            UsageError: a key is of another pool, or there are not as many slots as keys.
        """
        return await self._call(GET, keys, self._check_lengths(keys, slots))

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """Store `slots[i]` as page `i`: STORED, EXISTS, REJECTED, FAILED or TIMEOUT.

        What was found damaged is deleted first: an engine may keep the page that it has.

        Raises:
            UsageError: a key is of another pool, or there are not as many slots as keys.
        """
        slots = self._check_lengths(keys, slots)
        damaged = self._presence.damaged(keys)
        if damaged and Outcome.TIMEOUT in (await self._call(DELETE, damaged, ())).outcomes:
            return BatchResult([Outcome.REJECTED] * len(keys))  # it might delete what is stored after it
        batch = await self._call(PUT, keys, slots)
        for index, outcome in enumerate(batch.outcomes) if damaged else ():
            if outcome is Outcome.EXISTS and keys[index] in damaged:
                batch.outcomes[index] = Outcome.REJECTED  # it could not be deleted: what is there is wrong
        return batch

    async def delete(self, keys: Sequence[ObjectKey]) -> BatchResult:
        """Forget pages: HIT if it was there, MISS if not, REJECTED, FAILED or TIMEOUT.

        Raises:
            UsageError: a key is of another pool.
        """
        batch = await self._call(DELETE, keys, ())
        self._presence.forget(keys)
        return batch

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Tell the engine that pages were used in memory, in this order, the last one most recently.

        Nothing happens if the engine cannot be told, while the breaker is not closed, or while a call before
        this one is late. Failures are counted and logged, and neither raised nor held against the engine.

        Raises:
            UsageError: a key is of another pool.
        """
        if self.touchable:
            await self._call(TOUCH, keys, ())
        else:
            self._check_keys(keys)

    async def clear(self) -> int:
        """Forget every page of this pool, of these weights and of this shard; how many there were.

        Raises:
            StorageError: the engine failed, or did not answer in `clearing` seconds.
            ClosedError: the pool was closed before it answered.
        """
        self._check_keys(())
        try:
            gone = await with_deadline(self._engine.clear(), self._limits.clearing, "clear")
        except Exception as error:
            if self._closed:  # under the call, which nothing waits for: that is no fault of the engine's
                raise ClosedError(f"storage of pool {self._binding.pool!r} was closed") from error
            raise StorageError(f"pool {self._binding.pool!r} could not be cleared: {error!r}") from error
        finally:
            self._presence.invalidate()  # only now: calls that ran meanwhile learnt of pages that are gone
        if not isinstance(gone, int) or gone < 0:
            raise StorageError(f"pool {self._binding.pool!r}: {gone!r} is no answer to clear, but a count is")
        self._presence.clear()
        return gone

    def lingering(self, slots: Sequence[int]) -> asyncio.Future[None] | None:
        """Done once no call of the engine can touch `slots` any more; None if none can now.

        Cancelled if the pool is closed before that: the slots are then never safe again.
        """
        wanted = frozenset(slots)
        if not self._in_use(wanted):
            return None
        free = asyncio.get_running_loop().create_future()
        if self._abandoned_calls:
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
            full=bool(getattr(self._engine, "full", False)),
            **counts,
        )

    async def aclose(self) -> frozenset[int]:
        """Wait for running calls, with a limit, then close the engine; twice is harmless.

        Returns:
            Slots that the engine may still touch, because a call did not end in time: usually none.
        """
        self._closed = True
        await self._wait_for_calls()
        for call in self._calls:
            call.task.cancel()
        await self._wait_for_calls()
        for call in [call for call in self._calls if call.task.done()]:
            self._call_ended(call, call.task)  # it ended in this turn of the loop, which has not told us yet
        self._abandoned_calls = True  # not before: what ends while `aclose` waits is safe like any other
        for _, free in self._watchers:
            free.cancel()
        self._watchers.clear()
        await close(self._engine, self._limits.closing, f"the engine of pool {self._binding.pool!r}")
        return frozenset().union(*(call.slots for call in self._calls))

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
        stranger = next(key for key in keys if _IDENTITY(key) not in self._identities)
        pool, shard = self._binding.pool, self._binding.shard
        raise UsageError(f"{stranger.text()} is no page of pool {pool!r}, shard {shard!r}")

    async def _call(self, kind: EngineCall, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """Calls of the engine, as many as it takes, and what became of all pages."""
        self._check_keys(keys)
        step = self._batch_size(kind)
        cuts = [slice(start, start + step) for start in range(0, len(keys), step)]
        immediate = self._capabilities.immediate
        # Nobody waits for puts, and what bounds them is the bytes that are under way.
        deadline = SlidingDeadline(None if kind is PUT else self._limits.deadline)
        outcomes: list[Outcome] = []
        if len(cuts) > 1 and not immediate and kind is not TOUCH:  # whose order is all that it says
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._call_engine(kind, keys[c], slots[c], deadline)) for c in cuts
                ]
            outcomes = [outcome for task in tasks for outcome in task.result()]
        else:
            for cut in cuts:
                if outcomes and immediate:
                    await asyncio.sleep(0)  # other tasks' turn: the engine copies on the loop
                outcomes += await self._call_engine(kind, keys[cut], slots[cut], deadline)
        batch = BatchResult(outcomes, self.lingering(slots))
        if kind.updates_presence:
            self._presence.learn(keys, batch)
        return batch

    def _batch_size(self, kind: EngineCall) -> int:
        """Most keys of one call of the engine."""
        if not kind.moves_pages:
            return self._capabilities.batch_keys
        pages = self._limits.batch_bytes // self._binding.slot_bytes
        return max(1, min(self._capabilities.batch_pages, pages))

    async def _call_engine(
        self, kind: EngineCall, keys: Sequence[ObjectKey], slots: Sequence[int], deadline: SlidingDeadline
    ) -> list[Outcome]:
        """One call of the engine: in its turn, in a task of its own, answered by its deadline."""
        if self._capabilities.immediate:  # it never suspends: no turn, no task, no deadline
            if not self._may_call(kind):
                return self._reject(kind, len(keys), kind.refused)
            started = self._port.now()
            return self._record(kind, len(keys), await self._attempt(kind, keys, slots), started)
        try:
            # A touch does not wait with the puts: it is to come before them.
            acquired = await self._concurrency.acquire(deadline, put=kind is PUT)
        except TimeoutError:  # others kept it busy: that is no failure of the engine's
            return self._reject(kind, len(keys), Outcome.TIMEOUT)
        with acquired as permit:
            if self._hangs() or not self._may_call(kind):
                return self._reject(kind, len(keys), kind.refused)
            call = self._start_call(kind, keys, slots, permit.pop_all())
        outcomes = await call.answer
        if not call.late:
            deadline.renew()
        return outcomes

    def _hangs(self) -> bool:
        """An engine that has as many late calls as it may have at once hangs in all of them."""
        late = sum(call.late for call in self._calls if call.kind.feeds_breaker)
        return self._closed or late >= self._capabilities.concurrency

    def _may_call(self, kind: EngineCall) -> bool:
        """Whether the breaker lets a call through. One whose end tells it nothing is no try of a half-open
        breaker, and not begun while one like it is late: it would take a turn from others."""
        if kind.feeds_breaker:
            return self._breaker.allow()
        late = any(call.late for call in self._calls if call.kind is kind)
        return self._breaker.state is BreakerState.CLOSED and not late

    @property
    def _lingering(self) -> int:
        """Calls that nobody waits for: late ones, and those whose caller was cancelled."""
        return sum(call.answer.done() for call in self._calls)

    def _reject(self, kind: EngineCall, pages: int, outcome: Outcome) -> list[Outcome]:
        """The outcome of pages for which the engine is not asked."""
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
        self._calls.add(call)
        task.add_done_callback(partial(self._call_ended, call))
        return call

    def _deadline_passed(self, call: _RunningCall) -> None:
        """The deadline has come: answer for the engine, and let its call run on."""
        call.late = True
        if call.kind.feeds_breaker:
            self._breaker.failed()
        tally = self._counters[call.kind.name]
        tally.late += 1
        tally.count_answered({Outcome.TIMEOUT: call.pages}, self._port.now() - call.started)
        if not call.answer.done():
            call.answer.set_result([Outcome.TIMEOUT] * call.pages)
        call.permit.close()

    def _call_ended(self, call: _RunningCall, task: asyncio.Task[list[Outcome] | None]) -> None:
        if call not in self._calls:
            return  # `aclose` was quicker
        if call.timer is not None:
            call.timer.cancel()
        call.permit.close()
        if task.cancelled() and self._closed:  # given up by `aclose`; bytes may still move, so it stays
            if not call.answer.done():
                call.answer.set_result([Outcome.TIMEOUT] * call.pages)
            return
        self._calls.discard(call)
        error = failure(task)
        if error is not None:
            self._count_error(call.kind, call.pages, error)
        if not call.late:
            answer = task.result() if error is None else None
            outcomes = self._record(call.kind, call.pages, answer, call.started)
            if not call.answer.done():  # else its caller was cancelled
                call.answer.set_result(outcomes)
        self._notify_watchers()

    def _notify_watchers(self) -> None:
        """Tell those whose slots are free now."""
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
        """The engine's answer, checked, with failures asked for again where that is safe; None if it raised,
        or answered nonsense."""
        until = self._port.now() + self._limits.deadline
        outcomes: list[Outcome] | None = None
        asked: Sequence[int] = range(len(keys))
        some, places = keys, slots
        for retry in range(1 + (self._limits.retries if kind.repeatable else 0)):
            if retry:
                asked = failed(outcomes, len(keys))
                if not asked or not self._may_retry or self._port.now() >= until:
                    break
                some, places = [keys[i] for i in asked], [slots[i] for i in asked if slots]
            try:
                call = kind.ask(self._engine, some, places)
                answer = run_immediate(call) if self._capabilities.immediate else await call
                fresh = kind.read(answer, len(some))
                kind.check(fresh, len(some))
                if kind is GET:
                    fresh = await self._verifier.verify(some, places, fresh)
            except Exception as error:  # noqa: BLE001 - the task boundary to a stranger's engine
                self._count_error(kind, len(some), error)
                if retry:
                    break
                continue
            outcomes = _merged(outcomes, asked, fresh, len(keys))
        return outcomes

    @property
    def _may_retry(self) -> bool:
        return not self._closed and self._breaker.state is BreakerState.CLOSED

    def _count_error(self, kind: EngineCall, pages: int, error: BaseException) -> None:
        tally = self._counters[kind.name]
        level = logging.WARNING if kind.feeds_breaker or not tally.errors else logging.DEBUG
        tally.errors += 1
        logger.log(level, "pool %s: %s of %d pages failed: %r", self._binding.pool, kind.name, pages, error)

    def _record(
        self, kind: EngineCall, pages: int, answer: list[Outcome] | None, started: float
    ) -> list[Outcome]:
        """Tell breaker and counters how a call ended."""
        outcomes = answer if answer is not None else [Outcome.FAILED] * pages
        counts = kind.tally(outcomes)
        if kind.feeds_breaker and counts.get(Outcome.FAILED, 0) == pages:
            self._breaker.failed()
        elif kind.feeds_breaker:
            self._breaker.succeeded(weak=not kind.moves_pages)
        self._counters[kind.name].count_answered(counts, self._port.now() - started)
        return outcomes

    def __repr__(self) -> str:
        return (
            f"<GuardedPool {self._binding.pool}: {len(self._calls)} running, "
            f"{self._lingering} lingering, breaker {self._breaker.state.value}>"
        )


# Opening.


async def open_guarded(
    backend: StorageBackend, binding: PoolBinding, port: Port, limits: PoolLimits
) -> GuardedPool:
    """The backend's engine for a pool, made safe to call; one that nobody will use is closed.

    Args:
        backend: where the pages are.
        binding: the pool.
        port: clock and threads.
        limits: patience with the backend; it has `opening` seconds.

    Raises:
        StorageError: the backend cannot be used, took too long, raised, or gave no engine.
    """
    what = f"storage {backend.name!r}: opening pool {binding.pool!r}"
    unused = f"an engine of pool {binding.pool!r} that nobody uses"
    on_unwanted = partial(close, seconds=limits.closing, what=unused)
    with as_storage_error(what):
        engine = await with_deadline(
            backend.open_pool(binding), limits.opening, what, on_unwanted=on_unwanted
        )
        try:
            return GuardedPool(engine, binding, port, limits)
        except BaseException:
            await on_unwanted(engine)
            raise
