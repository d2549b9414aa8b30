"""Pages that outlive the process: a file store, who may open it, and what names its pages."""

import asyncio
from tempfile import TemporaryDirectory

from toy import SPEC, Toy

from asynchicache import CacheConfig, Hit, HybridCache, PrefetchOptions, PrefetchPolicy, StorageLockedError

PROMPT = range(100, 120)


def stored(path: str, *, weights: str = "2026-01", read_only: bool = False) -> CacheConfig:
    return CacheConfig(
        device_slots={"kv": 16, "mamba": 4},
        storage="file",
        storage_options={"path": path, "read_only": read_only},
        weight_version=weights,
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
    )


async def serve(options: CacheConfig) -> Hit:
    async with HybridCache.open(SPEC, options) as cache:
        return await Toy(cache).serve([*PROMPT, 1])


async def write_durably(options: CacheConfig) -> None:
    async with HybridCache.open(SPEC, options) as cache:
        toy = Toy(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            pages = request.extend(len(PROMPT))["kv"]
            toy.compute(PROMPT, 0, pages, request.state("mamba"))
            await request.checkpoint(len(PROMPT))
            print("in storage:", await request.durable())


async def main() -> None:
    with TemporaryDirectory() as path:
        await write_durably(stored(path))
        print("same weights: ", (await serve(stored(path))).by_tier)
        print("other weights:", (await serve(stored(path, weights="2026-02"))).by_tier)
        reader = stored(path, read_only=True)
        async with HybridCache.open(SPEC, reader) as one, HybridCache.open(SPEC, reader) as other:
            hits = [await Toy(cache).serve([*PROMPT, 2]) for cache in (one, other)]
            print("two readers:  ", [hit.tokens for hit in hits])
            try:
                await serve(stored(path))
            except StorageLockedError as error:
                print("a writer:     ", str(error).replace(path, "FOLDER"))


asyncio.run(main())
