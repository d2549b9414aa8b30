"""Weights that change under a running cache: no page of the old ones is served, or stored as a new one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import pytest

from asynchicache import (
    CacheConfig,
    Hit,
    HybridCache,
    MissReason,
    PrefetchOptions,
    PrefetchPolicy,
    Request,
    Tier,
)
from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.events import PagesRemoved, PagesStored, TiersCleared
from asynchicache.hashing import ObjectKey, page_digests
from asynchicache.layouts import HostLayout
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import PoolBinding
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.oracle import ByteOracle, HostOracle
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from cache.engine import config
from soaking import first

PAGE = 4
SPEC = synthetic_spec(PAGE, ("kv", "mamba", "swa", "dsa"), window_pages=2)
SLOTS = {"kv": 12, "mamba": 4, "swa": 12}
PROMPT = list(range(100, 120))


class Weights:
    """The weights that a model has now, and the bytes that it computes with them."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache

    @property
    def version(self) -> str:
        return self.cache.config.weight_version or ""

    def oracle(self, version: str) -> ByteOracle:
        return ByteOracle(self.cache.spec, self.cache.device_tensor, identity=lambda _: version)

    def places(self, request: Request, pages: int) -> list[tuple[str, Sequence[int], list[bytes]]]:
        """Slots and digests of what a prefix of so many pages has in each pool."""
        digests, found = page_digests(memoryview(request.tokens), PAGE)[:pages], []
        for pool in self.cache.spec.pools if pages else ():
            if pool.per_token:
                first = request.first_page(pool.name)
                found.append((pool.name, request.pages(pool.name)[: pages - first], digests[first:]))
            else:
                found.append((pool.name, [request.state(pool.name)], digests[-1:]))
        return found

    async def serve(self, tokens: Sequence[int], *, pause: float = 0.0, prefetch: bool = True) -> Hit:
        """Serve a prompt; what is restored must be of the weights that the model has at that time."""
        async with self.cache.request([*tokens, 1]) as request:
            if prefetch:
                await request.prefetch()
            ticket, version = request.load(), self.version
            await ticket
            hit = request.hit
            pages = hit.tokens // PAGE
            oracle = self.oracle(version)
            for pool, slots, digests in self.places(request, pages):
                assert oracle.count_wrong(pool, slots, digests) == 0, (pool, version)
            await request.reserve(len(tokens) - pages * PAGE)
            await asyncio.sleep(pause)
            for pool, slots, digests in self.places(request, len(tokens) // PAGE):
                oracle.write(pool, slots, digests)
            await request.checkpoint(len(tokens))
        return hit


def options(**values: object) -> CacheConfig:
    return config(device_slots=SLOTS, host_ratio=3, weight_version="one", **values)


@pytest.mark.asyncio
async def test_every_tier_forgets_and_storage_keeps() -> None:
    store = MemoryStore()
    async with HybridCache.open(SPEC, options(), storage=MemoryBackend(store)) as cache:
        model = Weights(cache)
        await model.serve(PROMPT)
        await cache.drain()
        held = len(store)
        assert (await model.serve(PROMPT)).tokens == 20
        await cache.update_weights("two")
        assert cache.config.weight_version == "two"
        assert (await model.serve(PROMPT)).tokens == 0
        await cache.drain()
        assert len(store) == 2 * held
        await cache.flush()
        assert (await model.serve(PROMPT)).by_tier == {Tier.STORAGE: 20}
        await cache.update_weights("one")  # a store knows both
        assert (await model.serve(PROMPT)).by_tier == {Tier.STORAGE: 20}
        await cache.drain()
        assert_clean(cache)
    async with HybridCache.open(SPEC, options(), storage=MemoryBackend(store)) as cache:
        assert (await Weights(cache).serve(PROMPT)).by_tier == {Tier.STORAGE: 20}


@pytest.mark.asyncio
async def test_an_open_request_goes_on_and_publishes_nothing() -> None:
    store = MemoryStore()
    async with HybridCache.open(SPEC, options(), storage=MemoryBackend(store)) as cache:
        model = Weights(cache)
        await model.serve(PROMPT)
        async with cache.request([*PROMPT, *range(8)]) as loaded, cache.request([*PROMPT, 1]) as matched:
            await loaded.load()
            assert loaded.hit.tokens == matched.hit.tokens == 20
            await cache.update_weights("two")
            stored = len(store)
            assert model.oracle("one").count_wrong(*model.places(loaded, 5)[0]) == 0  # its pages are its own
            loaded.extend(8)
            await loaded.checkpoint(28)
            assert not await loaded.durable()
            await matched.load()
            assert (matched.hit.tokens, matched.hit.reason) == (0, MissReason.WEIGHTS)
            async with cache.request([*PROMPT, 2]) as later:
                assert later.hit.tokens == 0
        await cache.drain()
        assert len(store) == stored
        assert_clean(cache)
        await cache.flush()
        assert {tier.held for tiers in cache.statistics().occupancy.values() for tier in tiers} == {0}


class OpensSlowly(MemoryBackend):
    """A store that says when it is being opened, and is open when it is told to be."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.opening, self.opened = asyncio.Event(), asyncio.Event()

    async def open_pool(self, binding: PoolBinding) -> MemoryEngine:
        self.opening.set()
        await self.opened.wait()
        return await super().open_pool(binding)


@pytest.mark.asyncio
async def test_storage_that_is_being_attached_when_the_weights_change_has_the_new_ones() -> None:
    store = MemoryStore()
    async with HybridCache.open(SPEC, options()) as cache:
        model, slow = Weights(cache), OpensSlowly(store)
        attaching = asyncio.create_task(cache.attach_storage(slow))
        await slow.opening.wait()
        changing = asyncio.create_task(cache.update_weights("two"))
        await asyncio.sleep(0)
        slow.opened.set()
        await asyncio.gather(attaching, changing)
        await model.serve(PROMPT)
        await cache.drain()
        assert_clean(cache)
    for version, tokens in (("one", 0), ("two", 20)):
        changed = msgspec.structs.replace(options(), weight_version=version)
        async with HybridCache.open(SPEC, changed, storage=MemoryBackend(store)) as cache:
            assert (await Weights(cache).serve(PROMPT)).tokens == tokens, version


def test_what_loads_during_the_change_restores_nothing_and_publishes_nothing() -> None:
    """It may compute with either weights, and storage is still that of the ones before."""

    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        storage = Latency(MemoryBackend(store), 0.01, sleep=world.sleep)
        async with world.open_cache(SPEC, options(), storage=storage) as cache:
            model = Weights(cache)
            await model.serve(PROMPT)
            await cache.drain()
            stored = len(store)
            async with cache.request(PROMPT) as used:
                await used.load()  # storage is told of that before it is detached
            await world.sleep(0.001)
            changing = asyncio.create_task(cache.update_weights("two"))
            await world.sleep(1e-5)  # until it has begun
            for other in (PROMPT, [*reversed(PROMPT)]):
                async with cache.request([*other, 1]) as request:
                    await request.prefetch()
                    await request.load()
                    assert not changing.done()
                    assert (request.hit.tokens, request.hit.reason) == (0, MissReason.WEIGHTS)
                    request.extend(21)
                    await request.checkpoint(20)
                    assert not await request.durable()
            await changing
            await cache.drain()
            assert len(store) == stored
            assert_clean(cache)

    for seed in range(5):
        run_seeded(seed, main)


@pytest.mark.asyncio
async def test_a_cancelled_caller_has_changed_them_all_the_same() -> None:
    """At every step of the call: its model has the new weights, so pages of the old ones are none of it."""
    for steps in range(1, 9):
        async with HybridCache.open(SPEC, options(), storage=MemoryBackend(MemoryStore())) as cache:
            model = Weights(cache)
            await model.serve(PROMPT)
            changing = asyncio.create_task(cache.update_weights("two"))
            for _ in range(steps):
                await asyncio.sleep(0)
            changing.cancel()
            with suppress(asyncio.CancelledError):
                await changing
            assert model.version == "two", steps
            async with cache.request([*PROMPT, 1]) as request:
                assert request.hit.tokens == 0


@pytest.mark.asyncio
async def test_a_request_that_loads_afterwards_publishes() -> None:
    async with HybridCache.open(SPEC, options()) as cache:
        model = Weights(cache)
        await model.serve(PROMPT)
        async with cache.request([*PROMPT, 1]) as request:
            await cache.update_weights("two")
            await request.load()
            request.extend(20)
            for place in model.places(request, 5):
                model.oracle("two").write(*place)
            await request.checkpoint(20)
        assert (await model.serve(PROMPT)).tokens == 20


@pytest.mark.asyncio
async def test_subscribers_hear_of_it_once() -> None:
    async with HybridCache.open(SPEC, options()) as cache:
        model, events = Weights(cache), cache.events()
        await model.serve(PROMPT)
        async with cache.request([*PROMPT, 1]) as request:
            await request.load()
            await cache.drain()
            events.take()
            await cache.update_weights("two")
            assert TiersCleared((Tier.DEVICE, Tier.HOST)) in events.take()
            assert await cache.snapshot() == []
            await cache.update_weights("two")
            await model.serve(PROMPT)
            await cache.drain()
            assert {type(event) for event in events.take()} == {PagesStored}
        await cache.flush()  # the last of the old pages go; their names are those of new ones
        assert not any(isinstance(event, PagesRemoved) for event in events.take())


@pytest.mark.asyncio
@pytest.mark.parametrize("version", ["", None, 7])
async def test_versions_that_are_no_names(version: str) -> None:
    async with HybridCache.open(SPEC, options()) as cache:
        with pytest.raises(ConfigError, match="must be a name that changes with the weights"):
            await cache.update_weights(version)
    with pytest.raises(ClosedError):
        await cache.update_weights("two")


@pytest.mark.asyncio
async def test_the_same_version_forgets_nothing() -> None:
    async with HybridCache.open(SPEC, options()) as cache:
        model = Weights(cache)
        await model.serve(PROMPT)
        await cache.update_weights("one")
        assert (await model.serve(PROMPT)).tokens == 20


@pytest.mark.asyncio
async def test_storage_that_is_gone_leaves_a_cache_without() -> None:
    backend = MemoryBackend(MemoryStore())
    async with HybridCache.open(SPEC, options(), storage=backend) as cache:
        model = Weights(cache)
        await model.serve(PROMPT)
        backend.open_pool = _refuse  # type: ignore[method-assign]
        with pytest.raises(StorageError):
            await cache.update_weights("two")
        assert (await model.serve(PROMPT)).tokens == 0
        assert not await cache.detach_storage()


async def _refuse(*_: object) -> None:
    raise StorageError("gone")


# Any order of events


class Witness(MemoryStore):
    """Checks that what is stored under a name was computed with the weights of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[bytes, str] = {}
        self.wrong: list[str] = []

    def name(self, cache: HybridCache, version: str) -> None:
        for pool in cache._parts.storage._pools.values():
            self.versions[pool.binding.fingerprint] = version

    def write(self, key: ObjectKey, header: bytes, page: bytes) -> bool:
        version = self.versions.get(key.fingerprint)
        if version is not None:
            oracle = HostOracle(SPEC, HostLayout.PAGE_FIRST_DIRECT, identity=lambda _: version)
            if not oracle.holds(key.pool, memoryview(page), key.digest):
                self.wrong.append(f"{key.pool} of {version}")
        return super().write(key, header, page)


async def chaos(world: SeededWorld) -> None:
    store, draw = Witness(), random.Random(world.seed)
    faulty = Faulty(MemoryBackend(store), FaultRates(), random.Random(world.seed))
    storage = Latency(faulty, 2e-3, sleep=world.sleep)
    wanted = options(
        prefetch=PrefetchOptions(policy=draw.choice(list(PrefetchPolicy))),
        storage_limits=PoolLimits(closing=0.1),
        write_policy=draw.choice(["write_through", "write_back", "write_through_selective"]),
        close_seconds=0.5,
    )
    async with world.open_cache(SPEC, wanted, storage=storage) as cache:
        model = Weights(cache)
        store.name(cache, "one")

        async def client() -> None:
            for _ in range(8):
                await world.sleep(draw.expovariate(300))
                family = draw.randrange(3) * 100
                tokens = list(range(family, family + draw.choice([8, 12, 20])))
                if draw.random() < 0.2:
                    await cache.flush()
                await model.serve(tokens, pause=draw.expovariate(500), prefetch=draw.random() < 0.8)

        async def trainer() -> None:
            for number in range(3):
                await world.sleep(draw.expovariate(100))
                await cache.update_weights(f"step {number}")
                store.name(cache, model.version)

        await asyncio.gather(trainer(), *(client() for _ in range(3)))
        await cache.drain()
        assert_clean(cache)
        await cache.flush()  # for write_back skips a state where all others are dirty
        await model.serve(PROMPT)
        await cache.drain()
        assert (await model.serve(PROMPT)).tokens == 20
    assert store.wrong == []
    assert store.versions


@pytest.mark.parametrize("seed", first(20, range(60)))
def test_any_order(seed: int) -> None:
    run_seeded(seed, chaos)
