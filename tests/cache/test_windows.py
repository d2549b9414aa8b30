"""Sliding windows through three tiers, alone and beside states, with real copies and real bytes."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from asynchicache import (
    CapacityError,
    ConfigError,
    HybridCache,
    MissReason,
    ModelSpec,
    Request,
    RequestStateError,
    Tier,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.types import trailing_pages
from cache.engine import PAGE, Engine, config

pytestmark = pytest.mark.asyncio

WINDOW = 2  # pages
KEPT = trailing_pages(WINDOW).kept
KEYS = TensorSpec("keys", (1,), (3,), "uint8")
INDEX = TensorSpec("index", (1,), (1,), "uint8")
KV = PoolSpec("kv", (KEYS,))
DSA = PoolSpec("dsa", (INDEX,), slots_of="kv")
SWA = PoolSpec("swa", (TensorSpec("keys", (0, 2), (2,), "uint8"),), coverage=trailing_pages(WINDOW))
DRAFT = PoolSpec("draft_swa", (KEYS,), coverage=trailing_pages(WINDOW), slots_of="swa")
STATE = PoolSpec(
    "mamba", (TensorSpec("recurrent", (3,), (8,), "uint8"),), coverage=trailing_pages(1), per_token=False
)
SPECS = [
    ModelSpec("windows", PAGE, 4, (KV, SWA)),
    ModelSpec("windows-and-states", PAGE, 4, (KV, SWA, STATE)),
    ModelSpec("everything", PAGE, 4, (KV, DSA, STATE, SWA, DRAFT)),
]
PROMPT = list(range(100, 120))


def options(**more: object):
    slots = {"kv": 32, "swa": 12, "mamba": 8}
    spec = more.pop("spec", SPECS[0])
    device = {pool.name: slots[pool.name] for pool in spec.owners}
    return config(**({"device_slots": device, "share_host": False} | more))  # each tier has room for its part


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
@pytest.mark.parametrize("inline", [True, False])
async def test_each_tier_serves_in_turn(spec: ModelSpec, inline: bool):
    backend = MemoryBackend(MemoryStore())
    async with HybridCache.open(spec, options(spec=spec, inline=inline), storage=backend) as cache:
        engine = Engine(cache)
        assert (await engine.serve(PROMPT)).tokens == 0
        device = await engine.serve([*PROMPT, 1, 2, 3])
        assert device.by_tier == {Tier.DEVICE: 20}
        for client in range(4):
            await engine.serve([client * 1000 + n for n in range(32)], prefetch=False)
        host = await engine.serve([*PROMPT, 4, 5, 6])
        assert host.by_tier == {Tier.HOST: 20}
        await cache.flush()
        storage = await engine.serve([*PROMPT, 7, 8, 9])
        assert storage.by_tier == {Tier.STORAGE: 20}


LONG = PoolSpec("long_swa", (KEYS,), coverage=trailing_pages(4))
AGAIN = [SPECS[0], ModelSpec("two-windows", PAGE, 4, (KV, SWA, LONG)), ModelSpec("tokens", 1, 4, (KV, SWA))]


async def _again(cache: HybridCache, tokens: list[int], *, away: bool) -> int:
    """Serve a prompt once more, and say how much of it was cached."""
    page = cache.spec.page_size
    if away:  # others push it off the device
        for salt in range(4):
            await _compute(cache, [1000 + salt] * (6 * page))
    return await _compute(cache, tokens)


async def _compute(cache: HybridCache, tokens: list[int]) -> int:
    async with cache.request(tokens) as request:
        await request.prefetch()
        await request.load()
        hit = request.hit.tokens
        request.extend(len(tokens) - hit)
        await request.checkpoint(len(tokens), final=True)
        await request.durable()
    assert cache.verify() == []
    return hit


@pytest.mark.parametrize("spec", AGAIN, ids=lambda spec: spec.model)
@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_a_prompt_that_comes_again_hits_all_but_its_last_page(spec, more: int, tmp_path: Path):
    """Of whole pages too, from each tier: its last token is computed anew, so it ends a page earlier."""
    page = spec.page_size
    prompt = list(range(100, 100 + 8 * page + more))
    right = (len(prompt) - 1) // page * page
    device = {pool.name: 12 if pool is KV else 10 for pool in spec.owners}
    stored = config(
        device_slots=device,
        host_slots=dict.fromkeys(device, 60),
        storage="file",
        storage_options={"path": str(tmp_path / "pages")},
    )
    async with HybridCache.open(spec, stored) as cache:
        assert await _compute(cache, prompt) == 0
        assert await _again(cache, prompt, away=False) == right
        await cache.flush()
        assert await _again(cache, prompt, away=False) == right  # from storage
    async with HybridCache.open(spec, stored) as cache:
        assert await _again(cache, prompt, away=True) == right  # from storage, by another process
        assert await _again(cache, prompt, away=True) == right  # from the host
    first = list(range(500, 500 + 8 * page + more))
    async with HybridCache.open(spec, stored) as cache:
        assert await _compute(cache, first) == 0
        assert await _again(cache, first, away=True) == right  # from the host, for the first time


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
async def test_a_file_survives_a_restart(spec: ModelSpec, tmp_path: Path):
    stored = options(spec=spec, storage="file", storage_options={"path": str(tmp_path / "pages")})
    async with HybridCache.open(spec, stored) as cache:
        await Engine(cache).serve(PROMPT, outputs=range(8))
    async with HybridCache.open(spec, stored) as cache:
        hit = await Engine(cache).serve([*PROMPT, *range(8), 50, 51])
    assert hit.by_tier == {Tier.STORAGE: 28}


async def test_a_conversation_holds_one_window():
    async with HybridCache.open(SPECS[0], options()) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            for end in range(PAGE, len(PROMPT) + 1, PAGE):  # a prefill in chunks of a page
                request.extend(PAGE)
                request.advance(end)
                assert len(request.pages("swa")) <= KEPT
            assert len(request.pages("kv")) == 5
            assert request.first_page("swa") == 2
            await request.checkpoint(len(PROMPT))
        await cache.drain()
        device, host = cache.statistics().occupancy["swa"]
        assert (device.held, host.held) == (KEPT, KEPT)
        assert cache.verify() == []


async def test_pages_are_given_back_behind_the_forward_that_reads_them():
    async with HybridCache.open(SPECS[0], options()) as cache:
        compute = cache.device.stream("compute")
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(len(PROMPT))
            request.advance(len(PROMPT), after=compute)
            assert cache.statistics().occupancy["swa"][0].held == 5  # the stream has not been asked yet
            await cache.drain()
            assert cache.statistics().occupancy["swa"][0].held == KEPT
            request.close(after=compute)
        await cache.drain()
        assert cache.verify() == []


async def test_only_the_window_is_read_from_storage():
    backend = MemoryBackend(MemoryStore())
    async with HybridCache.open(SPECS[0], options(), storage=backend) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.flush()
        before = cache.statistics().pages_read
        hit = await engine.serve([*PROMPT, 1])
        assert hit.tokens == len(PROMPT)
        assert cache.statistics().pages_read - before == 5 + WINDOW


async def test_what_is_here_of_a_window_is_not_read_again():
    backend = MemoryBackend(MemoryStore())
    spec = SPECS[0]
    async with HybridCache.open(spec, options(), storage=backend) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.flush()
        assert (await engine.serve(PROMPT[:17])).tokens == 16
        before = cache.statistics().pages_read
        hit = await engine.serve([*PROMPT, 1])
        assert hit.tokens == len(PROMPT)
        # The pages up to 16 are here with their window, which is the first half of the one at 20.
        assert cache.statistics().pages_read - before == 1 + 1


async def test_a_miss_names_the_window():
    async with HybridCache.open(SPECS[0], options(device_slots={"kv": 32, "swa": 4})) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            for end in range(PAGE, len(PROMPT) + 1, PAGE):
                request.extend(PAGE)
                request.advance(end)
            await request.checkpoint(len(PROMPT))
        async with cache.request([*PROMPT[:12], 7, 7, 7, 7, 7]) as branch:
            assert branch.hit.tokens == 0
            assert branch.hit.full_tokens == 12
            assert branch.hit.reason is MissReason.WINDOW
            assert branch.hit.held_back_by == "swa"
            assert "12 tokens" in branch.hit.advice
            assert branch.cuts == (12,)


async def test_a_window_that_made_room_asks_for_more_slots():
    async with HybridCache.open(
        SPECS[0], options(device_slots={"kv": 32, "swa": 5}, host_slots={"swa": 0})
    ) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT, prefetch=False)
        await engine.serve([n + 500 for n in PROMPT], prefetch=False)
        async with cache.request([*PROMPT, 1]) as request:
            assert request.hit.reason is MissReason.WINDOW
            assert request.hit.advice == "'swa' had to make room for others: raise its device or host slots"


async def test_pools_too_small_for_a_window_name_the_number():
    with pytest.raises(ConfigError, match=r"pool 'swa' has 2 device pages; one request needs 4"):
        async with HybridCache.open(SPECS[0], options(device_slots={"kv": 32, "swa": 2})):
            pass
    with pytest.raises(ConfigError, match=r"pool 'swa' has 2 host pages; a window of 2 .* need 3"):
        async with HybridCache.open(SPECS[0], options(host_slots={"swa": 2})):
            pass


async def test_a_prompt_longer_than_the_pool_goes_in_chunks():
    async with HybridCache.open(SPECS[0], options(device_slots={"kv": 32, "swa": 4})) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            with pytest.raises(CapacityError, match="5 more swa device slots wanted"):
                request.extend(len(PROMPT))
            request.extend(3 * PAGE)
            request.advance(3 * PAGE)
            request.extend(PAGE)
            request.advance(4 * PAGE)
            request.extend(PAGE)
            await request.checkpoint(len(PROMPT))
        assert cache.verify() == []


async def test_advance_checks_its_length():
    async with HybridCache.open(SPECS[0], options()) as cache, cache.request(PROMPT) as request:
        await request.load()
        with pytest.raises(RequestStateError, match=r"length 4 is outside 0\.\.0"):
            request.advance(4)
        with pytest.raises(KeyError, match="none of the pools with pages"):
            request.first_page("mamba")


class Forward:
    """A compute stream whose kernels run on until told."""

    def __init__(self, cache: HybridCache) -> None:
        self.stream = cache.device.stream("compute")
        self._ended = threading.Event()
        self.stream.launch(self._ended.wait)

    def end(self) -> None:
        self._ended.set()


async def _publish(cache: HybridCache, request: Request, forward: Forward, *, final: bool) -> None:
    """Compute and publish a prompt; the request is over as soon as the forward has ended."""
    await request.load()
    request.extend(len(PROMPT))
    request.checkpoint(len(PROMPT), after=forward.stream, final=final)
    request.close(after=forward.stream)


async def test_published_pages_before_the_window_stay_until_the_forward_has_ended():
    """They used to be anybody's as soon as they were published, while kernels still wrote to them."""
    slots = {"kv": 32, "swa": 6}
    async with HybridCache.open(SPECS[0], options(device_slots=slots, host_slots={"swa": 0})) as cache:
        forward = Forward(cache)
        async with cache.request(PROMPT) as request, cache.request([7] * 8) as other:
            await _publish(cache, request, forward, final=False)
            await other.load()
            try:
                with pytest.raises(CapacityError, match="2 more swa device slots wanted, 1 of 6 are free"):
                    other.extend(8)
            finally:
                forward.end()
            await other.reserve(8)
        await cache.drain()
        assert cache.verify() == []


