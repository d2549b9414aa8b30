"""Mooncake as fleets run it: an etcd, and two masters of which one leads. The leader is killed while caches
work: nothing hangs, no byte is wrong, and what was lost is written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asynchicache import HybridCache, PoolLimits, Tier
from asynchicache.backends.mooncake import MooncakeBackend, MooncakeOptions
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.store import MooncakeStore
from asynchicache.errors import StorageError
from cache.engine import SPEC, Engine, config
from engines import free_port
from storage.mooncake_cluster import Fleet, fleet, open_bench, own_network

pytestmark = [pytest.mark.asyncio, pytest.mark.engine("mooncake")]

PROMPTS = [[number, *range(1, 20)] for number in range(100, 106)]


@asynccontextmanager
async def cache_on(made: Fleet, store: MooncakeStore) -> AsyncIterator[HybridCache]:
    backend = MooncakeBackend(MooncakeOptions.of(made.options()), store)
    settings = config(device_slots={"kv": 64, "mamba": 16}, storage_limits=PoolLimits(cooldown=0.1))
    async with HybridCache.open(SPEC, settings, storage=backend) as cache:
        yield cache
    await backend.aclose()


async def stored(cache: HybridCache, prompt: list[int]) -> bool:
    """Serve a prompt; whether storage has it."""
    engine = Engine(cache)
    async with cache.request(prompt) as request:
        await request.prefetch()
        await request.load()
        engine.check(request)
        await engine.compute(request, len(prompt))
        return await request.durable()


async def found(made: Fleet, store: MooncakeStore) -> list[int]:
    """How many tokens of each prompt another cache reads from storage; it compares bytes."""
    async with cache_on(made, store) as other:
        hits = [await Engine(other).serve([*prompt, 1]) for prompt in PROMPTS]
    return [hit.by_tier.get(Tier.STORAGE, 0) for hit in hits]


@pytest.mark.parametrize("flags", [(), ("--enable_oplog=true",)], ids=["forgets", "oplog"])
async def test_the_leading_master_is_killed_under_load(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with own_network(), fleet(tmp_path, *flags) as made:
        store = join(MooncakeOptions.of(made.options()))
        async with cache_on(made, store) as cache:
            assert await asyncio.gather(*(stored(cache, prompt) for prompt in PROMPTS)) == [True] * 6
            assert await found(made, store) == [20] * 6
            made.master.kill()

            async def serve(number: int) -> None:
                """New prompts and old ones, until storage takes new ones again."""
                turn = 0
                while not await stored(cache, [number, turn := turn + 1, *range(18)]):
                    await stored(cache, PROMPTS[turn % 6])

            async with asyncio.timeout(240), asyncio.TaskGroup() as group:
                for number in range(200, 204):
                    group.create_task(serve(number))

            assert "state -> serving" in made.standby.output
            if flags:
                assert await found(made, store) == [20] * 6, "the log had it all"
            while not all([await stored(cache, prompt) for prompt in PROMPTS]):
                pass  # a circuit breaker may still be open
            assert await found(made, store) == [20] * 6
            assert cache.verify() == []
        made.standby.kill()
        store.close()


async def test_an_etcd_that_is_not_there_is_said() -> None:
    with own_network():
        backend = MooncakeBackend(
            MooncakeOptions.of({"master": f"etcd://127.0.0.1:{free_port()}", "open_seconds": 2})
        )
        with pytest.raises(StorageError, match=r"cannot join the cluster of etcd://127\.0\.0\.1"):
            await open_bench(backend)
        await backend.aclose()
