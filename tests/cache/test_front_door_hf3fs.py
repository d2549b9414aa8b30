"""Caches of two hosts that share pages through the 3FS engine, and what a dead metadata service costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asynchicache import CacheConfig, HybridCache, MissReason, StorageError, Tier
from cache.engine import SPEC, Engine, config
from engines import Server, free_port
from storage.hf3fs_services import service_process

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Server]:
    with service_process(tmp_path / "metadata", port) as server:
        yield server


@pytest.fixture
def options(tmp_path: Path, port: int) -> CacheConfig:
    places = {"path": str(tmp_path / "pages"), "metadata": f"http://127.0.0.1:{port}"}
    return config(storage="hf3fs", storage_options={**places, "capacity_bytes": 1 << 20})


async def test_what_one_host_computed_another_reads(server: Server, options: CacheConfig) -> None:
    async with HybridCache.open(SPEC, options) as one, HybridCache.open(SPEC, options) as other:
        assert (await Engine(one).serve(PROMPT)).tokens == 0
        assert (await Engine(other).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


async def test_pages_survive_host_and_service(server: Server, options: CacheConfig) -> None:
    async with HybridCache.open(SPEC, options) as cache:
        await Engine(cache).serve(PROMPT)
    server.kill()
    server.start()
    async with HybridCache.open(SPEC, options) as cache:
        assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


async def test_a_dead_service_costs_a_miss_with_its_reason(server: Server, options: CacheConfig) -> None:
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


async def test_without_a_service_the_cache_does_not_open(options: CacheConfig) -> None:
    with pytest.raises(StorageError, match="start one: python -m asynchicache"):
        async with HybridCache.open(SPEC, options):
            pass
