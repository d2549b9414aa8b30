"""An engine over all ranks of a group, in one loop: it computes what the bytes of every rank must be.

Every rank mirrors the forwards of the leader on a compute stream of its own, checks what it reads against its
own shard's bytes, and writes them.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, NamedTuple

import torch

from asynchicache.cache import BaseCache, EngineCache, EngineRequest, HybridCache, Request, RequestKind
from asynchicache.errors import RankError, StorageError, TransferError
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.ranks.group import RankGroup
from asynchicache.ranks.worker import RankWorker
from asynchicache.specs import ModelSpec
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.oracle import ByteOracle, PageTokens
from asynchicache.testing.paged import PagedMemory
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import token_array
from asynchicache_lab.chaos.clients import resumable_tokens
from asynchicache_lab.chaos.paged import GARBAGE, ChaosBlocks
from asynchicache_lab.ranks.delayed_link import DelayedLink


class RankSlots(NamedTuple):
    """Device slots of one pool, and the pages that belong there: of each, tokens `first` to `last - 1`."""

    pool: str
    slots: list[int]
    digests: list[bytes]
    first: int = 0
    last: int | None = None


class BaseRankMirror(ABC, Generic[RequestKind]):
    """An engine over all ranks: the leader serves requests, and every follower runs the same forwards."""

    def __init__(
        self,
        group: RankGroup,
        cache: BaseCache[RequestKind],
        workers: Sequence[RankWorker],
        devices: Sequence[EmulatedDevice],
        links: Mapping[int, DelayedLink],
        chance: random.Random,
    ) -> None:
        """`links`: by rank, the follower's end of its connection."""
        self._page_tokens = PageTokens(cache.spec.page_size) if cache.tails else None
        self.cache = cache
        self.links = links
        self.group = group
        self.violations: list[str] = []
        self.workers = workers
        self._chance = chance
        self._specs = [cache.spec, *(worker.spec for worker in workers)]
        self._known: dict[str, list[ByteOracle]] = {}
        self._streams = [device.stream("compute") for device in devices]
        self._turn = asyncio.Lock()

    @property
    def weights(self) -> str:
        """The weights that the model has now."""
        return self.cache.config.weight_version or ""

    def oracles(self, weights: str) -> list[ByteOracle]:
        """What every rank computes with some weights, by rank."""
        if weights not in self._known:
            self._known[weights] = [
                ByteOracle(
                    spec,
                    self._tensors(rank),
                    partial(_identity, weights, spec, rank),
                    self._page_tokens,
                )
                for rank, spec in enumerate(self._specs)
            ]
        return self._known[weights]

    @abstractmethod
    def _tensors(self, rank: int) -> Callable[[str, str], torch.Tensor]:
        """Returns the device memory of a rank, by pool and tensor."""

    async def update_weights(self, version: str) -> None:
        """Go on with other weights, between two forwards."""
        async with self._turn:
            with suppress(StorageError):  # the cache goes on without storage
                await self.cache.update_weights(version)

    @abstractmethod
    async def serve(self, tokens: Sequence[int], *, durable: bool = False) -> tuple[int, int]:
        """Serve a prompt; returns the tokens of its hit, and how many are in storage then, as `durable` has
        promised, under the weights that the model has in the end."""

    def _digests(self, tokens: Sequence[int]) -> Sequence[bytes]:
        return page_digests(token_array(tokens), self.cache.spec.page_size, namespace_seed(None))

    async def _forward(
        self,
        ticket: Ticket,
        oracles: Sequence[ByteOracle],
        reads: Sequence[RankSlots],
        writes: Sequence[RankSlots],
    ) -> None:
        async with self._turn:  # steps have an order; within one, ranks are not in step
            step = self.group.mark()
            with suppress(TransferError):
                await ticket.submitted()
            ticket.fence(self.cache.spec.layers - 1).wait_on(self._streams[0])
            self._launch(0, oracles[0], reads, writes)
            if self.group.failure is None:
                every = [
                    self._follow(rank, step, oracles[rank], reads, writes) for rank in range(1, len(oracles))
                ]
                await asyncio.gather(*every)

    async def _follow(
        self,
        rank: int,
        step: int,
        oracle: ByteOracle,
        reads: Sequence[RankSlots],
        writes: Sequence[RankSlots],
    ) -> None:
        worker = self.workers[rank - 1]
        await asyncio.sleep(self._chance.expovariate(5e3))
        with suppress(RankError, TransferError):  # the group has failed; nothing it computes is used
            async with worker.forward(step, self._streams[rank]) as applied:
                await applied.submitted()
                applied.wait_on(self._streams[rank], self.cache.spec.layers - 1)
                self._launch(rank, oracle, reads, writes)
                if self._chance.random() < 0.3:
                    await asyncio.sleep(self._chance.expovariate(5e3))

    def _launch(
        self, rank: int, oracle: ByteOracle, reads: Sequence[RankSlots], writes: Sequence[RankSlots]
    ) -> None:
        def run() -> None:
            for part in reads:
                wrong = oracle.count_wrong(*part)
                if wrong and self.group.failure is None:
                    self.violations.append(f"rank {rank} has {wrong} wrong pages of {part.pool}")
            for part in writes:
                oracle.write(*part)

        self._streams[rank].launch(run)


