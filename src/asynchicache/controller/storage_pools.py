"""The pools of one cache in storage: keys, calls, and outcomes per slot."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from operator import and_
from typing import NamedTuple, Self

from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.planner.actions import StorageWrite
from asynchicache.planner.fetch import Outcomes, StorageRead
from asynchicache.planner.state import CacheState
from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.deadlines import close
from asynchicache.storage.guard import GuardedPool, open_guarded
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.protocol import StorageBackend
from asynchicache.storage.statistics import PoolStatistics
from asynchicache.types import MissReason, Outcome

_WORST = (Outcome.TIMEOUT, Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED, Outcome.MISS)
"""Of outcomes of pools that share a slot, the first of these counts. A pool that timed out may still
write to its part of the slot, whatever became of the others."""


_REASONS = {
    Outcome.TIMEOUT: MissReason.DEADLINE,
    Outcome.FAILED: MissReason.STORAGE_FAILED,
    Outcome.REJECTED: MissReason.STORAGE_FAILED,
}


SLICE_PAGES = 4096
"""Pages of one call of a guarded engine: making their keys takes the loop some milliseconds."""


class Presence(NamedTuple):
    """One byte a page that was asked for, 1 if it is there; `reason` tells why that may be too few."""

    flags: bytes
    reason: MissReason


class StoredPool(NamedTuple):
    """One pool in storage.

    Attributes:
        guard: its engine, made safe to call.
        binding: names its keys.
        writes: False if another rank writes its pages: they are the same on every rank.
    """

    guard: GuardedPool
    binding: SlotBinding
    writes: bool = True


class AttachedStorage:
    """One backend, with the pools of one cache open in it."""

    def __init__(self) -> None:
        self.pools: dict[str, StoredPool] = {}
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
    ) -> Self:
        """
        Args:
            backend: where the pages are.
            bindings: the pools that have host slots for pages to arrive in.
            port: clock and threads.
            limits: patience with the backend.
            owned: the backend is closed with the attachment.
            read_only: pools that other ranks write.

        Raises:
            ConfigError: `backend` is none.
            StorageError: the backend cannot be used; nothing stays open.
        """
        if not isinstance(backend, StorageBackend):
            raise ConfigError(f"storage {backend!r} is no StorageBackend")
        attachment = cls()
        async with AsyncExitStack() as stack:
            if owned:
                stack.push_async_callback(close, backend, limits.closing, f"storage {backend.name!r}")
            stack.push_async_callback(attachment._close_pools)
            for binding in bindings:
                guard = await open_guarded(backend, binding, port, limits)
                attachment.pools[binding.pool] = StoredPool(guard, binding, binding.pool not in read_only)
            attachment._stack = stack.pop_all()
        return attachment

    async def _close_pools(self) -> None:
        """Side by side: each may hang for as long as its limits allow."""
        await asyncio.gather(*(pool.guard.aclose() for pool in self.pools.values()))

    async def aclose(self) -> None:
        """Wait for running calls, with a limit, and close everything; twice is harmless, and waits too."""
        async with self._closing:
            await self._stack.aclose()


class StoragePools:
    """The pools of a cache in storage; empty, and false, without storage, which may come and go."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._attachment: AttachedStorage | None = None
        self._detached: AttachedStorage | None = None

    def __bool__(self) -> bool:
        return self._attachment is not None

    @property
    def _pools(self) -> Mapping[str, StoredPool]:
        return self._attachment.pools if self._attachment is not None else {}

    def attach(self, attachment: AttachedStorage) -> None:
        """Have storage, where there is none."""
        self._attachment = attachment

    def detach(self) -> AttachedStorage | None:
        """From now on there is no storage; what was attached, for the caller to close."""
        attachment, self._attachment = self._attachment, None
        self._detached = attachment or self._detached
        return attachment

    async def aclose(self) -> None:
        """Close what is attached, or wait until what was detached is closed: it uses the host's memory."""
        self.detach()
        if self._detached is not None:
            await self._detached.aclose()

    def statistics(self) -> dict[str, PoolStatistics]:
        return {name: pool.guard.statistics() for name, pool in self._pools.items()}

    def page_sizes(self, work: StorageWrite) -> list[int]:
        """Bytes that a write moves for each page, by pool; none where another rank writes them."""
        pools = [self._pools.get(name) for name in work.pages]
        return [pool.binding.slot_bytes if pool is not None and pool.writes else 0 for pool in pools]

    async def clear(self) -> int:
        """Forget every page of every pool; how many there were. One that fails does not keep the others'.

        Raises:
            StorageError: an engine failed; the first that did.
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

    async def exists(self, component_id: int, digests: Sequence[bytes], *, fresh: bool = False) -> Presence:
        """Which pages are there, in every pool that shares the component's slots.

        Args:
            component_id: the component.
            digests: of the pages.
            fresh: the engine is asked whatever is remembered of it.
        """
        flags, reason = b"", MissReason.NONE
        for start in range(0, len(digests), SLICE_PAGES):
            if start:
                await asyncio.sleep(0)
            part = await self._exists_in_all(component_id, digests[start : start + SLICE_PAGES], fresh)
            flags += part.flags
            reason = part.reason if reason is MissReason.NONE else reason
        return Presence(flags, reason)

    async def _exists_in_all(self, component_id: int, digests: Sequence[bytes], fresh: bool) -> Presence:
        flags, reason = bytes([1]) * len(digests), MissReason.NONE
        for name in self._state.sharing(component_id):
            pool = self._pools.get(name)
            answer = BatchResult([Outcome.FAILED] * len(digests))
            with suppress(ClosedError):  # it was detached meanwhile
                if pool is not None:
                    answer = await pool.guard.exists(_keys(pool, digests), fresh=fresh)
            flags = bytes(map(and_, flags, answer.present))
            reason = next((_REASONS[outcome] for outcome in _REASONS if outcome in answer.outcomes), reason)
        return Presence(flags, reason)

    @property
    def touchable(self) -> bool:
        """Whether an engine wants to be told of uses."""
        return any(pool.guard.touchable for pool in self._pools.values())

    async def touch(self, uses: Mapping[int, Sequence[bytes]]) -> None:
        """Tell engines of pages that were used in memory, by component, the last one most recently."""
        calls = [
            (name, digests)
            for component_id, digests in uses.items()
            for name in self._state.sharing(component_id)
        ]
        await asyncio.gather(*(self._touch(name, digests) for name, digests in calls))

    async def _touch(self, name: str, digests: Sequence[bytes]) -> None:
        for start in range(0, len(digests), SLICE_PAGES):
            pool = self._pools.get(name)
            if pool is None or not pool.guard.touchable:
                return
            with suppress(ClosedError):
                await pool.guard.touch(_keys(pool, digests[start : start + SLICE_PAGES]))
            await asyncio.sleep(0)  # engines in memory do not suspend

    async def put(self, work: StorageWrite) -> list[BatchResult]:
        calls = [self._move(name, *pages, put=True) for name, pages in work.pages.items()]
        return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)  # usually no task

    async def get(self, read: StorageRead) -> tuple[Outcomes, list[BatchResult]]:
        """What became of each page, and the batches that may still write to their slots."""
        pools = [
            (component_id, name) for component_id in read.slots for name in self._state.sharing(component_id)
        ]
        calls = [
            self._move(name, read.digests(component_id), read.slots[component_id], put=False)
            for component_id, name in pools
        ]
        batches = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        results = [
            (component_id, batch.outcomes) for (component_id, _), batch in zip(pools, batches, strict=True)
        ]
        outcomes = {
            component_id: _worst([r for n, r in results if n == component_id]) for component_id in read.slots
        }
        return outcomes, [batch for batch in batches if batch.lingering is not None]

    async def _move(
        self, name: str, digests: Sequence[bytes], slots: Sequence[int], *, put: bool
    ) -> BatchResult:
        """Put or get the pages of one pool: in one call, or in some one after the other, with turns of the
        loop between them.

        Not side by side: a part that waits for its turn behind the others would be taken for late.
        """
        pool = self._pools.get(name)
        refused = Outcome.REJECTED if put else Outcome.FAILED
        if pool is None:
            return BatchResult([refused] * len(slots))
        if put and not pool.writes:
            return BatchResult([Outcome.EXISTS] * len(slots))  # or will: it is another rank's to write
        call = pool.guard.put if put else pool.guard.get
        batches: list[BatchResult] = []
        try:
            if len(digests) <= SLICE_PAGES:
                return await call(_keys(pool, digests), slots)
            for start in range(0, len(digests), SLICE_PAGES):
                end = start + SLICE_PAGES
                batches.append(await call(_keys(pool, digests[start:end]), slots[start:end]))
                await asyncio.sleep(0)
        except ClosedError:  # it was detached meanwhile; an engine may still use the slots of earlier parts
            answered = sum(len(batch.outcomes) for batch in batches)
            batches.append(BatchResult([refused] * (len(slots) - answered)))
        return _as_one(batches)


def _keys(pool: StoredPool, digests: Sequence[bytes]) -> list[ObjectKey]:
    return list(map(pool.binding.key, digests))


def _as_one(batches: Sequence[BatchResult]) -> BatchResult:
    outcomes = [outcome for batch in batches for outcome in batch.outcomes]
    late = [batch.lingering for batch in batches if batch.lingering is not None]
    return BatchResult(outcomes, asyncio.ensure_future(_all_ended(late)) if late else None)


async def _all_ended(calls: Sequence[asyncio.Future[None]]) -> None:
    """
    Raises:
        CancelledError: it will never be known of one when it ends.
    """
    await asyncio.wait(calls)
    if any(call.cancelled() for call in calls):
        raise asyncio.CancelledError


def _worst(results: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Pools that share slots are there together or not at all."""
    if len(results) == 1:
        return list(results[0])
    return [
        next((bad for bad in _WORST if bad in outcomes), Outcome.HIT)
        for outcomes in zip(*results, strict=True)
    ]


async def linger(batches: Iterable[BatchResult]) -> bool:
    """Wait for calls that outlived their deadline: until they end they use their slots.

    Returns:
        False if storage was closed before they ended: nobody will ever know when they do.
    """
    late = [batch.lingering for batch in batches if batch.lingering is not None]
    if late:
        await asyncio.wait(late)
    return not any(call.cancelled() for call in late)
