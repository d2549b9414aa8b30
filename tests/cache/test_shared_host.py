"""Pages, windows and states in one host memory: its use follows the traffic, and bytes stay right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from asynchicache import HybridCache, ModelSpec
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.layouts import HostLayout
from asynchicache.pools.extents import ExtentAllocator
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.tree.node import FULL_HOST
from asynchicache.types import trailing_pages
from cache.engine import PAGE, Engine, config

pytestmark = pytest.mark.asyncio

KEYS = TensorSpec("keys", (1,), (600,), "uint8")
KV = PoolSpec("kv", (KEYS,))
INDEX = PoolSpec("dsa", (TensorSpec("index", (1,), (1,), "uint8"),), slots_of="kv")
SWA = PoolSpec("swa", (TensorSpec("keys", (0, 2), (800,), "uint8"),), coverage=trailing_pages(2))
STATE = PoolSpec(
    "mamba", (TensorSpec("recurrent", (3,), (22_000,), "uint8"),), coverage=trailing_pages(1), per_token=False
)
SPECS = [
    ModelSpec("states", PAGE, 4, (KV, STATE)),
    ModelSpec("windows", PAGE, 4, (KV, SWA)),
    ModelSpec("all", PAGE, 4, (KV, INDEX, SWA, STATE)),
]
HOST_BYTES = 500_000


def sizes(spec: ModelSpec, host_bytes: int = HOST_BYTES, **options: object) -> dict[str, object]:
    device = {"kv": 48, "swa": 48, "mamba": 5}
    slots = {pool.name: device[pool.name] for pool in spec.owners}
    return {"device_slots": slots, "host_bytes": host_bytes, **options}


def conversations(seed: int, count: int) -> list[list[int]]:
    """Prompts of a few conversations that grow by turns, with long and short ones in phases."""
    chance = random.Random(seed)
    talks = [[talk] * PAGE for talk in range(12)]
    prompts = []
    for turn in range(count):
        talk = talks[chance.randrange(12) if turn % 40 < 20 else chance.randrange(3)]
        if len(talk) > 15 * PAGE:
            talk[PAGE:] = []
        talk += [chance.randrange(1000) for _ in range(PAGE * chance.choice([1, 1, 2, 6]))]
        prompts.append([*talk, 1])
    return prompts


async def serve_all(cache: HybridCache, prompts: Sequence[Sequence[int]]) -> int:
    engine = Engine(cache)
    return sum([(await engine.serve(prompt)).tokens for prompt in prompts])  # verifies after each


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
@pytest.mark.parametrize("layout", [HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST])
async def test_bytes_are_right_while_the_split_changes(spec, layout):
    async with HybridCache.open(spec, config(**sizes(spec, host_layout=layout))) as cache:
        hits = await serve_all(cache, conversations(1, 60))

        statistics = cache.statistics()
        assert hits > 0
        assert statistics.planner.moved > 0
        assert set(statistics.host_bytes) == {pool.name for pool in spec.owners}
        assert sum(statistics.host_bytes.values()) <= HOST_BYTES


async def test_one_pool_can_have_nearly_all_of_the_memory():
    spec = SPECS[0]
    async with HybridCache.open(spec, config(**sizes(spec, 1_200_000))) as cache:
        states = cache.statistics().occupancy["mamba"][1].capacity
        await serve_all(cache, [[talk] * (PAGE + 1) for talk in range(100)])  # a page and a state each

        assert cache.statistics().occupancy["mamba"][1].held >= states - 4  # beside two extents of pages

    async with HybridCache.open(spec, config(**sizes(spec, 1_200_000))) as cache:
        pages = cache.statistics().occupancy["kv"][1].capacity
        await serve_all(cache, [[*range(talk, talk + 20 * PAGE), 1] for talk in range(0, 100 * 100, 100)])

        assert cache.statistics().occupancy["kv"][1].held > 0.6 * pages  # beside a state for 20


async def test_pages_and_states_that_were_moved_are_in_storage_as_they_were():
    spec, store = SPECS[0], MemoryStore()
    prompts = conversations(2, 60)
    async with HybridCache.open(spec, config(**sizes(spec)), storage=MemoryBackend(store)) as cache:
        await serve_all(cache, prompts)
        assert cache.statistics().planner.moved > 0
    async with HybridCache.open(spec, config(**sizes(spec)), storage=MemoryBackend(store)) as cache:
        assert await serve_all(cache, prompts[-3:]) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"share_host": False},
        {"host_slots": {"mamba": 3}},
        {"host_layout": HostLayout.LAYER_FIRST},
        {"host_bytes": 60_000},
    ],
)
async def test_pools_can_have_memory_of_their_own(options):
    async with HybridCache.open(SPECS[0], config(**{**sizes(SPECS[0]), **options})) as cache:
        await serve_all(cache, conversations(3, 30))

        assert cache.statistics().host_bytes == {}
        assert cache.statistics().planner.moved == 0


async def test_a_pool_with_a_size_of_its_own_leaves_the_others_together():
    options = sizes(SPECS[2], host_slots={"swa": 10})
    async with HybridCache.open(SPECS[2], config(**options)) as cache:
        await serve_all(cache, conversations(4, 30))

        assert set(cache.statistics().host_bytes) == {"kv", "mamba"}
        assert cache.statistics().occupancy["swa"][1].capacity == 10


async def test_verify_finds_an_extent_that_was_given_away_too_early(monkeypatch):
    async with HybridCache.open(SPECS[0], config(**sizes(SPECS[0]))) as cache:
        await serve_all(cache, conversations(5, 10))
        free = cache._parts.planner.inventory.free[FULL_HOST]
        assert isinstance(free, ExtentAllocator)
        extent = free.emptiest()[0]
        free.extents.give_back(extent)

        assert any("in an extent of another pool, or of none" in line for line in cache.verify())
