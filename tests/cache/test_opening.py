"""A cache is opened by `async with` or by `await`; what is forgotten is told, with the place."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import warnings

import pytest

import forking
from asynchicache import CacheConfig, ClosedError, ConfigError, HybridCache, UsageError
from cache.engine import SPEC, config

PROMPT = list(range(100, 120))
HERE = re.escape(__file__)


@pytest.mark.asyncio
async def test_a_cache_may_be_awaited_and_closed_by_hand() -> None:
    cache = await HybridCache.open(SPEC, config())
    async with cache.request(PROMPT) as request:
        await request.load()
    await asyncio.gather(cache.aclose(), cache.aclose())
    await cache.aclose()

    assert repr(cache).startswith("<HybridCache closed, ")
    with pytest.raises(ClosedError):
        cache.request(PROMPT)


@pytest.mark.asyncio
async def test_it_opens_once() -> None:
    opening = HybridCache.open(SPEC, config())
    async with opening:
        with pytest.raises(UsageError, match=r"HybridCache\.open\(\.\.\.\) opens once"):
            await opening
    assert repr(opening) == "<HybridCache.open(...), used>"


def test_what_was_not_opened_says_how() -> None:
    opening = HybridCache.open(SPEC, config())
    with pytest.raises(AttributeError, match=r"no 'request' here: .*`async with .*`it\.aclose\(\)`"):
        opening.request(PROMPT)  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=rf"{HERE}:\d+: HybridCache\.open\(\.\.\.\) is not open yet"):
        del opening


@pytest.mark.asyncio
async def test_a_failure_to_open_leaves_nothing_to_close() -> None:
    with pytest.raises(ConfigError, match="device_slots names 'nope'"):
        await HybridCache.open(SPEC, CacheConfig(device_slots={"nope": 1}))


@pytest.mark.asyncio
async def test_a_request_that_is_open_when_the_cache_closes_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = await HybridCache.open(SPEC, config())
    leaked = cache.request(PROMPT)
    await leaked.__aenter__()
    assert any(
        re.search(rf"20 tokens is open: .*, made at {HERE}:\d+", one) for one in cache.verify(idle=True)
    )
    async with cache.request(PROMPT):
        pass
    with caplog.at_level(logging.WARNING):
        await cache.aclose()
    leaked.close()

    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert re.fullmatch(rf"closed while requests were open: one of 20 tokens, made at {HERE}:\d+", told[0])


@pytest.mark.asyncio
async def test_the_request_says_where_it_stands() -> None:
    async with HybridCache.open(SPEC, config()) as cache:
        request = cache.request(PROMPT)
        words = [repr(request)]
        async with request:
            words.append(repr(request))
            request.rest()
            words.append(repr(request))
            request.rematch()
            await request.load()
            words.append(repr(request))
            request.extend(20)
            request.checkpoint(20, final=True)
            words.append(repr(request))
            assert "1 requests" in repr(cache)
        words.append(repr(request))

    assert words == [
        "<Request not entered, 20 tokens>",
        "<Request matched, 0 to restore, 20 tokens>",
        "<Request resting, 20 tokens>",
        "<Request loaded, 0 restored, 20 tokens>",
        "<Request finished, 0 restored, 20 tokens>",
        "<Request closed, 20 tokens>",
    ]


FORGETFUL = """
import asyncio, gc, warnings; warnings.simplefilter("default")
from asynchicache import CacheConfig, HybridCache
from asynchicache.testing.specs import synthetic_spec

async def main():
    cache = await HybridCache.open(synthetic_spec(4), CacheConfig(device_slots={"kv": 4, "mamba": 4}))
    print(repr(cache)[:20])

asyncio.run(main())
gc.collect()
print("ended")
"""


def test_a_program_that_never_closes_its_cache_ends_and_is_told() -> None:
    run = forking.run(["-c", FORGETFUL])

    assert run.stdout == "<HybridCache open, s\nended\n"
    assert "<string>:7: this cache was never closed" in run.stderr


def test_a_closed_cache_warns_of_nothing() -> None:
    async def main() -> None:
        async with HybridCache.open(SPEC, config()):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        gc.collect()
