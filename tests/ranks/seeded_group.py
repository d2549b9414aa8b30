"""A group of ranks in one seeded loop, for tests of single cases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from asynchicache import CacheConfig, HybridCache, ModelSpec
from asynchicache.ranks.joining import RankGroup
from asynchicache.ranks.worker import RankWorker
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.rank_chaos import LIMITS, DelayedLink, RankMirror
from asynchicache.testing.seeded import SeededWorld


@asynccontextmanager
async def seeded_group(
    world: SeededWorld, specs: Sequence[ModelSpec], config: CacheConfig, storage: Sequence[StorageBackend]
) -> AsyncIterator[tuple[RankMirror, list[RankWorker]]]:
    """A group of one rank for each of `specs`, with its storage; the leader closes first."""
    devices = [world.device() for _ in specs]
    joined: dict[int, RankWorker] = {}
    async with AsyncExitStack() as stack:
        group = RankGroup("secret", LIMITS, ranks=len(specs))

        async def follow(rank: int, link: DelayedLink) -> None:
            joining = RankWorker.join(
                specs[rank],
                config,
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
                specs[0], config, storage=storage[0], port=world.port, device=devices[0], group=group
            )
        workers = [joined[rank] for rank in sorted(joined)]
        try:
            yield RankMirror(group, cache, workers, devices, world.random), workers
        finally:
            await cache.aclose()
            await group.aclose()
