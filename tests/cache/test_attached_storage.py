"""Storage that comes, goes and is cleared while requests are served; and what each rank writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from asynchicache import HybridCache, ModelSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.errors import ClosedError, ConfigError, StorageError, UsageError
from asynchicache.hashing import ObjectKey
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import Capabilities, PoolBinding, PoolEngine
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.types import MissReason, Outcome, ShedReason, trailing_pages
from cache.engine import PAGE, SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


async def test_storage_comes_and_goes():
    store = MemoryStore()
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        assert await cache.detach_storage() is False
        await cache.attach_storage(MemoryBackend(store))
        async with cache.request([*PROMPT, 1]) as request:
            await request.load()
            assert await request.durable()  # what was in memory before goes there now
        assert len(store) == 6
        assert await cache.detach_storage() is True
        await cache.flush()
        assert (await engine.serve([*PROMPT, 2])).tokens == 0
        assert len(store) == 6
        await cache.attach_storage(MemoryBackend(store))
        await cache.flush()
        assert (await engine.serve([*PROMPT, 3])).by_tier == {Tier.STORAGE: 20}


async def test_another_storage_gets_its_own_copy():
    first, second = MemoryStore(), MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(first)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.detach_storage()
        await cache.attach_storage(MemoryBackend(second))
        await engine.serve([*PROMPT, *range(4)])
        assert len(first) == 6
        assert len(second) == 8


async def test_a_named_backend_is_closed_with_its_attachment(tmp_path: Path):
    pages = {"path": str(tmp_path / "pages")}
    async with HybridCache.open(SPEC, config()) as cache:
        await cache.attach_storage("file", pages)
        with pytest.raises(UsageError, match="has storage already"):  # and not that the folder is locked
            await cache.attach_storage("file", pages)
        await Engine(cache).serve(PROMPT)
        await cache.detach_storage()
        await cache.attach_storage("file", pages)  # the lock is free again
        await cache.flush()
        assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


async def test_a_hanging_storage_is_detached_and_its_slots_are_not_lent_again():
    faults = Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))
    limits = PoolLimits(closing=0.05)
    async with HybridCache.open(SPEC, config(storage_limits=limits), storage=faults) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.flush()
        faults.rates = FaultRates(hang=1)
        async with cache.request([*PROMPT, 1]) as request:
            waiting = asyncio.create_task(request.prefetch())
            for _ in range(1000):
                await asyncio.sleep(0)
                if faults.hanging:
                    break
            assert await cache.detach_storage()
            hit = await waiting
            assert hit.tokens == 0
            await request.load()
            await engine.compute(request, len(PROMPT))
            assert not await request.durable()
        faults.release()
        assert cache.verify() == []
        assert (await engine.serve([*PROMPT, 2])).by_tier == {Tier.DEVICE: 20}


class Threads(MemoryBackend):
    """Its calls go on when they are cancelled, as those do that run in threads, and wait for `gate`."""

    def __init__(self, store: MemoryStore, held: str) -> None:
        super().__init__(store)
        self.gate = asyncio.Event()
        self.running: list[asyncio.Task[list[Outcome]]] = []
        self._held = held

    async def open_pool(self, binding: PoolBinding) -> ThreadedEngine:
        return ThreadedEngine(await super().open_pool(binding), binding, self)

    async def in_thread(self, name: str, call: Callable[[], Awaitable[list[Outcome]]]) -> list[Outcome]:
        self.running.append(asyncio.create_task(self._behind_gate(name, call)))
        return await asyncio.shield(self.running[-1])

    async def _behind_gate(self, name: str, call: Callable[[], Awaitable[list[Outcome]]]) -> list[Outcome]:
        if name == self._held:
            await self.gate.wait()
        return await call()


class ThreadedEngine:
    """An engine of its own for each call: what runs in a thread outlives the one that was closed."""

    capabilities = Capabilities(durable=False, checks=True)

    def __init__(self, engine: MemoryEngine, binding: PoolBinding, threads: Threads) -> None:
        self._engine = engine
        self._threads = threads
        self._inner = MemoryEngine(binding, threads.store, checksum=True)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        return await self._engine.exists(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._threads.in_thread("get", lambda: self._inner.get(keys, slots))

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._threads.in_thread("put", lambda: self._inner.put(keys, slots))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._engine.delete(keys)

    async def clear(self) -> int:
        return await self._engine.clear()

    async def aclose(self) -> None:
        await self._engine.aclose()


OTHERS = [[client * 1000 + n for n in range(20)] for client in range(1, 6)]
IMPATIENT = PoolLimits(deadline=0.01, closing=0.01)


def small(host_pages: int):
    """A cache that must use host slots again, and gives up on storage soon."""
    slots = {"kv": host_pages, "mamba": 8}
    return config(device_slots={"kv": 8, "mamba": 4}, host_slots=slots, storage_limits=IMPATIENT)


@pytest.mark.parametrize("detach", [False, True])
async def test_a_late_read_writes_to_nobodys_slots_and_if_it_outlives_its_storage(detach: bool):
    """The latter used to write to host slots that others had been given."""
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    threads = Threads(store, "get")
    async with HybridCache.open(SPEC, small(30), storage=threads) as cache:
        engine = Engine(cache)
        async with cache.request([*PROMPT, 1]) as request:
            assert (await request.prefetch()).reason is MissReason.DEADLINE
        if detach:
            await cache.detach_storage()
        for prompt in OTHERS:
            await engine.serve(prompt)
        threads.gate.set()
        await asyncio.wait(threads.running)
        served = [(await engine.serve([*prompt, 1])).by_tier for prompt in reversed(OTHERS)]  # compares bytes
        assert {Tier.HOST: 20} in served
        await cache.flush()
        assert cache.verify(idle=True) == []
        occupancy = cache.statistics().occupancy.values()
        assert [(host.held, host.quarantined) for _, host in occupancy] == [(0, 0)] * 2


async def test_a_write_that_outlives_its_storage_stores_no_others_bytes():
    """It used to seal, as its own, what others had put into its slots meanwhile."""
    threads = Threads(MemoryStore(), "put")
    async with HybridCache.open(SPEC, small(22), storage=threads) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.detach_storage()
        await cache.flush()
        for prompt in OTHERS:
            await engine.serve(prompt)
        threads.gate.set()
        await asyncio.wait(threads.running)
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(threads.store)) as cache:
        assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}  # compares bytes


class Gate:
    """A backend whose reads have happened, but are told, and whose engines are closed, when it opens."""

    name = "gated"

    def __init__(self, store: MemoryStore) -> None:
        self._backend = MemoryBackend(store)
        self.open = asyncio.Event()
        self.reading = asyncio.Event()
        self.engines_closed = 0

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return Gated(await self._backend.open_pool(binding), self)

    async def aclose(self) -> None:
        await self._backend.aclose()


class Gated:
    """One of its engines."""

    def __init__(self, engine: PoolEngine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self.capabilities = replace(engine.capabilities, immediate=False)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def get(self, keys, slots):
        outcomes = await self._engine.get(keys, slots)
        self._gate.reading.set()
        await self._gate.open.wait()
        return outcomes

    async def aclose(self) -> None:
        try:
            await self._gate.open.wait()
        finally:
            self._gate.engines_closed += 1
            await self._engine.aclose()


async def test_slots_that_a_closed_engine_may_write_to_are_never_lent_again():
    """They went back to the free ones: what the engine wrote late fell on somebody else's pages."""
    gate = Gate(MemoryStore())
    async with HybridCache.open(SPEC, config(storage_limits=PoolLimits(closing=0.02)), storage=gate) as cache:
        await Engine(cache).serve(PROMPT)
        await cache.flush()
        async with cache.request([*PROMPT, 1]) as request:
            waiting = asyncio.create_task(request.prefetch())
            await gate.reading.wait()
            assert await cache.detach_storage()
            assert (await waiting).tokens == 0
        await cache.drain()
        quarantined = {name: host.quarantined for name, (_, host) in cache.statistics().occupancy.items()}
        assert quarantined == {"kv": 5, "mamba": 1}
        assert cache.verify() == []


