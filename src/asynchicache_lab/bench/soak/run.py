"""A soak: real threads, real storage with failures, caches that open and close, at the highest rate."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions
from asynchicache.errors import CapacityError, ClosedError, StorageError, UsageError
from asynchicache.reports import Advance
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.seeded_loop import describe
from asynchicache.types import PrefetchPolicy
from asynchicache_lab.bench.soak.model import HitModel, SharedBound
from asynchicache_lab.bench.soak.options import SoakOptions
from asynchicache_lab.bench.soak.report import SoakReport
from asynchicache_lab.bench.soak.samples import ProcessSample, look
from asynchicache_lab.bench.soak.stores import STORES, SoakStore
from asynchicache_lab.bench.soak.traffic import ConversationPool, Engine, Models, SoakCounters, soak_spec
from asynchicache_lab.bench.soak.watchdog import LoopWatchdog

SAMPLE_SECONDS = 1.0
HANG_SECONDS = 60.0
"""A client that does not come to its end in that time hangs."""

_CACHES = 2  # at least: one is closed while idle, one while busy
_LEAST_SECONDS = 0.5
_ABANDONED = 0.05


async def run_soak(options: SoakOptions, advance: Advance) -> SoakReport:
    """Serve conversations for the given time, and check whether anything breaks or grows.

    Raises:
        ConfigError: the storage's server is not installed.
        StorageError: the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder or None) as name:
        chance = random.Random(options.seed)
        store = STORES[options.storage](Path(name), chance, options.capacity_mib << 20)
        await store.start()
        try:
            gc.collect()
            gc.freeze()  # exclude imported objects from collections, which would block the loop
            soak = Soak(options, store, chance, advance, await store.bounds(soak_spec()))
            with Complaints(soak.problems), LoopWatchdog(options.stall_ms / 1e3) as watchdog:
                await soak.run()
            return soak.report(watchdog)
        finally:
            gc.unfreeze()
            await store.stop()


