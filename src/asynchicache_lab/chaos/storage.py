"""Storage that outlives caches, fails as scripted, and is observed: stored pages must be right, and the
oracles know when there was no fault."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

from asynchicache.backends.memory import MemoryBackend, MemoryEngine
from asynchicache.cache import BaseCache
from asynchicache.controller.inspection import Inspection
from asynchicache.hashing import GROUP_PAGES, ObjectKey, page_digests
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.chain import ChainStage, Promotion, StagePolicy, StorageChain
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import (
    Capabilities,
    EngineWrapper,
    PoolBinding,
    PoolEngine,
    StorageBackend,
)
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.types import Outcome
from asynchicache_lab.chaos.calls import Call, Calls
from asynchicache_lab.chaos.faults import SLOWER, FaultDraws
from asynchicache_lab.chaos.identity import HostPages
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.script import NearStore, Rivals, StorageFaults, StorageLink
from asynchicache_lab.chaos.store import ChaosStore

CALL_SECONDS = 5e-4
"""The mean time that a storage call takes."""

_TROUBLE = (
    "storage.stall",
    "storage.restart",
    "storage.lose",
    "storage.detach",
    "storage.clear",
    "clock.jump",
)
"""What goes wrong with storage beside what `Faulty` counts."""

_FAULTS_THAT_LOSE = ("hang", "late", "lie", "swap", "drop", "stall", "lose", "forget", "detach")
"""After these, storage may lack what it has acknowledged, or lose it when a late call ends."""

_FAILURES = ("fail", "raises", "partial", "hang", "late")
"""Faults that a guard may log."""

_SPEEDS = ("stall", "exists")
"""What a script says of storage that is no fault rate."""


class ChaosStorage:
    """One cache's access to a store, with injected faults.

    Attributes:
        store: the store that outlives the cache.
        calls: record of the cache's calls.
    """

    def __init__(
        self,
        store: ChaosStore,
        faults: StorageFaults,
        pages: Callable[[], HostPages],
        draws: FaultDraws,
        ledger: Ledger,
        limits: PoolLimits,
        link: StorageLink,
        page_size: int,
        near: NearStore | None = None,
        rivals: Rivals | None = None,
    ) -> None:
        self.store = store
        self.calls = Calls(asyncio.get_running_loop().time)
        self._draws = draws
        self._limits = limits
        self._stall = faults.stall
        self._exists = faults.exists
        self._rates = _rates(faults)
        claims = partial(Claims, rivals, draws) if rivals is not None else None
        self._witness = VerifyingBackend(store, pages, ledger, claims)
        self._faulty = Faulty(self._witness, self._rates, draws.chance, late_seconds=0.03)
        slow = Latency(self._faulty, CALL_SECONDS, sleep=self._sleep)
        self.ledger = ledger
        self._link = link
        self._wire = asyncio.Lock()
        self._stuck = set(page_digests(array("q", link.stuck), page_size)) if link.stuck else set()
        self._mended = asyncio.Event()
        self._tracked = TrackedBackend(slow, self.calls, self)
        self._near = None
        self._stores = [self._faulty]
        self._near_store = ChaosStore(near.nbytes if near is not None else 0)
        if near is not None:
            own = VerifyingBackend(self._near_store, pages, ledger)
            self._near = Faulty(own, _rates(near.faults), draws.chance, late_seconds=0.03)
            self._stores.append(self._near)
        self._promote: Promotion = "all" if near is None else near.promote
        self._seen = 0
        self._troubled = -1.0
        self._cut = False

    def backend(self, port: Port) -> StorageBackend:
        """The backend that the cache uses."""
        near = self._near
        if near is None:
            return self._tracked
        first = ChainStage("near", lambda: near, StagePolicy(durable=False, promote=self._promote))
        return StorageChain([first, ChainStage("shared", lambda: self._tracked)], port)

    async def _sleep(self, mean_seconds: float) -> None:
        slower = SLOWER if self._draws.occurs("storage.stall", self._stall) else 1
        await asyncio.sleep(self._draws.chance.expovariate(1 / (mean_seconds * slower)))

    async def question(self) -> None:
        """Wait for the extra latency of a query."""
        if self._exists:
            await asyncio.sleep(self._exists)

    @property
    def queues(self) -> bool:
        """Whether reads and writes wait for each other."""
        return self._link != StorageLink()

    async def carry(self, keys: Sequence[ObjectKey]) -> None:
        """Wait until the bytes of some pages have gone over the wire, behind those that came first."""
        pages = len(keys)
        if self._link.page_seconds:
            async with self._wire:
                await asyncio.sleep(pages * self._link.page_seconds)

    async def hang(self, keys: Sequence[ObjectKey]) -> None:
        """Wait for the end of all faults if one of the pages is stuck."""
        if any(key.digest in self._stuck for key in keys):
            await self._mended.wait()

    def capabilities(self, own: Capabilities) -> Capabilities:
        """Those of an engine over the link."""
        link = self._link
        return replace(
            own,
            concurrency=link.concurrency or own.concurrency,
            batch_pages=link.batch_pages or own.batch_pages,
            object_pages=GROUP_PAGES,  # so that keys say where their pages lie, which is checked
        )

    # Stored pages and past faults

    def holds(self, digest: bytes) -> bool:
        """Whether the store has an attention page, and the cache has memory to prefetch such pages into."""
        return bool(self.has(["kv"], [digest])[0])

    def key(self, pool: str, digest: bytes) -> ObjectKey | None:
        """A page's key in the store; None if the cache does not store that pool."""
        binding = self._witness.bindings.get(pool)
        return ObjectKey(binding.fingerprint, digest, pool, binding.shard) if binding is not None else None

    def has(self, pools: Sequence[str], digests: Sequence[bytes]) -> bytearray:
        """One byte per page: 1 if the store has it for every pool."""
        found = bytearray(b"\1" * len(digests))
        for pool in pools:
            binding, store = self._witness.bindings.get(pool), self.store
            if binding is None:
                return bytearray(len(digests))
            fingerprint, shard = binding.fingerprint, binding.shard
            for page, digest in enumerate(digests):
                if ObjectKey(fingerprint, digest, pool, shard) not in store:
                    found[page] = 0
        return found

    def _has(self, pool: str, digests: Sequence[bytes]) -> list[bool]:
        """Whether any stage has each page."""
        keys = [self.key(pool, digest) for digest in digests]
        return [key is not None and (key in self.store or key in self._near_store) for key in keys]

    @property
    def has_near(self) -> bool:
        """Whether the cache has a store of its own before this one."""
        return self._near is not None

    @property
    def has_lied(self) -> bool:
        """Whether an `exists` was answered wrongly, ever."""
        return any(one.injected["lie"] > 0 for one in self._stores)

    def calm_since(self, moment: float, inside: Inspection) -> bool:
        """Whether storage had no fault since `moment` and earlier faults are over: since then the cache made
        all calls, and each was answered in time and correctly."""
        self.look()
        if not inside.storage or self._faulty.injected["swap"] or inside.clearing:
            return False
        if not self._seen:
            return True
        settled = moment - 2 * self._limits.deadline - self._limits.cooldown
        return self._troubled < settled and self.admits(inside)

    @staticmethod
    def admits(inside: Inspection) -> bool:
        """Whether the breakers let every call through now."""
        stages = inside.storage.stages().values()
        pools = [inside.storage.statistics(), *stages]
        return all(pool.breaker is BreakerState.CLOSED for one in pools for pool in one.values())

    def wrongly_marked(self, cache: BaseCache[Any]) -> list[str]:
        """Describe pages that the cache believes to be stored, and never writes again, while storage lacks
        them; of a storage that loses nothing by itself. Of a chain, a page may be in any stage."""
        counted, injected = self._draws.counted, self._faulty.injected
        lossy = any(counted[f"storage.{kind}"] or injected[kind] for kind in _FAULTS_THAT_LOSE)
        evicts = self._near_store.evicted or self.store.capacity_bytes is not None
        if lossy or counted["clock.jump"] or evicts:
            return []
        return [
            f"{have.count(False)} pages of {pool} are marked stored, and are not"
            for pool, digests in cache.inspect().marked_stored()
            if not all(have := self._has(pool, digests))
        ]

    def never_troubled(self) -> bool:
        """Whether storage never had a fault."""
        self.look()
        return not self._seen

    def look(self) -> None:
        """Record faults since the last look, and ongoing ones."""
        counted = self._draws.counted
        seen = sum(sum(one.injected.values()) for one in self._stores) + sum(
            counted[kind] for kind in _TROUBLE
        )
        if (
            seen != self._seen
            or any(one.hanging for one in self._stores)
            or self._is_late(self.calls.oldest())
        ):
            self._seen = seen or 1
            self._troubled = asyncio.get_running_loop().time()

    def _is_late(self, seconds: float) -> bool:
        """Whether a call that has run for so long was given up: its deadline began a few steps of the loop
        before it ran."""
        return seconds > self._limits.deadline or isclose(seconds, self._limits.deadline, rel_tol=1e-3)

    def release(self) -> None:
        """Let hanging calls continue."""
        for one in self._stores:
            one.release()

    async def restart(self, seconds: float, *, lose: bool) -> None:
        """Answer no call for `seconds`. If `lose`, also forget all pages."""
        self._draws.count("storage.lose" if lose else "storage.restart")
        self._faulty.rates = FaultRates(raises=1.0)
        if lose:
            self.store.forget(list(self.store))
        await asyncio.sleep(seconds)
        self._faulty.rates = self._rates

    def forget(self, share: float) -> None:
        """Lose some pages permanently and silently."""
        self._draws.count("storage.forget")
        keys = list(self.store)
        self.store.forget(self._draws.chance.sample(keys, round(len(keys) * share)))

    def cut_off(self) -> None:
        """The process is killed: none of its later calls reaches the store."""
        self._cut = True
        for one in self._stores:
            one.rates = FaultRates(raises=1.0)

    def mend(self) -> None:
        """Stop all faults, unless the process was killed."""
        self._stall, self._rates = 0.0, FaultRates()
        self._mended.set()
        for one in self._stores:
            one.rates = self._rates if not self._cut else FaultRates(raises=1.0)
        self.release()

    def settle(self) -> None:
        """Count the faults that were injected."""
        if self._near is not None:
            self.ledger.calls_failed += sum(map(self._near.injected.__getitem__, _FAILURES))
        for one in self._stores:
            for name, count in one.injected.items():
                self._draws.counted[f"storage.{name}"] += count
            one.injected.clear()