@pytest.mark.parametrize("change", ["detach", "weights"])
@pytest.mark.parametrize("verb", ["exists", "get", "put", "touch"])
async def test_nothing_is_held_for_calls_that_have_ended(verb: str, change: str):
    """Their slots used to be held, or in quarantine, for ever once the storage was detached."""
    faults = Faulty(MemoryBackend(MemoryStore(1 << 20)), FaultRates(), random.Random(0))
    async with HybridCache.open(SPEC, small(30), storage=faults) as cache:
        engine = Engine(cache)
        for round_number in range(3):
            await engine.serve([round_number, *PROMPT])
            await cache.flush()
            faults.rates = FaultRates(hang=1, calls=(verb,))
            for prompt in ([round_number, *PROMPT], [round_number, *OTHERS[0]]):
                await engine.serve(prompt)
            if change == "weights":
                await cache.update_weights(f"of round {round_number}")
            else:
                await cache.detach_storage()
                await cache.attach_storage(faults)
            faults.rates = FaultRates()
        await cache.detach_storage()
        assert cache.verify() == []
        faults.release()
        for _ in range(100):
            await asyncio.sleep(0)
        await cache.drain()
        await cache.flush()
        assert cache.verify(idle=True) == []
        occupancy = cache.statistics().occupancy.values()
        assert [(host.held, host.quarantined) for _, host in occupancy] == [(0, 0)] * 2


