"""A cache whose device memory an engine owns: what is restored, what is kept, and what is refused."""

from __future__ import annotations

from array import array

import pytest
import torch

from asynchicache import (
    CacheConfig,
    EngineCache,
    EngineRequest,
    HybridCache,
    MissReason,
    Request,
    Tier,
    WritePolicy,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError, InvalidTokensError, RequestStateError, UsageError
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.pools.engine import EngineMemory, EnginePages
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import token_array
from cache.paged_engine import PAGE, SPEC, PagedEngine, config, paged, spec_of

PROMPT = list(range(100, 122))
WHOLE = len(PROMPT) // PAGE * PAGE
MODELS = pytest.mark.parametrize(
    "pools", [("kv",), ("kv", "dsa"), ("kv", "mamba"), ("kv", "swa"), ("kv", "mamba", "swa")]
)


@MODELS
@pytest.mark.asyncio
async def test_a_second_request_gets_what_the_first_computed(pools: tuple[str, ...]) -> None:
    spec = spec_of(*pools)
    memory = paged(spec)
    async with HybridCache.open(spec, config(spec), engine=memory.memory) as cache:
        engine = PagedEngine(cache, memory)
        assert (await engine.serve(PROMPT)).tokens == 0
        hit = await engine.serve(PROMPT)
        assert (hit.tokens, hit.by_tier, hit.reason) == (WHOLE, {Tier.HOST: WHOLE}, MissReason.NONE)
        assert (await engine.serve([*PROMPT[:WHOLE], 7, 8, 9, 10, 11])).tokens == WHOLE
        assert cache.verify(idle=True) == []
        assert cache.statistics().served.hit_tokens[Tier.HOST] == 2 * WHOLE


@MODELS
@pytest.mark.asyncio
async def test_a_cache_that_opens_again_gets_it_from_storage(pools: tuple[str, ...]) -> None:
    spec, store = spec_of(*pools), MemoryStore()
    memory = paged(spec)
    for expected in ({}, {Tier.STORAGE: WHOLE}):
        async with HybridCache.open(
            spec, config(spec), engine=memory.memory, storage=MemoryBackend(store)
        ) as cache:
            hit = await PagedEngine(cache, memory).serve(PROMPT)
            assert hit.by_tier == expected
            assert cache.verify(idle=True) == []


def ordered(values: str, heads: int, width: int, *, named: bool) -> EngineMemory:
    """Pages whose tokens come first; of values perhaps the heads, as attention kernels want them."""
    keys, ours = (TensorSpec(name, (0,), (heads, width), "uint8") for name in ("keys", "values"))
    pool = PoolSpec("kv", (keys, ours))
    sizes = {"N": PAGE, "H": heads, "D": width}
    tensors = {
        name: torch.zeros(1, 16, *(sizes[axis] for axis in order), dtype=torch.uint8)
        for name, order in (("keys", "NHD"), ("values", values))
    }
    pages = EnginePages.of_tensors(pool, PAGE, tensors)
    return EngineMemory({"kv": pages}, order=values if named else "")


@pytest.mark.parametrize(
    ("heads", "width", "named"),
    [(2, 8, False), (2, PAGE, False), (2, 8, True), (PAGE, 8, True)],
    ids=["seen", "as wide as tokens", "named", "as many heads as tokens"],
)
@pytest.mark.asyncio
async def test_engines_with_another_order_of_axes_share_no_page(heads: int, width: int, named: bool) -> None:
    """The same bytes mean other values. Shapes say it, or, with as many heads as tokens, the engine."""
    store, hits = MemoryStore(), []
    options = CacheConfig(host_slots={"kv": 8}, weight_version="test", inline=True)
    for order in ("NHD", "HND", "NHD", "HND"):
        memory = ordered(order, heads, width, named=named)
        spec = ModelSpec("m", PAGE, 1, (memory.pools["kv"].spec,))
        async with HybridCache.open(spec, options, engine=memory, storage=MemoryBackend(store)) as cache:
            async with cache.request(PROMPT) as request:
                hits.append((await request.prefetch()).tokens)
                await request.load(into={"kv": range(hits[-1] // PAGE)})
                await request.checkpoint(WHOLE, pages={"kv": range(WHOLE // PAGE)})
                assert await request.durable()
    assert hits == [0, 0, WHOLE, WHOLE]


@pytest.mark.parametrize("spare", [0, 1], ids=["the window", "and the page before"])
@pytest.mark.asyncio
async def test_a_prompt_of_whole_pages_comes_again(spare: int) -> None:
    """It ends a page earlier then, if the engine still has, and names, the page before its window."""
    spec, store, prompt = spec_of("kv", "swa"), MemoryStore(), PROMPT[:WHOLE]
    memory, right = paged(spec), (WHOLE - PAGE) * spare
    tables = {name: memory.take(name, WHOLE // PAGE) for name in ("kv", "swa")}
    options = config(spec)
    async with HybridCache.open(spec, options, engine=memory.memory, storage=MemoryBackend(store)) as cache:
        for name, table in tables.items():
            memory.compute(name, table, page_digests(token_array(prompt), PAGE, namespace_seed(None)))
        async with cache.request(prompt) as request:
            await request.prefetch()
            await request.load(into={})
            swa = tables["swa"][-2 - spare :]
            await request.checkpoint(WHOLE, pages={"kv": tables["kv"], "swa": swa})
            assert await request.durable()
        for again, tokens in (([*prompt, 1], WHOLE), (prompt, right)):
            async with cache.request(again) as request:
                assert request.hit.tokens == tokens
    async with HybridCache.open(spec, options, engine=memory.memory, storage=MemoryBackend(store)) as cache:
        assert (await PagedEngine(cache, memory).serve(prompt)).tokens == right


@pytest.mark.asyncio
async def test_pages_that_the_engine_has_itself_are_not_copied() -> None:
    memory = paged()
    async with HybridCache.open(SPEC, config(), engine=memory.memory) as cache:
        engine = PagedEngine(cache, memory)
        await engine.serve(PROMPT)
        await engine.serve(PROMPT, own=3)
        sources = cache.statistics().served.hit_slots
        assert (sources["kv", Tier.DEVICE], sources["kv", Tier.HOST]) == (3, 2)


def key(number: int) -> bytes:
    return bytes([255 - number]) * 32  # words above 2**63, too


@pytest.mark.asyncio
async def test_a_prefix_may_be_given_as_page_keys() -> None:
    """Keys take the place of tokens in memory and in storage."""
    memory, store = paged(), MemoryStore()
    keys = [key(number) for number in range(5)]
    pages, state = memory.take("kv", 6), memory.take("mamba", 1)
    memory.compute("kv", pages[:5], keys)
    memory.compute("mamba", state, keys[-1:])
    for tier in (Tier.HOST, Tier.STORAGE):
        async with HybridCache.open(
            SPEC, config(page_keys=True), engine=memory.memory, storage=MemoryBackend(store)
        ) as cache:
            if tier is Tier.HOST:
                async with cache.request_keys(keys[:3], length=14) as request:
                    await request.load(into={})
                    request.append_keys(keys[3:])
                    await request.checkpoint(20, pages={"kv": pages[:5], "mamba": state})
                    assert await request.durable()
                for length, tokens in ((20, 0), (21, 20), (None, 20)):  # a state at 20 tokens only
                    async with cache.request_keys(keys, length=length) as request:
                        assert request.hit.tokens == tokens
            async with cache.request_keys(keys) as request:
                found, kept = memory.take("kv", 5), memory.take("mamba", 1)
                hit = await request.prefetch()
                await request.load(into={"kv": found, "mamba": kept})
                assert (hit.tokens, hit.by_tier) == (20, {tier: 20})
                assert (
                    memory.count_wrong("kv", found, keys) == memory.count_wrong("mamba", kept, keys[-1:]) == 0
                )
            memory.give("kv", found)
            memory.give("mamba", kept)
            await cache.drain()
            assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_what_is_no_key_is_refused() -> None:
    memory = paged()
    async with HybridCache.open(SPEC, config(page_keys=True), engine=memory.memory) as cache:
        for keys in ([b"short"], [key(0), key(1) + b"x"], [bytearray(key(0))], ["0" * 32], key(0)):
            with pytest.raises(InvalidTokensError, match=r"32 bytes|one run of bytes"):
                cache.request_keys(keys)  # type: ignore[arg-type]
        with pytest.raises(InvalidTokensError, match="2 page keys for a prompt of 7 tokens"):
            cache.request_keys([key(0), key(1)], length=7)
        with pytest.raises(UsageError, match="request_keys"):
            cache.request(PROMPT)
        async with cache.request_keys([key(0)]) as request:
            with pytest.raises(UsageError, match="append_keys"):
                request.append([1])
            with pytest.raises(InvalidTokensError, match="page key 0 is 3 bytes"):
                request.append_keys([b"abc"])
            with pytest.raises(UsageError, match="tokens are not known"):
                _ = request.tokens
    async with HybridCache.open(SPEC, config(), engine=memory.memory) as cache:
        with pytest.raises(UsageError, match="page_keys"):
            cache.request_keys([key(0)])
        async with cache.request(PROMPT) as request:
            with pytest.raises(UsageError, match="append"):
                request.append_keys([key(0)])


@pytest.mark.asyncio
async def test_pages_that_cannot_be_meant_are_refused_before_anything_changes() -> None:
    memory = paged()
    async with HybridCache.open(SPEC, config(), engine=memory.memory) as cache:
        await PagedEngine(cache, memory).serve(PROMPT)
        for into, why in (
            ({"swa": [1]}, "none of those that own slots"),
            ({"kv": [64]}, "no device page 64; it has 64"),
            ({"kv": [-1]}, "no device page -1"),
            ({"kv": [True]}, "no device page True"),
            ({"kv": [3, None, 3]}, "page 3 is named twice"),
            ({"kv": list(range(6))}, "6 pages of pool 'kv' for the last 5"),
            ({"mamba": [1, 2]}, "2 pages of pool 'mamba' for the last 1"),
            (None, "must name the engine's pages"),
        ):
            async with cache.request(PROMPT) as request:
                with pytest.raises(UsageError, match=why):
                    request.load(into=into)
                with pytest.raises(UsageError, match=why):
                    request.checkpoint(WHOLE, pages=into)
                await request.load(into={"kv": [9, None, 8]})
                with pytest.raises(RequestStateError, match="called already"):
                    request.load(into={})
        assert cache.verify(idle=True) == []


@pytest.mark.parametrize("length", [0, 3, 5])
@pytest.mark.asyncio
async def test_a_state_may_be_named_where_no_page_ends(length: int) -> None:
    memory = paged()
    async with HybridCache.open(SPEC, config(), engine=memory.memory) as cache:
        async with cache.request(range(5)) as request:
            await request.load(into={"kv": [], "mamba": []})
            await request.checkpoint(length, pages={"kv": [1][: length // 4], "mamba": [0]})
            with pytest.raises(UsageError, match="2 pages of pool 'mamba' for the last 1"):
                request.checkpoint(length, pages={"mamba": [0, 1]})
        assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_two_loads_into_one_page_are_refused_while_the_first_runs() -> None:
    memory = paged()
    async with HybridCache.open(SPEC, config(), engine=memory.memory) as cache:
        await PagedEngine(cache, memory).serve(PROMPT)
        async with cache.request(PROMPT) as first, cache.request(PROMPT) as second:
            ticket = first.load(into={"kv": [5]})
            with pytest.raises(UsageError, match="still writing device page 5"):
                second.load(into={"kv": [5]})
            await ticket
            await second.load(into={"kv": [5]})


@pytest.mark.asyncio
async def test_a_window_gives_only_its_last_pages() -> None:
    spec = spec_of("kv", "swa")
    memory = paged(spec)
    async with HybridCache.open(spec, config(spec), engine=memory.memory) as cache:
        await PagedEngine(cache, memory).serve(PROMPT)
        async with cache.request(PROMPT) as request:
            with pytest.raises(UsageError, match="page 2 is named, and the hit of 5 pages does not need it"):
                request.load(into={"swa": [1, 2, 3]})
            await request.load(into={"swa": [None, None, 1, 2]})


OF_SLOTS = {name for name in vars(Request) if not name.startswith("_")} - {"load", "checkpoint"}


@pytest.mark.asyncio
async def test_a_request_has_slots_or_pages_of_an_engine() -> None:
    assert {"extend", "reserve", "pages", "state", "admit", "suspend", "snapshot"} < OF_SLOTS
    memory = paged()
    async with HybridCache.open(SPEC, config(), engine=memory.memory) as cache:
        assert type(cache) is EngineCache
        assert not hasattr(cache, "device_tensor")
        async with cache.request(PROMPT) as request:
            assert type(request) is EngineRequest
            for name in OF_SLOTS:
                with pytest.raises(AttributeError, match=f"no attribute '{name}': an engine owns the device"):
                    getattr(request, name)
            with pytest.raises(AttributeError, match=r"no attribute 'extent'$"):
                request.extent  # noqa: B018
            for call in (request.load, lambda: request.checkpoint(4)):
                with pytest.raises(TypeError, match="required keyword-only argument"):
                    call()
    async with HybridCache.open(SPEC, CacheConfig(device_slots={"kv": 8, "mamba": 4})) as own:
        async with own.request(PROMPT) as request:
            with pytest.raises(TypeError, match="into"):
                request.load(into={})
            request.load()
            with pytest.raises(TypeError, match="pages"):
                request.checkpoint(4, pages={})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"write_policy": WritePolicy.WRITE_BACK}, "write_back"),
        ({"device_slots": {"kv": 4}}, "device_slots"),
        ({"device_bytes": 1 << 20}, "device_bytes"),
        ({"host_slots": {"kv": 0, "mamba": 4}}, "'kv' has 0 host slots"),
        ({"host_slots": {"kv": 4, "mamba": 0}}, "'mamba' has 0 host slots"),
        ({"host_bytes": 0, "host_slots": {}}, "'kv' has 0 host slots"),
    ],
)
@pytest.mark.asyncio
async def test_options_that_make_no_sense_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        async with HybridCache.open(SPEC, config(**options), engine=paged().memory):
            pass


@pytest.mark.asyncio
async def test_a_host_tier_that_is_too_small_keeps_what_it_can() -> None:
    memory = paged()
    options = config(host_slots={"kv": 4, "mamba": 1})
    async with HybridCache.open(SPEC, options, engine=memory.memory) as cache:
        engine = PagedEngine(cache, memory)
        for first in range(6):
            await engine.serve([first, *PROMPT])
        assert cache.statistics().planner.host_pressure > 0
        assert cache.verify(idle=True) == []
        short = list(range(9))
        await engine.serve(short)
        assert (await engine.serve(short)).tokens == 8


def test_words_of_keys_are_all_64_bits() -> None:
    from asynchicache.hashing import page_digests
    from asynchicache.types import key_array

    first, second = key_array([b"\xff" * 32]), key_array([b"\xff" * 28 + b"\x00\x00\x00\x80"])
    assert first == array("q", [-1] * 4)
    assert page_digests(first, 4) != page_digests(second, 4)


@pytest.mark.asyncio
async def test_a_state_that_found_no_host_slot_is_not_durable() -> None:
    memory, store = paged(), MemoryStore()
    options = config(host_slots={"kv": 32, "mamba": 1})
    async with HybridCache.open(SPEC, options, engine=memory.memory, storage=MemoryBackend(store)) as cache:
        await PagedEngine(cache, memory).serve(PROMPT)
        async with cache.request(PROMPT) as waits, cache.request([7] * 8) as request:
            assert waits.hit.tokens == WHOLE, "it keeps the only state on the host until it has loaded"
            request.load(into={})
            for told in (False, True):
                await request.checkpoint(8, pages={"kv": [0, 1], "mamba": [0]})
                assert await request.durable() is told
                waits.close()
