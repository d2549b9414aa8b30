"""Storage comes, goes, and is emptied, while a cache is open."""

import asyncio
import tempfile
from pathlib import Path

from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache

PROMPT = list(range(17))


async def main(folder: Path) -> None:
    config = CacheConfig(device_slots={"kv": 16, "mamba": 4}, weight_version="v1")
    async with HybridCache.open(SPEC, config) as cache:
        await cache.attach_storage("file", {"path": str(folder)})
        await Toy(cache).serve(PROMPT)
        await cache.flush()
        hit = await Toy(cache).serve(PROMPT)
        print(f"served from storage: {hit.tokens} of {len(PROMPT)} tokens")

        await cache.detach_storage()
        await cache.flush()
        hit = await Toy(cache).serve(PROMPT)
        print(f"without storage: {hit.tokens} of {len(PROMPT)} tokens")

        await cache.attach_storage("file", {"path": str(folder)})
        removed = await cache.clear_storage()
        print(f"removed: {removed} pages")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))
