"""The cache behind the connector: host memory and storage, no device. Confined to the bridge's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.controller.request import Hit, Request
from asynchicache.controller.statistics import CacheStatistics
from asynchicache.integrations.vllm.kv_groups import KvGroups
from asynchicache.integrations.vllm.weights import VllmWeights
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.pools.shared import HostHandle
from asynchicache.transfer.remote import CopyOrder, CopyResult, RemoteCopies
from asynchicache.types import Direction

logger = logging.getLogger(__name__)

Blocks = Mapping[str, Sequence[int | None]]


class Backup(NamedTuple):
    """Blocks that hold the end of a prefix.

    Attributes:
        tokens: of the prefix.
        blocks: by pool; None in place of a block that is gone.
    """

    tokens: int
    blocks: Blocks


class TakenOrders(NamedTuple):
    """New orders, and the cache's statistics after them."""

    orders: list[CopyOrder]
    statistics: CacheStatistics


@dataclass(slots=True, eq=False)
class _Served:
    """The cache's request of one admission, how many keys it knows, and the name of their weights."""

    request: Request
    keys: int
    weights: str


class ConnectorCache:
    """A `HybridCache` whose copies workers carry out; made by `open`.

    The scheduler's thread names what vLLM has admitted by a number of its own, a new one after a preemption.
    """

    def __init__(
        self, cache: HybridCache, remote: RemoteCopies, block_size: int, weights: VllmWeights
    ) -> None:
        self._cache = cache
        self._remote = remote
        self._block_size = block_size
        self._served: dict[int, _Served] = {}
        self._waiting: list[CopyOrder] = []
        self._weights = weights

    @classmethod
    async def open(cls, groups: KvGroups, config: CacheConfig, weights: VllmWeights) -> Self:
        """
        Raises:
            ConfigError, CapacityError, StorageError: as `HybridCache.open`.
        """
        remote = RemoteCopies(groups.pages(), workers=groups.workers)
        cache = await HybridCache.open(groups.spec, config, engine=remote)
        return cls(cache, remote, groups.block_size, weights)

    @property
    def host(self) -> HostHandle:
        return self._remote.host

    def statistics(self) -> CacheStatistics:
        return self._cache.statistics()

    async def look_up(
        self, number: int, keys: Sequence[bytes], tokens: int, hint: CacheHint = NO_HINT
    ) -> Hit:
        """Read into host memory what storage has of a prompt, and pin what there is."""
        request = await self._enter(number, keys, tokens, hint)
        try:
            return await request.prefetch()
        except BaseException:
            await self.leave(number)
            raise

    async def _enter(self, number: int, keys: Sequence[bytes], tokens: int, hint: CacheHint) -> Request:
        weights = self._weights.name()
        request = self._cache.request_keys(keys, length=tokens, namespace=weights or None, hint=hint)
        self._served[number] = _Served(request, len(keys), weights)
        return await request.__aenter__()

    async def load(self, number: int, into: Blocks) -> int | None:
        """Order the copies of a hit; return the order's id, None if there is nothing to copy."""
        self._waiting += self._remote.take()
        self._served[number].request.load(into=into)
        orders = self._remote.take()  # what was ordered just now
        self._waiting += orders
        return next((order.id for order in orders if order.direction is Direction.LOAD), None)

    async def release(self, number: int) -> None:
        """Drop the pins of a hit that is not loaded."""
        served = self._served.get(number)
        if served is not None:
            served.request.load(into={})

    async def back_up(
        self, number: int, keys: Sequence[bytes], backups: Iterable[Backup], hint: CacheHint = NO_HINT
    ) -> None:
        """Copy blocks to host memory; return when no copy reads them any more.

        Args:
            number: of the admission.
            keys: of all blocks that are complete.
            backups: by length, ascending.
            hint: what the client knows about the blocks' future.

        Raises:
            CacheError: a copy failed; its blocks are not cached.
        """
        served = self._served.get(number)
        if served is not None and served.weights != self._weights.name():
            await self.leave(number)  # what it computes from now on is of other weights
            served = None
        if served is None:
            await self._enter(number, keys, len(keys) * self._block_size, hint)
            served = self._served[number]
        elif len(keys) > served.keys:
            served.request.append_keys(keys[served.keys :])
            served.keys = len(keys)
        copies = [self._back_up_one(served.request, backup) for backup in backups]
        failures = [one for one in await asyncio.gather(*copies, return_exceptions=True) if one is not None]
        if failures:
            raise failures[0]

    async def _back_up_one(self, request: Request, backup: Backup) -> None:
        await request.checkpoint(backup.tokens, pages=backup.blocks)

    async def leave(self, number: int) -> None:
        served = self._served.pop(number, None)
        if served is not None:
            await served.request.__aexit__(None, None, None)

    async def take(self) -> TakenOrders:
        """Return orders that have not been taken."""
        orders, self._waiting = self._waiting + self._remote.take(), []
        return TakenOrders(orders, self._cache.statistics())

    async def finish(self, results: Mapping[int, Iterable[CopyResult]]) -> None:
        """Publish what every worker has copied, and wake what waits for it."""
        for worker, ended in results.items():
            self._remote.finish(ended, worker=worker)
        await asyncio.sleep(0)

    def forget(self) -> None:
        """Find nothing that was cached until now: keys get a namespace that is new."""
        self._weights.reset()

    async def aclose(self) -> None:
        """Wait for writes to storage, up to `close_seconds`, and close."""
        self._remote.abandon("vLLM shuts down, and no worker reports any more")
        for number in list(self._served):
            await self.leave(number)
        await self._cache.aclose()
