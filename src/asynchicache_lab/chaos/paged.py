"""The same search with an engine that owns its device memory: scripts for it, its pages, and its requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from asynchicache.cache import EngineRequest
from asynchicache.pools.sizing import FreeMemory, SizeOptions, plan_shared_host
from asynchicache.specs import ModelSpec
from asynchicache.testing.paged import PagedMemory
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import WritePolicy
from asynchicache_lab.chaos.clients import BaseChaosEngine, BaseForwards, PoolSlots
from asynchicache_lab.chaos.script import CacheSizes, ClientTurn, Life, Pace, Script
from asynchicache_lab.chaos.workload import host_bytes

GARBAGE = b"\xdd" * 32
"""Belongs in no page."""


def with_engine_memory(script: Script) -> Script:
    """The same script for an engine that owns its device memory."""
    spec = script.model.spec()
    last = script.last and _paged(script.last, spec)
    return msgspec.structs.replace(
        script, lives=tuple(_paged(life, spec) for life in script.lives), last=last, tails=False
    )


def _paged(life: Life, spec: ModelSpec) -> Life:
    """Every pool has host memory, and nothing is kept on the device until it is evicted there."""
    sizes = {
        pool.name: CacheSizes(
            device=life.sizes[pool.name].device,
            host=max(life.sizes[pool.name].host, (pool.coverage.pages or 0) + 1),
        )
        for pool in spec.owners
    }
    shared = life.shared if life.layout.whole_slots and len(sizes) > 1 else 0
    policy = life.write_policy
    if policy is WritePolicy.WRITE_BACK:
        policy = WritePolicy.WRITE_THROUGH
    clients = tuple(
        msgspec.structs.replace(client, turns=tuple(map(_for_pages, client.turns))) for client in life.clients
    )
    life = msgspec.structs.replace(
        life,
        sizes=sizes,
        clients=clients,
        write_policy=policy,
        steady=None,
        poor=None,
        paged=True,
        shared=0,
    )
    if not shared:
        return life
    return msgspec.structs.replace(life, shared=_shared_bytes(life, spec, shared))


def _for_pages(turn: ClientTurn) -> ClientTurn:
    """A request whose pages its engine has: it is not suspended, and finds what other sizes leave it."""
    return msgspec.structs.replace(turn, through=(), least=0)


def _shared_bytes(life: Life, spec: ModelSpec, wanted: int) -> int:
    """Host memory that pools share. Less than one request of every pool needs would be refused."""
    nbytes = max(2 * wanted, 2 * host_bytes(spec, life.sizes))
    pages = ChaosBlocks.counts(spec, life)
    ample = FreeMemory(device=0, host=sys.maxsize, shared=False)
    while plan_shared_host(spec, SizeOptions(host_bytes=nbytes), pages, ample, engine=True) is None:
        nbytes *= 2
    return nbytes


class ChaosBlocks:
    """The pages of an engine. The page that was freed last is the next to be used."""

    def __init__(self, spec: ModelSpec, memory: PagedMemory) -> None:
        self.spec = spec
        self.memory = memory
        self._leaving: list[tuple[dict[str, list[int]], list[Ticket]]] = []

    @classmethod
    def counts(cls, spec: ModelSpec, life: Life) -> dict[str, int]:
        """Pages that suffice if the copies of no request ever end."""
        full = next(iter(life.sizes.values())).device
        turns = [turn for client in life.clients for turn in client.turns]
        longest = max([full, *(len(turn.prompt + turn.output) // spec.page_size + 1 for turn in turns)])
        requests = 2 * len(turns) + 8
        return {pool.name: requests * (longest if pool.per_token else 1) for pool in spec.owners}

    def take(self, tokens: int) -> dict[str, list[int]]:
        """Pages of every pool for a request of `tokens` tokens."""
        staying = []
        for tables, tickets in self._leaving:
            if all(ticket.done for ticket in tickets):
                for pool, pages in tables.items():
                    self.memory.give(pool, pages)
            else:
                staying.append((tables, tickets))
        self._leaving = staying
        count = -(-tokens // self.spec.page_size)
        return {
            pool.name: self.memory.take(pool.name, count if pool.per_token else 1)
            for pool in self.spec.owners
        }

    def named(
        self, tables: dict[str, list[int]], pages: int, restored: int = 0
    ) -> dict[str, Sequence[int | None]]:
        """The pages of every pool for a prefix of `pages` pages; of windows and states, those that are kept.

        Args:
            tables: of the request.
            pages: whole pages of the prefix.
            restored: pages of its hit. Windows have no pages that only shorter prefixes need.
        """
        found: dict[str, Sequence[int | None]] = {}
        for pool in self.spec.owners:
            window, table = pool.coverage.pages, tables[pool.name]
            if not pool.per_token:
                found[pool.name] = table if pages else []
            elif window is None:
                found[pool.name] = table[:pages]
            else:
                first = max(pages - pool.coverage.kept, restored - window, 0)
                found[pool.name] = [None if page < first else table[page] for page in range(pages)]
        return found

    def leave(self, tables: dict[str, list[int]], tickets: list[Ticket]) -> None:
        """A request has ended; its pages are free once its copies have ended."""
        self._leaving.append((tables, tickets))


class PagedChaosEngine(BaseChaosEngine[EngineRequest]):
    """Serves requests on a cache without device memory.

    Attributes:
        blocks: its pages; set once it is made.
    """

    blocks: ChaosBlocks

    async def serve(self, turn: ClientTurn) -> None:
        """Run one request, from match to release."""
        self.did("open")
        request = self.request(turn)
        async with request:
            case = await self._matched(request, turn)
            tables = self.blocks.take(len(turn.prompt) + len(turn.output))
            tickets: list[Ticket] = []
            try:
                for pool in self.cache.spec.pools:  # whatever is not copied or computed is found
                    pages = tables[pool.slots_of or pool.name]
                    self.write(PoolSlots(pool.name, pages, [GARBAGE] * len(pages)), None, self.oracle)
                self.did("load")
                whole = request.hit.tokens // self.cache.spec.page_size
                with self.hits.loading(request, case):
                    tickets.append(
                        request.load(into=self.blocks.named(tables, whole, whole), after=self.stream)
                    )
                forwards = PagedForwards(self, request, turn, tables, tickets)
                await tickets[0].submitted()
                self._count(request)
                await self._run(forwards, turn, request)
            finally:
                self.blocks.leave(tables, tickets)


class PagedForwards(BaseForwards[EngineRequest]):
    """The forwards of one request in pages of its engine's own."""

    def __init__(
        self,
        engine: PagedChaosEngine,
        request: EngineRequest,
        turn: ClientTurn,
        tables: dict[str, list[int]],
        tickets: list[Ticket],
    ) -> None:
        super().__init__(engine, request, turn, tickets[0])
        self._paged = engine
        self._tables = tables
        self._all_tickets = tickets
        self._hit = self.done // engine.cache.spec.page_size

    async def _forward(self, stop: int) -> None:
        if self.done < stop:
            self._count_down()
            self._compute(stop)
            await self._afterwards(next(self._paces, Pace()))

    def _publish(self, length: int, *, final: bool = False) -> Ticket:
        whole = length // self._paged.cache.spec.page_size
        ticket = self._request.checkpoint(
            length,
            pages=self._paged.blocks.named(self._tables, whole, self._hit),
            after=self._paged.stream,
            final=final,
        )
        self._all_tickets.append(ticket)
        return ticket

    def _read(self) -> list[PoolSlots]:
        spec, digests, parts = self._paged.cache.spec, self._digests(), []
        end = self.done // spec.page_size
        for pool in spec.pools:
            table = self._tables[pool.slots_of or pool.name]
            if pool.per_token:
                first = max(end - (pool.coverage.pages or end), 0)
                parts.append(PoolSlots(pool.name, table[first:end], digests[first:end]))
            elif self._restored and end:
                parts.append(PoolSlots(pool.name, table, digests[end - 1 : end]))
        return parts

    def _written(self, length: int) -> list[PoolSlots]:
        spec, digests, parts = self._paged.cache.spec, self._digests(), []
        first, last = self.done // spec.page_size, length // spec.page_size
        for pool in spec.pools:
            table = self._tables[pool.slots_of or pool.name]
            if pool.per_token:
                parts.append(PoolSlots(pool.name, table[first:last], digests[first:last]))
            else:
                state = GARBAGE if length % spec.page_size else digests[last - 1]
                parts.append(PoolSlots(pool.name, table, [state]))
        return parts

    async def _afterwards(self, pace: Pace) -> None:
        if pace.snapshot or pace.checkpoint:
            self._paged.did("checkpoint")
            await self._follow(self._publish(self.done))
        if pace.again is not None and not self._paged.has_states:
            self._paged.did("checkpoint")
            await self._follow(self._publish(self.done * pace.again // 100))
        await self._pause(pace)
