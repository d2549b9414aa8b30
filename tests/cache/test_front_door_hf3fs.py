"""Caches of two hosts that share pages through the 3FS engine, and what a dead server of names costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asynchicache import CacheConfig, HybridCache, MissReason, StorageError, Tier
from cache.engine import SPEC, Engine, config
from storage.hf3fs_names import names_server
from storage.redis_servers import RedisServer

pytestmark = [pytest.mark.asyncio, pytest.mark.engine("redis")]

PROMPT = list(range(100, 120))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with names_server(tmp_path / "metadata") as server:
        yield server


@pytest.fixture
def options(tmp_path: Path, server: RedisServer) -> CacheConfig:
    places = {"path": str(tmp_path / "pages"), "metadata": server.url}
    return config(storage="hf3fs", storage_options={**places, "capacity_bytes": 1 << 20})


async def test_what_one_host_computed_another_reads(server: RedisServer, options: CacheConfig) -> None:
    async with HybridCache.open(SPEC, options) as one, HybridCache.open(SPEC, options) as other:
        assert (await Engine(one).serve(PROMPT)).tokens == 0
        assert (await Engine(other).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


async def test_pages_survive_host_and_server(server: RedisServer, options: CacheConfig) -> None:
    async with HybridCache.open(SPEC, options) as cache:
        await Engine(cache).serve(PROMPT)
    server.kill()
    server.start()
    async with HybridCache.open(SPEC, options) as cache:
        assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


async def test_a_dead_server_costs_a_miss_with_its_reason(server: RedisServer, options: CacheConfig) -> None:
    async with HybridCache.open(SPEC, options) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await cache.flush()
        server.kill()
        hit = await engine.serve([*PROMPT, 1])
        assert (hit.tokens, hit.reason) == (0, MissReason.STORAGE_FAILED)
        await cache.flush()
        server.start()

        assert (await engine.serve([*PROMPT, 2])).by_tier == {Tier.STORAGE: 20}


async def test_without_a_server_the_cache_does_not_open(server: RedisServer, options: CacheConfig) -> None:
    server.kill()
    with pytest.raises(StorageError, match=f"127.0.0.1:{server.port}: open: Connection refused"):
        async with HybridCache.open(SPEC, options):
            pass