class Complaints(logging.Handler):
    """While entered, records the library's logged errors as problems. Injected faults only log warnings."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems
        self._logger = logging.getLogger("asynchicache")
        self._before = self._logger.propagate

    def emit(self, record: logging.LogRecord) -> None:
        self._problems.append(f"logged: {self.format(record)}")

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logger.propagate = self._before
        self._logger.removeHandler(self)


class Soak:
    """One run.

    Attributes:
        problems: descriptions of what went wrong.
    """

    def __init__(
        self,
        options: SoakOptions,
        store: SoakStore,
        chance: random.Random,
        advance: Advance,
        bounds: Sequence[SharedBound],
    ) -> None:
        self._options = options
        self._store = store
        self._chance = chance
        self._advance = advance
        self._conversations = ConversationPool(chance, options.clients * options.conversations)
        self._served = SoakCounters(self._models(bounds))
        self._samples: list[ProcessSample] = []
        self._happened: Counter[str] = Counter()
        self._unwritten: Counter[str] = Counter()
        self.problems: list[str] = []
        self._caches = 0
        self._started = time.monotonic()
        self._own_tasks: set[asyncio.Task[object]] = set()
        self._files: int | None = None

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def _seconds(self) -> float:
        return self._options.minutes * 60

    async def run(self) -> None:
        """Run one cache after the other until the time is up."""
        sampler = asyncio.create_task(self._sample(), name="sampler")
        try:
            self._own_tasks = set(asyncio.all_tasks())
            while (self._elapsed < self._seconds or self._caches < _CACHES) and not self.problems:
                await self._one_cache()
        finally:
            sampler.cancel()
            await asyncio.wait([sampler])
        self._samples.append(look(self._elapsed, self._served))

    async def _sample(self) -> None:
        while True:
            self._samples.append(look(self._elapsed, self._served))
            self._advance(int(min(self._elapsed, self._seconds)), int(self._seconds))
            await asyncio.sleep(SAMPLE_SECONDS)

    # One cache

    async def _one_cache(self) -> None:
        """Open a cache, serve, inject faults, and close it, alternately when idle and while busy."""
        self._caches += 1
        threads = look(self._elapsed, self._served).threads
        async with HybridCache.open(soak_spec(), self._config()) as cache:
            stop = asyncio.Event()
            engine = Engine(cache, self._served, durable=self._patient)
            clients = {self._task(self._client(engine, stop), "client") for _ in range(self._options.clients)}
            operator = self._task(self._operate(cache, stop), "operator")
            left = max(self._seconds - self._elapsed, _LEAST_SECONDS)
            await self._until(min(self._options.reopen_seconds, left), clients)
            stop.set()
            await self._ended({operator})
            if self._caches % 2:
                await self._ended(clients)
                await self._settled(cache)
            self._count_unwritten(cache)
        self._happened["close"] += 1
        await self._ended(clients)
        for model in self._served.models.all():
            model.forget_memory()
        self._nothing_left(threads)

    def _count_unwritten(self, cache: HybridCache) -> None:
        statistics = cache.statistics()
        shed = {reason.value: count for reason, count in statistics.traffic.shed.items()}
        self._unwritten.update(shed)
        self._unwritten["host_pressure"] += statistics.planner.host_pressure
        self._unwritten["states_skipped"] += statistics.planner.states_skipped

    def _task(self, work: object, name: str) -> asyncio.Task[object]:
        return asyncio.create_task(work, name=name)  # type: ignore[arg-type]

    async def _until(self, seconds: float, clients: set[asyncio.Task[object]]) -> None:
        """Wait for some time, or until a client fails."""
        await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _slots(self) -> tuple[dict[str, int], dict[str, int]]:
        """Sizes of the device and of the host, which also holds copies of the device's pages."""
        clients = self._options.clients
        device = {"kv": clients * 24, "mamba": clients * 4, "swa": clients * 16}
        host = {"kv": clients * 40, "mamba": clients * 6, "swa": clients * 16}
        if self._patient:  # spare slots for reads and writes in flight
            host = {"kv": clients * 48, "mamba": clients * 16, "swa": clients * 40}
        return device, host

    @property
    def _patient(self) -> bool:
        """Without faults, hits are judged, so none may be lost to a deadline or a slow disk."""
        return not self._options.fault_seconds

    def _models(self, bounds: Sequence[SharedBound]) -> Models:
        spec, (_, host) = soak_spec(), self._slots()
        sharing = {pool.slots_of: pool.name for pool in spec.pools if pool.slots_of}
        memory = [
            SharedBound({name: 1} | ({sharing[name]: 0} if name in sharing else {}), slots)
            for name, slots in host.items()
        ]
        judged = HitModel(spec, memory, bounds)
        if len(bounds) == 1:
            return Models(judged, judged)
        costs = {pool: cost for part in bounds for pool, cost in part.costs.items()}
        whole = SharedBound(costs, sum(part.capacity for part in bounds))
        return Models(judged, HitModel(spec, memory, [whole]))

    def _config(self) -> CacheConfig:
        device, host = self._slots()
        return CacheConfig(
            device_slots=device,
            host_slots=host,
            prefetch=self._prefetch(),
            storage=self._store.engine,
            storage_options=dict(self._store.options),
            storage_limits=PoolLimits(
                deadline=30.0 if self._patient else 1.0, cooldown=0.5, closing=30.0, known_pages=4096
            ),
            weight_version="soak",
            seed=self._options.seed,
        )

    def _prefetch(self) -> PrefetchOptions:
        if self._patient:
            return PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE)
        return PrefetchOptions(base_seconds=0.5)

    # Concurrent tasks

    async def _client(self, engine: Engine, stop: asyncio.Event) -> None:
        """Serve one turn after the other; abandon some midway."""
        while not stop.is_set():
            conversation, answer = self._conversations.take(), self._conversations.answer()
            try:
                patience = self._chance.uniform(0, 0.1) if self._chance.random() < _ABANDONED else None
                async with asyncio.timeout(patience):
                    await engine.serve(conversation, answer)
            except TimeoutError:
                self._served.abandoned += 1
            except CapacityError:  # all requests waited for each other, and this one was refused
                self._served.gave_way += 1
            except ClosedError:
                return
            finally:
                self._conversations.give_back(conversation)

    async def _operate(self, cache: HybridCache, stop: asyncio.Event) -> None:
        """Inject storage faults and operator actions."""
        while self._options.fault_seconds and not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._chance.expovariate(1 / self._options.fault_seconds))
            if not stop.is_set():
                await self._disturb(cache)

    async def _disturb(self, cache: HybridCache) -> None:
        own = {"reattach": self._reattach, "flush": HybridCache.flush, "clear": HybridCache.clear_storage}
        actions = {**self._store.faults, **own}
        name = self._chance.choices(list(actions), [8] * len(self._store.faults) + [4, 2, 1])[0]
        self._happened[name] += 1
        with suppress(StorageError, UsageError):
            await actions[name](cache)

    async def _reattach(self, cache: HybridCache) -> None:
        await cache.detach_storage()
        await cache.attach_storage(self._store.engine, self._store.options)

    # Checks

    async def _ended(self, tasks: set[asyncio.Task[object]]) -> None:
        """Check that tasks that were told to end do so."""
        _, hanging = await asyncio.wait(tasks, timeout=HANG_SECONDS)
        self.problems += [f"hangs: {describe(task)}" for task in hanging]
        errors = [error for task in tasks - hanging if (error := task.exception()) is not None]
        if errors:
            raise errors[0]

    async def _settled(self, cache: HybridCache) -> None:
        """Check that an idle cache holds nothing: everything left must be evictable."""
        await self._idle(cache)
        await cache.flush()
        self.problems += cache.verify(idle=True)
        for pool, tiers in cache.statistics().occupancy.items():
            for tier, occupancy in zip(("device", "host"), tiers, strict=True):
                if occupancy.held or occupancy.quarantined:
                    self.problems.append(f"slots left of {pool} {tier}: {occupancy}")

    async def _idle(self, cache: HybridCache) -> None:
        """Wait for all storage calls, including those past their deadline, which still hold their slots."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HANG_SECONDS):
                await cache.drain()
                while cache.verify(idle=True):
                    await asyncio.sleep(SAMPLE_SECONDS)
                    await cache.drain()

    def _nothing_left(self, threads: int) -> None:
        """Check that a closed cache leaves no task, thread or file."""
        left = [task for task in asyncio.all_tasks() - self._own_tasks if not task.done()]
        self.problems += [f"left behind: {describe(task)}" for task in left]
        now = look(self._elapsed, self._served)
        if self._files is None:  # the first cache has also created the loop's threads and pipes
            self._files = now.files
            return
        if now.threads > threads:
            self.problems.append(f"{now.threads} threads, there were {threads}")
        if now.files > self._files:
            self.problems.append(f"{now.files} open files, there were {self._files}")

    def report(self, watchdog: LoopWatchdog) -> SoakReport:
        """The report."""
        return SoakReport.of(
            self._options,
            self._served,
            self._samples,
            happened=dict(self._happened),
            unwritten=dict(self._unwritten),
            caches=self._caches,
            problems=self.problems,
            watchdog=watchdog,
        )
