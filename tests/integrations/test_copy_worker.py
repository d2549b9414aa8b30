"""A cache without device memory and the worker that copies for it, on one loop and in two processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asynchicache import EngineCache, EngineMemory, HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError
from asynchicache.integrations.copy_worker import CopyWorker
from asynchicache.specs import ModelSpec
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.remote import CopyOrder, RemoteCopies
from asynchicache.types import Direction, PoolTransfer
from cache.paged_engine import PAGES, SPEC, PagedEngine, config, paged, spec_of
from integrations.two_processes import schedule

PROMPT = list(range(22))
MODELS = pytest.mark.parametrize("pools", [("kv", "dsa"), ("kv", "mamba", "swa")])


@asynccontextmanager
async def pumped(
    spec: ModelSpec, memory: PagedMemory, store: MemoryStore, **options: object
) -> AsyncIterator[EngineCache]:
    """A cache whose orders a worker on the same loop carries out."""
    remote = RemoteCopies({pool.name: PAGES[pool.name] for pool in spec.owners})
    async with (
        HybridCache.open(spec, config(spec, **options), engine=remote, storage=MemoryBackend(store)) as cache,
        CopyWorker.open(spec, memory.memory, remote.host, config(spec)) as worker,
    ):

        async def pump() -> None:
            while True:
                await remote.wait()
                remote.finish(await worker.run(remote.take()))

        pumping = asyncio.create_task(pump())
        yield cache
        pumping.cancel()


@MODELS
@pytest.mark.parametrize("layout", ["page_first_direct", "page_first"])
@pytest.mark.asyncio
async def test_what_a_worker_copies_is_found_again_in_memory_and_in_storage(
    pools: tuple[str, ...], layout: str
) -> None:
    spec, store = spec_of(*pools), MemoryStore()
    memory = paged(spec)
    for tier in (Tier.HOST, Tier.STORAGE):
        async with pumped(spec, memory, store, host_layout=layout) as cache:
            engine = PagedEngine(cache, memory)
            if tier is Tier.HOST:
                assert (await engine.serve(PROMPT)).tokens == 0
            assert (await engine.serve(PROMPT)).by_tier == {tier: 20}
            assert cache.verify(idle=True) == []


@pytest.mark.asyncio
async def test_a_copy_that_cannot_be_made_is_a_result() -> None:
    memory = paged()
    remote = RemoteCopies({"kv": 99, "mamba": 16})  # more than the worker has
    async with (
        HybridCache.open(SPEC, config(), engine=remote),
        CopyWorker.open(SPEC, memory.memory, remote.host, config()) as worker,
    ):
        orders = [
            CopyOrder(1, Direction.LOAD, (PoolTransfer("kv", [0], [98]),)),
            CopyOrder(2, Direction.LOAD, (PoolTransfer("kv", [0], [3]),)),
            CopyOrder(3, Direction.BACKUP, (PoolTransfer("none", [0], [3]),)),
        ]
        good, *bad = sorted(await worker.run(orders), key=lambda result: len(result.error))
        assert (good.id, good.error) == (2, "")
        assert {result.id for result in bad} == {1, 3}
        assert "no device slot 98; it has 64" in bad[1].error + bad[0].error


@pytest.mark.asyncio
async def test_results_of_a_cancelled_waiter_come_with_the_next_call() -> None:
    memory = paged()
    remote = RemoteCopies({"kv": 64, "mamba": 16})
    async with (
        HybridCache.open(SPEC, config(), engine=remote),
        CopyWorker.open(SPEC, memory.memory, remote.host, config(inline=False)) as worker,
    ):
        order = CopyOrder(7, Direction.LOAD, (PoolTransfer("kv", [0], [3]),))
        waiting = asyncio.create_task(worker.run([order]))
        await asyncio.sleep(0)  # it has begun
        waiting.cancel()
        told: list[int] = []
        while 7 not in told:
            told += [result.id for result in await worker.run([])]


@pytest.mark.asyncio
async def test_a_worker_of_another_model_is_refused() -> None:
    memory = paged()
    remote = RemoteCopies({"kv": 64, "mamba": 16})
    async with HybridCache.open(SPEC, config(), engine=remote):
        other = synthetic_spec(8)
        theirs = PagedMemory(other, {"kv": 4, "mamba": 4})
        with pytest.raises(ConfigError, match="the same model and page size"):
            await CopyWorker.open(other, theirs.memory, remote.host)
        with pytest.raises(ConfigError, match="engine memory of pools"):
            await CopyWorker.open(SPEC, EngineMemory({"kv": memory.memory.pools["kv"]}), remote.host)


@pytest.mark.asyncio
async def test_the_two_sides_may_be_two_processes() -> None:
    """The scheduler starts a worker, sends it orders, kills it, starts another, and finds everything."""
    assert await schedule() == "computed 0, killed, restored 20 of 20"
