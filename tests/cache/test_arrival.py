"""A wait for what another process computes, `prefetch(until=...)`: it ends when every pool has its part."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from asynchicache import ClosedError, Hit, HybridCache, MissReason, ModelSpec, RequestStateError, UsageError
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.hashing import ObjectKey, namespace_seed, page_digests
from asynchicache.openings import Opening
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from cache.engine import SPEC, Engine, config
from cache.test_tails import TokenEngine
from cache.test_tails import config as tail_config
from cache.test_windows import SPECS, options

PROMPT = list(range(100, 120))
PATIENCE = 60.0


class Handover:
    """What a prefill left in storage, and another storage to which it comes bit by bit.

    Attributes:
        keys: of its pages, the full ones first and in order.
        published: tokens at which another cache can go on.
    """

    def __init__(self, world: SeededWorld, spec: ModelSpec = SPEC, *, tails: bool = False) -> None:
        self.world = world
        self.spec = spec
        self.options = options(spec=spec) if not tails else tail_config(weight_version="test")
        self.source, self.store = MemoryStore(), MemoryStore()
        self.faults = Faulty(MemoryBackend(self.store), FaultRates(), world.random)
        self.published = 0

    def open(self, storage: MemoryBackend | Faulty) -> Opening[HybridCache]:
        return self.world.open_cache(self.spec, self.options, storage=storage)

    async def prefill(self, tokens: Sequence[int] = PROMPT) -> None:
        async with self.open(MemoryBackend(self.source)) as cache:
            engine = Engine(cache)
            async with cache.request(tokens) as request:
                await request.load()
                await engine.compute(request, len(tokens))
                assert await request.durable()
                self.published = request.published

    @property
    def keys(self) -> list[ObjectKey]:
        return list(self.source)

    def come(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            page = self.source.read(key)
            assert page is not None
            self.store.write(key, *page)

    def of(self, *pools: str) -> list[ObjectKey]:
        return [key for key in self.keys if key.pool in pools]

    @asynccontextmanager
    async def decoder(self) -> AsyncIterator[HybridCache]:
        async with self.open(self.faults) as cache:
            yield cache
            self.faults.release()
            await cache.drain()
            assert_clean(cache)

    async def wait(self, cache: HybridCache, seconds: float = PATIENCE, until: int = len(PROMPT)) -> Hit:
        """Wait, as a decoder does that has the prompt and its next token, and go on."""
        async with cache.request([*PROMPT, 1]) as request:
            await request.prefetch(until=until, seconds=seconds)
            await request.load()
            Engine(cache).check(request)
            return request.hit


def questions(cache: HybridCache) -> int:
    """Keys that storage was asked for."""
    return sum(pool.exists.pages for pool in cache.statistics().storage.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", [SPEC, *SPECS], ids=lambda spec: spec.model)
def test_the_wait_ends_with_the_last_page_of_any_pool(spec: ModelSpec, seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world, spec)
        await s.prefill()
        assert s.published == len(PROMPT)
        async with s.decoder() as cache:
            waiting = asyncio.create_task(s.wait(cache))
            keys = s.keys
            world.random.shuffle(keys)
            for number, key in enumerate(keys):
                await asyncio.sleep(1)
                there = s.published if await arrived(s, cache) else 0
                assert waiting.done() == (there == len(PROMPT)), f"{number} of {len(keys)}"
                s.come([key])
            assert (await waiting).tokens == len(PROMPT)

    async def arrived(s: Handover, cache: HybridCache) -> bool:
        """Whether the decoder could go on: another one, which knows nothing, says so."""
        async with s.open(MemoryBackend(s.store)) as other, other.request([*PROMPT, 1]) as request:
            return (await request.prefetch()).tokens == len(PROMPT)

    run_seeded(seed, main)


@pytest.mark.parametrize("late", ["kv", "mamba", "swa"])
def test_the_end_of_a_prefix_is_asked_for_first_and_seldom(late: str) -> None:
    async def main(world: SeededWorld) -> None:
        spec = SPECS[1]
        s = Handover(world, spec)
        await s.prefill()
        s.come([key for key in s.keys if key.pool != late])
        async with s.decoder() as cache:
            waiting = asyncio.create_task(s.wait(cache))
            await asyncio.sleep(30)
            assert questions(cache) < 3 * 100, "one key of each pool, at last twice a second"
            assert not waiting.done()
            s.come(s.of(late))
            assert (await waiting).tokens == len(PROMPT)

    run_seeded(0, main)


def test_what_this_cache_computes_itself_ends_the_wait_too() -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world)
        async with s.decoder() as cache:
            waiting = asyncio.create_task(s.wait(cache))
            await asyncio.sleep(1)
            await Engine(cache).serve(PROMPT)
            assert (await waiting).tokens == len(PROMPT)

    run_seeded(0, main)


def test_a_wait_in_vain_ends_in_time_with_what_is_there() -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world)
        await s.prefill(PROMPT[:8])
        s.come(s.keys)
        async with s.decoder() as cache:
            began = world.loop.time()
            hit = await s.wait(cache)
            assert (hit.tokens, hit.reason) == (8, MissReason.COLD)
            assert PATIENCE <= world.loop.time() - began < PATIENCE + 1
            default = cache.config.prefetch.max_seconds
            began = world.loop.time()
            async with cache.request([7, *PROMPT]) as request:
                await request.prefetch(until=16)
            assert default <= world.loop.time() - began < default + 1

    run_seeded(0, main)


@pytest.mark.parametrize(
    ("faults", "seconds", "reason"),
    [
        (FaultRates(fail=1.0), PATIENCE, MissReason.STORAGE_FAILED),
        (FaultRates(hang=1.0), 1.0, MissReason.DEADLINE),
        (FaultRates(hang=1.0, pools=("mamba",)), 1.0, MissReason.DEADLINE),
        (FaultRates(hang=1.0), PATIENCE, MissReason.STORAGE_FAILED),  # it takes no more calls by then
    ],
)
def test_storage_that_fails_or_hangs_bounds_the_wait_and_is_named(
    faults: FaultRates, seconds: float, reason: MissReason
) -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world)
        await s.prefill()
        s.come(s.keys)
        s.faults.rates = faults
        async with s.decoder() as cache:
            began = world.loop.time()
            hit = await s.wait(cache, seconds)
            assert (hit.tokens, hit.reason) == (0, reason)
            assert world.loop.time() - began < seconds + cache.config.prefetch.max_seconds + 1

    run_seeded(0, main)


def test_storage_that_comes_back_ends_the_wait() -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world)
        await s.prefill()
        s.come(s.keys)
        s.faults.rates = FaultRates(fail=1.0)
        async with s.decoder() as cache:
            waiting = asyncio.create_task(s.wait(cache))
            await asyncio.sleep(20)  # the breaker is open
            assert not waiting.done()
            s.faults.rates = FaultRates()
            assert (await waiting).tokens == len(PROMPT)

    run_seeded(0, main)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("end", ["cancelled", "detached", "closed", "left", "loaded"])
def test_a_wait_ends_with_its_request_its_storage_and_its_cache(end: str, seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world)
        await s.prefill()
        s.come(s.of("kv"))
        async with s.open(s.faults) as cache:
            request = cache.request([*PROMPT, 1])
            await request.__aenter__()
            waiting = asyncio.create_task(request.prefetch(until=len(PROMPT), seconds=1e6))
            await asyncio.sleep(world.random.random())
            began = world.loop.time()
            if end in ("left", "loaded") and seed % 2:
                s.come(s.keys)  # in the same moment
            if end == "cancelled":
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            elif end == "detached":
                await cache.detach_storage()
                assert (await waiting).tokens == 0
            elif end == "closed":
                await cache.aclose()
                with pytest.raises(ClosedError):
                    await waiting
            elif end == "loaded":
                await request.load()
                assert (await waiting).tokens == 0
            else:
                request.close()
                with pytest.raises(RequestStateError):
                    await waiting
            assert world.loop.time() - began < 1
            request.close()
            if end != "closed":
                await cache.drain()
                assert_clean(cache)

    run_seeded(seed, main)


def test_an_end_inside_a_page_is_waited_for_alone() -> None:
    """Its whole pages are in memory, where no question without `until` would look further."""

    async def main(world: SeededWorld) -> None:
        s, store = Handover(world, tails=True), MemoryStore()
        async with s.open(MemoryBackend(store)) as prefill, s.open(MemoryBackend(store)) as decode:
            await TokenEngine(decode).serve(PROMPT)
            async with decode.request([*PROMPT, 1, 2, 3]) as request:
                waiting = asyncio.create_task(request.prefetch(until=22))
                await asyncio.sleep(5)
                assert not waiting.done()
                async with prefill.request([*PROMPT, 1, 2]) as other:
                    await other.load()
                    other.extend(22)
                    ends = page_digests(other.tokens, 1, namespace_seed(None))
                    TokenEngine(prefill).compute(other, 0, 22, ends)
                    await other.checkpoint(22, final=True)
                    assert other.published == 22
                    assert await other.durable()
                assert (await waiting).tokens == 22

    run_seeded(0, main)


@pytest.mark.parametrize("until", [20, 21, 1000])
def test_what_could_never_be_restored_is_not_waited_for(until: int) -> None:
    async def main(world: SeededWorld) -> None:
        s = Handover(world)
        await s.prefill()
        s.come(s.keys)
        async with s.decoder() as cache:
            began = world.loop.time()
            assert (await s.wait(cache, until=until)).tokens == len(PROMPT)
            assert world.loop.time() - began < 1

    run_seeded(0, main)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"until": -1}, r"until=-1"),
        ({"until": "all"}, r"'all'"),
        ({"until": 4, "seconds": -1}, r"seconds=-1"),
        ({"until": 4, "seconds": "3"}, r"seconds='3'"),
        ({"until": 4, "seconds": float("nan")}, r"seconds=nan"),
    ],
)
def test_what_is_no_length_and_no_time_is_refused(arguments: dict[str, object], match: str) -> None:
    async def main(world: SeededWorld) -> None:
        async with world.open_cache(SPEC, config()) as cache, cache.request(PROMPT) as request:
            with pytest.raises(UsageError, match=match):
                await request.prefetch(**arguments)
            assert (await request.prefetch(until=16)).tokens == 0, "without storage nothing can come"

    run_seeded(0, main)
