"""Groups of other sizes find each other's pages, if these are stored in parts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from asynchicache import CacheConfig, ConfigError, HybridCache, ModelSpec
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.layouts import HostLayout
from asynchicache.specs.pools import CutSection, PoolSpec, TensorSpec
from asynchicache.specs.sharding import Axis, tensor_rows
from asynchicache.storage import divided
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache_lab.ranks.group import openings, seeded_group
from integrations.zoo import PAGE, random_tokens, tiny_spec

MODELS = ["qwen3_5", "deepseek_v3", "gemma3", "llama"]
PARTS = 2


def config(folder: Path, **more: object) -> CacheConfig:
    options: dict[str, object] = {
        "storage": "file",
        "storage_options": {"path": str(folder)},
        "weight_version": "test",
        "store_parts": PARTS,
        "inline": True,
    }
    return CacheConfig(**(options | more))


def in_objects(
    folder: Path, slots: Mapping[str, int], *, object_pages: int = 32, **more: object
) -> CacheConfig:
    """Options of ranks that share a store: an object is a file."""
    url = {"url": f"file://{folder}", "object_pages": object_pages}
    return config(folder, storage="object", storage_options=url, device_slots=slots, host_slots=slots, **more)


class ShardedEngine:
    """Ranks of one size, each with a cache of its own over its own folder or a shared one."""

    def __init__(self, whole: ModelSpec, size: int) -> None:
        self.whole = whole
        self.size = size
        self.caches: list[HybridCache] = []

    async def open(self, stack: AsyncExitStack, options: CacheConfig) -> None:
        for rank in range(self.size):
            spec = self.whole.shard(tp=(rank, self.size))
            self.caches.append(await stack.enter_async_context(HybridCache.open(spec, options)))

    def content(self, rank: int, pool: str, tensor: str, seed: int) -> torch.Tensor:
        """What belongs in a page or state, of this rank's heads: `[layers, (entries,) rows, ...]`."""
        spec = next(one for one in self.whole.pool(pool).tensors if one.name == tensor)
        entries = (PAGE,) if self.whole.pool(pool).per_token else ()
        shape = (len(spec.layers), *entries, *spec.shape)
        whole = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
        if self.whole.pool(pool).replicated or self.size == 1:
            return whole
        rows = [row for part in tensor_rows(spec, Axis(rank, self.size)) for row in part]
        return whole.index_select(1 + len(entries), torch.tensor(rows))

    async def store(self, tokens: Sequence[int]) -> None:
        for rank, cache in enumerate(self.caches):
            async with cache.request(tokens) as request:
                await request.load()
                request.extend(len(tokens))
                self._fill(rank, cache, request, len(tokens) // PAGE)
                await request.checkpoint(len(tokens) // PAGE * PAGE)
                assert await request.durable()

    def _fill(self, rank: int, cache: HybridCache, request: object, pages: int) -> None:
        for memory, page, place in self._places(rank, cache, request, pages):
            memory[:, place] = page.to(memory.dtype)

    def _places(self, rank: int, cache: HybridCache, request: object, pages: int):  # type: ignore[no-untyped-def]
        """The memory of each tensor, what belongs in a slot, and the slot; of the last pages of windows."""
        for number, pool in enumerate(cache.spec.pools):
            owner = pool.slots_of or pool.name
            for place, tensor in enumerate(pool.tensors):
                memory = cache.device_tensor(pool.name, tensor.name)
                seed = 1000 * number + 100 * place
                if not pool.per_token:
                    yield (
                        memory,
                        self.content(rank, pool.name, tensor.name, seed + pages),
                        request.state(owner),
                    )
                    continue
                first = request.first_page(owner)
                for page, slot in enumerate(request.pages(owner)[: pages - first], first):
                    yield memory, self.content(rank, pool.name, tensor.name, seed + page), slot

    async def restored(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that each rank has in storage, with the right bytes."""
        hits = []
        for rank, cache in enumerate(self.caches):
            async with cache.request([*tokens, 1]) as request:
                await request.prefetch()
                await request.load()
                hits.append(request.hit.tokens)
                pages = request.hit.tokens // PAGE
                for memory, page, slot in self._places(rank, cache, request, pages) if pages else ():
                    assert torch.equal(memory[:, slot], page.to(memory.dtype))
        return hits


def slots_of(spec: ModelSpec) -> dict[str, int]:
    return {pool.name: 12 for pool in spec.owners}


@pytest.mark.asyncio
@pytest.mark.parametrize("layout", [HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST])
@pytest.mark.parametrize(
    ("name", "parts", "writers", "readers"),
    [
        *((name, 2, writers, readers) for name in MODELS for writers in (1, 2) for readers in (1, 2)),
        # More ranks than heads: two of four hold the same.
        ("llama", 4, 1, 4),
        ("llama", 4, 4, 1),
        ("llama", 4, 2, 4),
    ],
)
async def test_a_group_of_another_size_reads_them(
    name: str, parts: int, writers: int, readers: int, layout: HostLayout, tmp_path: Path
) -> None:
    """To the byte, for heads, channels, windows, and what all ranks hold; one store for all."""
    whole, tokens = tiny_spec(name), random_tokens(3 * PAGE)
    slots = slots_of(whole)

    options = in_objects(tmp_path, slots, host_layout=layout, store_parts=parts)
    for size, work in ((writers, "store"), (readers, "read")):
        async with AsyncExitStack() as stack:
            engine = ShardedEngine(whole, size)
            await engine.open(stack, options)
            if work == "store":
                await engine.store(tokens)
            else:
                assert await engine.restored(tokens) == [len(tokens)] * readers


@pytest.mark.asyncio
@pytest.mark.parametrize("storage", ["file", "memory"])
async def test_a_rank_alone_comes_back_after_a_restart(storage: str, tmp_path: Path) -> None:
    whole, tokens = tiny_spec("qwen3_5"), random_tokens(3 * PAGE)
    slots = slots_of(whole)
    more = {} if storage == "file" else {"storage": "memory", "storage_options": {"name": str(tmp_path)}}
    async with AsyncExitStack() as stack:
        engine = ShardedEngine(whole, 1)
        await engine.open(stack, config(tmp_path, device_slots=slots, host_slots=slots, **more))
        await engine.store(tokens)
        await engine.caches[0].flush()
        assert await engine.restored(tokens) == [len(tokens)]
        stored = engine.caches[0]
        assert stored.verify() == []


@pytest.mark.asyncio
async def test_a_detached_stage_stays_so_when_the_weights_change(tmp_path: Path) -> None:
    whole = tiny_spec("llama")
    slots = slots_of(whole)
    chain = {
        "storage": [{"backend": "file", "name": "near"}, {"backend": "file", "name": "far"}],
        "storage_options": [{"path": str(tmp_path / "near")}, {"path": str(tmp_path / "far")}],
    }
    options = config(tmp_path, device_slots=slots, host_slots=slots, **chain)
    async with HybridCache.open(whole.shard(tp=(0, 1)), options) as cache:
        assert await cache.detach_storage("far")
        await cache.update_weights("others")
        assert list(cache.statistics().stages) == ["near"]
        await cache.attach_stage("far")
        assert list(cache.statistics().stages) == ["near", "far"]


HEADS = TensorSpec("keys", layers=(0,), shape=(4, 2), dtype="int64", cut=(CutSection(4, 4),))
FOUR_HEADS = ModelSpec("four heads", page_size=PAGE, layers=1, pools=(PoolSpec("kv", (HEADS,)),))


def test_what_a_group_stored_is_found_by_one_process() -> None:
    """The leader decides, each rank stores its heads one by one, and one process reads all."""
    pages, tokens, slots = 3, random_tokens(3 * PAGE), {"kv": 8}
    options = CacheConfig(device_slots=slots, host_slots=slots, weight_version="test", store_parts=4)
    content = torch.randint(0, 1000, (1, pages, PAGE, 4, 2))

    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        ranks = [FOUR_HEADS.shard(tp=(rank, 2)) for rank in range(2)]
        backends = [MemoryBackend(store) for _ in ranks]
        async with seeded_group(world, openings(world, ranks, options, backends)) as mirror:
            (worker,) = mirror.workers
            async with mirror.cache.request(tokens) as request:
                await request.load()
                request.extend(len(tokens))
                places, step = list(request.pages("kv")), mirror.group.mark()
                mirror.cache.device_tensor("kv", "keys")[:, places] = content[:, :, :, :2]
                async with worker.forward(step, worker._follower._device.stream("engine")):
                    worker.device_tensor("kv", "keys")[:, places] = content[:, :, :, 2:]
                await request.checkpoint(len(tokens))
                assert await request.durable()
        assert len(store) == 4 * pages
        one = MemoryBackend(store)
        async with (
            world.open_cache(FOUR_HEADS, options, storage=one) as cache,
            cache.request([*tokens, 1]) as request,
        ):
            await request.prefetch()
            await request.load()
            assert request.hit.tokens == len(tokens)
            assert torch.equal(cache.device_tensor("kv", "keys")[:, list(request.pages("kv"))], content)

    run_seeded(7, main)


def stored_pages(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]


@pytest.mark.asyncio
async def test_a_part_that_is_lost_or_damaged_is_a_miss(tmp_path: Path) -> None:
    """Each file in turn: other ranks' parts are never put in its place."""
    whole, tokens = tiny_spec("llama"), random_tokens(2 * PAGE)
    slots = slots_of(whole)

    options = in_objects(tmp_path, slots, object_pages=1)
    async with AsyncExitStack() as stack:
        engine = ShardedEngine(whole, 1)
        await engine.open(stack, options)
        await engine.store(tokens)
    files = stored_pages(tmp_path)
    assert len(files) == 2 * PARTS
    for path in files:
        data = path.read_bytes()
        for broken in (None, bytes([*data[:-1], data[-1] ^ 1]), data[: len(data) // 2]):
            path.unlink() if broken is None else path.write_bytes(broken)
            async with AsyncExitStack() as stack:
                engine = ShardedEngine(whole, 1)
                await engine.open(stack, options)
                (hit,) = await engine.restored(tokens)
                assert hit < len(tokens)
            path.write_bytes(data)


@pytest.mark.asyncio
async def test_many_pages_at_once_and_cancelled_reads(tmp_path: Path) -> None:
    """More than staging memory has slots for, from several requests, some of which leave."""
    whole, pages = tiny_spec("llama"), 150
    slots = {"kv": 400}
    options = config(tmp_path, device_slots=slots, host_slots=slots)
    prompts = [random_tokens(pages * PAGE, seed=seed) for seed in range(2)]
    async with AsyncExitStack() as stack:
        engine = ShardedEngine(whole, 1)
        await engine.open(stack, options)
        for prompt in prompts:
            await engine.store(prompt)
        (cache,) = engine.caches
        chance = random.Random(3)
        for _ in range(10):
            await cache.flush()
            tasks = [asyncio.create_task(engine.restored(prompt)) for prompt in prompts * 2]
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            tasks[chance.randrange(4)].cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [one for one in done if not isinstance(one, asyncio.CancelledError)] == [
                [pages * PAGE]
            ] * 3
            await cache.drain()
        assert cache.verify() == []


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            tiny_spec("llama").shard(tp=(0, 2)),
            {"store_parts": 3},
            "3 must be a multiple of the tensor-parallel size 2",
        ),
        (tiny_spec("llama"), {"store_parts": 3}, "store_parts 3: tp size 3 must"),
        (tiny_spec("llama"), {"ranks": 2, "rank": 0}, "give each rank its pools"),
        (tiny_spec("llama").shard(tp=(0, 2)).with_quantised_kv(), {}, "pools of this rank were changed"),
    ],
)
@pytest.mark.asyncio
async def test_what_cannot_be_divided_is_refused(
    spec: ModelSpec, options: dict[str, object], words: str, tmp_path: Path
) -> None:
    slots = slots_of(spec)
    with pytest.raises(ConfigError, match=words):
        async with HybridCache.open(spec, config(tmp_path, device_slots=slots, host_slots=slots, **options)):
            pass


@pytest.mark.parametrize(
    ("parts", "page"),
    [((1, 1), 1), ((1, 0), 0), ((0, 2), 0), ((2, 1), 2), ((2, 2), 2)],
)
def test_a_page_is_there_if_each_part_is(parts: tuple[int, int], page: int) -> None:
    """2: nobody knows."""
    assert divided._all_there(parts) == page
