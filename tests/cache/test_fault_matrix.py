"""Every call of a backend fails, hangs, answers late, in part or wrongly, for every pool, in virtual time.

Each case is a whole cache whose one backend breaks one kind of call of one pool. It costs what storage
would have added, with the right reason, and no longer than the deadline; bytes are compared, slots counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from asynchicache import Hit, HybridCache, MissReason, PrefetchOptions, PrefetchPolicy, Request, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import StorageError
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import PoolBinding, PoolEngine, StorageBackend
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import ShedReason
from cache.engine import PAGE, Engine, config

POOLS = ("kv", "dsa", "swa", "mamba")
SPEC = synthetic_spec(PAGE, ("kv", "mamba", "swa", "dsa"), window_pages=2)
ATTENTION = synthetic_spec(PAGE, ("kv", "dsa"))
PROMPT = list(range(100, 120))
OTHER = list(range(200, 220))
NEAR = 8
"""Tokens of the prompt that are on the device when storage breaks."""

LATE = 5.0
SLACK = 0.05
"""Seconds that a healthy read takes, at most: threads take a drawn time, a thousandth on average."""

DEADLINES = {"the-requests": (0.25, 1.0), "storages": (1.0, 0.25)}
"""Seconds that a request, and a call of the engine, may take: whose deadline comes first."""

ABSENT = {
    "kv": MissReason.COLD,
    "dsa": MissReason.COLD,
    "swa": MissReason.WINDOW,
    "mamba": MissReason.STATE,
}
TROUBLE = {
    "fail": MissReason.STORAGE_FAILED,
    "raises": MissReason.STORAGE_FAILED,
    "partial": MissReason.STORAGE_FAILED,
    "hang": MissReason.DEADLINE,
    "late": MissReason.DEADLINE,
    "swap": MissReason.CORRUPT,
}
SHED = {
    "fail": ShedReason.FAILED,
    "raises": ShedReason.FAILED,
    "partial": ShedReason.FAILED,
    "hang": ShedReason.TIMEOUT,
    "late": ShedReason.TIMEOUT,
}
READS = [
    *[("exists", fault) for fault in ("fail", "raises", "hang", "late", "lie")],
    *[("get", fault) for fault in ("fail", "raises", "hang", "late", "partial", "swap")],
]
each_order = pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), id="one-seed"),
        pytest.param(range(1, 21), id="many-seeds", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
"""A case is one run by default; the seed decides the order of tasks, and what takes how long."""


class Scene:
    """A cache over a backend that can be broken."""

    def __init__(self, world: SeededWorld, cache: HybridCache, store: MemoryStore, faults: Faulty) -> None:
        self.world = world
        self.cache = cache
        self.store = store
        self.faults = faults
        self.engine = Engine(cache)

    def break_calls(self, call: str, fault: str, *pools: str, rate: float = 1) -> None:
        self.faults.rates = FaultRates(**{fault: rate}, calls=(call,), pools=pools)

    async def mend(self) -> None:
        """The fault is over, and every call of its time has ended."""
        self.faults.rates = FaultRates()
        self.faults.release()
        await asyncio.sleep(LATE)
        await self.settle()

    async def settle(self) -> None:
        await self.cache.drain()
        assert self.cache.verify() == []

    async def timed(self, work: Coroutine[Any, Any, object]) -> float:
        """Seconds that `work` takes."""
        started = self.world.loop.time()
        await work
        return self.world.loop.time() - started

    async def compute(self, request: Request) -> None:
        """Load, compare what was restored, compute and publish the rest."""
        await request.load()
        self.engine.check(request)
        for cut in [*request.cuts, len(request.tokens)]:
            await self.engine.compute(request, cut)

    async def ask(self, tokens: list[int], *, patience: float = SLACK) -> Hit:
        """Serve one prompt, whose prefetch may take `patience` seconds."""
        async with self.cache.request(tokens) as request:
            assert await self.timed(request.prefetch()) <= patience
            await self.compute(request)
            return request.hit

    async def forget(self) -> None:
        """Nothing is in memory any more: every slot came back."""
        await self.cache.flush()
        await self.settle()
        occupancy = self.cache.statistics().occupancy
        assert all(tier.held == 0 for tiers in occupancy.values() for tier in tiers), occupancy
        assert all(free.quarantined == 0 for free in self.cache._parts.planner.inventory.free)


class Vouching:
    """A backend that says that its engines check what they read, and are shared; the former is wrong."""

    def __init__(self, backend: StorageBackend) -> None:
        self.name = f"vouching-{backend.name}"
        self.aclose = backend.aclose
        self._backend = backend

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return _VouchingEngine(await self._backend.open_pool(binding))


class _VouchingEngine:
    def __init__(self, engine: PoolEngine) -> None:
        self.capabilities = replace(engine.capabilities, checks=True, shared=True)
        self.exists, self.get, self.put = engine.exists, engine.get, engine.put
        self.delete, self.clear, self.aclose = engine.delete, engine.clear, engine.aclose


@asynccontextmanager
async def scene(
    world: SeededWorld,
    *,
    spec=SPEC,
    request_seconds: float = 1.0,
    call_seconds: float = 0.25,
    store_bytes: int = 1 << 20,
    vouching: bool = False,
):
    store = MemoryStore()
    faults = Faulty(MemoryBackend(store), FaultRates(), world.random, late_seconds=LATE)
    options = config(
        device_slots={"kv": 32, "mamba": 8, "swa": 16} if spec is SPEC else {"kv": 32},
        prefetch=PrefetchOptions(
            policy=PrefetchPolicy.TIMEOUT, base_seconds=request_seconds, seconds_per_ki_token=0
        ),
        storage_limits=PoolLimits(deadline=call_seconds, closing=0.5, clearing=0.5),
        store_bytes=store_bytes,
    )
    storage = Vouching(faults) if vouching else faults
    async with world.open_cache(spec, options, storage=storage) as cache:
        yield Scene(world, cache, store, faults)
    assert len(asyncio.all_tasks()) == 1, "closing leaves no task behind"


async def served_before(s: Scene) -> None:
    """Storage has two prompts; the first pages of one are on the device as well."""
    await s.ask(OTHER)
    await s.ask(PROMPT)
    await s.settle()
    await s.forget()
    await s.ask(PROMPT[:NEAR])
    await s.settle()


async def served_after(s: Scene) -> None:
    """With the fault over, everything is in storage, or comes to be there."""
    await s.mend()
    await s.ask([*PROMPT, 2])
    await s.settle()
    await s.forget()
    assert (await s.ask([*PROMPT, 3])).by_tier == {Tier.STORAGE: 20}
    await s.settle()
    await s.forget()


async def broken_read(world: SeededWorld, call: str, fault: str, pool: str, deadlines: str) -> None:
    request_seconds, call_seconds = DEADLINES[deadlines]
    async with scene(world, request_seconds=request_seconds, call_seconds=call_seconds) as s:
        await served_before(s)
        s.break_calls(call, fault, pool)
        hit = await s.ask([*PROMPT, 1], patience=min(request_seconds, call_seconds) + SLACK)
        assert s.faults.injected[fault]
        assert hit.tokens == NEAR
        assert hit.reason is (ABSENT[pool] if fault == "lie" else TROUBLE[fault])
        assert s.cache.verify() == []
        await served_after(s)


def run(seeds: range, main: Callable[..., Coroutine[Any, Any, None]], *args: str) -> None:
    for seed in seeds:
        run_seeded(seed, partial(_last, main, args))


def _last(main: Callable[..., Coroutine[Any, Any, None]], args: tuple[str, ...], world: SeededWorld):
    return main(world, *args)


@each_order
@pytest.mark.parametrize("deadlines", DEADLINES)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(("call", "fault"), READS)
def test_a_broken_read_costs_what_storage_would_have_added(
    seeds: range, call: str, fault: str, pool: str, deadlines: str
):
    run(seeds, broken_read, call, fault, pool, deadlines)


async def other_pages(world: SeededWorld, pool: str) -> None:
    async with scene(world, vouching=True) as s:
        await served_before(s)
        s.break_calls("get", "swap", pool)
        hit = await s.ask([*PROMPT, 1])
        assert s.faults.injected["swap"]
        assert (hit.tokens, hit.reason) == (NEAR, MissReason.CORRUPT)
        await served_after(s)


@each_order
@pytest.mark.parametrize("pool", POOLS)
def test_another_ones_page_is_no_hit_though_a_shared_engine_says_that_it_checks(seeds: range, pool: str):
    """Damaged bytes would be: the core does not hash again what an engine says it has."""
    run(seeds, other_pages, pool)


async def claimed(world: SeededWorld) -> None:
    async with scene(world) as s:
        s.break_calls("exists", "lie")
        hit = await s.ask([*PROMPT, 1])
        assert (hit.tokens, hit.reason) == (0, MissReason.COLD)
        assert s.cache.statistics().storage["kv"].get.pages == 5  # they were asked for
        await s.mend()
        await s.forget()
        assert (await s.ask([*PROMPT, 2])).by_tier == {Tier.STORAGE: 20}


@each_order
def test_pages_that_are_claimed_to_be_there_are_a_miss(seeds: range):
    run(seeds, claimed)


async def broken_write(world: SeededWorld, fault: str, pool: str) -> None:
    async with scene(world) as s:
        s.break_calls("put", fault, pool)
        await s.ask(PROMPT)
        assert await s.timed(s.settle()) <= 0.25 + SLACK
        assert set(s.cache.statistics().traffic.shed) == {SHED[fault]}
        await s.cache.flush()
        hit = await s.ask([*PROMPT, 1])
        if SHED[fault] is ShedReason.TIMEOUT:  # storage may still read the host's slots, so they are kept
            assert hit.by_tier == {Tier.HOST: 20}
        else:
            assert (hit.tokens, hit.reason) == (0, ABSENT[pool])
        assert s.cache.verify() == []
        await served_after(s)


@each_order
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("fault", SHED)
def test_a_broken_write_is_shed_and_made_up_for(seeds: range, fault: str, pool: str):
    run(seeds, broken_write, fault, pool)


async def not_durable(world: SeededWorld, fault: str, pool: str) -> None:
    async with scene(world) as s:
        s.break_calls("put", fault, pool)
        async with s.cache.request(PROMPT) as request:
            await s.compute(request)
            started = world.loop.time()
            # A late call did its work, and storage is asked: it has the pages.
            assert await request.durable() == (fault == "late")
            assert world.loop.time() - started <= 2 * 0.25 + SLACK  # it is tried once more
            await s.mend()
            assert await request.durable()
        await s.settle()
        await s.forget()


@each_order
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("fault", SHED)
def test_what_could_not_be_written_is_not_called_durable(seeds: range, fault: str, pool: str):
    run(seeds, not_durable, fault, pool)


async def broken_repair(world: SeededWorld, fault: str, pool: str) -> None:
    """A damaged page is deleted before it is written anew; here that goes wrong."""
    async with scene(world) as s:
        await s.ask(OTHER)
        await s.ask(PROMPT)
        await s.settle()
        await s.forget()
        async with s.cache.request([*PROMPT, 1]) as request:
            s.break_calls("get", "swap", pool)
            assert (await request.prefetch()).reason is MissReason.CORRUPT
            s.break_calls("delete", fault, pool)
            await s.compute(request)
            assert request.hit.tokens == 0
        await s.settle()
        await s.cache.flush()
        shed = s.cache.statistics().traffic.shed
        hit = await s.ask([*PROMPT, 1])
        # Also where it was done in the end: it might have removed what was stored meanwhile.
        assert (set(shed), hit.tokens, hit.reason) == ({ShedReason.REJECTED}, 0, ABSENT[pool])
        await served_after(s)


@each_order
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("fault", ["fail", "raises", "hang", "late"])
def test_a_damaged_page_that_cannot_be_deleted_stays_a_miss(seeds: range, fault: str, pool: str):
    run(seeds, broken_repair, fault, pool)


async def broken_clear(world: SeededWorld, fault: str, pool: str) -> None:
    async with scene(world) as s:
        await s.ask(PROMPT)
        await s.settle()
        s.break_calls("clear", fault, pool)
        with pytest.raises(StorageError, match=f"pool '{pool}' could not be cleared"):
            await s.cache.clear_storage()
        await s.mend()
        async with s.cache.request([*PROMPT, 1]) as request:
            await s.compute(request)
            assert await request.durable()
        assert len(s.store) == 5 + 5 + 3 + 1, "what was cleared before the failure is written anew"
        await s.forget()
        assert (await s.ask([*PROMPT, 3])).by_tier == {Tier.STORAGE: 20}


@each_order
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("fault", ["fail", "raises", "hang", "late"])
def test_what_a_failed_clear_has_removed_is_not_taken_for_stored(seeds: range, fault: str, pool: str):
    run(seeds, broken_clear, fault, pool)


async def part_of_a_read(world: SeededWorld) -> int:
    async with scene(world, spec=ATTENTION) as s:
        await s.ask(PROMPT)
        await s.settle()
        await s.forget()
        s.break_calls("get", "partial", rate=0.5)  # and those that failed are asked for once more
        hit = await s.ask([*PROMPT, 1])
        short = hit.tokens < len(PROMPT)
        assert hit.reason is (MissReason.STORAGE_FAILED if short else MissReason.NONE)
        await served_after(s)
        return hit.tokens


def test_a_read_that_succeeds_in_part_gives_the_prefix_that_came():
    assert len({run_seeded(seed, part_of_a_read) for seed in range(12)}) > 3


async def one_hanging_pool(world: SeededWorld, pool: str) -> None:
    """What each prompt writes fits into the limit once, and not twice."""
    async with scene(world, store_bytes=108_000) as s:
        s.break_calls("put", "hang", pool)
        for first in range(100, 700, 100):
            await s.ask(list(range(first, first + 20)))
            await s.settle()
        shed = s.cache.statistics().traffic.shed
        assert ShedReason.BUDGET not in shed
        assert shed[ShedReason.TIMEOUT] > 0
        others = {key.pool for key in s.store}
        assert others == set(POOLS) - {pool}
        await served_after(s)
        assert s.cache._parts.storage_writer.storing_bytes == 0


@each_order
@pytest.mark.parametrize("pool", ["swa", "mamba"])
def test_a_pool_that_hangs_takes_no_others_share_of_the_writes(seeds: range, pool: str):
    run(seeds, one_hanging_pool, pool)


async def part_of_a_write(world: SeededWorld) -> int:
    async with scene(world, spec=ATTENTION) as s:
        s.break_calls("put", "partial", rate=0.2)
        async with s.cache.request(PROMPT) as request:
            await s.compute(request)
            digests = s.engine.digests(request, None)
        await s.settle()
        await s.forget()
        stored = {(key.pool, key.digest) for key in s.store}
        whole = [all((pool, digest) in stored for pool in ("kv", "dsa")) for digest in digests]
        hit = await s.ask([*PROMPT, 1])
        assert hit.tokens == PAGE * [*whole, False].index(False)
        await served_after(s)
        return hit.tokens


def test_a_write_that_succeeds_in_part_leaves_the_prefix_that_is_there():
    assert len({run_seeded(seed, part_of_a_write) for seed in range(12)}) > 3