async def test_what_was_cleared_meanwhile_does_not_count_as_stored():
    """A read that ended after a clear marked its pages: `durable` said yes, and nobody wrote them again."""
    store = MemoryStore()
    gate = Gate(store)
    async with HybridCache.open(SPEC, config(), storage=gate) as cache:
        await Engine(cache).serve(PROMPT)
        await cache.flush()
        async with cache.request([*PROMPT, 1]) as request:
            waiting = asyncio.create_task(request.prefetch())
            await gate.reading.wait()
            assert await cache.clear_storage() == 6
            gate.open.set()
            assert (await waiting).tokens == 20
            await request.load()
            assert len(store) == 0
            assert await request.durable()
            assert len(store) == 6


async def test_a_clear_that_fails_halfway_forgets_what_was_stored():
    store = MemoryStore()
    faults = Faulty(MemoryBackend(store), FaultRates(), random.Random(0))
    async with HybridCache.open(SPEC, config(), storage=faults) as cache:
        await Engine(cache).serve(PROMPT)
        occurs, faults.occurs = faults.occurs, lambda name: name == "raises" and len(store) == 1
        with pytest.raises(StorageError, match="'mamba' could not be cleared"):
            await cache.clear_storage()
        faults.occurs = occurs
        assert len(store) == 1
        async with cache.request([*PROMPT, 1]) as request:
            await request.load()
            assert await request.durable()
        assert len(store) == 6


async def test_a_pool_that_cannot_be_cleared_does_not_keep_the_others():
    store = MemoryStore()
    faults = Faulty(MemoryBackend(store), FaultRates(), random.Random(0))
    async with HybridCache.open(SPEC, config(), storage=faults) as cache:
        await Engine(cache).serve(PROMPT)
        blows = iter([True])
        faults.occurs = lambda name: name == "raises" and next(blows, False)
        with pytest.raises(StorageError, match="'kv' could not be cleared"):
            await cache.clear_storage()
        assert len(store) == 5  # the state is gone, the five pages are not