async def test_a_state_that_was_handed_over_stays_until_the_forward_has_ended():
    """A final checkpoint gives the tree the working state itself, which kernels may still write to."""
    spec, slots = SPECS[1], {"kv": 32, "swa": 12, "mamba": 1}
    sizes = {"device_slots": slots, "host_slots": {"swa": 0, "mamba": 0}}
    async with HybridCache.open(spec, options(spec=spec, **sizes)) as cache:
        forward = Forward(cache)
        async with cache.request(PROMPT) as request, cache.request([7] * 8) as other:
            await _publish(cache, request, forward, final=True)
            await other.load()
            try:
                with pytest.raises(CapacityError, match="1 more mamba device slots wanted"):
                    other.extend(1)
            finally:
                forward.end()
            await other.reserve(1)
        await cache.drain()
        assert cache.verify() == []


async def test_a_page_that_a_request_published_stays_while_it_may_publish_it_again():
    """Between pages that it kept as duplicates, a request offered one more time what the tree had taken
    from it and given to others: a slot had two owners."""
    spec, slots = SPECS[1], {"kv": 32, "swa": 8, "mamba": 8}
    async with HybridCache.open(spec, options(spec=spec, device_slots=slots)) as cache:
        async with cache.request(PROMPT) as request, cache.request([n + 500 for n in range(16)]) as other:
            await request.load()
            request.extend(4)
            await request.snapshot(4)  # holds its windows back
            await Engine(cache).serve(PROMPT[:8])  # these two pages are duplicates
            request.extend(16)
            await request.checkpoint(20)
            await other.load()
            with suppress(CapacityError):
                other.extend(16)
            await request.checkpoint(20)
            await cache.drain()
            assert cache.verify() == []
        await cache.drain()
        assert cache.verify() == []


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda spec: spec.model)
async def test_a_lone_request_has_room_for_what_the_tree_has_without_a_state(spec: ModelSpec):
    """It computes these pages again. Beside the tree's, which it locks, its own left no room for more."""
    slots = {"kv": 16, "swa": 40, "mamba": 8}
    async with HybridCache.open(spec, options(spec=spec, device_slots=slots)) as cache:
        engine, long, other = Engine(cache), list(range(60)), [*range(56), *range(1000, 1008)]
        await engine.serve(long)
        async with cache.request(other) as request:
            await request.load()
            assert request.hit.tokens == 0
            await engine.compute(request, 56)  # 14 pages, of which the tree has some
            await cache.drain()
            await engine.compute(request, 64)
        await cache.drain()
        assert (await engine.serve(other)).by_tier == {Tier.DEVICE: 56}


