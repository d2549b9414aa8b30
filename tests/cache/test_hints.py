"""What clients know: it changes the order of eviction, within bounds, and nothing else."""

from __future__ import annotations

from array import array

import pytest

from asynchicache import CacheConfig, CacheHint, HybridCache
from asynchicache.errors import ConfigError
from asynchicache.planner.hints import NO_HINT, HintLedger
from asynchicache.ports import AsyncioPort
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.keeps import HINTED_SHARE

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
        match = cache._parts.planner.inventory.tree.match
        seed = cache._parts.namespaces.seed(None, None)
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


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5), (8, -1)])
def test_lengths_that_repeat_are_few(lengths: tuple[int, ...]):
    with pytest.raises(
        ConfigError, match=r"hint repeats \(.*\) must be 4 lengths at most, of 0 tokens or more"
    ):
        CacheHint(repeats=lengths)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("repeats", "cuts"),
    [((), (16,)), ((13,), (12,)), ((13, 9), (8, 12)), ((3,), ()), ((99,), (16,)), ((16, 17), (16,))],
)
async def test_states_are_kept_where_later_prompts_go_on(repeats: tuple[int, ...], cuts: tuple[int, ...]):
    spec, slots = synthetic_spec(4, ("kv", "mamba")), {"kv": 16, "mamba": 8}
    async with (
        HybridCache.open(spec, CacheConfig(device_slots=slots, host_ratio=0, inline=True)) as cache,
        cache.request(range(18), hint=CacheHint(repeats=repeats)) as request,
    ):
        assert request.cuts == cuts


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
    """Every request says that it will be continued, or is to be kept: beyond a share, that is nothing."""
    hints = {first: CacheHint(continues=True) for first in range(0, 1000, 100)}
    assert len(await survivors(hints)) < 8
    config = CacheConfig(device_slots={"kv": 27}, host_ratio=0, inline=True)
    async with HybridCache.open(SPEC, config) as cache:
        for first in range(0, 1000, 100):
            await serve(cache, first, CacheHint(keep_seconds=3600))
        assert await serve(cache, 9000, pages=6) == 0, "others find room"
        assert await serve(cache, 9000, pages=6) == 24
        assert cache.verify(idle=True) == []


class Clock(AsyncioPort):
    """A clock that tests set forward."""

    def __init__(self) -> None:
        super().__init__(threads=1, seed=0)
        self.ahead = 0.0

    def now(self) -> float:
        return self.ahead


PAGES = CacheConfig(device_slots={"kv": 200}, host_slots={"kv": 0}, inline=True)
IN_TWO_TIERS = CacheConfig(device_slots={"kv": 50}, host_slots={"kv": 200}, inline=True)
STATES = CacheConfig(device_slots={"kv": 200, "mamba": 20}, host_slots={"kv": 0, "mamba": 0}, inline=True)
WINDOWS = CacheConfig(device_slots={"kv": 200, "swa": 100}, host_slots={"kv": 0, "swa": 0}, inline=True)
SHARED = CacheConfig(device_slots={"kv": 30, "mamba": 4}, host_bytes=1_000_000, inline=True)
KINDS = [
    pytest.param(("kv",), PAGES, id="pages"),
    pytest.param(("kv",), IN_TWO_TIERS, id="two tiers"),
    pytest.param(("kv", "mamba"), STATES, id="states"),
    pytest.param(("kv", "swa"), WINDOWS, id="windows"),
    pytest.param(("kv", "mamba"), SHARED, id="one host memory"),
]


async def visit(cache: HybridCache, first: int, hint: CacheHint = NO_HINT, salt: str | None = None) -> int:
    """Serve a prompt of four pages; returns the hit."""
    async with cache.request(range(first, first + 17), hint=hint, salt=salt) as request:
        await request.load()
        await request.reserve(17 - request.hit.tokens)
        await request.checkpoint(16)
        hit = request.hit.tokens
    await cache.drain()
    return hit


@pytest.mark.parametrize(("pools", "config"), KINDS)
@pytest.mark.parametrize("before", [0, 100], ids=["new", "quiet"])
@pytest.mark.asyncio
async def test_kept_seconds_are_seconds_whatever_the_traffic_was(pools, config, before: int):
    port = Clock()
    async with HybridCache.open(synthetic_spec(4, pools), config, port=port) as cache:
        for first in range(0, 100 * before, 100):
            await visit(cache, first)
            port.ahead += 60
        await visit(cache, 10**6, CacheHint(keep_seconds=100))
        for first in range(2 * 10**6, 2 * 10**6 + 100 * 60, 100):  # a busy minute
            await visit(cache, first)
            port.ahead += 1
        assert await visit(cache, 10**6, CacheHint(keep_seconds=10)) == 16
        port.ahead += 41
        for first in range(3 * 10**6, 3 * 10**6 + 100 * 60, 100):
            await visit(cache, first)
        assert cache.verify() == []
        assert await visit(cache, 10**6) == 0, "its time is over"
        assert cache.verify(idle=True) == []
    await port.aclose()


