"""Prefixes that end inside a page, through the whole cache: bytes and lengths, token by token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from asynchicache import CacheConfig, CacheHint, HybridCache, Request, Tier, WritePolicy
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.events import PagesStored
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.node import FULL
from asynchicache.types import token_array
from cache.token_oracle import TokenOracle
from soaking import first

PAGE = 4


def config(**options: object) -> CacheConfig:
    defaults: dict[str, object] = {
        "device_slots": {"kv": 32, "mamba": 8},
        "host_slots": {"kv": 64, "mamba": 16},
        "inline": True,
        "tails": True,
    }
    return CacheConfig(**(defaults | options))


class TokenEngine:
    """Computes bytes that depend on all tokens so far, for each token and for the states behind it."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.tokens = TokenOracle(cache.spec, cache.device_tensor)
        self.states = ByteOracle(cache.spec, cache.device_tensor)
        self.paged = [pool.name for pool in cache.spec.pools if pool.per_token]
        self.others = [pool.name for pool in cache.spec.pools if not pool.per_token]

    def check(self, request: Request, done: int, digests: Sequence[bytes]) -> None:
        """The first `done` tokens, and the states behind them, are what was computed."""
        for pool in self.paged:
            first = request.first_page(pool)
            tokens = digests[first * PAGE : done]
            assert self.tokens.count_wrong(pool, request.pages(pool), 0, tokens) == 0
        for pool in self.others if done else ():
            assert self.states.count_wrong(pool, [request.state(pool)], [digests[done - 1]]) == 0

    def compute(self, request: Request, done: int, end: int, digests: Sequence[bytes]) -> None:
        for pool in self.paged:
            start = done - request.first_page(pool) * PAGE
            self.tokens.write(pool, request.pages(pool), start, digests[done:end])
        for pool in self.others:
            self.states.write(pool, [request.state(pool)], [digests[end - 1]])

    async def serve(
        self,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        namespace: str | None = None,
        final: bool = True,
        stops: Sequence[int] = (),
        repeats: Sequence[int] = (),
    ) -> int:
        """Serve a prompt, publish it and its output; returns the tokens that were restored."""
        hint = CacheHint(repeats=tuple(repeats))
        async with self.cache.request(prompt, namespace=namespace, hint=hint) as request:
            matched = request.hit
            await request.prefetch()
            await request.load()
            hit = request.hit
            assert hit.tokens >= matched.tokens, "nobody else was served meanwhile"
            assert all(cut > hit.tokens for cut in request.cuts)
            request.append(output) if output else None
            ends = page_digests(token_array(request.tokens), 1, namespace_seed(namespace))
            self.check(request, hit.tokens, ends)
            total, done = len(ends), hit.tokens
            for stop in sorted({*request.cuts, *stops, len(prompt), total}):
                if stop > done:
                    await request.reserve(max(stop - request.reserved, 0))
                    self.compute(request, done, stop, ends)
                    await request.checkpoint(stop, final=final and stop == total)
                    done = stop
            if not final:
                self.check(request, total, ends)
        await self.cache.drain()
        assert self.cache.verify() == []
        return hit.tokens


@pytest.fixture(params=["kv", "kv,mamba", "kv,dsa", "kv,swa", "kv,mamba,swa"])
def spec(request):
    return synthetic_spec(PAGE, request.param.split(","))


def ends_with_requests(spec) -> bool:
    """Whether only finished requests leave a prefix that ends inside a page."""
    return len(spec.owners) > 1


def options(spec, **more: object) -> CacheConfig:
    names = [pool.name for pool in spec.owners]
    sizes = {"kv": (24, 40), "mamba": (6, 9), "swa": (16, 16)} | more.pop("sizes", {})
    return config(
        device_slots={name: sizes[name][0] for name in names},
        host_slots={name: sizes[name][1] for name in names},
        **more,
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("final", [False, True])
async def test_a_conversation_goes_on_at_its_last_token(spec, final):
    async with HybridCache.open(spec, options(spec)) as cache:
        engine = TokenEngine(cache)
        assert await engine.serve([1, 2, 3, 4, 5, 6], [7, 8, 9, 10], final=final) == 0
        whole = not final and ends_with_requests(spec)  # what a request still needs is not given away
        again = await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [13], final=final)
        last = await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], final=final)

    assert again == ((4 if engine.others else 8) if whole else 10)
    assert last == (12 if whole else 13)


