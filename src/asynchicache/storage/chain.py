"""A chain of stores: a page is read from the nearest stage that has it, and written to each by a policy.

Each stage has a guard of its own, with its deadlines, breaker, limits and counters, so a stage that is down
costs the pages that only it has. A stage whose breaker is not closed is not waited for: it is tried beside
the calls, with a question.

Pages that move between stages (promoted, on their second hit, or leaving a full stage) wait in staging slots
of the chain, behind those of the pool, because the pool's own slots belong to the caller.

More than 900 lines: each call of a pool goes to stages that open, fail and come back, and give pages on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Annotated, ClassVar, Literal, TypeAlias, TypeVar, cast

from msgspec import Meta

from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import ObjectKey
from asynchicache.options import Options
from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.deadlines import close, joined
from asynchicache.storage.guard import ENGINE_CALLS, GuardedPool, open_guarded
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.presence import ExpiringKeys, PresenceStatistics
from asynchicache.storage.protocol import Capabilities, PoolBinding, PoolEngine, StorageBackend
from asynchicache.storage.staging import StagedCopy, StagingSlots
from asynchicache.storage.statistics import CallCounters, PoolStatistics
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_HELD_BACK_SECONDS = 1.0
"""How long a question to a farther stage holds back what nearer ones have answered."""

_QUEUED_BATCHES = 4
"""Batches that wait for a stage without a promise, as a multiple of its concurrent calls; it misses more."""

_READ_ORDER = (Outcome.HIT, Outcome.TIMEOUT, Outcome.CORRUPT, Outcome.FAILED, Outcome.MISS)
_WRITE_ORDER = (
    Outcome.TIMEOUT,
    Outcome.FAILED,
    Outcome.REJECTED,
    Outcome.CLAIMED,
    Outcome.STORED,
    Outcome.EXISTS,
)
_PROMISE_ORDER = (Outcome.TIMEOUT, Outcome.FAILED, Outcome.MISS, Outcome.HIT)
_DELETE_ORDER = (Outcome.TIMEOUT, Outcome.FAILED, Outcome.REJECTED, Outcome.HIT, Outcome.MISS)
"""The outcome of a page is the first of these that any of the stages gave."""

_TAKEN = (Outcome.STORED, Outcome.EXISTS)

T = TypeVar("T")
Promotion: TypeAlias = Literal["all", "second_hit", "none"]
StageName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{0,64}\Z")]


class StagePolicy(Options, frozen=True):
    """What one stage of a chain gets, and what it is trusted with.

    Attributes:
        write: `all`: every page; `second_hit`: pages that were read back from a nearer stage; `leaving`:
            pages that the next nearer stage is about to evict. Default: `all`.
        promote: pages that were read from a farther stage: `all`, `second_hit` (on the second read) or
            `none`. Default: `all`.
        durable: whether `durable()` waits for this stage, and is True only if it has the pages. Only with
            `write` `all`. Default: those stages whose engine is durable; if there are none, every stage that
            gets all pages.
        limits: deadlines, breaker and limits. Default: `storage_limits`.
    """

    subject: ClassVar[str] = "storage stage: option "

    write: Literal["all", "second_hit", "leaving"] = "all"
    promote: Promotion = "all"
    durable: bool | None = None
    limits: PoolLimits | None = None

    def check(self) -> None:
        if self.durable and self.write != "all":
            raise ConfigError(f"storage stage: durable needs write 'all', and it is {self.write!r}")


@dataclass(slots=True, eq=False)
class ChainStage:
    """One store of a chain.

    Attributes:
        name: in statistics.
        open: opens the store, which the chain closes; called again later if the store is not there.
        policy: what it gets.
        backend: the open store; None until it is open.
        detached: it is not used, and not tried.
        late: questions, of all pools, whose answers were not waited for, and have not come.
    """

    name: str
    open: Callable[[], StorageBackend]
    policy: StagePolicy = field(default_factory=StagePolicy)
    backend: StorageBackend | None = None
    detached: bool = False
    late: int = 0


class StorageChain:
    """Several stores as one, the nearest first. See `open_stored`.

    Stages that are detached are not opened.

    Raises:
        ConfigError: fewer than two stages, a name twice, or policies that do not fit together.
        StorageError: no store that is used can be opened.
    """

    def __init__(self, stages: Sequence[ChainStage], port: Port) -> None:
        self.name = "+".join(stage.name for stage in stages)
        self.stages = tuple(stages)
        self.port = port
        self._opening = asyncio.Lock()
        self.turns = [asyncio.Lock() for _ in stages]
        """By stage: who stores there, while what leaves it goes to the next one."""
        self.pools: dict[tuple[bytes, str, str], ChainedPool] = {}
        _check_stages(self.stages)
        used = [stage for stage in self.stages if not stage.detached]
        failures = [error for stage in used if (error := _opened(stage)) is not None]
        if failures and len(failures) == len(used):
            raise failures[0]

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        """A pool as an engine, for code that has its own guard around engines."""
        async with self._opening:
            pool = self._pool_of(binding)
            if pool is None:
                pool = await self.open_chained(binding, PoolLimits())
            elif pool.binding is not binding:
                raise StorageError(f"pool {binding.pool!r} is open already; close that engine first")
            return pool.engine

    def _pool_of(self, binding: PoolBinding) -> ChainedPool | None:
        pool = self.pools.get((binding.fingerprint, binding.pool, binding.shard))
        return None if pool is None or pool.closed else pool

    async def open_chained(self, binding: PoolBinding, limits: PoolLimits) -> ChainedPool:
        """Open a pool in every stage that can be opened now; the others follow when they can.

        Raises:
            ConfigError: a stage cannot take this pool, whenever it is tried.
            StorageError: no stage can be opened.
        """
        pool = ChainedPool(self, binding, self.port, limits)
        try:
            await pool.open()
        except BaseException:
            await pool.aclose()
            raise
        self.pools[binding.fingerprint, binding.pool, binding.shard] = pool
        return pool

    def stage(self, name: str) -> ChainStage:
        """
        Raises:
            ConfigError: there is no such stage.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"there is no storage stage {name!r}, but {[stage.name for stage in self.stages]}")

    async def detach(self, name: str) -> bool:
        """Go on without a stage, whose pages are missed and which promises nothing; False if it is detached.

        Raises:
            ConfigError: there is no such stage.
        """
        stage = self.stage(name)
        if stage.detached:
            return False
        stage.detached = True
        await asyncio.gather(*(pool.detach(stage) for pool in self.pools.values() if not pool.closed))
        backend, stage.backend = stage.backend, None
        if backend is not None:
            await close(backend, PoolLimits().closing, f"storage {name!r}")
        return True

    async def attach(self, name: str) -> None:
        """Use a detached stage again; one that cannot be opened is tried again later.

        Raises:
            ConfigError: there is no such stage.
        """
        stage = self.stage(name)
        if stage.detached:
            stage.detached = False
            await asyncio.gather(*(pool.attach(stage) for pool in self.pools.values() if not pool.closed))

    async def aclose(self) -> None:
        """Close every pool and store; closing twice is harmless."""
        for pool in self.pools.values():
            await pool.aclose()
        for stage in self.stages:
            if stage.backend is not None:
                await close(stage.backend, PoolLimits().closing, f"storage {stage.name!r}")


