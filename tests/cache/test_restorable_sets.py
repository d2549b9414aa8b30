"""What a request is given, when storage has lost any of its pages, is what brute force says."""

from __future__ import annotations

import pytest

from asynchicache import ModelSpec
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array
from cache.engine import PAGE, Engine, config

PROMPT = list(range(100, 132))
DIGESTS = page_digests(token_array(PROMPT), PAGE, namespace_seed(None))
WINDOW = 2  # pages
LOST = {"kv": 0.05, "dsa": 0.05, "swa": 0.2, "mamba": 0.5}
"""How likely a page is lost: so that pools differ in the lengths that they could restore."""
SPECS = {
    "dsa": synthetic_spec(PAGE, ("kv", "dsa")),
    "mamba": synthetic_spec(PAGE, ("kv", "mamba")),
    "swa": synthetic_spec(PAGE, ("kv", "swa"), window_pages=WINDOW),
    "all": synthetic_spec(PAGE, ("kv", "mamba", "swa", "dsa"), window_pages=WINDOW),
}


def needs(pool: str, length: int) -> range:
    """The pages of a pool that a prefix of `length` pages needs."""
    first = {"kv": 0, "dsa": 0, "swa": max(length - WINDOW, 0), "mamba": length - 1}[pool]
    return range(first, length)


def by_brute_force(spec: ModelSpec, store: MemoryStore) -> int:
    """The longest prefix, in pages, all of which is stored that it needs."""
    there = {(key.pool, key.digest) for key in store}
    whole = [
        all((pool.name, DIGESTS[page]) in there for pool in spec.pools for page in needs(pool.name, length))
        for length in range(1, len(DIGESTS) + 1)
    ]
    return max((length for length, fits in enumerate(whole, start=1) if fits), default=0)


async def lose_some(world: SeededWorld, spec: ModelSpec) -> tuple[int, int]:
    """Pages that are restored by storage that has lost some, and those that should be."""
    store = MemoryStore()
    sizes = {pool.name: 16 for pool in spec.owners}
    options = config(device_slots=sizes, host_slots=sizes)
    async with world.open_cache(spec, options, storage=MemoryBackend(store)) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            for end in range(PAGE, len(PROMPT) + 1, PAGE):  # with a state, and a window, at each page
                await engine.compute(request, end)
        await cache.flush()
        for key in [key for key in store if world.random.random() < LOST[key.pool]]:
            store.drop(key)
        expected = by_brute_force(spec, store)
        hit = await engine.serve([*PROMPT, 1])  # compares bytes
    return hit.tokens // PAGE, expected


@pytest.mark.parametrize("pools", SPECS)
def test_any_pages_may_be_lost(pools: str) -> None:
    runs = [run_seeded(seed, lambda world: lose_some(world, SPECS[pools])) for seed in range(25)]

    assert [got for got, _ in runs] == [expected for _, expected in runs]
    assert len({expected for _, expected in runs}) > 4
