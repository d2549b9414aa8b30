"""Opens a group of ranks in one seeded loop, for the search, the simulated bench and tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.config import CacheConfig
from asynchicache.pools.engine import EngineMemory
from asynchicache.ranks.group import RankGroup
from asynchicache.ranks.options import RankLimits
from asynchicache.ranks.worker import RankWorker
from asynchicache.specs import ModelSpec
from asynchicache.specs.sharding import WHOLE
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.seeded import SeededWorld
from asynchicache_lab.ranks.delayed_link import DelayedLink
from asynchicache_lab.ranks.mirror import BaseRankMirror, PagedRankMirror, RankMirror

LIMITS = RankLimits(joining=5.0, heartbeat=0.5, silence=3.0, copy_seconds=10.0, storage_seconds=20.0)
_TOKEN = "secret"  # noqa: S105 - of groups that live in one loop


@dataclass(frozen=True, slots=True)
class RankOpening:
    """What one rank opens with. `memory`: its engine's, if engines own the device memory."""

    spec: ModelSpec
    config: CacheConfig
    storage: StorageBackend
    device: EmulatedDevice
    memory: PagedMemory | None = None

    @property
    def engine(self) -> EngineMemory | None:
        return None if self.memory is None else self.memory.memory


def openings(
    world: SeededWorld,
    specs: Sequence[ModelSpec],
    config: CacheConfig,
    storage: Sequence[StorageBackend],
    *,
    by_options: bool = True,
) -> list[RankOpening]:
    """What the ranks of `specs` open with, each with its storage and a device. `by_options`: if specs do not
    say what part of a model they are, the options rank and ranks do."""
    configs = [config] * len(specs)
    if by_options and all(spec.place == WHOLE for spec in specs):
        configs = [replace(config, rank=rank, ranks=len(specs)) for rank in range(len(specs))]
    devices = [world.device() for _ in specs]
    return [RankOpening(*parts) for parts in zip(specs, configs, storage, devices, strict=True)]


@asynccontextmanager
async def seeded_group(
    world: SeededWorld,
    ranks: Sequence[RankOpening],
    *,
    wire: float = 1e-4,
    share_host: bool = True,
    limits: RankLimits = LIMITS,
) -> AsyncIterator[BaseRankMirror[Any]]:
    """A group of `ranks`, the leader first. `wire`: mean seconds of a message's way.

    Raises:
        RankError: the ranks do not fit together; in a group of exceptions.
    """
    joined: dict[int, RankWorker] = {}
    links: dict[int, DelayedLink] = {}
    leading = ranks[0]
    async with AsyncExitStack() as stack:
        group = RankGroup(_TOKEN, limits, ranks=len(ranks), share_host=share_host)
        stack.push_async_callback(group.aclose)

        async def follow(rank: int) -> None:
            mine = ranks[rank]
            joining = RankWorker.join(
                mine.spec,
                mine.config,
                "unix:in-this-process",
                _TOKEN,
                rank=rank,
                limits=limits,
                storage=mine.storage,
                port=world.port,
                device=mine.device,
                engine=mine.engine,
                link=links[rank],
            )
            joined[rank] = await stack.enter_async_context(joining)

        async with asyncio.TaskGroup() as forming:
            for rank in range(1, len(ranks)):
                here, links[rank] = DelayedLink.pair(world.random, wire)
                forming.create_task(group.admit(here))
                forming.create_task(follow(rank))
            opening = HybridCache.open(
                leading.spec,
                leading.config,
                storage=leading.storage,
                port=world.port,
                device=leading.device,
                engine=leading.engine,
                group=group,
            )
            cache: HybridCache | EngineCache = await stack.enter_async_context(opening)
        workers, devices = [joined[rank] for rank in sorted(joined)], [one.device for one in ranks]
        if isinstance(cache, EngineCache):
            memories = [one.memory for one in ranks if one.memory is not None]
            yield PagedRankMirror(group, cache, workers, devices, links, world.random, memories)
        else:
            yield RankMirror(group, cache, workers, devices, links, world.random)
        await cache.aclose()  # the leader goes first, else its followers count as lost
        await group.aclose()
