"""Run a cache in virtual time: one seed, one order of tasks, copies and storage calls."""

import asyncio

from toy import SPEC, Toy

from asynchicache import CacheConfig
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.faults import Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded

OPTIONS = CacheConfig(device_slots={"kv": 32, "mamba": 8}, weight_version="1")


async def crowd(world: SeededWorld) -> list[str]:
    """Three clients side by side, on storage that takes a drawn time for each call."""
    slow = Latency(MemoryBackend(MemoryStore()), 0.01, sleep=world.sleep)
    async with world.open_cache(SPEC, OPTIONS, storage=slow) as cache:
        toy = Toy(cache)
        order: list[str] = []

        async def client(name: str) -> None:
            await toy.serve(list(range(22)))
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(client(name))
        assert cache.verify() == []
        return order


for seed in range(3):
    assert run_seeded(seed, crowd) == run_seeded(seed, crowd)
print("orders seen:", len({tuple(run_seeded(seed, crowd)) for seed in range(50)}))
