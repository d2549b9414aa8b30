"""What clients know: it changes the order of eviction, within bounds, and nothing else."""

from __future__ import annotations

from array import array

import pytest

from asynchicache import CacheConfig, CacheHint, HybridCache
from asynchicache.errors import ConfigError
from asynchicache.planner.hints import HINTED_SHARE, HintLedger
from asynchicache.testing.specs import synthetic_spec

SPEC = synthetic_spec(4, ("kv",))


async def serve(cache: HybridCache, first: int, hint: CacheHint | None = None, pages: int = 2) -> int:
    prompt = range(first, first + 4 * pages + 1)
    async with cache.request(prompt, **({} if hint is None else {"hint": hint})) as request:
        await request.load().submitted()
        request.extend(len(prompt) - request.hit.tokens)
        request.checkpoint(4 * pages)
        return request.hit.tokens


async def survivors(hints: dict[int, CacheHint]) -> list[int]:
    """Which of ten prompts are still cached after seven others, in a cache that has seen usual returns."""
    config = CacheConfig(device_slots={"kv": 27}, host_ratio=0, inline=True)
    async with HybridCache.open(SPEC, config) as cache:
        for group in range(10_000, 15_000, 1000):  # what is asked for again is asked for after a while
            for first in (*range(group, group + 600, 100), *range(group, group + 600, 100)):
                await serve(cache, first)
        for first in range(0, 1000, 100):
            await serve(cache, first, hints.get(first))
        for first in range(5000, 5700, 100):
            await serve(cache, first)
        match = cache._controller.planner.state.tree.match
        seed = cache._controller.namespaces.seed(None, None)
        return [
            first
            for first in range(0, 1000, 100)
            if match(array("q", range(first, first + 8)), seed).pages == 2
        ]


@pytest.mark.asyncio
async def test_what_is_over_goes_first_and_what_continues_stays():
    assert await survivors({}) == [400, 500, 600, 700, 800, 900]
    assert 900 not in await survivors({900: CacheHint(over=True)})
    assert 200 in await survivors({200: CacheHint(continues=True)})


@pytest.mark.asyncio
async def test_a_request_may_be_kept_for_some_seconds():
    assert 200 in await survivors({200: CacheHint(keep_seconds=3600)})


@pytest.mark.asyncio
async def test_a_transient_request_leaves_nothing():
    config = CacheConfig(device_slots={"kv": 27}, host_ratio=0, inline=True)
    async with HybridCache.open(SPEC, config) as cache:
        await serve(cache, 0, CacheHint(transient=True))
        assert await serve(cache, 0) == 0
        assert await serve(cache, 0, CacheHint(transient=True)) == 8, "it may use what others left"
        assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_one_namespace_cannot_keep_everything():
    """Every request says that it will be continued: beyond a share, that counts for nothing."""
    hints = {first: CacheHint(continues=True) for first in range(0, 1000, 100)}
    assert len(await survivors(hints)) < 8
    config = CacheConfig(device_slots={"kv": 27}, host_ratio=0, inline=True)
    async with HybridCache.open(SPEC, config) as cache:
        for first in range(0, 1000, 100):
            await serve(cache, first, CacheHint(keep_seconds=3600))
        assert cache._controller.planner.hints.refused > 5
        assert await serve(cache, 9000, pages=6) == 0, "others find room"
        assert cache.verify(idle=True) == []


def test_a_share_of_the_pages_is_favoured_at_a_time():
    ledger = HintLedger(100)
    assert HINTED_SHARE == 0.25
    assert ledger.allows(b"a", 20, 0)
    ledger.note(b"a", 20, until=50)
    assert not ledger.allows(b"a", 6, 10)
    assert ledger.allows(b"a", 5, 10)
    assert ledger.allows(b"b", 25, 10), "another namespace has its own share"
    assert ledger.allows(b"a", 25, 50), "the first one has ended"
    assert ledger.refused == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keep_seconds": -1}, "keep_seconds -1 must be 0 to 3600"),
        ({"keep_seconds": 4000}, "keep_seconds 4000 must be 0 to 3600"),
        ({"keep_seconds": float("nan")}, "keep_seconds nan must be"),
        ({"over": True, "continues": True}, "not both"),
        ({"transient": True, "keep_seconds": 1}, "not both"),
    ],
)
def test_contradictions_are_named(fields: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        CacheHint(**fields)