def _rates(faults: StorageFaults) -> FaultRates:
    return FaultRates(
        **{name: getattr(faults, name) for name in StorageFaults.__struct_fields__ if name not in _SPEEDS}
    )


class TrackedBackend:
    """A backend that records its calls, and counts callers that stop waiting before a call ends."""

    def __init__(self, backend: StorageBackend, calls: Calls, storage: ChaosStorage) -> None:
        self.name = backend.name
        self._backend = backend
        self.calls = calls
        self.storage = storage
        self.aclose = backend.aclose

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return _WatchedCalls(await self._backend.open_pool(binding), binding.pool, self)


class _WatchedCalls(EngineWrapper):
    evicts = True  # also a store without a bound is told of uses, so that faults of `touch` are tried

    def __init__(self, engine: PoolEngine, pool: str, watched: TrackedBackend) -> None:
        super().__init__(engine)
        self._pool = pool
        self._watched = watched
        self._storage = watched.storage
        self.capabilities = watched.storage.capabilities(engine.capabilities)

    async def call(self, verb: str, *arguments: Any) -> Any:
        with self._counting_errors():
            return await super().call(verb, *arguments)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        with self._running("exists", keys) as call:
            await self._storage.question()
            answer = await self._engine.exists(keys)
        self._watched.calls.answered(call, [there == 1 for there in answer])
        return answer

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._running("get", keys) as call, self._noticing():
            await self._storage.carry(keys)
            await self._storage.hang(keys)
            outcomes = await self._engine.get(keys, slots)
        self._answered(call, outcomes)
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._running("put", keys) as call, self._noticing():
            await self._storage.carry(keys)
            outcomes = await self._engine.put(keys, slots)
        self._answered(call, outcomes)
        return outcomes

    def _answered(self, call: Call, outcomes: Sequence[Outcome]) -> None:
        self._storage.ledger.calls_failed += Outcome.FAILED in outcomes
        self._watched.calls.answered(call, outcomes)

    @contextmanager
    def _running(self, verb: str, keys: Sequence[ObjectKey]) -> Iterator[Call]:
        self._storage.look()
        try:
            with (
                self._counting_errors(),
                self._watched.calls.running(verb, self._pool, [key.digest for key in keys]) as call,
            ):
                yield call
        finally:
            self._storage.look()

    @contextmanager
    def _counting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._storage.ledger.calls_failed += 1
            raise

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self._watched.calls.given_up += 1
            raise


