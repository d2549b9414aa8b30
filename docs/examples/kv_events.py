"""A router that knows what a cache has: it joins late, and follows."""

import asyncio

from toy import PAGE, SPEC, Toy

from asynchicache import CacheConfig, HybridCache
from asynchicache.events import PagesStored
from asynchicache.hashing import page_digests
from asynchicache.integrations.kv_events.config import KvEventsConfig
from asynchicache.integrations.kv_events.encoding import int64_hash
from asynchicache.integrations.kv_events.index import BlockIndex
from asynchicache.integrations.kv_events.publisher import KvEventPublisher
from asynchicache.integrations.kv_events.subscriber import KvEventSubscriber
from asynchicache.types import token_array


async def listen(cache: HybridCache) -> None:
    with cache.events() as events:
        await Toy(cache).serve(range(500, 510))
        for event in events.take():
            if isinstance(event, PagesStored):
                print(event.tier.name, event.pool, len(event.digests), "pages")


async def route(cache: HybridCache) -> None:
    config = KvEventsConfig(endpoint="tcp://*:*", replay_endpoint="tcp://127.0.0.1:*")
    async with KvEventPublisher.open(cache, config) as publisher:
        await Toy(cache).serve(range(22))
        await publisher.flush()

        index = BlockIndex()
        async with KvEventSubscriber.open(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ) as subscriber:
            for update in subscriber.take():
                index.apply(update.batch.events)
                print(update.origin.name, "with", len(update.batch.events), "events")

        digests = page_digests(token_array(range(30)), PAGE)
        blocks = [int64_hash(digest) for digest in digests]
        print("the worker has", index.reach(blocks) * PAGE, "of these 30 tokens")


async def main() -> None:
    async with HybridCache.open(SPEC, CacheConfig(device_slots={"kv": 16, "mamba": 4})) as cache:
        await listen(cache)
        await route(cache)


asyncio.run(main())
