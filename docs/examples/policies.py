"""When pages go down, and how long a request waits for storage."""

import asyncio

from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache, PrefetchOptions, PrefetchPolicy, WritePolicy
from asynchicache.backends.memory import MemoryBackend, MemoryStore

PROMPT = range(100, 120)


async def write(policy: WritePolicy) -> None:
    """Pages and states sent to the host by one request, by a second like it, and by three others."""
    options = CacheConfig(device_slots={"kv": 16, "mamba": 4}, write_policy=policy)
    async with HybridCache.open(SPEC, options) as cache:
        toy, counts = Toy(cache), []
        others = [range(start, start + 20) for start in (0, 30, 60)]
        for prompts in ([PROMPT], [[*PROMPT, 1]], others):
            for prompt in prompts:
                await toy.serve(prompt)
            counts.append(cache.statistics().planner.backed_up)
        print(f"{policy.value:24} {counts}")


async def fetch(policy: PrefetchPolicy, store: MemoryStore) -> None:
    """What a request, and the one after it, get from storage."""
    options = CacheConfig(
        device_slots={"kv": 16, "mamba": 4},
        weight_version="1",
        prefetch=PrefetchOptions(policy=policy, base_seconds=0.5, max_seconds=2.0),
    )
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(store)) as cache:
        toy = Toy(cache)
        first, second = await toy.serve([*PROMPT, 1]), await toy.serve([*PROMPT, 2])
        print(f"{policy.value:24} {first.tokens:2}, then {second.tokens}")


async def main() -> None:
    for writing in WritePolicy:
        await write(writing)
    options = CacheConfig(device_slots={"kv": 16, "mamba": 4}, weight_version="1")
    store = MemoryStore()
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(store)) as cache:
        await Toy(cache).serve(PROMPT)
    for waiting in PrefetchPolicy:
        await fetch(waiting, store)


asyncio.run(main())