async def test_storage_that_comes_too_late_is_closed_again(tmp_path: Path):
    path = {"path": str(tmp_path / "pages")}
    async with HybridCache.open(SPEC, config()) as cache:
        attaching = asyncio.create_task(cache.attach_storage("file", path))
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await attaching
    async with HybridCache.open(SPEC, config()) as cache:
        await cache.attach_storage("file", path)  # the lock is free


async def test_closing_waits_for_storage_that_is_being_detached():
    gate = Gate(MemoryStore())
    limits = PoolLimits(closing=0.02)
    async with HybridCache.open(SPEC, config(storage_limits=limits), storage=gate) as cache:
        detaching = asyncio.create_task(cache.detach_storage())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert gate.engines_closed == 2, "they use the host's memory, which is gone now"
    assert await detaching


async def test_nothing_is_durable_without_storage():
    async with HybridCache.open(SPEC, config()) as cache, cache.request(PROMPT) as request:
        await request.load()
        assert not await request.durable()


async def test_clear_leaves_other_models_alone():
    store = MemoryStore()
    for version in ("one", "two"):
        async with HybridCache.open(
            SPEC, config(weight_version=version), storage=MemoryBackend(store)
        ) as cache:
            await Engine(cache).serve(PROMPT)
    assert len(store) == 12
    options = config(weight_version="two")
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(store)) as cache:
        assert await cache.clear_storage() == 6
        assert len(store) == 6
        engine = Engine(cache)
        assert (await engine.serve([*PROMPT, 1])).tokens == 0
        assert len(store) == 12  # and is written anew


async def test_attaching_needs_a_weight_version():
    async with HybridCache.open(SPEC, config(weight_version=None)) as cache:
        with pytest.raises(ConfigError, match="needs weight_version"):
            await cache.attach_storage(MemoryBackend(MemoryStore()))
    async with HybridCache.open(SPEC, config()) as cache:
        with pytest.raises(ConfigError, match="none of the backends"):
            await cache.attach_storage("tape")


async def test_shed_writes_say_why():
    store = MemoryStore()
    store.capacity_bytes = 0
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
        assert cache.statistics().traffic.shed == {ShedReason.REJECTED: 6}


LATENT = PoolSpec("kv", (TensorSpec("latent", (0,), (3,), "uint8"),), replicated=True)
STATE = PoolSpec(
    "mamba", (TensorSpec("recurrent", (1,), (8,), "uint8"),), coverage=trailing_pages(1), per_token=False
)
MLA = ModelSpec("mla-and-states", PAGE, 2, (LATENT, STATE))


async def test_replicated_pages_are_written_by_one_rank_and_states_by_each():
    """Each of two ranks holds the whole latent and a part of the states."""
    store = MemoryStore()
    for rank in (1, 0):
        async with HybridCache.open(MLA, config(rank=rank, ranks=2), storage=MemoryBackend(store)) as cache:
            await Engine(cache).serve(PROMPT)
        assert len(store) == (1 if rank else 1 + 6)
    for rank in (0, 1):
        async with HybridCache.open(MLA, config(rank=rank, ranks=2), storage=MemoryBackend(store)) as cache:
            assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


@pytest.mark.parametrize("rest", [(), (TensorSpec("conv", (1,), (8,), "uint8"),)], ids=["pool", "tensor"])
async def test_states_of_no_bytes_are_neither_stored_nor_missed(rest: tuple[TensorSpec, ...]):
    nothing = TensorSpec("recurrent", (1,), (0,), "uint8")
    states = PoolSpec("mamba", (*rest, nothing), coverage=trailing_pages(1), per_token=False)
    spec = ModelSpec("partly-empty", PAGE, 2, (LATENT, states))
    store = MemoryStore()
    for tail, hit in (([], 0), ([1], 20)):
        options = config(device_slots={"kv": 32})
        async with HybridCache.open(spec, options, storage=MemoryBackend(store)) as cache:
            assert (await Engine(cache).serve([*PROMPT, *tail])).tokens == hit
    assert len(store) == 5 + len(rest)
