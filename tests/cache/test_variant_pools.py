"""Bytes of quantised pages, drafts' pools and index keys go down three tiers and come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from asynchicache import HybridCache, ModelSpec, PoolSpec, Request, TensorSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.hashing import ObjectKey, page_digests
from asynchicache.testing.oracle import ByteOracle
from asynchicache.types import trailing_pages
from cache.engine import config

pytestmark = pytest.mark.asyncio

PAGE = 4
PAGES = 5
PROMPT = list(range(100, 100 + PAGES * PAGE))


def model(name: str, *tensors: TensorSpec, states: bool = False) -> ModelSpec:
    pools = [PoolSpec("kv", tensors)]
    if states:
        state = TensorSpec("recurrent", (0,), (4, 8), "float32")
        pools.append(PoolSpec("mamba", (state,), coverage=trailing_pages(1), per_token=False))
    return ModelSpec(name, PAGE, 3, tuple(pools), identity=name)


KEYS, VALUES = (TensorSpec(name, (1, 2), (2, 8), "bfloat16") for name in ("keys", "values"))
LATENT = TensorSpec("latent", (0, 1, 2), (1, 24), "bfloat16", sections=(16, 8))
INDEX_KEYS = TensorSpec("index_keys", (0, 2), (6,), "bfloat16")
TARGET = model("target", KEYS, VALUES, states=True)
DRAFT = model("draft", KEYS)
INDEXED = ModelSpec(
    "indexed",
    PAGE,
    3,
    (
        PoolSpec("kv", (LATENT,), replicated=True),
        PoolSpec(
            "dsa", (TensorSpec("index_keys", (0, 2), (6,), "bfloat16"),), slots_of="kv", replicated=True
        ),
    ),
)
SPECS = {
    "quantised": TARGET.with_quantised_kv(),
    "quantised latent": INDEXED.with_quantised_kv("int8", scale_dtype="float16", pools=["kv", "dsa"]),
    "draft": TARGET.with_draft(DRAFT),
    "draft with states": TARGET.with_draft(TARGET),
    "both quantised": TARGET.with_quantised_kv().with_draft(DRAFT.with_quantised_kv("float8_e5m2")),
    "index keys": INDEXED,
    "index keys of a draft": INDEXED.with_draft(INDEXED),
}


def slots(spec: ModelSpec) -> dict[str, int]:
    return {pool.name: 8 for pool in spec.owners}


class Pages:
    """The slots of one request, by pool, and the digests of what belongs there."""

    def __init__(self, cache: HybridCache, request: Request) -> None:
        self.oracle = ByteOracle(cache.spec, cache.device_tensor)
        self.digests = page_digests(memoryview(request.tokens), PAGE)
        self.spec, self.request = cache.spec, request

    def held(self, pages: int) -> list[tuple[str, list[int], list[bytes]]]:
        """Of every pool what a prefix of so many pages needs."""
        found = []
        for pool in self.spec.pools:
            owner = pool.slots_of or pool.name
            if pool.per_token:
                found.append((pool.name, self.request.pages(pool.name)[:pages], self.digests[:pages]))
            else:
                found.append((pool.name, [self.request.state(owner)], self.digests[pages - 1 : pages]))
        return found

    def write(self, pages: int) -> None:
        for pool, where, digests in self.held(pages):
            self.oracle.write(pool, where, digests)

    def wrong(self, pages: int) -> list[str]:
        return [pool for pool, *held in self.held(pages) if self.oracle.count_wrong(pool, *held)]


async def compute(cache: HybridCache, tokens: list[int]) -> None:
    async with cache.request(tokens) as request:
        await request.load()
        request.extend(len(tokens))
        Pages(cache, request).write(PAGES)
        await request.checkpoint(len(tokens))
    await cache.drain()
    assert cache.verify() == []


async def serve(cache: HybridCache, tokens: list[int]) -> tuple[dict[Tier, int], list[str]]:
    """Where a prompt's pages came from, and the pools with wrong bytes among them."""
    async with cache.request([*tokens, 1]) as request:
        await request.prefetch()
        await request.load()
        return dict(request.hit.by_tier), Pages(cache, request).wrong(PAGES)


