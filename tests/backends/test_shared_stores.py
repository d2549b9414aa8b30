"""A whole cache on redis and on an object store: pages outlive it, and a store that dies is a miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynchicache import HybridCache, MissReason, Tier
from cache.engine import SPEC, Engine, config
from storage.object_servers import SERVERS, ObjectServer
from storage.redis_servers import RedisServer

PROMPT = list(range(100, 120))


@pytest.mark.asyncio
@pytest.mark.engine("object")
@pytest.mark.parametrize("kind", SERVERS)
async def test_pages_in_a_bucket_survive_a_restart_of_the_cache(kind: type[ObjectServer]) -> None:
    with kind() as server:
        options = config(storage="object", storage_options=server.options("cache"))
        async with HybridCache.open(SPEC, options) as cache:
            await Engine(cache).serve(PROMPT)
        async with HybridCache.open(SPEC, options) as cache:
            assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


@pytest.mark.asyncio
@pytest.mark.engine("redis")
async def test_pages_in_redis_are_shared_and_a_dead_server_is_a_miss(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        options = config(storage="redis", storage_options={"url": server.url})
        async with HybridCache.open(SPEC, options) as first, HybridCache.open(SPEC, options) as second:
            await Engine(first).serve(PROMPT)
            assert (await Engine(second).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}

            server.kill()
            await second.flush()
            miss = await Engine(second).serve([*PROMPT, 2])
            assert (miss.tokens, miss.reason) == (0, MissReason.STORAGE_FAILED)

            server.start()
            await second.flush()
            await Engine(first).serve([1, 2, 3, 4, *PROMPT])
            assert (await Engine(second).serve([1, 2, 3, 4, *PROMPT, 5])).by_tier == {Tier.STORAGE: 24}