async def test_pages_that_another_request_reads_are_not_handed_over():
    spec = SPECS[1]
    slots = {"kv": 24, "swa": 40, "mamba": 8}
    async with HybridCache.open(spec, options(spec=spec, device_slots=slots)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        async with cache.request([*PROMPT, 1]) as reader, cache.request([*PROMPT[:16], *range(48)]) as other:
            await reader.load()
            engine.check(reader)
            pages = reader.pages("kv")
            await other.load()
            await engine.compute(other, 16)  # these four pages are duplicates
            with pytest.raises(CapacityError, match="kv device slots wanted"):
                other.extend(48 + 16)
            assert reader.pages("kv") == pages
            engine.check(reader)
            assert cache.verify() == []
            reader.close()
            other.extend(48 + 16)
            assert cache.verify() == []


async def test_a_snapshot_that_was_published_holds_no_pages_back():
    """A conversation that took one snapshot kept every page of its windows from there on."""
    spec = SPECS[1]
    async with HybridCache.open(spec, options(spec=spec)) as cache, cache.request(PROMPT) as request:
        await request.load()
        request.extend(len(PROMPT))
        await request.snapshot(len(PROMPT))
        await request.checkpoint(len(PROMPT))
        for _ in range(8):
            request.extend(PAGE)
            request.append(range(PAGE))
            request.advance(request.reserved)
            assert len(request.pages("swa")) <= KEPT
