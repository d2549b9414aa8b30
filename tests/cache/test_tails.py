"""Prefixes that end inside a page, through the whole cache: bytes and lengths, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from asynchicache import CacheConfig, HybridCache, Request, Tier, WritePolicy
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.specs import synthetic_spec
from asynchicache.testing.tokens import TokenOracle
from asynchicache.types import token_array

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
            assert self.tokens.count_wrong(pool, request.pages(pool), 0, digests[:done]) == 0
        for pool in self.others if done else ():
            assert self.states.count_wrong(pool, [request.state(pool)], [digests[done - 1]]) == 0

    def compute(self, request: Request, done: int, end: int, digests: Sequence[bytes]) -> None:
        for pool in self.paged:
            self.tokens.write(pool, request.pages(pool), done, digests[done:end])
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
    ) -> int:
        """Serve a prompt, publish it and its output; returns the tokens that were restored."""
        async with self.cache.request(prompt, namespace=namespace) as request:
            matched = request.hit
            await request.prefetch()
            await request.load()
            hit = request.hit
            assert hit.tokens >= matched.tokens, "nobody else was served meanwhile"
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


@pytest.fixture(params=["kv", "kv,mamba", "kv,dsa"])
def spec(request):
    return synthetic_spec(PAGE, request.param.split(","))


def options(spec, **more: object) -> CacheConfig:
    names = [pool.name for pool in spec.owners]
    sizes = {"kv": (24, 40), "mamba": (6, 9)} | more.pop("sizes", {})
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
        whole = not final and bool(engine.others)  # the state of a request that goes on is not given away
        again = await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [13], final=final)
        last = await engine.serve([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], final=final)

    assert again == (4 if whole else 10)
    assert last == (12 if whole else 13)


@pytest.mark.asyncio
@pytest.mark.parametrize("final", [False, True])
async def test_a_conversation_has_one_end_at_a_time(spec, final):
    """A tail that was continued is dropped; with states it is aged, as its state serves a branch there."""
    async with HybridCache.open(spec, options(spec)) as cache:
        engine, tokens = TokenEngine(cache), [1, 2, 3, 4, 5]
        for turn in range(5):
            await engine.serve(tokens, [10 + turn], final=final)
            tokens = [*tokens, 10 + turn, 7]
        ends = [node for node in cache._controller.planner.state.tree.nodes() if node.tail]

    if engine.others:
        assert [bool(node.superseded) for node in ends].count(False) == int(final)
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


@pytest.mark.asyncio
async def test_storage_has_whole_pages(spec):
    storage = options(spec, storage="memory", weight_version="test", sizes={"kv": (8, 8), "mamba": (2, 3)})
    async with HybridCache.open(spec, storage) as cache:
        engine = TokenEngine(cache)
        await engine.serve([1, 2, 3, 4], [5, 6, 7])
        for start in range(100, 500, 100):
            await engine.serve(list(range(start, start + 20)), [7])
        nodes = list(cache._controller.planner.state.tree.nodes())
        assert {bool(node.stored) for node in nodes if node.tail} == {False}
        assert any(node.stored for node in nodes)
        again = await engine.serve([1, 2, 3, 4, 5, 6, 7, 8])

    assert again == 4


@pytest.mark.asyncio
async def test_namespaces_share_no_ends(spec):
    async with HybridCache.open(spec, options(spec)) as cache:
        engine = TokenEngine(cache)
        await engine.serve([1, 2, 3], namespace="a")

        assert await engine.serve([1, 2, 3, 4], namespace="b") == 0
        assert await engine.serve([1, 2, 3, 4], namespace="a") == 3


@pytest.mark.asyncio
async def test_models_with_windows_and_small_options_keep_whole_pages():
    for made, more in (
        (
            synthetic_spec(PAGE, ("kv", "swa")),
            {"device_slots": {"kv": 32, "swa": 8}, "host_slots": {"kv": 32, "swa": 8}},
        ),
        (
            synthetic_spec(PAGE, ("kv",)),
            {"tails": False, "device_slots": {"kv": 32}, "host_slots": {"kv": 32}},
        ),
    ):
        async with HybridCache.open(made, config(**more)) as cache:
            async with cache.request([1, 2, 3, 4, 5, 6]) as request:
                await request.load()
                request.extend(6)
                await request.checkpoint(6, final=True)
            async with cache.request([1, 2, 3, 4, 5, 6, 7]) as request:
                assert request.hit.tokens == 4


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
@pytest.mark.parametrize("seed", range(4))
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
    assert inside > (0 if engine.others else 5)
