"""The scheduler's half of the connector: decides what is loaded and kept, and does all input and output.

A prompt's blocks are read from storage into host memory before anything is promised to vLLM, so a failure of
storage is a miss. Blocks that are copied to host memory are referenced in vLLM's pool until the workers have
reported the copy: neither a preemption, nor an abort, nor a window that moves on, lets others write to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Self

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.config import CacheConfig
from asynchicache.controller.request import EngineRequest
from asynchicache.controller.statistics import CacheStatistics
from asynchicache.errors import CacheError, ClosedError
from asynchicache.integrations.bridge import Job, JobState, LoopBridge
from asynchicache.integrations.vllm.connector_worker import StepOrders, StepResults
from asynchicache.integrations.vllm.contents import VllmWeights
from asynchicache.integrations.vllm.hints import RequestHints, read_hints
from asynchicache.integrations.vllm.kv_groups import KvGroup, KvGroups
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.pools.shared import HostHandle
from asynchicache.transfer.remote import CopyOrder, CopyResult, RemoteCopies
from asynchicache.types import Direction, Hit, Tier

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

    request: EngineRequest
    keys: int
    weights: str


class ConnectorCache:
    """An `EngineCache` whose copies workers carry out; made by `open`.

    The scheduler's thread names what vLLM has admitted by a number of its own, a new one after a preemption.
    """

    def __init__(
        self, cache: EngineCache, remote: RemoteCopies, block_size: int, weights: VllmWeights
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

    async def _enter(self, number: int, keys: Sequence[bytes], tokens: int, hint: CacheHint) -> EngineRequest:
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

    async def _back_up_one(self, request: EngineRequest, backup: Backup) -> None:
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


logger = logging.getLogger(__name__)

KEY_BYTES = 32
_LOOP_S = 0.05  # most that a step waits for the loop; what takes longer goes with a later step
_CLOSE_MARGIN_S = 10.0

Offers = Sequence[tuple[int, int, int]]
"""States of one request: group, block, and the tokens that the state is of."""


@dataclass(slots=True, eq=False)
class Tracked:
    """A request of vLLM's.

    Attributes:
        hints: what it asks for.
        number: of its admission; a preempted request is admitted anew.
        lookup: what asks for its prefix; None before, and when it has ended.
        hit: the answer; None until it is known, and after vLLM has used it.
        kept: blocks whose copies to host memory were ordered.
        computes: it loads nothing, because that failed or storage was not asked.
        loading: it waits for copies to its blocks.
        tiers: tokens of the last hit by the tier that they came from.
    """

    request: Any
    hints: RequestHints
    number: int
    lookup: Job[Hit] | None = None
    hit: Hit | None = None
    kept: int = 0
    computes: bool = False
    loading: bool = False
    tiers: Mapping[Tier, int] | None = None

    @property
    def name(self) -> str:
        return str(self.request.request_id)


class _LookUpJob(NamedTuple):
    tracked: Tracked


class _LoadJob(NamedTuple):
    tracked: Tracked


class _BackupJob(NamedTuple):
    blocks: list[Any]


class ConnectorScheduler:
    """Decides for all requests of one engine. Called from vLLM's scheduler thread only."""

    def __init__(
        self,
        groups: KvGroups,
        config: CacheConfig,
        idle_wait_s: float,
        weights: VllmWeights | None = None,
    ) -> None:
        """
        Raises:
            ConfigError, CapacityError, StorageError: as `HybridCache.open`.
        """
        self._groups = groups
        self._close_s = config.close_seconds
        self._idle_wait_s = idle_wait_s
        self._pool: Any = None
        self._requests: dict[str, Tracked] = {}
        self._numbers = count()
        self._loads: dict[int, str] = {}  # by order, requests whose load no step has carried yet
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._taking: Job[TakenOrders] | None = None
        self._ordering = 0  # jobs that have not ended, and may order copies
        self._counted = False  # whether a lookup has ended since statistics were taken
        self._bridge = LoopBridge(name="asynchicache-vllm")
        try:
            self._cache = self._bridge.call(ConnectorCache.open(groups, config, weights or VllmWeights()))
        except BaseException:
            self._bridge.close(0)
            raise
        self.statistics: CacheStatistics = self._cache.statistics()

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = pool

    # Looking up.

    def new_request(self, request: Any) -> None:
        numbers = [group.number for group in self._groups.groups]
        hints = read_hints(request.kv_transfer_params, getattr(request, "kv_hints", None), numbers)
        self._requests[request.request_id] = Tracked(request, hints, next(self._numbers))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the first `computed` are in host memory; None until that is known."""
        tracked = self._requests[request.request_id]
        if request.skip_reading_prefix_cache or tracked.hints.no_load or tracked.computes:
            return 0, False
        self._poll()
        if tracked.hit is None and tracked.lookup is None:
            whole = self._whole(tracked, request.num_tokens - 1)
            if whole * self._groups.block_size <= computed:
                return 0, False
            self._look_up(tracked, whole)
        if tracked.hit is None:
            return (0 if tracked.computes else None), False
        more = max(tracked.hit.tokens - computed, 0)
        return more, more > 0

    def _look_up(self, tracked: Tracked, whole: int) -> None:
        """Begin a new admission: of a request that was preempted, all blocks may have gone."""
        self._leave(tracked)
        tracked.number, tracked.kept = next(self._numbers), 0
        keys, tokens = self._keys(tracked, whole), tracked.request.num_tokens
        looking = self._cache.look_up(tracked.number, keys, tokens, tracked.hints.cache)
        tracked.lookup = self._submit(looking, _LookUpJob(tracked))
        tracked.computes = tracked.lookup is None

    def _found(self, tracked: Tracked, job: Job[Hit]) -> None:
        if tracked.lookup is not job:
            return  # the request has ended, and has left the cache
        tracked.lookup = None
        self._counted = True
        if job.state is JobState.DONE:
            tracked.hit = job.result()
        else:
            logger.warning("request %s is computed: %r", tracked.name, job.exception())
            tracked.computes = True

    # Loading.

    def allocated(self, request: Any, tables: Sequence[Sequence[Any]], external: int) -> None:
        """Order the copies of a hit to the blocks that vLLM has allocated; without any, drop its pins."""
        tracked = self._requests[request.request_id]
        hit, tracked.hit = tracked.hit, None
        if hit is None:
            return
        if not external:
            self._submit(self._cache.release(tracked.number), None)
            return
        tracked.kept = hit.tokens // self._groups.block_size
        tracked.tiers = hit.by_tier
        tracked.loading = True
        into = self._missing(tables, tracked.kept)
        if self._submit(self._cache.load(tracked.number, into), _LoadJob(tracked)) is None:
            self._failed.add(tracked.name)

    def _missing(self, tables: Sequence[Sequence[Any]], whole: int) -> Blocks:
        """The blocks of a hit that vLLM does not have: those that are allocated and have no hash."""
        into = {}
        for group in self._groups.groups:
            table = tables[group.number][_first_needed(group, whole) : whole]
            named = [None if block.is_null or block.block_hash else block.block_id for block in table]
            if any(number is not None for number in named):
                into[group.pool.name] = named
        return into

    def _ordered(self, tracked: Tracked, job: Job[int | None]) -> None:
        if job.state is not JobState.DONE:
            logger.warning("request %s is computed: %r", tracked.name, job.exception())
            tracked.computes = True
            self._failed.add(tracked.name)
        elif (order := job.result()) is None:
            self._loaded.add(tracked.name)
        else:
            self._loads[order] = tracked.name

    def tiers(self, request: Any, external: int) -> dict[Tier, int]:
        """Split the tokens of a hit by the tier that they came from; storage gave the last ones."""
        tiers = self._requests[request.request_id].tiers or {}
        stored = min(tiers.get(Tier.STORAGE, 0), external)
        return {Tier.STORAGE: stored, Tier.HOST: external - stored}

    # Keeping.

    def step(self, output: Any) -> StepOrders:
        """Keep what this step completes, and return what the workers are to copy in it."""
        self._poll()
        state = output.kv_connector_block_state
        for name, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(name)
            if tracked is not None and not tracked.hints.no_store:
                tracked.loading = False
                computed = tracked.request.num_computed_tokens + scheduled
                offers = state.boundary_state_offloads.get(name, ())
                self._keep(tracked, computed, state.get_block_ids(name), offers)
        step = StepOrders(self._cache.host, idle=not output.total_num_scheduled_tokens)
        self._take_orders(step)
        if step.idle and not step.orders and self._idle_wait_s and self._bridge.pending:
            self._bridge.wait_finished(self._idle_wait_s)
        return step

    def _keep(
        self, tracked: Tracked, computed: int, tables: Sequence[Sequence[int]], offers: Offers = ()
    ) -> None:
        """Copy the blocks that are complete with `computed` tokens, and states that vLLM offers."""
        size, pools = self._groups.block_size, self._groups.state_pools
        whole = self._whole(tracked, computed)
        states: dict[int, dict[str, list[int | None]]] = {}
        for number, block, tokens in offers:
            if block and number in pools and tokens % size == 0 and tokens <= whole * size:
                states.setdefault(tokens, {})[pools[number]] = [block]
        lengths = sorted({*states, whole * size} if whole > tracked.kept else states)
        if not lengths:
            return
        tracked.kept = max(tracked.kept, whole)
        attention = [self._table(tables, length // size) for length in lengths]
        backups = [
            Backup(length, blocks | states.get(length, {}))
            for length, blocks in zip(lengths, attention, strict=True)
        ]
        self._back_up(tracked, whole, backups)

    def _table(self, tables: Sequence[Sequence[int]], whole: int) -> dict[str, list[int | None]]:
        """The first blocks of a request by pool, without states. vLLM's number 0 stands for no block."""
        return {
            group.pool.name: [number or None for number in tables[group.number][:whole]]
            for group in self._groups.groups
            if not group.states
        }

    def _back_up(self, tracked: Tracked, whole: int, backups: Sequence[Backup]) -> None:
        numbers = dict.fromkeys(
            number
            for backup in backups
            for named in backup.blocks.values()
            for number in named
            if number is not None
        )
        blocks = [self._pool.blocks[number] for number in numbers]
        self._pool.touch(blocks)
        keys, hint = self._keys(tracked, whole), tracked.hints.cache
        copying = self._cache.back_up(tracked.number, keys, backups, hint)
        if self._submit(copying, _BackupJob(blocks)) is None:
            self._free(blocks)

    def _free(self, blocks: Sequence[Any]) -> None:
        self._pool.free_blocks(reversed(blocks))  # vLLM evicts the first ones first

    def _whole(self, tracked: Tracked, tokens: int) -> int:
        """Blocks that `tokens` tokens fill, and that have keys."""
        keyed = len(tracked.request.block_hashes) // self._groups.keys_per_block
        return min(tokens // self._groups.block_size, keyed)

    def _keys(self, tracked: Tracked, blocks: int) -> list[bytes]:
        """Keys of the first `blocks` blocks: the hash at the end of each, shorter ones filled up."""
        each, hashes = self._groups.keys_per_block, tracked.request.block_hashes
        return [bytes(hashes[end * each - 1]).ljust(KEY_BYTES, b"\0") for end in range(1, blocks + 1)]

    # Orders.

    def _take_orders(self, step: StepOrders) -> None:
        # Not for lookups alone: requests that run would wait for the loop, which reads pages for others.
        if self._taking is None and (self._ordering or self._loads or self._counted):
            self._counted = False
            self._taking = self._submit(self._cache.take(), None, queued=False)
        if self._taking is not None and self._taking.wait(_LOOP_S):
            job, self._taking = self._taking, None
            step.orders, self.statistics = job.result()
        self._poll()
        taken = {order.id for order in step.orders}
        step.loads = {order: name for order, name in self._loads.items() if order in taken}
        for order in step.loads:
            del self._loads[order]
        step.loaded, self._loaded = self._loaded, set()
        step.failed, self._failed = self._failed, set()

    def reported(self, results: StepResults) -> None:
        """Publish copies that all workers have reported, and free their blocks."""
        job = self._submit(self._cache.finish(results.results), None, queued=False)
        if job is not None:
            job.wait(_LOOP_S)
        self._poll()

    def _submit(self, coro: Coroutine[Any, Any, Any], tag: object, *, queued: bool = True) -> Job[Any] | None:
        """Start a job; None if the bridge is closed: then nothing is loaded or kept any more."""
        try:
            job = self._bridge.submit(coro, tag=tag, queued=queued)
        except ClosedError as error:
            logger.warning("the cache is not used: %s", error)
            return None
        self._ordering += isinstance(tag, _LoadJob | _BackupJob)
        return job

    def _poll(self) -> None:
        for job in self._bridge.finished():
            if isinstance(job.tag, _LoadJob | _BackupJob):
                self._ordering -= 1
                self._counted = True
            if isinstance(job.tag, _LookUpJob):
                self._found(job.tag.tracked, job)
            elif isinstance(job.tag, _LoadJob):
                self._ordered(job.tag.tracked, job)
            else:
                if job.state is not JobState.DONE:
                    logger.warning("blocks were not kept: %r", job.exception())
                if isinstance(job.tag, _BackupJob):
                    self._free(job.tag.blocks)

    # The end.

    def request_finished(self, request: Any, tables: Sequence[Sequence[int]]) -> None:
        """Keep the last blocks of a request, whose hashes may have come after its last step; forget it."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return
        if tracked.lookup is None and not tracked.loading and not tracked.hints.no_store:
            confirmed = max(request.num_prompt_tokens, request.num_tokens - 1)
            self._keep(tracked, min(request.num_computed_tokens, confirmed), tables)
        self._leave(tracked)

    def _leave(self, tracked: Tracked) -> None:
        lookup, tracked.lookup, tracked.hit = tracked.lookup, None, None
        if lookup is not None:
            lookup.cancel()
        self._submit(self._cache.leave(tracked.number), None)

    @property
    def busy(self) -> bool:
        """Whether copies need further steps."""
        self._poll()
        return self._bridge.pending > 0 or bool(self._loads)

    def forget(self) -> None:
        """Find nothing any more that is cached now."""
        self._cache.forget()

    def close(self) -> None:
        """Wait for writes to storage, up to `close_seconds`, and close. Idempotent."""
        if self._bridge.closed:
            return
        job = self._bridge.submit(self._cache.aclose(), queued=False)
        try:
            job.result(self._close_s + _CLOSE_MARGIN_S)
        except (CacheError, OSError) as error:  # a TimeoutError is an OSError
            logger.warning("the cache was not closed: %r", error)
        finally:
            self._bridge.close(_CLOSE_MARGIN_S)


def _first_needed(group: KvGroup, whole: int) -> int:
    """The first of `whole` blocks that a hit needs of a group."""
    return max(0, whole - (group.pool.coverage.pages or whole))