class VerifyingBackend:
    """A backend that checks the bytes of every page before storing it.

    Attributes:
        bindings: bindings of the opened pools, by name.
    """

    def __init__(
        self,
        store: ChaosStore,
        pages: Callable[[], HostPages],
        ledger: Ledger,
        claims: Callable[[ChaosStore, PoolBinding, HostPages], Claims] | None = None,
    ) -> None:
        """
        Args:
            store: the pages.
            pages: what belongs in the pages of pools that are opened now.
            ledger: gets what is wrong.
            claims: makes the claims of a pool. Default: its engine knows none.
        """
        self._store = store
        self._backend = MemoryBackend(store)
        self.name = f"watched-{self._backend.name}"
        self._pages = pages
        self._ledger = ledger
        self._claims = claims
        self.bindings: dict[str, PoolBinding] = {}

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        self.bindings[binding.pool] = binding
        engine = await self._backend.open_pool(binding)
        pages = self._pages()
        claims = self._claims and self._claims(self._store, binding, pages)
        return _VerifyingEngine(engine, binding, self._store, pages, self._ledger, claims)

    async def aclose(self) -> None:
        await self._backend.aclose()


class Claims:
    """The claims of one cache and pool, among those of other caches on the same store, and of rivals that are
    drawn: they hold a claim, and store the pages before it ends, or never."""

    def __init__(
        self, rivals: Rivals, draws: FaultDraws, store: ChaosStore, binding: PoolBinding, pages: HostPages
    ) -> None:
        self._rivals = rivals
        self._draws = draws
        self._store = store
        assert isinstance(binding, SlotBinding)
        self._binding = binding
        self._pages = pages

    async def claim(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        loop, claims = asyncio.get_running_loop(), self._store.claims
        missing = [key for key in keys if key not in self._store]
        free = [
            key for key in missing if claims.get(key, (self, 0.0))[0] is self or claims[key][1] < loop.time()
        ]
        owner: object = self
        if free and self._draws.occurs("storage.claimed", self._rivals.rate):
            owner = self._rivals
            if self._draws.chance.random() >= self._rivals.deaths:
                loop.call_later(self._draws.chance.uniform(0, seconds), self._store_all, free)
        claims.update((key, (owner, loop.time() + seconds)) for key in free)
        mine = {key for key in missing if claims[key][0] is self}
        return [
            Outcome.MISS if key in mine else Outcome.CLAIMED if key in missing else Outcome.EXISTS
            for key in keys
        ]

    def end(self, keys: Sequence[ObjectKey]) -> None:
        """The cache has stored pages."""
        for key in keys:
            if self._store.claims.get(key, (None, 0.0))[0] is self:
                del self._store.claims[key]

    def _store_all(self, keys: Sequence[ObjectKey]) -> None:
        """A rival stores its pages."""
        for key in keys:
            if key not in self._store:
                page = self._pages.page(key, self._binding.slot_bytes)
                slot = _OneSlot(page)
                self._binding.over(slot).seal(0, key)
                self._store.write(key, bytes(slot.header(0)), bytes(page[: self._binding.page_bytes]))
            self._store.claims.pop(key, None)


class _OneSlot:
    """Memory of one slot."""

    def __init__(self, page: bytearray) -> None:
        self._views = memoryview(bytearray(HEADER_BYTES)), memoryview(page)

    def header(self, slot: int) -> memoryview:
        return self._views[0]

    def page(self, slot: int) -> memoryview:
        return self._views[1]

    def regions(self) -> tuple[memoryview, memoryview]:
        return self._views


class _VerifyingEngine(EngineWrapper):
    def __init__(
        self,
        engine: MemoryEngine,
        binding: PoolBinding,
        store: ChaosStore,
        pages: HostPages,
        ledger: Ledger,
        claims: Claims | None,
    ) -> None:
        super().__init__(engine)
        self._claims = claims
        if claims is not None:
            self.claim = claims.claim
        self._binding = binding
        self._store = store
        self._pages = pages
        self._ledger = ledger

    async def call(self, verb: str, *arguments: Any) -> Any:
        if arguments and isinstance(arguments[0], Sequence):
            self._check_places(arguments[0])
        return await super().call(verb, *arguments)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_places(keys)
        outcomes = await self._engine.get(keys, slots)
        self._tell(keys, outcomes)
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_places(keys)
        binding = self._binding
        for key, slot in zip(keys, slots, strict=True):
            if not self._pages.put(binding.pool, binding.page(slot), key):
                self._ledger.violations.append(
                    f"wrong bytes: host slot {slot} of {binding.pool!r} goes to storage as another page"
                )
        outcomes = await self._engine.put(keys, slots)
        self._tell(keys, outcomes)
        if self._claims is not None:
            self._claims.end(keys)
        return outcomes

    def _check_places(self, keys: Sequence[ObjectKey]) -> None:
        self._ledger.violations.extend(
            f"wrong place: page {key.place} of a group is asked for at another one: {key.text()}"
            for key in self._store.misplaced(keys)
        )

    def _tell(self, keys: Sequence[ObjectKey], outcomes: Sequence[Outcome]) -> None:
        """Report used pages that the store could not see itself."""
        if (keeper := self._store.keeper) is not None:
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome in (Outcome.HIT, Outcome.STORED, Outcome.EXISTS):
                    keeper.used(key, self._binding.page_bytes)