@pytest.mark.parametrize("name", SPECS)
async def test_bytes_survive_the_host_and_storage(name: str) -> None:
    spec, backend = SPECS[name], MemoryBackend(MemoryStore())
    async with HybridCache.open(
        spec, config(device_slots=slots(spec), host_ratio=4), storage=backend
    ) as cache:
        await compute(cache, PROMPT)
        assert await serve(cache, PROMPT) == ({Tier.DEVICE: 20}, [])
        for start in (1000, 2000, 3000):  # push it out of device memory
            await compute(cache, list(range(start, start + len(PROMPT))))
        assert await serve(cache, PROMPT) == ({Tier.HOST: 20}, [])
        await cache.flush()
        assert await serve(cache, PROMPT) == ({Tier.STORAGE: 20}, [])


@pytest.mark.parametrize("name", SPECS)
async def test_a_byte_lost_in_any_tensor_would_show(name: str) -> None:
    spec = SPECS[name]
    async with HybridCache.open(spec, config(device_slots=slots(spec))) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(len(PROMPT))
            pages = Pages(cache, request)
            for pool in spec.pools:
                for tensor in pool.tensors:
                    pages.write(PAGES)
                    slot = next(where for name, where, _ in pages.held(PAGES) if name == pool.name)[0]
                    cache.device_tensor(pool.name, tensor.name)[-1, slot].view(torch.uint8)[...] ^= 1
                    assert pages.wrong(PAGES) == [pool.name]


class Forgetful(MemoryStore):
    """Has lost everything of one pool; counts what it was given."""

    def __init__(self, lost: str = "") -> None:
        super().__init__()
        self.lost = lost
        self.keys: list[ObjectKey] = []

    def present(self, keys: Sequence[ObjectKey]) -> bytearray:
        found = super().present(keys)
        return bytearray(there and key.pool != self.lost for there, key in zip(found, keys, strict=True))

    def write(self, key: ObjectKey, header: bytes, page: bytes) -> bool:
        self.keys.append(key)
        return super().write(key, header, page)


@pytest.mark.parametrize("lost", ["kv", "draft_kv"])
async def test_a_page_without_its_drafts_is_no_hit(lost: str) -> None:
    """Pools that share slots are there together or not at all, in storage too."""
    spec, store = SPECS["draft"], Forgetful(lost)
    options = config(device_slots=slots(spec))
    async with HybridCache.open(spec, options, storage=MemoryBackend(store)) as cache:
        await compute(cache, PROMPT)
        await cache.flush()
        async with cache.request([*PROMPT, 1]) as request:
            assert (await request.prefetch()).tokens == 0


async def ranks(spec: ModelSpec) -> Forgetful:
    """What two ranks stored that computed the same prompt, and both found again."""
    store = Forgetful()
    for rank in (0, 1):
        options = config(device_slots=slots(spec), rank=rank, ranks=2)
        async with HybridCache.open(spec, options, storage=MemoryBackend(store)) as cache:
            await compute(cache, PROMPT)
            await cache.flush()
            assert await serve(cache, PROMPT) == ({Tier.STORAGE: 20}, [])
    return store


async def test_what_every_rank_holds_is_written_once() -> None:
    store = await ranks(SPECS["index keys"])
    assert len(store.keys) == len(set(store.keys)) == 2 * PAGES
    assert {key.shard for key in store.keys} == {""}


async def test_what_ranks_hold_parts_of_is_written_by_each() -> None:
    store = await ranks(SPECS["quantised"])
    assert {(key.pool, key.shard) for key in store.keys} == {
        (pool, shard) for pool in ("kv", "mamba") for shard in ("0/2", "1/2")
    }


async def test_a_replicated_page_of_one_rank_serves_another() -> None:
    spec, store = SPECS["index keys"], Forgetful()
    for rank in (0, 1):
        options = config(device_slots=slots(spec), rank=rank, ranks=2)
        async with HybridCache.open(spec, options, storage=MemoryBackend(store)) as cache:
            if rank == 0:
                await compute(cache, PROMPT)
            else:
                assert await serve(cache, PROMPT) == ({Tier.STORAGE: 20}, [])
