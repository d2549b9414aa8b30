"""The pools of one cache in storage: keys, calls, and outcomes per slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from operator import and_
from typing import NamedTuple, Self, TypeAlias

from asynchicache.errors import ClosedError, StorageError, UsageError
from asynchicache.hashing import ObjectKey, PlacedPage
from asynchicache.planner.actions import StorageWrite
from asynchicache.planner.readings import StorageRead
from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.chain import AnyPool, ChainedPool, StorageChain, open_stored
from asynchicache.storage.deadlines import close, joined
from asynchicache.storage.labels import label_maker
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.protocol import StorageBackend, check_backend
from asynchicache.storage.statistics import PoolStatistics
from asynchicache.types import MissReason, Outcome

_WORST = (
    Outcome.TIMEOUT,
    Outcome.CORRUPT,
    Outcome.FAILED,
    Outcome.REJECTED,
    Outcome.CLAIMED,
    Outcome.MISS,
)
"""If parts of a page (pools that share a slot, or ranks) have different outcomes, the first of these counts.
`TIMEOUT` is first: that part may still be written to."""


_ANSWER_REASONS = {
    Outcome.TIMEOUT: MissReason.DEADLINE,
    Outcome.FAILED: MissReason.STORAGE_FAILED,
    Outcome.REJECTED: MissReason.STORAGE_FAILED,
}


SLICE_PAGES = 4096
"""Pages per call of a guarded engine: making their keys blocks the loop for some milliseconds."""


class Presence(NamedTuple):
    """A byte per page asked for, 1 if it is there; `reason`: why the answer may be incomplete."""

    flags: bytes
    reason: MissReason


class StoredPool(NamedTuple):
    """One pool in storage.

    Attributes:
        guard: its guarded engine, or those of a chain.
        binding: makes its keys.
        writes: False if another rank writes its pages, which are the same on every rank.
    """

    guard: AnyPool
    binding: SlotBinding
    writes: bool = True


OnUnused: TypeAlias = "Callable[[AttachedStorage, str, frozenset[int]], object]"


class AttachedStorage:
    """One backend, with the pools of one cache open in it.

    Attributes:
        on_unused: called with itself, a pool and slots when a read has ended that was running when this was
            closed. None: those who wait for its slots go on waiting, as other ranks' calls may use them.
        chain: the backend, if it is a chain of stores.
    """

    def __init__(self) -> None:
        self.on_unused: OnUnused | None = None
        self.pools: dict[str, StoredPool] = {}
        self.chain: StorageChain | None = None
        self._stack = AsyncExitStack()
        self._closing = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        backend: StorageBackend,
        bindings: Iterable[SlotBinding],
        port: Port,
        limits: PoolLimits,
        *,
        owned: bool,
        read_only: Collection[str] = (),
        model: str = "",
        weight_version: str = "",
    ) -> Self:
        """
        Args:
            bindings: the pools that have host slots.
            owned: whether closing the attachment closes the backend.
            read_only: pools that other ranks write.
            model, weight_version: for the labels of the pools.

        Raises:
            ConfigError: `backend` is not a `StorageBackend`.
            StorageError: the backend cannot be used; nothing stays open.
        """
        check_backend(f"storage {backend!r}", backend)
        attachment = cls()
        attachment.chain = backend if isinstance(backend, StorageChain) else None
        async with AsyncExitStack() as stack:
            if owned:
                stack.push_async_callback(close, backend, limits.closing, f"storage {backend.name!r}")
            try:
                for binding in bindings:
                    guard = await open_stored(backend, binding, port, limits)
                    guard.labelled(label_maker(binding, model, weight_version))
                    attachment.pools[binding.pool] = StoredPool(guard, binding, binding.pool not in read_only)
            except BaseException:
                await attachment._close_pools()
                raise
            attachment._stack = stack.pop_all()
        return attachment

    async def _close_pools(self) -> None:
        """Close concurrently: each may take as long as its limits allow."""
        await asyncio.gather(*(pool.guard.aclose() for pool in self.pools.values()))

    async def aclose(self) -> None:
        """Wait for running calls, up to a limit, and close everything. A second call waits too.

        Calls that have not ended run on, until `abandon`.
        """
        async with self._closing:
            guards = {name: pool.guard for name, pool in self.pools.items()}
            await asyncio.gather(*(guard.stop() for guard in guards.values()))
            # All in one moment: pools share slots, and the last read of any of them is to report these.
            for name, guard in guards.items():
                guard.retire(None if self.on_unused is None else partial(self.on_unused, self, name))
            await asyncio.gather(*(guard.close_engine() for guard in guards.values()))
            await self._stack.aclose()

    async def abandon(self) -> None:
        """Close everything, and give up calls that have not ended."""
        async with self._closing:
            await self._close_pools()
            await self._stack.aclose()

    def used(self, names: Iterable[str], slots: frozenset[int]) -> frozenset[int]:
        """Those of `slots` that a running call of a pool in `names` uses."""
        guards = [self.pools[name].guard for name in names if name in self.pools]
        return frozenset().union(*(guard.used(slots) for guard in guards))

    @property
    def detached_stages(self) -> list[str]:
        """Names of the stages of a chain that are not used."""
        stages = self.chain.stages if self.chain is not None else ()
        return [stage.name for stage in stages if stage.detached]

    @property
    def ended(self) -> bool:
        """Whether no call runs."""
        return not any(pool.guard.statistics().running for pool in self.pools.values())


class StoragePools:
    """The pools of a cache in storage; falsy without storage. Storage can be attached and detached.

    Attributes:
        alone: whether no other rank's calls use the same slots.
        on_unused: see `AttachedStorage`.
    """

    alone = True
    on_unused: OnUnused | None = None

    def __init__(self, sharing: Callable[[int], Iterable[str]]) -> None:
        """`sharing`: returns the pools that share the slots of a component."""
        self._sharing = sharing
        self._attachment: AttachedStorage | None = None
        self._detached: list[AttachedStorage] = []
        """Those with calls that have not ended, and the last one."""

    def __bool__(self) -> bool:
        return self._attachment is not None

    @property
    def _pools(self) -> Mapping[str, StoredPool]:
        return self._attachment.pools if self._attachment is not None else {}

    @property
    def attached(self) -> AttachedStorage | None:
        """What is attached now."""
        return self._attachment

    def attach(self, attachment: AttachedStorage) -> None:
        """Attach storage; there must be none."""
        self._attachment = attachment

    def detach(self) -> AttachedStorage | None:
        """Detach storage; returns it, for the caller to close, or None."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.on_unused = self.on_unused if self.alone else None
            self._detached = [*(one for one in self._detached if not one.ended), attachment]
        return attachment

    async def aclose(self) -> None:
        """Close attached storage, and give up the calls of detached storage: they use host memory."""
        self.detach()
        await asyncio.gather(*(one.abandon() for one in self._detached))

    def statistics(self) -> dict[str, PoolStatistics]:
        return {name: pool.guard.statistics() for name, pool in self._pools.items()}

    def by_stage(self, number: int, tokens: int) -> dict[str, int]:
        """`tokens` under the name of a stage of a chain of stores; empty without a chain."""
        guard = next((pool.guard for pool in self._pools.values()), None)
        return {guard.stage_names[number]: tokens} if tokens and isinstance(guard, ChainedPool) else {}

    def chain(self) -> StorageChain:
        """The chain of stores that is attached.

        Raises:
            UsageError: there is none.
        """
        chain = self._attachment.chain if self._attachment is not None else None
        if chain is None:
            raise UsageError("no chain of stores is attached, so there is no stage")
        return chain

    def stages(self) -> dict[str, dict[str, PoolStatistics]]:
        """By stage of a chain, the nearest first, and pool; empty without a chain."""
        found: dict[str, dict[str, PoolStatistics]] = {}
        for name, pool in self._pools.items():
            for stage, one in pool.guard.stages().items() if isinstance(pool.guard, ChainedPool) else ():
                found.setdefault(stage, {})[name] = one
        return found

    def page_sizes(self, work: StorageWrite) -> list[int]:
        """Bytes written per page, by pool; 0 where another rank writes the pages."""
        pools = [self._pools.get(name) for name in work.pages]
        return [pool.binding.slot_bytes if pool is not None and pool.writes else 0 for pool in pools]

    async def clear(self) -> int:
        """Remove every page of every pool; returns their number. A failing pool does not stop the others.

        Raises:
            StorageError: an engine failed; the first such error.
        """
        gone, failures = 0, []
        for pool in [pool for pool in self._pools.values() if pool.writes]:
            try:
                gone += await pool.guard.clear()
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return gone

    async def exists(
        self,
        component_id: int,
        pages: Sequence[PlacedPage],
        *,
        fresh: bool = False,
        everywhere: bool = False,
    ) -> Presence:
        """Which pages are present in every pool that shares the component's slots.

        Args:
            fresh: do not use cached answers.
            everywhere: nor leave out stages of a chain that promise nothing, see `ChainedPool.exists`.
        """
        flags, reason = b"", MissReason.NONE
        for start in range(0, len(pages), SLICE_PAGES):
            if start:
                await asyncio.sleep(0)
            some = pages[start : start + SLICE_PAGES]
            part = await self.exists_in_all(
                self._sharing(component_id), some, fresh=fresh, everywhere=everywhere
            )
            flags += part.flags
            reason = part.reason if reason is MissReason.NONE else reason
        return Presence(flags, reason)

    async def exists_in_all(
        self, names: Iterable[str], pages: Sequence[PlacedPage], *, fresh: bool, everywhere: bool
    ) -> Presence:
        """Which pages are present in every pool of `names`."""
        flags, reason = bytes([1]) * len(pages), MissReason.NONE
        for name in names:
            pool = self._pools.get(name)
            answer = BatchResult([Outcome.FAILED] * len(pages))
            with suppress(ClosedError):  # it was detached meanwhile
                if pool is not None:
                    keys = _keys(pool, pages)
                    answer = await pool.guard.exists(keys, fresh=fresh, everywhere=everywhere)
            flags = bytes(map(and_, flags, answer.present))
            reason = next(
                (_ANSWER_REASONS[outcome] for outcome in _ANSWER_REASONS if outcome in answer.outcomes),
                reason,
            )
        return Presence(flags, reason)

    def renew_labels(self) -> None:
        """Have each pool's label written again soon: what has lost pages may have lost it too."""
        for pool in self._pools.values():
            pool.guard.renew_label()

    @property
    def touchable(self) -> bool:
        """Whether any engine accepts touches."""
        return any(pool.guard.touchable for pool in self._pools.values())

    async def touch(self, uses: Mapping[int, Sequence[PlacedPage]]) -> None:
        """Report pages used in memory to the engines, by component, the most recently used last."""
        calls = [
            (name, pages) for component_id, pages in uses.items() for name in self._sharing(component_id)
        ]
        await asyncio.gather(*(self.touch_pool(name, pages) for name, pages in calls))

    async def touch_pool(self, name: str, pages: Sequence[PlacedPage]) -> None:
        for start in range(0, len(pages), SLICE_PAGES):
            pool = self._pools.get(name)
            if pool is None or not pool.guard.touchable:
                return
            with suppress(ClosedError):
                await pool.guard.touch(_keys(pool, pages[start : start + SLICE_PAGES]))
            await asyncio.sleep(0)  # engines in memory do not suspend

    async def put(self, work: StorageWrite) -> list[BatchResult]:
        calls = [self.move(name, pages, slots, put=True) for name, (pages, slots) in work.pages.items()]
        return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)  # usually no task

    def read_limits(self, component_id: int) -> tuple[int, int, int]:
        """How to read a component: concurrent calls, pages of a call, and bytes of a page, at most."""
        pools = [self._pools[name] for name in self._sharing(component_id) if name in self._pools]
        limits = [pool.guard.read_limits for pool in pools]
        calls, pages = map(min, zip(*limits, strict=True)) if limits else (1, SLICE_PAGES)
        return calls, pages, sum(pool.binding.slot_bytes for pool in pools)

    async def get(self, read: StorageRead) -> tuple[list[Outcome], list[BatchResult]]:
        """Read pages; returns the outcome of each, and the batches that may still write to their slots.

        Notes in `read` which stage of a chain each page came from.
        """
        pages, slots = read.placed, read.slots
        calls = [self.move(name, pages, slots, put=False) for name in self._sharing(read.component_id)]
        batches = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        outcomes = worst_outcomes([batch.outcomes for batch in batches])
        for batch in batches:
            for page, stage in zip(read.pages, batch.sources, strict=False):
                page.stage = max(page.stage, stage)
        return outcomes, [batch for batch in batches if batch.lingering is not None]

    async def move(
        self, name: str, pages: Sequence[PlacedPage], slots: Sequence[int], *, put: bool
    ) -> BatchResult:
        """Put or get the pages of one pool, in slices with loop iterations in between. A put leaves to other
        processes what they are sending (CLAIMED), and shall be repeated soon.

        Slices run one after another: a slice queued behind others would count as late.
        """
        pool = self._pools.get(name)
        refused = Outcome.REJECTED if put else Outcome.FAILED
        if pool is None:
            return BatchResult([refused] * len(slots))
        if put and not pool.writes:
            pool.guard.repaired(_keys(pool, pages))
            return BatchResult([Outcome.EXISTS] * len(slots))  # or will: another rank writes it
        call = partial(pool.guard.put, yields=True) if put else pool.guard.get
        batches: list[BatchResult] = []
        try:
            if len(pages) <= SLICE_PAGES:
                return await call(_keys(pool, pages, put=put), slots)
            for start in range(0, len(pages), SLICE_PAGES):
                end = start + SLICE_PAGES
                batches.append(await call(_keys(pool, pages[start:end], put=put), slots[start:end]))
                await asyncio.sleep(0)
        except ClosedError:  # it was detached meanwhile; an engine may still use the slots of earlier parts
            answered = sum(len(batch.outcomes) for batch in batches)
            batches.append(BatchResult([refused] * (len(slots) - answered)))
        return _as_one(batches)


