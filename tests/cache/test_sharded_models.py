"""Caches of the ranks of one model over one storage: each finds its bytes; shared bytes are written once."""

from __future__ import annotations

import pytest

from asynchicache import HybridCache, ModelSpec, PoolSpec, TensorSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError
from asynchicache.hashing import ObjectKey, page_digests
from asynchicache.specs.pools import CutSection
from asynchicache.testing.oracle import ByteOracle
from asynchicache.types import trailing_pages
from cache.engine import config

pytestmark = pytest.mark.asyncio

PAGE, PAGES = 4, 3
PROMPT = list(range(100, 100 + PAGES * PAGE))
KEYS = TensorSpec("keys", (0, 2), (2, 8), "bfloat16", cut=(CutSection(2, 2, repeats=True),))
STATE = TensorSpec("recurrent", (1,), (4, 8), "float32", cut=(CutSection(4, 4),))
ATTENTION = ModelSpec("attention", PAGE, 3, (PoolSpec("kv", (KEYS,)),))
HYBRID = ModelSpec(
    "hybrid",
    PAGE,
    3,
    (*ATTENTION.pools, PoolSpec("mamba", (STATE,), coverage=trailing_pages(1), per_token=False)),
)
LATENT = ModelSpec(
    "latent", PAGE, 3, (PoolSpec("kv", (TensorSpec("latent", (0,), (12,), "uint8"),), replicated=True),)
)


class Counting(MemoryStore):
    """Counts how often each key was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[tuple[str, str], int] = {}

    def write(self, key: ObjectKey, header: bytes, page: bytes) -> bool:
        family = (key.pool, key.shard)
        self.written[family] = self.written.get(family, 0) + 1
        return super().write(key, header, page)


async def serve(spec: ModelSpec, store: MemoryStore) -> tuple[dict[Tier, int], list[str]]:
    """Where one rank found the prompt, and the pools with wrong bytes; then it computes the rest."""
    options = config(device_slots={pool.name: 16 for pool in spec.owners})
    async with HybridCache.open(spec, options, storage=MemoryBackend(store)) as cache:
        oracle = ByteOracle(spec, cache.device_tensor, identity=lambda pool: spec.pool(pool).shard)
        digests = page_digests(memoryview(cache.request(PROMPT).tokens), PAGE)
        async with cache.request([*PROMPT, 1]) as request:
            await request.prefetch()
            await request.load()
            hit, pages = request.hit, request.hit.tokens // PAGE
            held = {pool.name: request.pages(pool.name) for pool in spec.pools if pool.per_token}
            wrong = [
                name
                for name, slots in held.items()
                if oracle.count_wrong(name, slots[:pages], digests[:pages])
            ]
            if not pages:
                request.extend(len(PROMPT))
                for pool in spec.pools:
                    if pool.per_token:
                        oracle.write(pool.name, request.pages(pool.name), digests)
                    else:
                        oracle.write(pool.name, [request.state(pool.name)], digests[-1:])
                await request.checkpoint(len(PROMPT))
            elif len(spec.pools) > 1:
                wrong += ["mamba"] * oracle.count_wrong("mamba", [request.state("mamba")], digests[-1:])
        await cache.drain()
        assert cache.verify() == []
        return dict(hit.by_tier), wrong


FOUND = ({Tier.STORAGE: PAGES * PAGE}, [])


async def test_each_rank_finds_its_own_bytes() -> None:
    store, ranks = Counting(), [HYBRID.shard(tp=(rank, 4)) for rank in range(4)]
    for spec in ranks:
        await serve(spec, store)
    assert store.written == {
        ("kv", "tp0/2"): PAGES,  # two ranks hold each head, and one of them writes it
        ("kv", "tp1/2"): PAGES,
        **{("mamba", f"tp{rank}/4"): 1 for rank in range(4)},
    }
    for spec in ranks:
        assert await serve(spec, store) == FOUND


async def test_ranks_of_another_size_find_whole_heads() -> None:
    store = Counting()
    for rank in range(2):
        await serve(ATTENTION.shard(tp=(rank, 2)), store)
    for rank in range(8):
        assert await serve(ATTENTION.shard(tp=(rank, 8)), store) == FOUND
    assert (await serve(ATTENTION, store))[0] == {}  # both heads in one page: another layout


async def test_stripes_of_pages_are_apart_and_latents_are_shared() -> None:
    store = Counting()
    for rank in range(2):
        assert await serve(LATENT.shard(cp=(rank, 2)), store) == ({}, [])
    assert store.written == {("kv", "cp0/2"): PAGES, ("kv", "cp1/2"): PAGES}
    for rank in range(2):
        assert await serve(LATENT.shard(cp=(rank, 2)), store) == FOUND
    shared = Counting()
    for rank in range(3):
        await serve(LATENT.shard(tp=(rank, 3)), shared)
    assert shared.written == {("kv", ""): PAGES}
    assert await serve(LATENT, shared) == FOUND


async def test_a_rank_is_named_once() -> None:
    options = config(device_slots={"kv": 16}, rank=1, ranks=2)
    with pytest.raises(ConfigError, match=r"rank 1 of 2: pool 'kv' is tp1/2 of the model .* leave them out"):
        async with HybridCache.open(
            ATTENTION.shard(tp=(1, 2)), options, storage=MemoryBackend(MemoryStore())
        ):
            pass
