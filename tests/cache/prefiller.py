"""A process that prefills prompts into a shared store, in turn, and names each that is durable."""

from __future__ import annotations

import asyncio
import sys

from asynchicache import HybridCache
from cache.engine import SPEC, Engine, config


def prompt(number: int) -> list[int]:
    return [number, *range(100, 119)]


async def main(url: str, first: int, count: int) -> None:
    async with HybridCache.open(SPEC, config(storage="redis", storage_options={"url": url})) as cache:
        for number in range(first, first + count):
            async with cache.request(prompt(number)) as request:
                await request.load()
                await Engine(cache).compute(request, len(prompt(number)))
                assert await request.durable()
                print(number, request.published, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