@pytest.mark.asyncio
@pytest.mark.parametrize("inside", [False, True], ids=["whole pages", "tails"])
async def test_the_next_turn_resumes_where_it_leaves_this_one(spec, inside):
    """At every length of a prompt whose last three tokens the next turn does not repeat: the template's
    invitation to answer. In memory, and after a restart."""
    store = MemoryStore()
    more = {"tails": inside, "weight_version": "test"}
    for length in range(6, 6 + 2 * PAGE):
        repeated = length - 3
        turn = [*range(100 * length, 100 * length + repeated)]
        expected = repeated
        if not inside or {"swa"} & {pool.name for pool in spec.pools}:
            expected = repeated // PAGE * PAGE
        async with HybridCache.open(spec, options(spec, **more), storage=MemoryBackend(store)) as cache:
            engine = TokenEngine(cache)
            await engine.serve([*turn, 1, 2, 3], [4, 5, 6], repeats=[repeated])
            if engine.others or not inside:
                assert await engine.serve([*turn, 7, 8, 9]) == expected
            await engine.serve([*turn, 1, 2, 3], [14, 15], repeats=[repeated])
        async with HybridCache.open(spec, options(spec, **more), storage=MemoryBackend(store)) as cache:
            if engine.others:
                assert await TokenEngine(cache).serve([*turn, 17, 18, 19]) == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("final", [False, True])
async def test_a_conversation_has_one_end_at_a_time(spec, final):
    """A tail that was continued is dropped; with states or windows it is aged: it serves a branch there."""
    async with HybridCache.open(spec, options(spec)) as cache:
        engine, tokens = TokenEngine(cache), [1, 2, 3, 4, 5]
        for turn in range(5):
            await engine.serve(tokens, [10 + turn], final=final)
            tokens = [*tokens, 10 + turn, 7]
        ends = [node for node in cache._parts.planner.inventory.tree.nodes() if node.tail]

    if ends_with_requests(spec):
        aged = [node.superseded or not node.worth[FULL] for node in ends]
        assert [bool(one) for one in aged].count(False) == int(final)
    else:
        assert [node.tail for node in ends] == [(len(tokens) - 1) % PAGE] == [2]


@pytest.mark.asyncio
async def test_a_tail_comes_back_from_the_host(spec):
    async with HybridCache.open(spec, options(spec, sizes={"kv": (6, 40), "mamba": (2, 9)})) as cache:
        engine = TokenEngine(cache)
        await engine.serve([1, 2, 3, 4, 5, 6], [7])
        await engine.serve(list(range(100, 120)), [7])
        async with cache.request([1, 2, 3, 4, 5, 6, 7, 8]) as request:
            assert request.hit.by_tier == {Tier.HOST: 7}
        assert await engine.serve([1, 2, 3, 4, 5, 6, 7, 8]) == 7


async def fill_memory(engine: TokenEngine) -> None:
    """Serve other prompts until nothing of what was served before is in memory."""
    for start in range(100, 500, 100):
        await engine.serve(list(range(start, start + 20)), [7])


def stored(spec, **more: object) -> CacheConfig:
    return options(spec, weight_version="test", sizes={"kv": (8, 8), "mamba": (2, 3)}, **more)


@pytest.mark.asyncio
async def test_a_tail_comes_back_from_storage(spec):
    async with HybridCache.open(spec, stored(spec, storage="memory")) as cache:
        engine = TokenEngine(cache)
        await engine.serve([1, 2, 3, 4], [5, 6, 7])
        await fill_memory(engine)
        async with cache.request([1, 2, 3, 4, 5, 6, 7, 8]) as request:
            assert request.hit.tokens == 0
            await request.prefetch()
            await request.load()
            assert request.hit.by_tier == {Tier.STORAGE: 7}
        await fill_memory(engine)
        assert await engine.serve([1, 2, 3, 4, 5, 6, 7, 8]) == 7


