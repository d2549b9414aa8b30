"""One of several replicas that meet one new prompt at once: `python herd_peer.py URL REPLICAS PAGES`."""

from __future__ import annotations

import asyncio
import sys

import redis

from asynchicache import CacheConfig, HybridCache
from asynchicache.testing.specs import synthetic_spec

SPEC = synthetic_spec(64, ("kv", "mamba"), token_bytes=1024, state_bytes=1 << 18)
LIMITS = {"claim_seconds": 60.0, "deadline": 60.0, "batch_bytes": 4 << 20}  # for a machine that is slow


async def main(url: str, replicas: int, pages: int) -> None:
    config = CacheConfig(
        device_bytes="64MiB",
        host_bytes="64MiB",
        storage="redis",
        storage_options={"url": url, "timeout_seconds": 60},
        storage_limits=LIMITS,
        weight_version="1",
    )
    async with HybridCache.open(SPEC, config) as cache, cache.request(list(range(64 * pages + 1))) as request:
        with redis.Redis.from_url(url) as client:
            client.incr("ready")
            while int(client.get("ready")) < replicas:  # noqa: ASYNC110 - another process tells
                await asyncio.sleep(0.01)
        await request.load()
        for end in request.cuts:
            request.extend(end - request.reserved)
            await request.checkpoint(end)
        print(await request.durable())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