def in_each_store(
    storage: StorageBackend, wrap: Callable[[StorageBackend], StorageBackend], port: Port
) -> StorageBackend:
    """A store, or each stage of a chain, in a wrapper."""
    if not isinstance(storage, StorageChain):
        return wrap(storage)
    return StorageChain([_wrapped(stage, wrap) for stage in storage.stages], port)


def _wrapped(stage: ChainStage, wrap: Callable[[StorageBackend], StorageBackend]) -> ChainStage:
    inner = None if stage.backend is None else wrap(stage.backend)
    return ChainStage(stage.name, lambda: wrap(stage.open()), stage.policy, inner, stage.detached)


def _check_stages(stages: Sequence[ChainStage]) -> None:
    names = [stage.name for stage in stages]
    if len(names) < 2:
        raise ConfigError(f"a chain of stores has two stages or more, and {names} are {len(names)}")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"storage stage {name!r} is there twice; give each stage a name of its own")
    writes = [stage.policy.write for stage in stages]
    if writes[0] != "all":
        raise ConfigError(
            f"storage stage {names[0]!r}: write {writes[0]!r} takes pages from a nearer stage, and this is "
            "the nearest; it must be 'all'"
        )
    if all(stage.policy.durable is False for stage in stages if stage.policy.write == "all"):
        raise ConfigError(f"storage stages {names}: one that gets all pages must not be durable=false")


def _opened(stage: ChainStage) -> StorageError | None:
    """Open a store that is not open; returns why it cannot be."""
    if stage.backend is None:
        try:
            stage.backend = stage.open()
        except StorageError as error:
            logger.warning("storage stage %s cannot be opened, and is tried again: %s", stage.name, error)
            return error
    return None


@dataclass(slots=True, eq=False)
class _PoolStage:
    """One stage of one pool.

    Attributes:
        guard: the open pool; None while it cannot be opened.
        reaches_staging: whether its engine can use staging slots.
        tried: when it was last opened, or tried to.
        trial: tries a stage that is down.
        queued: pages of writes that have not ended.
        shed: pages that it did not get from other stages, or because it was behind.
    """

    stage: ChainStage
    limits: PoolLimits
    guard: GuardedPool | None = None
    reaches_staging: bool = True
    tried: float = 0.0
    trial: asyncio.Task[None] | None = None
    queued: int = 0
    shed: int = 0

    @property
    def policy(self) -> StagePolicy:
        return self.stage.policy

    @property
    def ready(self) -> GuardedPool | None:
        """The pool, if calls are made now."""
        return self.guard if self.guard is not None and self.guard.answering else None

    @property
    def carried_to(self) -> GuardedPool | None:
        """The pool, if it takes pages from staging slots now."""
        return self.ready if self.reaches_staging else None

    def answered(self, _: asyncio.Task[Sequence[Outcome]]) -> None:
        """A late question has its answer."""
        self.stage.late -= 1

    def statistics(self, pool: str) -> PoolStatistics:
        if self.guard is not None:
            return replace(self.guard.statistics(), shed=self.shed)
        return PoolStatistics(
            pool=pool,
            running=0,
            lingering=0,
            breaker=BreakerState.OPEN,
            opened=1,
            known=PresenceStatistics(0, 0, 0),
            full=False,
            shed=self.shed,
            **{kind.name: CallCounters(0).snapshot() for kind in ENGINE_CALLS},
        )


