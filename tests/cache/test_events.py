"""Who follows the events of a cache knows what is in it, whenever they began to listen."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterable

import pytest

from asynchicache import CacheConfig, ClosedError, ConfigError, HybridCache, ModelSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.events import CacheEvent, EventsDropped, PagesRemoved, PagesStored, TiersCleared
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.testing.devices import break_device
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array
from cache.engine import PAGE, SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 121))
MEMORY = (Tier.DEVICE, Tier.HOST)


class Follower:
    """Knows what it was told: by pool and tier, digests."""

    def __init__(self, events: Iterable[CacheEvent] = ()) -> None:
        self.pages: dict[tuple[str, Tier], set[bytes]] = {}
        self.follow(events)

    def follow(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case PagesStored():
                    check(event)
                    self.pages.setdefault((event.pool, event.tier), set()).update(event.digests)
                case PagesRemoved():
                    self.pages.setdefault((event.pool, event.tier), set()).difference_update(event.digests)
                case TiersCleared():
                    self.pages = {at: found for at, found in self.pages.items() if at[1] not in event.tiers}
                case EventsDropped():
                    pytest.fail("the queue was long enough")

    def known(self, *tiers: Tier) -> dict[tuple[str, Tier], set[bytes]]:
        return {at: found for at, found in self.pages.items() if at[1] in tiers and found}


def check(event: PagesStored) -> None:
    """Tokens, parent and namespace are those that the digests stand for."""
    seed = namespace_seed(event.namespace, event.salt)
    prior = seed if event.parent is None else event.parent
    assert list(event.digests) == page_digests(event.tokens, PAGE, prior)
    assert event.page_size == PAGE


async def truth(cache: HybridCache) -> Follower:
    return Follower(await cache.snapshot())


async def churn(cache: HybridCache, rng: random.Random) -> None:
    """One thing that happens to a cache."""
    start = rng.randrange(6) * 100
    prompt = [*range(start, start + rng.randrange(5, 40)), rng.randrange(3)]
    match rng.randrange(8):
        case 0:
            await cache.flush()
        case 1:
            await cache.drain()
        case _:
            await Engine(cache).serve(
                prompt, namespace=rng.choice([None, "lora"]), outputs=range(rng.randrange(9))
            )


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 40))]
)
@pytest.mark.parametrize(
    "spec",
    [SPEC, synthetic_spec(PAGE, ("kv", "mamba", "swa"), window_pages=2)],
    ids=["states", "states and windows"],
)
async def test_followers_agree_with_the_cache_whenever_they_began(spec: ModelSpec, seed: int):
    rng = random.Random(seed)
    slots = {pool.name: 24 if pool.per_token else 4 for pool in spec.owners}
    backend = MemoryBackend(MemoryStore())
    async with HybridCache.open(spec, config(device_slots=slots, host_ratio=1.5), storage=backend) as cache:
        early = cache.events()
        first, second = Follower(), Follower()
        late, seen = None, set()
        for step in range(24):
            await churn(cache, rng)
            if step == 8:
                late = cache.events()
                second.follow(await cache.snapshot())
            if step == 16:
                await cache.clear_storage()
            first.follow(early.take())
            second.follow(late.take() if late is not None else ())
            now = await truth(cache)
            assert first.known(*MEMORY) == now.known(*MEMORY)
            if late is not None:
                assert second.known(*MEMORY) == now.known(*MEMORY)
            for at, digests in now.known(Tier.STORAGE).items():
                assert digests <= first.pages[at]  # it also knows of pages that memory has forgotten
            seen |= now.pages.keys()
        assert len(seen) == len(spec.owners) * len(Tier)


async def test_storage_that_is_cleared_or_detached_is_told():
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(MemoryStore())) as cache:
        events = cache.events()
        follower = Follower()
        await Engine(cache).serve(PROMPT)
        follower.follow(events.take())
        assert len(follower.pages["kv", Tier.STORAGE]) == 5
        await cache.clear_storage()
        told = events.take()
        assert told == [TiersCleared((Tier.STORAGE,))], "what memory has is not told anew"
        follower.follow(told)
        assert not follower.known(Tier.STORAGE)
        assert follower.known(*MEMORY)


async def test_what_storage_brings_back_is_told_to_be_there():
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        events = cache.events()
        await Engine(cache).serve(PROMPT)
        follower = Follower(events.take())
        digests = set(page_digests(token_array(PROMPT), PAGE))
        assert follower.pages["kv", Tier.STORAGE] == digests
        assert follower.pages["kv", Tier.HOST] == digests
        assert follower.pages["kv", Tier.DEVICE] == digests


async def test_a_broken_device_leaves_followers_right():
    async with HybridCache.open(SPEC, config(device_slots={"kv": 12, "mamba": 4})) as cache:
        events = cache.events()
        engine = Engine(cache)
        for start in (0, 100, 200):
            await engine.serve(range(start, start + 21))
        break_device(cache.device)
        async with cache.request(range(21)) as request:
            await asyncio.gather(request.load(), return_exceptions=True)
        await cache.drain()
        assert Follower(events.take()).known(*MEMORY) == (await truth(cache)).known(*MEMORY)


async def test_a_slow_listener_is_told_what_it_lost():
    async with HybridCache.open(SPEC, config()) as cache:
        events = cache.events(limit=4)
        engine = Engine(cache)
        for start in (0, 100, 200):
            await engine.serve(range(start, start + 21))
        seen = events.take()
        assert isinstance(seen[0], EventsDropped)
        assert seen[0].count == events.dropped > 0
        assert len(seen) == 1 + 4
        assert events.take() == []

        follower = Follower(await cache.snapshot())
        await engine.serve(range(300, 305))
        follower.follow(events.take())
        assert follower.known(*MEMORY) == (await truth(cache)).known(*MEMORY)


async def test_iteration_waits_and_ends_with_the_cache():
    async with HybridCache.open(SPEC, config()) as cache:
        events = cache.events(limit=1)
        heard: list[CacheEvent] = []

        async def listen() -> None:
            async for event in events:
                heard.append(event)

        listening = asyncio.create_task(listen())
        await Engine(cache).serve(PROMPT)
    await listening
    assert any(isinstance(event, PagesStored) for event in heard)
    assert sum(event.count for event in heard if isinstance(event, EventsDropped)) == events.dropped
    with pytest.raises(ClosedError):
        cache.events()
    with pytest.raises(ClosedError):
        await cache.snapshot()


async def test_nothing_is_computed_while_nobody_listens():
    async with HybridCache.open(SPEC, config()) as cache:
        tree = cache._parts.planner.inventory.tree
        engine = Engine(cache)
        await engine.serve(PROMPT)
        assert tree.watcher is None
        assert all(node.digests is None for node in tree.nodes())

        with cache.events() as events:
            assert tree.watcher is not None
            await engine.serve(range(200, 221))
            assert events.take()
        await engine.serve(range(300, 321))
        assert tree.watcher is None  # noticed at the first event that nobody heard
        assert not events.take()

        cache.events()  # nobody holds it
        gc.collect()
        await engine.serve(range(400, 421))
        assert tree.watcher is None


async def test_salts_and_namespaces_are_named():
    async with HybridCache.open(SPEC, config()) as cache:
        events = cache.events()
        async with cache.request(PROMPT, namespace="tenant", salt="s") as request:
            await request.load()
            request.extend(len(PROMPT))
            await request.checkpoint(20)
        stored = [event for event in events.take() if isinstance(event, PagesStored)]
        assert stored
        assert {(event.namespace, event.salt) for event in stored} == {("tenant", "s")}


async def test_a_request_that_begins_long_after_it_was_made_has_its_salt():
    async with HybridCache.open(SPEC, config()) as cache:
        events = cache.events()
        late = cache.request(PROMPT, namespace="tenant", salt="s")
        for number in range(3000):
            cache.request([1], salt=str(number))
        async with late as request:
            await request.load()
            request.extend(len(PROMPT))
            await request.checkpoint(20)
        stored = [event for event in events.take() if isinstance(event, PagesStored)]
        assert {(event.namespace, event.salt) for event in stored} == {("tenant", "s")}


async def test_names_of_namespaces_that_are_gone_are_forgotten():
    async with HybridCache.open(SPEC, CacheConfig(device_slots={"kv": 8, "mamba": 2})) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT, namespace="kept")
        for number in range(3000):
            cache.request([1], salt=str(number))
        names = cache._parts.namespaces
        assert names.named(namespace_seed("kept")).name == "kept"
        assert len(names._names) < 2100


async def test_a_queue_must_hold_an_event():
    async with HybridCache.open(SPEC, config()) as cache:
        with pytest.raises(ConfigError, match="limit 0 of waiting events must be 1 or more"):
            cache.events(limit=0)