def _keys(pool: StoredPool, pages: Sequence[PlacedPage], *, put: bool = False) -> list[ObjectKey]:
    if pool.guard.object_pages > 1 or (put and pool.guard.claims):
        return list(map(pool.binding.placed_key, pages))
    return [pool.binding.key(page.digest) for page in pages]


def _as_one(batches: Sequence[BatchResult]) -> BatchResult:
    outcomes = [outcome for batch in batches for outcome in batch.outcomes]
    late = [batch.lingering for batch in batches if batch.lingering is not None]
    return BatchResult(outcomes, joined(late), b"".join(batch.sources for batch in batches))


def worst_outcomes(results: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """The worst outcome per page, of several parts that are usable only together; else the first part's."""
    if len(results) == 1:
        return list(results[0])
    return [
        next((bad for bad in _WORST if bad in outcomes), outcomes[0])
        for outcomes in zip(*results, strict=True)
    ]


async def linger(batches: Iterable[BatchResult]) -> bool:
    """Wait for calls past their deadline: they use their slots until they end.

    Returns:
        False if storage was closed before they ended, so their end will never be known.
    """
    late = [batch.lingering for batch in batches if batch.lingering is not None]
    if late:
        await asyncio.wait(late)
    return not any(call.cancelled() for call in late)
