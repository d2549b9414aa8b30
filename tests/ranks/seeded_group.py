"""A group of ranks in one seeded loop, for tests of single cases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec.structs import replace

from asynchicache import CacheConfig, HybridCache, ModelSpec
from asynchicache.ranks.joining import RankGroup
from asynchicache.ranks.worker import RankWorker
from asynchicache.specs.sharding import WHOLE
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.seeded import SeededWorld
from asynchicache_lab.ranks.chaos import LIMITS
from asynchicache_lab.ranks.delayed_link import DelayedLink
from asynchicache_lab.ranks.mirror import RankMirror


@asynccontextmanager
async def seeded_group(
    world: SeededWorld,
    specs: Sequence[ModelSpec],
    config: CacheConfig,
    storage: Sequence[StorageBackend],
    *,
    by_options: bool = True,
) -> AsyncIterator[tuple[RankMirror, list[RankWorker]]]:
    """A group of one rank for each of `specs`, with its storage; the leader closes first. `by_options`: if
    specs do not say what part of a model they are, the options rank and ranks do."""
    devices = [world.device() for _ in specs]
    configs = [config] * len(specs)
    if by_options and all(spec.place == WHOLE for spec in specs):
        configs = [replace(config, rank=rank, ranks=len(specs)) for rank in range(len(specs))]
    joined: dict[int, RankWorker] = {}
    async with AsyncExitStack() as stack:
        group = RankGroup("secret", LIMITS, ranks=len(specs))

        async def follow(rank: int, link: DelayedLink) -> None:
            joining = RankWorker.join(
                specs[rank],
                configs[rank],
                "unix:of-a-test",
                "secret",
                rank=rank,
                limits=LIMITS,
                storage=storage[rank],
                port=world.port,
                device=devices[rank],
                link=link,
            )
            joined[rank] = await stack.enter_async_context(joining)

        async with asyncio.TaskGroup() as forming:
            for rank in range(1, len(specs)):
                here, there = DelayedLink.pair(world.random, 1e-4)
                forming.create_task(group.admit(here))
                forming.create_task(follow(rank, there))
            cache = await HybridCache.open(
                specs[0], configs[0], storage=storage[0], port=world.port, device=devices[0], group=group
            )
        workers = [joined[rank] for rank in sorted(joined)]
        try:
            yield RankMirror(group, cache, workers, devices, world.random), workers
        finally:
            await cache.aclose()
            await group.aclose()
