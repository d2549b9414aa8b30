"""Bad input and misuse: each gets an error that names the value and the rule, and nothing is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from asynchicache import (
    CapacityError,
    ClosedError,
    ConfigError,
    HybridCache,
    InvalidTokensError,
    RequestStateError,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.ports import AsyncioPort
from asynchicache.testing.kit import OpenSmallCache
from cache.engine import SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


@pytest.mark.parametrize("tokens", [[], [-1], [1.5], ["a"], [[1, 2]], [1 << 63], None])
async def test_bad_tokens_are_refused(tokens: object, small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        with pytest.raises((InvalidTokensError, TypeError)):
            cache.request(tokens)


async def test_too_long_a_prompt_is_refused_at_once(small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        with pytest.raises(CapacityError, match="132 tokens need 33 pages of 4; the device holds 32"):
            async with cache.request(list(range(132))):
                raise AssertionError("entered")


async def test_a_request_is_used_once(small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        request = cache.request(PROMPT)
        async with request:
            with pytest.raises(RequestStateError, match="used once"):
                await request.__aenter__()
        with pytest.raises(RequestStateError, match="used once"):
            await request.__aenter__()
        with pytest.raises(RequestStateError, match="closed"):
            await request.prefetch()
        assert cache.verify() == []


async def test_order_is_enforced(small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        with pytest.raises(RequestStateError, match="not entered"):
            cache.request(PROMPT).load()
        async with cache.request(PROMPT) as request:
            with pytest.raises(RequestStateError, match=r"load\(\) first"):
                request.extend(1)
            await request.load()
            with pytest.raises(RequestStateError, match="called already"):
                request.load()
            with pytest.raises(RequestStateError, match="comes before load"):
                await request.prefetch()
            with pytest.raises(RequestStateError, match=r"length 4 is outside 0\.\.0"):
                request.checkpoint(4)
            with pytest.raises(RequestStateError, match=r"extend\(-1\)"):
                request.extend(-1)
            with pytest.raises(KeyError, match="swa"):
                request.pages("swa")
            with pytest.raises(KeyError, match="kv"):
                request.state("kv")


async def test_a_cache_is_opened_with_what_it_takes():
    for spec, options in ((None, None), ("qwen3", config()), (SPEC, {"device_slots": {"kv": 8}})):
        with pytest.raises(ConfigError, match="opened with a ModelSpec and a CacheConfig, not"):
            async with HybridCache.open(spec, options):
                pass


@pytest.mark.parametrize("device", ["cpu:1", "gpu", "cuda:x", "meta", ""])
async def test_devices_that_there_are_not_are_refused(device: str):
    with pytest.raises(ConfigError, match=f"device '{device}' must be cpu, cuda or cuda:N"):
        async with HybridCache.open(SPEC, config(device=device)):
            pass


@pytest.mark.parametrize(("pool", "tensor"), [("kb", "k"), ("kv", "nothing")])
async def test_tensors_that_there_are_not_are_named(pool: str, tensor: str, small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        with pytest.raises(KeyError, match=f"tensor '{tensor}' of pool '{pool}' is none of {{'kv'"):
            cache.device_tensor(pool, tensor)


@pytest.mark.parametrize("tokens", [4.0, 1.5, "4", None, True])
async def test_numbers_of_tokens_are_whole(tokens: object, small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache, cache.request(PROMPT) as request:
        await request.load()
        request.extend(8)
        for verb in (request.extend, request.advance, request.snapshot, request.checkpoint):
            with pytest.raises(RequestStateError, match=r"a whole number of tokens"):
                verb(tokens)
        with pytest.raises(RequestStateError, match=r"a whole number of tokens"):
            await request.reserve(tokens)


async def test_numbers_of_other_libraries_are_numbers(small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache, cache.request(PROMPT) as request:
        await request.load()
        request.extend(np.int64(4))
        assert type(request.reserved) is int
        await request.checkpoint(torch.tensor(4))


@pytest.mark.parametrize("tokens", [1.5, "3", None, True])
async def test_numbers_of_tokens_by_name_are_said_by_name(tokens: object, small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache, cache.request(PROMPT) as request:
        with pytest.raises(RequestStateError, match=rf"prefetch\(until={tokens!r}\): a whole number"):
            await request.prefetch(until=tokens)
        if tokens is not None:
            with pytest.raises(RequestStateError, match=rf"computed\(context={tokens!r}\): a whole number"):
                request.computed(4, 1.0, context=tokens)


@pytest.mark.parametrize("limit", [-1, 1.5, True, "a"])
async def test_limits_of_prefixes_are_whole(limit: object, small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        with pytest.raises(ConfigError, match="limit"):
            cache.prefixes(limit=limit)
        assert cache.prefixes(limit=0) == []


@pytest.mark.parametrize("limit", [0, 1.5, True, "many"])
async def test_limits_of_events_are_whole(limit: object, small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        with pytest.raises(ConfigError, match="limit"):
            cache.events(limit=limit)


async def test_a_closed_cache_says_so(small_cache: OpenSmallCache):
    async with small_cache(SPEC) as cache:
        pass
    with pytest.raises(ClosedError):
        cache.request(PROMPT)
    with pytest.raises(ClosedError):
        await cache.flush()


@pytest.mark.parametrize("verb", ["prefetch", "admit", "reserve", "durable"])
async def test_a_request_whose_turn_comes_after_the_cache_was_closed_is_told(verb: str):
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(MemoryStore())) as cache:
        request = await cache.request(PROMPT).__aenter__()
        if verb in ("reserve", "durable"):
            await request.load()
        waiting = request.reserve(4) if verb == "reserve" else getattr(request, verb)()
        waiting.send(None)  # it has begun, and gives others their turn
    with pytest.raises(ClosedError):
        waiting.send(None)
    request.close()


@pytest.mark.parametrize("verb", ["flush", "clear_storage", "snapshot", "attach_storage"])
async def test_a_call_whose_turn_comes_after_the_cache_was_closed_is_refused(
    verb: str, small_cache: OpenSmallCache
):
    storage = MemoryBackend(MemoryStore())
    async with small_cache(SPEC) as cache:
        waiting = cache.attach_storage(storage) if verb == "attach_storage" else getattr(cache, verb)()
        waiting.send(None)
    with pytest.raises(ClosedError):
        waiting.send(None)


async def test_what_the_caller_raises_comes_out_as_it_is():
    with pytest.raises(ValueError, match="mine"):
        async with HybridCache.open(SPEC, config()):
            raise ValueError("mine")


async def test_storage_needs_a_weight_version():
    with pytest.raises(ConfigError, match="weight_version"):
        async with HybridCache.open(SPEC, config(weight_version=None), storage=MemoryBackend(MemoryStore())):
            raise AssertionError("opened")


async def test_nothing_is_left_behind():
    before = len(asyncio.all_tasks())
    async with HybridCache.open(SPEC, config(storage="memory")) as cache:
        await Engine(cache).serve(PROMPT)
    assert len(asyncio.all_tasks()) == before


async def test_the_port_stays_the_callers():
    port = AsyncioPort()
    async with HybridCache.open(SPEC, config(), port=port) as cache:
        await Engine(cache).serve(PROMPT)
    assert await port.run_blocking(lambda: 1) == 1
    await port.aclose()
