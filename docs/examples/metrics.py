"""Metrics of a cache, as Prometheus is sent them."""

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache
from asynchicache.integrations.prometheus import CacheCollector


async def main() -> None:
    options = CacheConfig(device_slots={"kv": 12, "mamba": 4})
    async with HybridCache.open(SPEC, options) as cache:
        registry = CollectorRegistry()
        registry.register(CacheCollector(cache, labels={"engine": "a"}))
        toy = Toy(cache)
        for start in (0, 100, 0):
            await toy.serve(range(start, start + 22))
        for line in generate_latest(registry).decode().splitlines():
            if line.startswith("asynchicache_hit_tokens_total"):
                print(line)


asyncio.run(main())