class RankMirror(BaseRankMirror[Request]):
    """The same for caches that own their device memory."""

    cache: HybridCache

    def _tensors(self, rank: int) -> Callable[[str, str], torch.Tensor]:
        return self.cache.device_tensor if rank == 0 else self.workers[rank - 1].device_tensor

    async def serve(self, tokens: Sequence[int], *, durable: bool = False) -> tuple[int, int]:
        request = self.cache.request(tokens)
        try:
            await request.__aenter__()
            await request.prefetch()
            await request.admit()
            ticket, weights = request.load(), self.weights
            hit = request.hit.tokens
            await request.reserve(len(tokens) - request.reserved)
            reads, writes = self._read_and_written(request, tokens, hit)
            await self._forward(ticket, self.oracles(weights), reads, writes)
            final = self._page_tokens is not None and self._chance.random() < 0.6
            await request.checkpoint(len(tokens), after=self._streams[0], final=final)
            # Without a free slot for its state, a prefix is published that no prompt can go on from.
            promised = durable and await request.durable()
            return hit, resumable_tokens(self.cache, request) if promised else 0
        finally:
            request.close(after=self._streams[0])

    def _read_and_written(
        self, request: Request, tokens: Sequence[int], hit: int
    ) -> tuple[list[RankSlots], list[RankSlots]]:
        """The slots that the forward of a request reads, and those that it writes."""
        size, end = self.cache.spec.page_size, len(tokens)
        if self._page_tokens is None:
            end -= end % size
        else:
            self._page_tokens.note(token_array(tokens), namespace_seed(None))
        reads = [*self._pages(request, tokens, 0, hit), *self._states(request, tokens, hit)]
        writes = self._pages(request, tokens, hit, end) if end > hit else []
        return reads, [*writes, *self._states(request, tokens, end if len(tokens) == end else 0)]

    def _pages(self, request: Request, tokens: Sequence[int], begin: int, end: int) -> list[RankSlots]:
        """The slots of the tokens `begin` to `end - 1` of a request."""
        found, size, digests = [], self.cache.spec.page_size, self._digests(tokens)
        for pool in self.cache.spec.pools:
            if pool.per_token:
                behind = request.first_page(pool.name)
                slots = request.pages(pool.name)
                for page, first, last in _parts(max(begin, behind * size), end, size):
                    digest = digests[page] if last == size else self._digest(tokens, page * size + last)
                    found.append(RankSlots(pool.name, [slots[page - behind]], [digest], first, last))
        return found

    def _states(self, request: Request, tokens: Sequence[int], length: int) -> list[RankSlots]:
        """The slots of a request's states, which are those behind `length` tokens; none if it is 0."""
        pools = [pool.name for pool in self.cache.spec.pools if not pool.per_token and length]
        return [RankSlots(name, [request.state(name)], [self._digest(tokens, length)]) for name in pools]

    def _digest(self, tokens: Sequence[int], length: int) -> bytes:
        """What identifies the page that ends at a length, and the states there."""
        words = token_array(tokens[:length])
        if length % self.cache.spec.page_size:
            return page_digests(words, 1, namespace_seed(None))[-1]
        return page_digests(words, self.cache.spec.page_size, namespace_seed(None))[-1]