def reopened(spec, store: MemoryStore) -> AbstractAsyncContextManager[HybridCache]:
    """A cache with nothing in memory."""
    return HybridCache.open(spec, options(spec, weight_version="test"), storage=MemoryBackend(store))


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", ["", "state", "tail"])
async def test_a_tail_comes_back_after_a_restart(spec, lost):
    """To those who go on at it, and only to them; if a part of it is lost, the pages before it do."""
    store = MemoryStore()
    turn = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    async with reopened(spec, store) as cache:
        engine = TokenEngine(cache)
        assert await engine.serve(turn[:6], turn[6:], stops=[4, 8]) == 0
        pools = {"state": engine.others, "tail": engine.paged}.get(lost)
        if pools:
            lose(cache, store, pools[0])

    async with reopened(spec, store) as cache:
        assert await TokenEngine(cache).serve([*turn[:9], 77, 78, 79, 80]) == 8
    async with reopened(spec, store) as cache:
        engine = TokenEngine(cache)
        assert await engine.serve([*turn, 11, 12, 13, 14, 15]) == (8 if pools else 10)
        assert await engine.serve([*turn, 11, 12, 13, 14, 15, 16]) == 15


@pytest.mark.asyncio
async def test_durable_means_the_last_token(spec):
    store = MemoryStore()
    async with reopened(spec, store) as cache, cache.request([1, 2, 3, 4, 5, 6]) as request:
        engine = TokenEngine(cache)
        ends = page_digests(token_array(request.tokens), 1, namespace_seed(None))
        await request.load()
        request.extend(6)
        engine.compute(request, 0, 6, ends)
        await request.checkpoint(6, final=True)
        assert await request.durable()
        kept = {pool.name: sum(key.pool == pool.name for key in store) for pool in spec.pools}
        lose(cache, store, spec.owners[0].name)
        assert await request.durable(), "what storage has lost is written anew"

    assert kept == {pool.name: 2 if pool.per_token else 1 for pool in spec.pools}
    async with reopened(spec, store) as cache:
        assert await TokenEngine(cache).serve([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 6


def lose(cache: HybridCache, store: MemoryStore, pool: str) -> None:
    """Remove what a store has of a pool for the longest path's tail."""
    tree = cache._parts.planner.inventory.tree
    end = max((node for node in tree.nodes() if node.tail), key=lambda node: node.end)
    key = next(key for key in store if key.pool == pool and key.digest == tree.digests(end)[0])
    assert store.drop(key)


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [11, 12], ids=["another tail", "a whole page"])
@pytest.mark.parametrize("final", [False, True])
async def test_durable_means_an_end_that_another_page_begins_with(spec, before, final):
    """In memory that page serves as well; after a restart only what was stored under the end itself does."""
    store, tokens = MemoryStore(), list(range(12))
    async with reopened(spec, store) as cache:
        engine = TokenEngine(cache)
        await engine.serve(tokens[:before], final=final)
        async with cache.request(tokens[:10]) as request:
            await request.load()
            await request.reserve(10 - request.hit.tokens)
            ends = page_digests(token_array(request.tokens), 1, namespace_seed(None))
            engine.compute(request, request.hit.tokens, 10, ends)
            await request.checkpoint(10, final=True)
            assert await request.durable()
    async with reopened(spec, store) as cache:
        assert await TokenEngine(cache).serve([*tokens[:10], 99]) == 10


@pytest.mark.asyncio
async def test_a_tail_stays_until_the_promise_about_it_is_kept():
    """A second request ends where the first did; then a third takes what memory there is."""
    spec, store = synthetic_spec(PAGE, ("kv",)), MemoryStore()
    small = config(
        device_slots={"kv": 8},
        host_slots={"kv": 8},
        write_policy=WritePolicy.WRITE_BACK,
        weight_version="test",
    )
    async with HybridCache.open(spec, small, storage=MemoryBackend(store)) as cache:
        engine = TokenEngine(cache)
        await engine.serve(range(10), final=True)
        async with cache.request(range(10)) as request:
            await request.load()
            await request.reserve(10 - request.hit.tokens)
            await request.checkpoint(10, final=True)
            for first in (50, 70, 90):
                await engine.serve(range(first, first + 12))
            assert await request.durable()
    async with HybridCache.open(spec, small, storage=MemoryBackend(store)) as cache:
        assert await TokenEngine(cache).serve([*range(10), 99]) == 10


@pytest.mark.asyncio
async def test_what_has_left_memory_is_not_promised(spec):
    """Other weights: nothing tells any more whether the pages of the old ones are in storage."""
    store = MemoryStore()
    async with reopened(spec, store) as cache:
        for length in (3, 8, 10):
            async with cache.request(range(length)) as request:
                await request.load()
                await request.reserve(length - request.hit.tokens)
                await request.checkpoint(length, final=True)
                await cache.update_weights(f"of {length}")
                assert not await request.durable()


@pytest.mark.asyncio
async def test_a_sequence_within_one_page_comes_back_too(spec):
    store = MemoryStore()
    async with reopened(spec, store) as cache:
        await TokenEngine(cache).serve([1], [2])
    async with reopened(spec, store) as cache:
        assert await TokenEngine(cache).serve([1, 2, 3]) == 2
        assert await TokenEngine(cache).serve([1, 2, 3, 4, 5]) == 3
        asked = cache.statistics().storage["kv"].exists.calls
        assert await TokenEngine(cache).serve([1, 2, 3]) == 2
        assert cache.statistics().storage["kv"].exists.calls == asked, "memory had it"


@pytest.mark.asyncio
async def test_the_end_of_a_prompt_that_goes_on_is_not_stored():
    """Its answer follows it, so only memory keeps it for prompts that are asked twice."""
    spec = synthetic_spec(PAGE, ("kv",))
    async with HybridCache.open(spec, options(spec, storage="memory", weight_version="test")) as cache:
        await TokenEngine(cache).serve([1, 2, 3, 4, 5, 6], [7], final=False)
        ends = [node for node in cache._parts.planner.inventory.tree.nodes() if node.tail]

    assert [(node.tail, node.stored) for node in ends] == [(3, 0)]


@pytest.mark.asyncio
async def test_requests_that_go_on_at_the_same_tail_ask_and_read_once(spec):
    store = MemoryStore()
    turn = [1, 2, 3, 4, 5, 6, 7]
    async with reopened(spec, store) as cache:
        await TokenEngine(cache).serve(turn[:4], turn[4:])
    async with reopened(spec, store) as cache:
        requests = [cache.request([*turn, 100 + one]) for one in range(6)]
        async with AsyncExitStack() as stack:
            for request in requests:
                await stack.enter_async_context(request)
            await asyncio.gather(*(request.prefetch() for request in requests))
            hits = [request.hit.tokens for request in requests]
        storage = cache.statistics().storage

    assert hits == [7] * 6
    assert {name: pool.get.pages for name, pool in storage.items()} == {
        pool.name: 2 if pool.per_token else 1 for pool in spec.pools
    }
    assert {pool.exists.calls for pool in storage.values()} <= {1, 2}


@pytest.mark.asyncio
async def test_events_and_snapshots_tell_of_whole_pages(spec):
    store = MemoryStore()
    for _ in range(2):
        async with reopened(spec, store) as cache:
            events = cache.events()
            engine = TokenEngine(cache)
            await engine.serve([1, 2, 3, 4], [5, 6, 7])
            await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
            told = [*events.take(), *await cache.snapshot()]
            assert any(node.tail and node.stored for node in cache._parts.planner.inventory.tree.nodes())
        tokens = [token for event in told if isinstance(event, PagesStored) for token in event.tokens]
        assert {event.tier for event in told if isinstance(event, PagesStored)} == set(Tier)
        assert min(tokens) > 0, "no id of a tail's filling"


@pytest.mark.asyncio
async def test_namespaces_share_no_ends(spec):
    async with HybridCache.open(spec, options(spec)) as cache:
        engine = TokenEngine(cache)
        await engine.serve([1, 2, 3], namespace="a")

        assert await engine.serve([1, 2, 3, 4], namespace="b") == 0
        assert await engine.serve([1, 2, 3, 4], namespace="a") == 3


@pytest.mark.asyncio
async def test_without_the_option_prefixes_are_whole_pages(spec):
    async with HybridCache.open(spec, options(spec, tails=False)) as cache:
        async with cache.request([1, 2, 3, 4, 5, 6]) as request:
            await request.load()
            for end in (4, 6):
                request.extend(end - request.reserved)
                await request.checkpoint(end, final=end == 6)
        async with cache.request([1, 2, 3, 4, 5, 6, 7]) as request:
            assert request.hit.tokens == 4


@pytest.mark.asyncio
async def test_a_window_comes_back_with_its_tail_or_not_at_all():
    """The page of the window and those before it: if one is lost, the prefix ends where all are there."""
    spec = synthetic_spec(PAGE, ("kv", "swa"), window_pages=2)
    turn = list(range(1, 15))  # three pages and two tokens
    for lost, hit in ((None, 14), (3, 12), (2, 8), (1, 4)):
        store = MemoryStore()
        async with reopened(spec, store) as cache:
            await TokenEngine(cache).serve(turn[:12], turn[12:])
            tree = cache._parts.planner.inventory.tree
            end = next(node for node in tree.nodes() if node.tail)
            pages = page_digests(token_array(turn), PAGE, namespace_seed(None)) + tree.digests(end)
            if lost is not None:
                key = next(key for key in store if key.pool == "swa" and key.digest == pages[lost])
                assert store.drop(key)
        async with reopened(spec, store) as cache:
            assert await TokenEngine(cache).serve([*turn, 77]) == hit
            read = cache.statistics().storage["kv"].get.pages
            assert read == -(-hit // PAGE), "nothing is read that no window lets a prefix end at"


@pytest.mark.asyncio
async def test_a_window_pool_without_room_for_two_tails_uses_none():
    spec = synthetic_spec(PAGE, ("kv", "swa"), window_pages=2)
    for pages, hit in ((4, 8), (5, 10)):
        sizes = {"swa": (pages, 8)}
        async with HybridCache.open(spec, options(spec, sizes=sizes)) as cache:
            engine = TokenEngine(cache)
            await engine.serve([1, 2, 3, 4, 5, 6, 7, 8], [9, 10])
            assert await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == hit


@pytest.mark.asyncio
async def test_a_suspended_request_goes_on_where_it_was(spec):
    async with HybridCache.open(spec, options(spec)) as cache:
        engine = TokenEngine(cache)
        prompt = [1, 2, 3, 4, 5, 6, 7]
        ends = page_digests(token_array(prompt), 1, namespace_seed(None))
        async with cache.request(prompt) as request:
            await request.load()
            request.extend(6)
            engine.compute(request, 0, 6, ends)
            request.suspend(6)
            request.rematch()
            await request.load()

            assert request.hit.tokens == 6
            engine.check(request, 6, ends)


@pytest.mark.asyncio
async def test_a_prompt_that_fills_the_device_copies_no_page():
    made = synthetic_spec(PAGE, ("kv",))
    for pages, hit in ((3, 4), (4, 6)):
        async with HybridCache.open(made, options(made, sizes={"kv": (pages, 8)})) as cache:
            engine = TokenEngine(cache)
            await engine.serve([1, 2, 3, 4, 5, 6], final=False)
            assert await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == hit


@pytest.mark.asyncio
async def test_a_prompt_that_fills_the_device_is_promised_no_end_that_only_a_tail_has():
    spec = synthetic_spec(PAGE, ["kv", "mamba"])
    async with HybridCache.open(spec, options(spec)) as cache:
        engine = TokenEngine(cache)
        await engine.serve([1, 2, 3], [4, 5, 6, 7])  # its only state is inside the second page
        for others, hit in ((89, 0), (80, 7)):  # with 80 there is room for the copy of its page
            async with cache.request([1, 2, 3, 4, 5, 6, 7, *range(90, 90 + others)]) as request:
                assert request.hit.tokens == hit
                await request.load()
                assert request.hit.tokens == hit


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("seed", first(2, (3, 0, 1, 2)))  # one with storage and inline, one with neither
async def test_random_conversations(spec, policy, seed):
    draw = random.Random(seed)
    stored = draw.random() < 0.5
    more = {"storage": "memory", "weight_version": "test"} if stored else {}
    opened = options(spec, write_policy=policy, inline=draw.random() < 0.7, **more)
    async with HybridCache.open(spec, opened) as cache:
        engine, known, inside = TokenEngine(cache), [[]], 0
        for _ in range(60):
            before = draw.choice(known)
            prompt = before[: draw.choice((len(before), draw.randint(0, len(before))))] + draw.choices(
                (1, 2, 2**40), k=draw.randint(1, 9)
            )
            output = draw.choices((1, 2), k=draw.randint(0, 6))
            if len(prompt) + len(output) > 60:
                continue
            hit = await engine.serve(
                prompt,
                output,
                namespace=draw.choice((None, "a")),
                final=draw.random() < 0.6,
                stops=[draw.randint(1, len(prompt))],
            )
            inside += hit % PAGE > 0
            known = [*known[-20:], prompt + output]
    assert inside > (0 if ends_with_requests(spec) else 5)
