"""Run a script: open its caches in a seeded world, run clients and events, and check what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from functools import partial
from typing import Any

import torch

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions
from asynchicache.errors import CapacityError, StorageError, UsageError
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.oracle import ByteOracle, HostOracle, PageTokens
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.seeded import SeededWorld
from asynchicache.types import PrefetchPolicy
from asynchicache_lab.chaos.clients import FOREVER, BaseChaosEngine, ChaosEngine
from asynchicache_lab.chaos.faults import (
    ChaosDevice,
    FaultDraws,
    RoomRefusals,
    refusing_memory,
)
from asynchicache_lab.chaos.hits import HitOracle
from asynchicache_lab.chaos.identity import HostPages, PageNames, page_identity
from asynchicache_lab.chaos.inside import SlotOracle
from asynchicache_lab.chaos.ledger import Ledger, error_text
from asynchicache_lab.chaos.paged import ChaosBlocks, PagedChaosEngine
from asynchicache_lab.chaos.promises import DurabilityOracle
from asynchicache_lab.chaos.recency import RecencyOracle
from asynchicache_lab.chaos.script import ChaosClient, ClientTurn, Life, Script, ScriptEvent
from asynchicache_lab.chaos.steady import SteadyTraffic
from asynchicache_lab.chaos.storage import ChaosStorage
from asynchicache_lab.chaos.store import ChaosStore

_CLOSE_SECONDS = 0.5
_REST_SECONDS = 3.0
"""After these nothing follows from a use any more: storage is told of it a second later, and may then be
found to have lost the path, and be sent it."""


def life_limits(life: Life) -> PoolLimits:
    """Storage limits that tolerate many slow queries in a row, which are no fault."""
    deadline = 0.01 + 20 * life.storage.exists + 2000 * life.link.page_seconds
    return PoolLimits(deadline=deadline, cooldown=0.01, closing=0.005, clearing=0.005, claim_seconds=0.3)


def life_prefetch(life: Life) -> PrefetchOptions:
    """Prefetch options, which determine how long requests wait for storage."""
    seconds = life.patience + 40 * life.storage.exists
    return PrefetchOptions(
        policy=life.prefetch,
        base_seconds=seconds,
        max_seconds=4 * seconds,
    )


def life_config(life: Life, *, tails: bool = False) -> CacheConfig:
    """The options of a cache."""
    return CacheConfig(
        device_slots={} if life.paged else {name: sizes.device for name, sizes in life.sizes.items()},
        host_slots={} if life.shared else {name: sizes.host for name, sizes in life.sizes.items()},
        host_bytes=life.shared or None,
        host_layout=life.layout,
        write_policy=life.write_policy,
        eviction=life.eviction,
        checkpoints=life.checkpoints,
        prefetch=life_prefetch(life),
        storage_limits=life_limits(life),
        store_bytes=life.store_bytes,
        weight_version=life.weights,
        salt=life.salt,
        rank=life.rank,
        ranks=life.ranks,
        audit=float(life.audit),
        close_seconds=_CLOSE_SECONDS,
        tails=tails,
    )


async def run_lives(world: SeededWorld, script: Script, ledger: Ledger) -> None:
    """Run a script to its end, and record violations in `ledger`."""
    store = ChaosStore(script.capacity)
    promises = DurabilityOracle(store, ledger, loses_nothing=script.loses_nothing)
    recency = RecencyOracle(store, ledger) if script.capacity is not None else None
    page_tokens = PageTokens(script.model.page_size) if script.tails else None
    names = PageNames(script.model.page_size, ledger)
    begin = partial(
        _LifeRun,
        world,
        script,
        promises=promises,
        recency=recency,
        store=store,
        ledger=ledger,
        page_tokens=page_tokens,
        names=names,
    )
    if script.together:
        async with asyncio.TaskGroup() as group:
            for run in [begin(life) for life in script.lives]:
                group.create_task(run.run(), name="life")
    for life in (script.last,) if script.together else script.every_life:
        if life is not None:
            await begin(life).run()
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    ledger.violations += [f"task {name!r} was left behind" for name in left]


class _LifeRun:
    """The run of one life."""

    def __init__(
        self,
        world: SeededWorld,
        script: Script,
        life: Life,
        *,
        promises: DurabilityOracle,
        recency: RecencyOracle | None,
        store: ChaosStore,
        ledger: Ledger,
        page_tokens: PageTokens | None,
        names: PageNames,
    ) -> None:
        self._world = world
        self._page_tokens = page_tokens
        self._life = life
        self._model = script.model
        self._spec = script.model.spec(life.dtype)
        self._names = names
        self._weights = life.weights
        self._ledger = ledger
        self._draws = FaultDraws(world.random, ledger.faults)
        self._device = ChaosDevice(world.loop, world.loop.random, life.device, self._draws)
        self._storage = ChaosStorage(
            store,
            life.storage,
            self._host_pages,
            self._draws,
            ledger,
            life_limits(life),
            life.link,
            script.model.page_size,
            life.near,
            life.rivals,
        )
        self._recency = recency
        self._paged: PagedMemory | None = None
        self._restarts: list[asyncio.Task[None]] = []
        self._others = script.together
        # With dishonest storage, a page reported as present may be missing, which is not the cache's fault.
        self._promises = promises if not any(map(_dishonest, script.every_life)) else None

    async def run(self) -> None:
        refused = self._ledger.faults["memory.refused"]
        if self._life.poor is not None:
            with refusing_memory(self._draws, self._life.poor), suppress(CapacityError):
                async with self._open():  # succeeds if it allocates fewer slabs than that
                    if self._ledger.faults["memory.refused"] > refused:
                        self._ledger.violations.append("a cache was opened without its memory")
        with ExitStack() as watch:  # to the last storage call: one of a cache that closes is judged too
            await self._end(await self._opened(watch))

    async def _opened(self, watch: ExitStack) -> list[asyncio.Task[None]]:
        """Open the cache, let it live, and close it; returns the tasks that may still run."""
        async with self._open() as cache:
            inside, slots = cache.inspect(), SlotOracle(cache)
            slots.poison_freed()
            slots.copy_in_groups(self._life.group_bytes)
            self._device.memory = slots.memory
            engine = self._engine(cache)
            watch.enter_context(engine.hits.watching())
            refusals = RoomRefusals(self._draws, self._life.refuse)
            with inside.observed_by(slots), inside.observed_by(refusals):
                tasks = await self._live(engine)
            self._ledger.violations += slots.violations
            if self._life.crash:
                self._draws.count("cache.crash")
                if engine.hits.recency is not None:
                    engine.hits.recency.restarted()  # what was not told by now never will be
                self._storage.cut_off()
            if engine.closing or self._life.dirty:
                slots.stop_poisoning()
            else:
                await self._settle(engine, slots)
            if engine.hits.recency is not None:
                engine.hits.recency.restarted()
        return tasks

    @property
    def _identity(self) -> Callable[[str], str]:
        return page_identity(self._life, self._model, self._weights)

    def _host_pages(self) -> HostPages:
        """What belongs in host pages with the present weights."""
        oracle = HostOracle(self._spec, self._life.layout, self._identity, self._page_tokens)
        return HostPages(oracle, self._identity, self._names)

    def _engine(self, cache: HybridCache | EngineCache) -> BaseChaosEngine[Any]:
        life, paged = self._life, self._paged
        kind, tensor = self._kind(cache)

        def oracle() -> ByteOracle:
            return ByteOracle(self._spec, tensor, self._identity, self._page_tokens)

        engine = kind(
            cache,
            self._device,
            oracle,
            self._names,
            self._draws,
            self._ledger,
            self._hit_oracle,
            self._promises,
            lambda: (self._weights, life.salt, life.dtype, life.rank, life.ranks, life.layout),
        )
        if isinstance(engine, PagedChaosEngine) and paged is not None:
            engine.blocks = ChaosBlocks(self._spec, paged)
        return engine

    def _kind(
        self, cache: HybridCache | EngineCache
    ) -> tuple[Callable[..., BaseChaosEngine[Any]], Callable[[str, str], torch.Tensor]]:
        """The engine that uses a cache, and the device memory, by pool and tensor."""
        if isinstance(cache, HybridCache):
            return ChaosEngine, cache.device_tensor
        assert self._paged is not None
        return PagedChaosEngine, self._paged.tensor

    def _hit_oracle(self, engine: BaseChaosEngine[Any]) -> HitOracle:
        options = life_prefetch(self._life)
        return HitOracle(
            engine.cache,
            self._storage,
            options,
            self._draws,
            self._ledger,
            lambda: engine.excused,
            self._recency,
        )

    def _open(self) -> AbstractAsyncContextManager[HybridCache | EngineCache]:
        storage = self._storage.backend(self._world.port) if self._life.weights is not None else None
        config = life_config(self._life, tails=self._page_tokens is not None)
        if self._life.hashing:
            self._world.port.worker_seconds["asynchicache-audit"] = self._life.hashing
        self._paged = None
        if self._life.paged:
            counts = ChaosBlocks.counts(self._spec, self._life)
            self._paged = PagedMemory(self._spec, counts, self._identity, poison=False)
        memory = None if self._paged is None else self._paged.memory
        return self._world.open_cache(self._spec, config, storage=storage, device=self._device, engine=memory)

    async def _live(self, engine: BaseChaosEngine[Any]) -> list[asyncio.Task[None]]:
        """Run clients and events until the clients are done or it is time to close."""
        if self._promises is not None and self._life.weights is not None:
            patient = self._life.prefetch is PrefetchPolicy.WAIT_COMPLETE
            asked = self._promises.asked(engine.identity, patient=patient)
            await engine.serve_all(ChaosClient(turns=tuple(asked)))
        tasks = [asyncio.create_task(self._client(engine, client)) for client in self._life.clients]
        happening = asyncio.create_task(self._happen(engine), name="events")
        running = set(tasks)
        if running:
            _, running = await asyncio.wait(tasks, timeout=self._life.close)
        if running or self._life.device.never is not None:
            engine.closing = True
            self._draws.count("cache.close")
        if not engine.closing or self._world.random.random() < 0.5:
            await _stop([happening, *self._restarts])
            steady = self._life.steady
            if steady is not None and isinstance(engine, ChaosEngine) and not engine.closing:
                await SteadyTraffic(engine, steady, self._storage.backend(self._world.port)).run()
            return tasks
        return [*tasks, happening]

    async def _client(self, engine: BaseChaosEngine[Any], client: ChaosClient) -> None:
        try:
            async with asyncio.timeout(client.cancel) as patience:
                await engine.serve_all(client)
        except TimeoutError:
            if not patience.expired():
                raise
            self._draws.count("client.cancel")

    async def _happen(self, engine: BaseChaosEngine[Any]) -> None:
        """Run the events. Refusals that are allowed are not violations."""
        for event in self._life.events:
            await asyncio.sleep(event.wait)
            with suppress(UsageError, StorageError):
                await self._one_event(engine, event)
            if not engine.closing:
                engine.verify(f"after {event.what}")

    async def _one_event(self, engine: BaseChaosEngine[Any], event: ScriptEvent) -> None:
        cache, storage, draws = engine.cache, self._storage, self._draws
        engine.did(event.what)
        match event.what:
            case "flush":
                await cache.flush()
            case "drain":
                await cache.drain()
            case "attach" if self._life.weights is not None:
                await cache.attach_storage(storage.backend(self._world.port))
            case "detach":
                draws.count("storage.detach")
                await cache.detach_storage()
            case "clear":
                draws.count("storage.clear")
                await cache.clear_storage()
            case "forget":
                storage.forget(event.share)
            case "look":
                cache.statistics()
            case "release":
                storage.release()
            case "restart" | "lose" as how:
                restart = storage.restart(min(event.seconds, 0.05), lose=how == "lose")
                self._restarts.append(asyncio.create_task(restart, name=how))
            case "weights" if self._life.weights is not None:
                self._weights = event.weights  # from here on, what is computed is computed with them
                engine.learn_weights()
                with engine.hits.changing_weights():
                    await cache.update_weights(event.weights)
            case "jump":
                draws.count("clock.jump")
                self._world.loop.skip(event.seconds)

    async def _settle(self, engine: BaseChaosEngine[Any], slots: SlotOracle) -> None:
        """Stop all faults, then check that everything ends, nothing leaks, and one more request is served."""
        self._storage.mend()
        await asyncio.sleep(_REST_SECONDS)
        await engine.cache.drain()
        engine.verify("at the end")
        if not self._others:  # which may clear the store that all share
            self._ledger.violations += self._storage.wrongly_marked(engine.cache)
        if engine.suspect and not engine.cache.inspect().failed:
            self._ledger.violations += [f"undetected: {words}" for words in engine.suspect]
        if self._device.error is None and not self._device.lied:
            await engine.serve_all(ChaosClient(turns=(self._last_turn(),)))
            await asyncio.sleep(_REST_SECONDS)
            await engine.cache.drain()
        await engine.cache.flush()
        self._storage.settle()
        self._ledger.violations += slots.leftovers(self._may_leak())

    def _last_turn(self) -> ClientTurn:
        """The largest possible request."""
        full = next(iter(self._life.sizes.values()))
        prompt = tuple(range(full.device * self._spec.page_size))
        return ClientTurn(prompt=prompt, patience=None, admit=not self._life.paged)

    def _may_leak(self) -> bool:
        """Whether slots may be lost for good: a failed device may still write to them, or a storage engine
        whose call had not ended (or, after a clock jump, not begun) when it was closed."""
        counted = self._ledger.faults
        not_begun = counted["storage.detach"] and counted["clock.jump"]
        return bool(self._device.error or self._device.lied or self._storage.calls.given_up or not_begun)

    async def _end(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """The cache is closed: check that every task gets an error and ends."""
        self._storage.mend()
        self._storage.settle()
        _, hanging = await asyncio.wait(tasks, timeout=FOREVER) if tasks else ((), ())
        self._ledger.violations += [f"hang: {task.get_name()} waits in a closed cache" for task in hanging]
        await _stop([*hanging, *self._restarts])
        self._ledger.violations += [
            f"a client was told {error_text(error)}"
            for task in [*tasks, *self._restarts]
            if not task.cancelled() and (error := task.exception()) is not None
        ]


def _dishonest(life: Life) -> bool:
    faults = life.storage
    return bool(faults.lie or faults.swap or faults.drop)


async def _stop(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