class PagedRankMirror(BaseRankMirror[EngineRequest]):
    """The same with engines that own their device memory: on every rank, the pages that the leader's engine
    names."""

    def __init__(
        self,
        group: RankGroup,
        cache: EngineCache,
        workers: Sequence[RankWorker],
        devices: Sequence[EmulatedDevice],
        links: Mapping[int, DelayedLink],
        chance: random.Random,
        memories: Sequence[PagedMemory],
    ) -> None:
        super().__init__(group, cache, workers, devices, links, chance)
        self._memories = memories
        self._blocks = ChaosBlocks(cache.spec, memories[0])
        self._used = [False] * len(memories)

    def _tensors(self, rank: int) -> Callable[[str, str], torch.Tensor]:
        return self._memories[rank].tensor

    async def serve(self, tokens: Sequence[int], *, durable: bool = False) -> tuple[int, int]:
        size, tickets = self.cache.spec.page_size, []
        async with self.cache.request(tokens) as request:
            await request.prefetch()
            tables = self._blocks.take(len(tokens))
            try:
                self._poison(tables)
                whole = request.hit.tokens // size
                into = self._blocks.named(tables, whole, whole)
                tickets.append(request.load(into=into, after=self._streams[0]))
                hit, oracles = request.hit.tokens, self.oracles(self.weights)
                reads, writes = self._paged(tables, tokens, hit // size)
                await self._forward(tickets[0], oracles, reads, writes)
                pages = self._blocks.named(tables, len(tokens) // size, hit // size)
                tickets.append(request.checkpoint(len(tokens), pages=pages, after=self._streams[0]))
                promised = durable and await request.durable() and self._resumable(tokens)
                return hit, len(tokens) // size * size if promised else 0
            finally:
                self._blocks.leave(tables, tickets)

    def _poison(self, tables: Mapping[str, list[int]]) -> None:
        """Write what belongs in no page, behind all that has run on each rank: loads run after it, except the
        first ones of a rank, which knows no stream yet."""
        for rank, stream in enumerate(self._streams):
            if self._used[rank]:
                for pool in self.cache.spec.pools:
                    pages = tables[pool.slots_of or pool.name]
                    write = self._memories[rank].oracle.write
                    stream.launch(partial(write, pool.name, pages, [GARBAGE] * len(pages)))

    def _launch(
        self, rank: int, oracle: ByteOracle, reads: Sequence[RankSlots], writes: Sequence[RankSlots]
    ) -> None:
        self._used[rank] = True
        super()._launch(rank, oracle, reads, writes)

    def _paged(
        self, tables: Mapping[str, list[int]], tokens: Sequence[int], known: int
    ) -> tuple[list[RankSlots], list[RankSlots]]:
        """What a forward reads and writes: `known` pages are there."""
        size, digests = self.cache.spec.page_size, self._digests(tokens)
        last, reads, writes = len(tokens) // size, [], []
        for pool in self.cache.spec.pools:
            table = tables[pool.slots_of or pool.name]
            if pool.per_token:
                first = max(known - (pool.coverage.pages or known), 0)
                reads.append(RankSlots(pool.name, table[first:known], list(digests[first:known])))
                writes.append(RankSlots(pool.name, table[known:last], list(digests[known:last])))
            else:
                reads += [RankSlots(pool.name, table, [digests[known - 1]])] if known else []
                state = GARBAGE if len(tokens) % size else digests[last - 1]
                writes.append(RankSlots(pool.name, table, [state]))
        return reads, writes

    def _resumable(self, tokens: Sequence[int]) -> bool:
        """Whether memory has all that a later prompt needs to go on at the end of these tokens."""
        tree = self.cache.inspect().planner.inventory.tree
        pages = len(tokens) // self.cache.spec.page_size
        node = tree.known_end(token_array(tokens), namespace_seed(None), pages)
        return node.end == pages and tree.restorable(node)


def _identity(weights: str, spec: ModelSpec, rank: int, pool: str) -> str:
    """What distinguishes a rank's bytes: ranks with the same part of a pool have the same."""
    part = spec.pool(pool)
    return f"weights {weights}, shard {part.shard or (rank if part.writes and not part.replicated else 0)}/"


def _parts(begin: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The pages of the tokens `begin` to `end - 1`; of each, the first of its tokens, and the end of them."""
    while begin < end:
        page, first = divmod(begin, size)
        last = min(size, end - page * size)
        yield page, first, last
        begin = page * size + last