@pytest.mark.asyncio
async def test_a_running_request_lets_the_time_of_others_pass():
    """No request begins for an hour: one decodes."""
    port = Clock()
    async with HybridCache.open(SPEC, PAGES, port=port) as cache:
        await visit(cache, 0, CacheHint(keep_seconds=60))
        for first in range(100, 5000, 100):
            await visit(cache, first)
        async with cache.request(range(10**6, 10**6 + 17)) as request:
            await request.load()
            port.ahead += 3600
            request.extend(17)
        assert await visit(cache, 0) < 16
    await port.aclose()


@pytest.mark.parametrize(("pools", "config"), KINDS)
@pytest.mark.parametrize("salts", [1, 5, 100])
@pytest.mark.asyncio
async def test_whoever_floods_with_hints_leaves_room(pools, config, salts: int):
    """Clients choose their namespaces: what bounds hints is the sum over all of them."""
    port, keep = Clock(), CacheHint(keep_seconds=3600, continues=True)
    async with HybridCache.open(synthetic_spec(4, pools), config, port=port) as cache:
        for first in range(0, 100 * 100, 100):
            await visit(cache, first, keep, f"attacker {first // 100 % salts}")
        for first in range(10**6, 10**6 + 100 * 3, 100):  # one more has room for hints too
            await visit(cache, first, CacheHint(keep_seconds=50), "late" if first > 10**6 else None)
        victim = range(2 * 10**6, 2 * 10**6 + 500, 100)
        for _ in range(4):
            hits = [await visit(cache, first, salt="victim") for first in victim]
            assert cache.verify() == []
        assert hits == [16] * 5
        inventory = cache._parts.planner.inventory
        assert inventory.hints.share.used <= inventory.hints.share.most
    await port.aclose()


@pytest.mark.asyncio
async def test_what_a_request_generates_counts_for_its_hint():
    """A short prompt with a long answer claims no more than a long prompt."""
    async with HybridCache.open(SPEC, PAGES) as cache:
        for first in range(10_000, 15_000, 1000):  # usual returns
            for group in (range(first, first + 600, 100),) * 2:
                for one in group:
                    await visit(cache, one)
        share = cache._parts.planner.inventory.hints.share
        async with cache.request([1], hint=CacheHint(continues=True)) as request:
            await request.load()
            request.extend(4 * 30)
            request.append(range(4 * 30 - 1))
            await request.checkpoint(4 * 30)
            assert share.used == 30
            request.extend(4 * 30)
            request.append(range(4 * 30))
            await request.checkpoint(4 * 60)
            assert share.used == 30, "more than a share: they count as any others"


@pytest.mark.asyncio
async def test_a_suspended_request_keeps_its_hint():
    port = Clock()
    async with HybridCache.open(SPEC, PAGES, port=port) as cache:
        async with cache.request(range(17), hint=CacheHint(keep_seconds=3600)) as request:
            await request.load()
            request.extend(17)
            request.suspend(4)
            request.rematch()
            await request.load()
            request.extend(17 - 4)
            await request.checkpoint(16)
        for first in range(10**6, 10**6 + 100 * 100, 100):
            await visit(cache, first)
        assert await visit(cache, 0) == 16
    await port.aclose()


def test_hints_have_a_share_of_the_pages_and_each_namespace_a_part_of_it():
    ledger = HintLedger(100)
    assert HINTED_SHARE == 0.25
    assert ledger.allow(b"a", 10, 0, until=9000), "one long hint"
    assert ledger.allow(b"a", 10, 0, until=50)
    assert not ledger.allow(b"a", 1, 10, until=60), "four fifths of the share"
    assert ledger.allow(b"b", 4, 10, until=60), "another namespace finds some of it free"
    assert not ledger.allow(b"c", 2, 10, until=60), "but all of them together have no more than one share"
    assert ledger.allow(b"a", 5, 50, until=70), "what has ended is free, whatever has not"
    assert ledger.refused == 2


def test_a_hint_that_is_over_costs_nothing():
    ledger = HintLedger(1000)
    for number in range(10_000):
        assert ledger.allow(b"%d" % number, 1, number, until=number + 2)
        assert ledger.allow(b"short", 0, number, until=10**9)
        assert ledger.share.namespaces < 4
    assert len(ledger._ends) < 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keep_seconds": -1}, "keep_seconds -1 must be 0 to 3600"),
        ({"keep_seconds": 4000}, "keep_seconds 4000 must be 0 to 3600"),
        ({"keep_seconds": float("nan")}, "keep_seconds nan must be"),
        ({"keep_seconds": "5"}, "hint keep_seconds '5': expected float, got str"),
        ({"keep_seconds": True}, "hint keep_seconds True: expected float, got bool"),
        ({"over": 1}, "hint over 1: expected bool, got int"),
        ({"continues": "no"}, "hint continues 'no': expected bool"),
        ({"transient": None}, "hint transient None: expected bool"),
        ({"repeats": 8}, "hint repeats 8: expected array, got int"),
        ({"repeats": (8.0,)}, r"hint repeats \(8.0,\): expected int, got float"),
        ({"over": True, "continues": True}, "not both"),
        ({"transient": True, "keep_seconds": 1}, "not both"),
    ],
)
def test_contradictions_are_named(fields: dict[str, object], words: str):
    with pytest.raises(ConfigError, match=words):
        CacheHint(**fields)