class ChainedPool:
    """One pool in all stages of a chain; it has the calls of a `GuardedPool`.

    Attributes:
        engine: the pool as an engine.
        closed: whether calls are refused.

    Args:
        chain: its stages.
        limits: those of stages that have none of their own.
    """

    def __init__(self, chain: StorageChain, binding: PoolBinding, port: Port, limits: PoolLimits) -> None:
        self.binding = binding
        self.engine = ChainEngine(self)
        self.closed = False
        self.chain = chain
        self._binding = cast("SlotBinding", binding)
        self.port = port
        self._limits = limits
        self.staged = StagingSlots(self._binding)
        self._stages = [_PoolStage(stage, stage.policy.limits or limits) for stage in chain.stages]
        self._counters = {
            kind.name: CallCounters(binding.page_bytes if kind.moves_pages else 0) for kind in ENGINE_CALLS
        }
        self._seen = ExpiringKeys(limits.known_pages, float("inf"), port.now)
        self._owed = [ExpiringKeys(limits.known_pages, float("inf"), port.now) for _ in chain.stages]
        self._carrying: set[ObjectKey] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._failures = FailureLog(logger)
        self._clearing = 0
        self._former: list[GuardedPool] = []  # of detached stages
        self._label: Callable[[float], bytes] | None = None

    # Opening, and trying again

    async def open(self) -> None:
        """Open every stage that is not detached.

        Raises:
            StorageError: none can be opened; the first error.
        """
        used = [stage for stage in self._stages if not stage.stage.detached]
        failures = [error for stage in used if (error := await self._open(stage)) is not None]
        if failures and len(failures) == len(used):
            raise failures[0]

    async def detach(self, stage: ChainStage) -> None:
        """End the use of a stage. Its calls that have not ended run on, and keep their slots."""
        for one in self._stages:
            if one.stage is stage and one.guard is not None:
                guard, one.guard = one.guard, None
                self._former.append(guard)
                await guard.stop()
                await guard.close_engine()

    async def attach(self, stage: ChainStage) -> None:
        """Use a stage again."""
        for one in self._stages:
            if one.stage is stage and one.guard is None:
                await self._open(one)

    async def _open(self, stage: _PoolStage) -> StorageError | None:
        """Open a stage; returns why it cannot be."""
        stage.tried = self.port.now()
        error = _opened(stage.stage)
        if stage.stage.backend is None:
            return error
        binding = self._binding.over(self.staged)
        binding.regions = partial(self._all_memory, stage)
        try:
            store, name = stage.stage.backend, stage.stage.name
            guard = await open_guarded(store, binding, self.port, stage.limits, name)
        except StorageError as failed:
            message = "pool %s: storage stage %s cannot be opened, and is tried again: %s"
            self._failures.warning(stage.stage.name, message, self._binding.pool, stage.stage.name, failed)
            return failed
        except ClosedError as closed:
            if stage.stage.backend is store:
                raise
            return StorageError(f"storage stage {name!r} was detached: {closed}")
        if self.closed:
            await guard.aclose()
        if stage.stage.backend is not store:  # it was detached meanwhile, and may be attached again
            await guard.aclose()
            return StorageError(f"storage stage {name!r} was detached")
        if stage.policy.write == "leaving" and guard.object_pages > 1:
            # An engine that gives pages away knows their digests, but not where they lie on their paths.
            await guard.aclose()
            raise ConfigError(
                f"storage stage {stage.stage.name!r}: write='leaving' moves single pages, and this store has "
                f"up to {guard.object_pages} pages in one object: set its option object_pages = 1"
            )
        stage.guard = guard
        if self._label is not None:
            guard.labelled(self._label)
        return None

    def labelled(self, label: Callable[[float], bytes]) -> None:
        """As `GuardedPool.labelled`, in every stage."""
        self._label = label
        for guard in self._guards():
            guard.labelled(label)

    def renew_label(self) -> None:
        """As `GuardedPool.renew_label`, in every stage."""
        for guard in self._guards():
            guard.renew_label()

    def _all_memory(self, stage: _PoolStage) -> tuple[memoryview, memoryview]:
        """An engine that asks for all memory at once does not reach staging slots."""
        stage.reaches_staging = False
        return self._binding.regions()

    def _try(self, stage: _PoolStage, key: ObjectKey) -> None:
        """Try a stage that is down, beside the calls: they do not wait for it."""
        if self.closed or stage.trial is not None or stage.stage.detached:
            return
        if stage.guard is not None:
            call = self._ask_again(stage.guard, key)
        elif self.port.now() - stage.tried >= stage.limits.cooldown:
            call = self._open_again(stage)
        else:
            return
        stage.trial = self._spawn(call)
        stage.trial.add_done_callback(partial(self._tried, stage))

    @staticmethod
    async def _ask_again(guard: GuardedPool, key: ObjectKey) -> None:
        with suppress(ClosedError):
            await guard.exists([key], fresh=True)  # the breaker lets it through after its cooldown

    async def _open_again(self, stage: _PoolStage) -> None:
        if await self._open(stage) is None:
            logger.warning("pool %s: storage stage %s is open now", self._binding.pool, stage.stage.name)

    @staticmethod
    def _tried(stage: _PoolStage, _: asyncio.Task[None]) -> None:
        stage.trial = None

    def _spawn(self, call: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(call, name="storage-chain")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("pool %s: a chain of stores failed", self._binding.pool, exc_info=error)

    # What a chain is asked

    @property
    def durable(self) -> bool:
        """Whether what `put` stores survives the end of this process."""
        guards = [self._stages[number].guard for number in self._promising()]
        return all(guard is not None and guard.durable for guard in guards)

    @property
    def touchable(self) -> bool:
        """Whether any stage wants `touch` calls."""
        return any(guard.touchable for guard in self._guards())

    @property
    def claims(self) -> bool:
        """Whether a stage knows what other processes are sending."""
        return any(guard.claims for guard in self._guards())

    @property
    def object_pages(self) -> int:
        """The most pages that any stage keeps in one object."""
        return max((guard.object_pages for guard in self._guards()), default=1)

    @property
    def read_limits(self) -> tuple[int, int]:
        """The most concurrent reads, and the most pages of one."""
        limits = [guard.read_limits for guard in self._guards()]
        if not limits:
            return 1, 1
        return max(calls for calls, _ in limits), min(pages for _, pages in limits)

    def _guards(self) -> list[GuardedPool]:
        return [stage.guard for stage in self._stages if stage.guard is not None]

    def _every_guard(self) -> list[GuardedPool]:
        """Also those of detached stages, whose calls may go on."""
        return [*self._guards(), *self._former]

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"storage of pool {self._binding.pool!r} is closed")

    async def exists(
        self, keys: Sequence[ObjectKey], *, fresh: bool = False, everywhere: bool = False
    ) -> BatchResult:
        """HIT if any stage has the page, else MISS, or FAILED or TIMEOUT if a stage gave no answer.

        If `fresh`, HIT only if every stage has it that promises to (`StagePolicy.durable`). If `everywhere`,
        HIT only if a stage has it too that promises nothing, but lies behind one that does, gets all pages
        and answers: no read brings back there what it has lost.
        """
        self._check_open()
        started = self.port.now()
        if everywhere:
            outcomes = await self._everywhere(keys)
        else:
            outcomes = await (self._promised(keys) if fresh else self._anywhere(keys))
        return self._counted("exists", BatchResult(outcomes), started)

    async def _anywhere(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        outcomes, left = [Outcome.MISS] * len(keys), list(range(len(keys)))
        for number in range(len(self._stages)):
            if left:
                answers = await self._heard(number, [keys[place] for place in left])
                left = _merge(outcomes, left, answers)
        return outcomes

    async def _heard(self, number: int, keys: Sequence[ObjectKey]) -> Sequence[Outcome]:
        """As `_asked`, but TIMEOUT if a farther stage is late with an answer, to any pool: those of nearer
        stages wait meanwhile. Its guard still learns what comes, and when."""
        stage = self._stages[number]
        if not number:
            return await self._asked(stage, keys)
        asking = self._spawn(self._asked(stage, keys))
        await asyncio.wait([asking], timeout=0.0 if stage.stage.late else _HELD_BACK_SECONDS)
        if asking.done() and not asking.cancelled():
            return asking.result()
        stage.stage.late += 1
        asking.add_done_callback(stage.answered)
        return [Outcome.TIMEOUT] * len(keys)

    async def _asked(
        self, stage: _PoolStage, keys: Sequence[ObjectKey], *, fresh: bool = False
    ) -> Sequence[Outcome]:
        """Which pages a stage has; FAILED without waiting if it is down, and none if it is detached."""
        if stage.stage.detached:
            return [Outcome.MISS] * len(keys)
        guard = stage.ready
        if guard is None:
            self._try(stage, keys[0])
        else:
            with suppress(ClosedError):
                return (await guard.exists(keys, fresh=fresh)).outcomes
        return [Outcome.FAILED] * len(keys)

    def _given_all(self) -> list[int]:
        """Numbers of the stages in use that get every page."""
        return [
            number
            for number, stage in enumerate(self._stages)
            if stage.policy.write == "all" and not stage.stage.detached
        ]

    def _promising(self) -> list[int]:
        """Numbers of the stages that `durable` counts on."""
        numbers = self._given_all()
        named = [number for number in numbers if self._promises(self._stages[number])]
        return named or [number for number in numbers if self._stages[number].policy.durable is None]

    @staticmethod
    def _promises(stage: _PoolStage) -> bool:
        if stage.policy.durable is not None:
            return stage.policy.durable
        return stage.guard is None or stage.guard.durable  # not open: it may be durable

    async def _promised(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        """Ask every stage that promises; what has left one for the next is there."""
        if not keys:
            return []
        found = await asyncio.gather(*(self._kept(number, keys) for number in self._promising()))
        if not found:  # all that promise are detached
            return [Outcome.MISS] * len(keys)
        return [min(outcomes, key=_PROMISE_ORDER.index) for outcomes in zip(*found, strict=True)]

    async def _everywhere(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        """As `_promised`, but MISS also where a stage behind one that promises says that it has not a page.
        If that gives no answer, it costs its own hits, and no rewrite."""
        promising = self._promising()
        # Nearer ones may evict what the others keep, and get it back with `promote`.
        behind = [number for number in self._given_all() if number > min(promising, default=number)]
        others = [number for number in behind if number not in promising]
        outcomes, *found = await asyncio.gather(
            self._promised(keys), *(self._kept(number, keys) for number in others)
        )
        for answers in found:
            for place, answer in enumerate(answers):
                if answer is Outcome.MISS and outcomes[place] is Outcome.HIT:
                    outcomes[place] = Outcome.MISS
        return outcomes

    async def _kept(self, number: int, keys: Sequence[ObjectKey]) -> list[Outcome]:
        outcomes, left = [Outcome.MISS] * len(keys), list(range(len(keys)))
        for stage in self._stages[number:]:
            if left and (stage is self._stages[number] or stage.policy.write == "leaving"):
                answers = await self._asked(stage, [keys[place] for place in left], fresh=True)
                left = _merge(outcomes, left, answers)
            elif stage is not self._stages[number]:
                break
        return outcomes

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """Read each page from the nearest stage that has it; `sources` says which that was.

        A page that one stage loses or damages is read from the next. One that a stage is late with is not,
        because it may still write to the slot.
        """
        self._check_open()
        started, late = self.port.now(), list[asyncio.Future[None]]()
        outcomes, sources = [Outcome.MISS] * len(keys), bytearray(len(keys))
        left = list(range(len(keys)))
        for stage in self._stages:  # also those that nearer ones leave nothing to: pages may be owed to them
            if keys and stage.ready is None:
                self._try(stage, keys[0])
        for number, stage in enumerate(self._stages):
            if not left:
                break
            there = left
            if number + 1 < len(self._stages):  # a read that hangs would cost pages that a farther one has
                answers = await self._heard(number, [keys[place] for place in left])
                there = [place for place, one in zip(left, answers, strict=True) if one is Outcome.HIT]
                _merge(outcomes, left, [Outcome.MISS if one is Outcome.HIT else one for one in answers])
            batch = await self._read(stage, [keys[place] for place in there], [slots[p] for p in there])
            lost = _merge(outcomes, there, batch.outcomes)
            for place in set(there).difference(lost):
                sources[place] = number
            unsafe = frozenset[int]()
            if batch.lingering is not None:
                late.append(batch.lingering)
                unsafe = self.used(frozenset(slots[place] for place in lost))
            left = [p for p in left if outcomes[p] is not Outcome.HIT and slots[p] not in unsafe]
        await self._spread(keys, slots, outcomes, sources)
        return self._counted("get", BatchResult(outcomes, joined(late), bytes(sources)), started)

    async def _read(self, stage: _PoolStage, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        guard = stage.ready
        if guard is not None and keys:
            with suppress(ClosedError):
                return await guard.get(keys, slots)
        return BatchResult([Outcome.FAILED] * len(keys))

    async def put(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], *, yields: bool = False
    ) -> BatchResult:
        """Store pages in every stage that gets all; the outcomes are those of the stages that promise.

        `yields`: as of `GuardedPool.put`, in each stage.
        """
        self._check_open()
        started, promising = self.port.now(), self._promising()
        numbers = [number for number, stage in enumerate(self._stages) if stage.policy.write == "all"]
        calls = [self._put(one, keys, slots, promised=one in promising, yields=yields) for one in numbers]
        found = await asyncio.gather(*calls)
        for one, batch in zip(numbers, found, strict=True):
            self._owe(one, keys, batch.outcomes)
        columns = [batch.outcomes for one, batch in zip(numbers, found, strict=True) if one in promising]
        outcomes = [min(each, key=_WRITE_ORDER.index) for each in zip(*columns, strict=True)]
        if not columns:  # all that promise are detached
            outcomes = [Outcome.REJECTED] * len(keys)
        late = [batch.lingering for batch in found if batch.lingering is not None]
        return self._counted("put", BatchResult(outcomes, joined(late)), started)

    async def _put(
        self,
        number: int,
        keys: Sequence[ObjectKey],
        slots: Sequence[int],
        *,
        promised: bool = False,
        yields: bool = False,
    ) -> BatchResult:
        """Store pages in one stage. One without a promise that is far behind misses them: no other stage
        waits for it."""
        stage = self._stages[number]
        guard, refused = stage.ready, BatchResult([Outcome.REJECTED] * len(keys))
        if guard is None:
            if keys:
                self._try(stage, keys[0])
            return refused
        calls, pages = guard.read_limits
        if not promised and stage.queued >= _QUEUED_BATCHES * calls * pages:
            stage.shed += len(keys)
            return refused
        stage.queued += len(keys)
        try:
            async with self._room(number, len(keys)):
                return await guard.put(keys, slots, yields=yields)
        except ClosedError:
            return refused
        finally:
            stage.queued -= len(keys)

    def _owe(self, number: int, keys: Sequence[ObjectKey], outcomes: Sequence[Outcome]) -> None:
        """Note which pages a stage that gets all did not take: it gets them when they are read from a nearer
        one, for what a nearer one has is not written again."""
        self._owed[number].discard(compress(keys, [one in _TAKEN for one in outcomes]))
        self._owed[number].add(compress(keys, [one not in _TAKEN for one in outcomes]))

    def repaired(self, keys: Sequence[ObjectKey]) -> None:
        """Another rank stores these pages: ask for them again, also if they were found damaged."""
        for guard in self._guards():
            guard.repaired(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> BatchResult:
        """Delete pages in every stage: HIT if one had it, MISS if none."""
        self._check_open()
        started = self.port.now()
        found = await asyncio.gather(*(self._delete(stage, keys) for stage in self._stages))
        outcomes = [min(each, key=_DELETE_ORDER.index) for each in zip(*found, strict=True)]
        return self._counted("delete", BatchResult(outcomes), started)

    @staticmethod
    async def _delete(stage: _PoolStage, keys: Sequence[ObjectKey]) -> list[Outcome]:
        if stage.stage.detached:
            return [Outcome.MISS] * len(keys)
        if stage.guard is not None:
            with suppress(ClosedError):
                return (await stage.guard.delete(keys)).outcomes
        return [Outcome.FAILED] * len(keys)

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Tell every stage that pages were used in memory, in this order, the last one most recently."""
        self._check_open()
        started = self.port.now()
        guards = [stage.ready for stage in self._stages]
        await asyncio.gather(*(_touch(guard, keys) for guard in guards if guard is not None))
        if self.touchable:
            self._counted("touch", BatchResult([Outcome.HIT] * len(keys)), started)

    async def clear(self) -> int:
        """Delete every page of this pool in every stage; returns how many the fullest one had.

        Raises:
            StorageError: a stage failed, or is not open; the others were cleared.
            ClosedError: the pool was closed before all had answered.
        """
        self._check_open()
        self._clearing += 1
        try:
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=self._limits.deadline)
            found = await asyncio.gather(*map(self._clear, self._stages), return_exceptions=True)
            for owed in self._owed:
                owed.clear()
        finally:
            self._clearing -= 1
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return max(one for one in found if isinstance(one, int))

    async def _clear(self, stage: _PoolStage) -> int:
        if stage.stage.detached:
            return 0
        if stage.guard is None:
            raise StorageError(
                f"pool {self._binding.pool!r}: stage {stage.stage.name!r} is not open, and not cleared"
            )
        return await stage.guard.clear()

    # Pages that go from one stage to another

    async def _spread(
        self,
        keys: Sequence[ObjectKey],
        slots: Sequence[int],
        outcomes: Sequence[Outcome],
        stages: Sequence[int],
    ) -> None:
        """Begin to carry pages that were just read to the stages that want them."""
        hits = [place for place, one in enumerate(outcomes) if one is Outcome.HIT]
        wishes = {place: wished for place in hits if (wished := self._wishes(keys[place], stages[place]))}
        self._seen.add(keys[place] for place in hits if stages[place])
        if not wishes or self._clearing or self.closed:
            return
        staged = self.staged.take(min(len(wishes), self.staged.free - self.staged.reserve))
        places = list(wishes)[: len(staged)]
        for place in list(wishes)[len(staged) :]:
            for number in wishes[place]:
                self._stages[number].shed += 1
        if not places:
            return
        carried = [keys[place] for place in places]
        self._carrying.update(carried)
        wanted = [wishes[place] for place in places]
        copy = StagedCopy()
        self._spawn(self._carry(copy, carried, staged, wanted))
        sources = [slots[place] for place in places]
        nbytes = len(staged) * self._binding.slot_bytes
        await copy.run(partial(self.staged.copy, sources, staged), self.port, nbytes)

    def _wishes(self, key: ObjectKey, source: int) -> list[int]:
        """Numbers of the stages that want a page which was read from stage `source`."""
        if key in self._carrying:
            return []
        return [
            number
            for number, stage in enumerate(self._stages)
            if number != source and stage.carried_to and self._wants(number, key, nearer=number < source)
        ]

    def _wants(self, number: int, key: ObjectKey, *, nearer: bool) -> bool:
        policy = self._stages[number].policy
        if not nearer:
            return policy.write == "second_hit" or key in self._owed[number]
        return policy.promote == "all" or (policy.promote == "second_hit" and key in self._seen)

    async def _carry(
        self, copy: StagedCopy, keys: Sequence[ObjectKey], slots: list[int], wanted: Sequence[Sequence[int]]
    ) -> None:
        """Store pages in staging slots in the stages that want them."""
        try:
            late = list[asyncio.Future[None]]()
            if await copy.ended:
                numbers = sorted({number for wishes in wanted for number in wishes})
                parts = [[place for place, wishes in enumerate(wanted) if one in wishes] for one in numbers]
                batches = await asyncio.gather(
                    *(
                        self._bring(number, [keys[p] for p in part], [slots[p] for p in part])
                        for number, part in zip(numbers, parts, strict=True)
                    )
                )
                late = [batch.lingering for batch in batches if batch.lingering is not None]
        finally:
            self._carrying.difference_update(keys)
        await self._give_back(slots, late)

    async def _bring(self, number: int, keys: list[ObjectKey], slots: list[int]) -> BatchResult:
        """Store pages in a stage that may have got them meanwhile."""
        answers = await self._asked(self._stages[number], keys)
        missing = [place for place, one in enumerate(answers) if one is not Outcome.HIT]
        self._owed[number].discard(compress(keys, [one is Outcome.HIT for one in answers]))
        if self._clearing or not missing:
            return BatchResult([])
        lacking = [keys[place] for place in missing]
        batch = await self._put(number, lacking, [slots[place] for place in missing])
        self._owed[number].discard(compress(lacking, [one in _TAKEN for one in batch.outcomes]))
        return batch

    async def _give_back(self, slots: list[int], late: Sequence[asyncio.Future[None]]) -> None:
        """Free staging slots, once no call uses them; never, if that is not known."""
        if late:
            await asyncio.wait(late)
        if not any(one.cancelled() for one in late):
            self.staged.give_back(slots)

    @asynccontextmanager
    async def _room(self, number: int, pages: int) -> AsyncIterator[None]:
        """During the body, which stores `pages` in stage `number`, nobody else stores there, and what it
        would have evicted for them has gone to the next stage; if that takes what leaves."""
        rest = self._stages[number + 1 :]
        if not rest or rest[0].policy.write != "leaving":
            yield
            return
        async with self.chain.turns[number]:
            giver = self._stages[number].ready
            leaving = await giver.leaving(pages) if giver is not None else []
            for identity in dict.fromkeys(map(_identity, leaving)):
                pool = self.chain.pools.get(identity)
                if pool is not None:
                    await pool.hand_on(number, [key for key in leaving if _identity(key) == identity])
            yield

    async def hand_on(self, number: int, keys: Sequence[ObjectKey]) -> None:
        """Move pages from a stage to the next. They are deleted here, not evicted: reading them has made
        them the most recently used ones."""
        giver, taker = self._stages[number], self._stages[number + 1]
        if taker.ready is None:
            self._try(taker, keys[0])
        for start in range(0, len(keys), self.staged.reserve):
            source, target = giver.carried_to, taker.carried_to
            part = keys[start : start + self.staged.reserve]
            slots = self.staged.take(len(part)) if source is not None and target is not None else []
            if source is None or target is None or not slots:
                taker.shed += len(part)
                continue
            part = part[: len(slots)]
            read = await source.get(part, slots)
            hits = [place for place, one in enumerate(read.outcomes) if one is Outcome.HIT]
            written = await target.put([part[p] for p in hits], [slots[p] for p in hits])
            taker.shed += sum(one not in (Outcome.STORED, Outcome.EXISTS) for one in written.outcomes)
            await source.delete(part)
            late = [one for one in (read.lingering, written.lingering) if one is not None]
            self._spawn(self._give_back(slots, late)) if late else self.staged.give_back(slots)

    @property
    def carrying(self) -> set[asyncio.Task[object]]:
        """What runs beside calls: pages on their way to other stages, trials of stages that are down, and
        questions to farther stages."""
        return set(self._tasks)

    # Slots in use, and closing

    def lingering(self, slots: Sequence[int]) -> asyncio.Future[None] | None:
        """As `GuardedPool.lingering`, for all stages."""
        return joined([one for guard in self._every_guard() if (one := guard.lingering(slots)) is not None])

    def used(self, slots: frozenset[int]) -> frozenset[int]:
        """Those of `slots` that a running call of a stage uses."""
        return frozenset().union(*(guard.used(slots) for guard in self._every_guard()))

    async def stop(self) -> None:
        """Refuse further calls, and wait for running ones, for a limited time."""
        self.closed = True
        await asyncio.gather(*(guard.stop() for guard in self._every_guard()))
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._limits.closing)

    def retire(self, on_unused: Callable[[frozenset[int]], object] | None) -> None:
        """After `stop`: calls that have not ended are late now, see `GuardedPool.retire`."""
        own = None if on_unused is None else lambda slots: on_unused(self._own(slots))
        for guard in self._every_guard():
            guard.retire(own)

    def _own(self, slots: Iterable[int]) -> frozenset[int]:
        """Those of `slots` that are not for staging."""
        return frozenset(slot for slot in slots if slot < self.staged.first)

    async def aclose(self) -> frozenset[int]:
        """Close every stage; returns the slots that an engine may still touch."""
        await self.stop()
        held = await asyncio.gather(*(guard.aclose() for guard in self._every_guard()))
        return self._own(frozenset().union(*held))

    async def close_engine(self) -> None:
        """Close the engine of every stage, once."""
        await asyncio.gather(*(guard.close_engine() for guard in self._every_guard()))

    # Statistics

    def _counted(self, name: str, batch: BatchResult, started: float) -> BatchResult:
        counts = {one: batch.outcomes.count(one) for one in Outcome}
        self._counters[name].count_answered(counts, self.port.now() - started)
        return batch

    @property
    def stage_names(self) -> list[str]:
        return [stage.stage.name for stage in self._stages]

    def stages(self) -> dict[str, PoolStatistics]:
        """The statistics of each stage that is not detached, the nearest first."""
        used = [stage for stage in self._stages if not stage.stage.detached]
        return {stage.stage.name: stage.statistics(self._binding.pool) for stage in used}

    def statistics(self) -> PoolStatistics:
        """The calls of the chain, with the faults of all its stages; the breaker is open only if those of
        all stages are."""
        stages = [stage.statistics(self._binding.pool) for stage in self._stages]
        best = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)
        calls = {
            name: replace(
                tally.snapshot(),
                errors=sum(getattr(stage, name).errors for stage in stages),
                late=sum(getattr(stage, name).late for stage in stages),
            )
            for name, tally in self._counters.items()
        }
        return PoolStatistics(
            pool=self._binding.pool,
            running=sum(stage.running for stage in stages),
            lingering=sum(stage.lingering for stage in stages),
            breaker=min((stage.breaker for stage in stages), key=best.index),
            opened=sum(stage.opened for stage in stages),
            known=PresenceStatistics(
                sum(stage.known.there for stage in stages),
                sum(stage.known.damaged for stage in stages),
                sum(stage.known.recalled for stage in stages),
            ),
            full=any(stages[number].full for number in self._promising()),
            shed=sum(stage.shed for stage in stages),
            **calls,
        )

    def __repr__(self) -> str:
        return f"<ChainedPool {self._binding.pool}: {', '.join(stage.stage.name for stage in self._stages)}>"


def _merge(outcomes: list[Outcome], places: Sequence[int], answers: Sequence[Outcome]) -> list[int]:
    """Add the answers of one more stage for the pages at `places`; returns those that are no hit yet."""
    for place, answer in zip(places, answers, strict=True):
        outcomes[place] = min(outcomes[place], answer, key=_READ_ORDER.index)
    return [place for place in places if outcomes[place] is not Outcome.HIT]


_identity = attrgetter("fingerprint", "pool", "shard")


async def _touch(guard: GuardedPool, keys: Sequence[ObjectKey]) -> None:
    with suppress(ClosedError):
        await guard.touch(keys)  # called here: a task cancelled before it begins has nothing to await


class ChainEngine:
    """A `ChainedPool` as a `PoolEngine`: a call ends when no stage uses its slots any more."""

    def __init__(self, pool: ChainedPool) -> None:
        self._pool = pool

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=self._pool.durable, checks=True)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        return bytearray((await self._pool.exists(keys)).present)

    async def confirm(self, keys: Sequence[ObjectKey]) -> bytearray:
        return bytearray((await self._pool.exists(keys, fresh=True)).present)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._ended(await self._pool.get(keys, slots))

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._ended(await self._pool.put(keys, slots))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._ended(await self._pool.delete(keys))

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        await self._pool.touch(keys)

    async def clear(self) -> int:
        return await self._pool.clear()

    async def aclose(self) -> None:
        await self._pool.aclose()

    @property
    def evicts(self) -> bool:
        return self._pool.touchable

    @property
    def full(self) -> bool:
        return self._pool.statistics().full

    @staticmethod
    async def _ended(batch: BatchResult) -> list[Outcome]:
        if batch.lingering is not None:
            await asyncio.wait([batch.lingering])
        return [Outcome.FAILED if one is Outcome.TIMEOUT else one for one in batch.outcomes]


AnyPool: TypeAlias = GuardedPool | ChainedPool


async def open_stored(
    storage: StorageBackend, binding: PoolBinding, port: Port, limits: PoolLimits
) -> AnyPool:
    """Open a pool, guarded, in a store or in a chain of them; as `open_guarded`."""
    if isinstance(storage, StorageChain):
        return await storage.open_chained(binding, limits)
    return await open_guarded(storage, binding, port, limits)
