"""Clients that run a script's requests on one cache, and check the contents of slots before using them.

Forwards run on a compute stream. As on a GPU, only fences order them with copies: a forward's input is
checked when the stream reaches the forward, not when the forward is enqueued.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple

from asynchicache.cache import BaseCache, Request, RequestKind
from asynchicache.controller.request import BaseRequest
from asynchicache.errors import CapacityError, ClosedError, DeviceError, TransferError, UsageError
from asynchicache.hashing import page_digests
from asynchicache.streams.base import Stream
from asynchicache.testing.oracle import ByteOracle
from asynchicache.transfer.ticket import Ticket
from asynchicache_lab.chaos.faults import ChaosDevice, FaultDraws
from asynchicache_lab.chaos.hits import HitCase, HitOracle
from asynchicache_lab.chaos.identity import PageNames, seed_of
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.promises import DurabilityOracle, DurablePrefix
from asynchicache_lab.chaos.script import HINTS, ChaosClient, ClientTurn, Pace

_GARBAGE = b"\xff" * 32
FOREVER = 1e5
"""Seconds, of virtual time, after which nothing that a client waits for can still come."""


class PoolSlots(NamedTuple):
    """Slots of a pool, and the digests of the pages or states that belong in them; of each page the tokens
    from `first` up to `last`."""

    pool: str
    slots: Sequence[int]
    digests: Sequence[bytes]
    first: int = 0
    last: int | None = None


def resumable_tokens(cache: BaseCache[Any], request: BaseRequest) -> int:
    """The tokens of a request behind which a later prompt can go on, if `durable` is True."""
    state = request.inspect()
    if state is None:
        return 0
    promise = cache.inspect().planner.promise(state)
    page_size = cache.spec.page_size
    return (promise.end - 1) * page_size + promise.tail if promise.tail else promise.end * page_size


class BaseChaosEngine(ABC, Generic[RequestKind]):
    """Serves requests on one cache.

    Attributes:
        cache, ledger: the cache, and the record of the run.
        oracle: knows the bytes of pages that are computed with the present weights.
        identity: what distinguishes its pages from those of other caches.
        names: the names of pages, from which their bytes follow.
        closing: the cache is being closed, so it refuses requests.
        page_tokens: knows the bytes of each token, if prefixes may end inside a page.
        suspect: wrong bytes that a forward read after a copy wrote a wrong byte; the cache must notice them.
        stream: runs the forwards.
    """

    def __init__(
        self,
        cache: BaseCache[RequestKind],
        device: ChaosDevice,
        oracle: Callable[[], ByteOracle],
        names: PageNames,
        draws: FaultDraws,
        ledger: Ledger,
        hits: Callable[[BaseChaosEngine[Any]], HitOracle],
        promises: DurabilityOracle | None,
        identity: Callable[[], object],
    ) -> None:
        """`oracle`, `identity`: with the present weights."""
        self.cache = cache
        self.ledger = ledger
        self.closing = False
        self.suspect: list[str] = []
        self.stream: Stream = device.stream("compute")
        self.has_states = any(not pool.per_token for pool in cache.spec.pools)
        self._with_weights = oracle
        self._identity_now = identity
        self.learn_weights()
        self.page_tokens = self.oracle.page_tokens
        self.names = names
        self._device = device
        self._draws = draws
        self.hits = hits(self)
        self._promises = promises

    def learn_weights(self) -> None:
        """Requests that load from now on compute with other weights."""
        self.oracle, self.identity = self._with_weights(), self._identity_now()

    def did(self, operation: str) -> None:
        self.ledger.operations[operation] += 1

    def violated(self, what: str) -> None:
        self.ledger.violations.append(what)

    @property
    def excused(self) -> bool:
        """Whether requests may fail: the device failed or the cache is closing."""
        return self.closing or self._device.error is not None or self._device.lied

    def expect(self, part: PoolSlots, layer: int | None, where: str, oracle: ByteOracle) -> None:
        """On the compute stream, compare the slots' contents with the expected ones."""

        def look() -> None:
            count = oracle.count_wrong(*part, layer=layer)
            if count:
                found = self.suspect if self._device.lied else self.ledger.violations
                found.append(f"wrong bytes: {count} of {len(part.slots)} slots of {part.pool!r}, {where}")

        if self._concerns(part, layer):
            self.stream.launch(look)

    def write(self, part: PoolSlots, layer: int | None, oracle: ByteOracle) -> None:
        if self._concerns(part, layer):
            self.stream.launch(lambda: oracle.write(*part, layer=layer))

    def _concerns(self, part: PoolSlots, layer: int | None) -> bool:
        tensors = self.cache.spec.pool(part.pool).tensors
        return bool(part.slots) and (layer is None or any(layer in tensor.layers for tensor in tensors))

    async def promised(self, request: BaseRequest, turn: ClientTurn, length: int, identity: object) -> None:
        """Wait until `length` tokens of a request are in storage. If `durable()` is True, check the store.

        If the request is finished, storage has its last page too, if ends may be inside one.

        `identity`: of the cache when the request was loaded.
        """
        self.did("durable")
        seed, size = seed_of(turn), self.cache.spec.page_size
        tokens = request.tokens[: length // size * size]
        digests = page_digests(tokens, size, seed)
        self.hits.wanted(digests)
        if self._promises is None:
            with self.hits.confirming(digests):
                await request.durable()
            return
        with self._promises.waiting() as gone:
            with self.hits.confirming(digests):
                durable = await request.durable()
            if durable and self._device.error is None:  # a failed device publishes nothing
                # Another request may have left a state there since, which this one did not ask about.
                end = resumable_tokens(self.cache, request)
                path = self.hits.path(tokens, seed, len(tokens) // size, ends=end == len(tokens))
                tails = self.hits.tail_keys(request.tokens[:end], seed) if end % size else []
                if turn.final and self.cache.tails:
                    tails += self.hits.end_keys(request.tokens[:length], seed)
                path = path._replace(ends=[*path.ends, *tails])
                # A model with states can go on only where it has left some: here, or at an earlier length.
                ends_here = length % size == 0 or not self.cache.spec.owners[1:]
                least = len(tokens) // size if ends_here else 0
                promise = DurablePrefix(identity, turn.tenant, turn.salt, tuple(tokens), least)
                self._promises.made(promise, path, gone)

    def verify(self, when: str) -> None:
        """Recompute the cache's invariants."""
        self.did("verify")
        self.ledger.violations += [f"verify {when}: {problem}" for problem in self.cache.verify()]

    async def serve_all(self, client: ChaosClient) -> None:
        """Run a client's requests. Refusals that are allowed are not violations."""
        for turn in client.turns:
            await asyncio.sleep(turn.wait)
            if self.closing:
                return
            try:
                async with asyncio.timeout(FOREVER):
                    await self.serve(turn)
            except CapacityError:
                self.did("refused")  # all requests waited for each other, and this one was refused
            except (ClosedError, TransferError, DeviceError):
                if not self.excused:
                    raise
            if not self.closing:
                self.verify("after a request")

    def request(self, turn: ClientTurn) -> RequestKind:
        return self.cache.request(turn.prompt, namespace=turn.tenant, salt=turn.salt, hint=HINTS[turn.hint])

    @abstractmethod
    async def serve(self, turn: ClientTurn) -> None:
        """Run one request, from match to release."""

    async def _matched(self, request: BaseRequest, turn: ClientTurn) -> HitCase:
        """What a request does before it loads."""
        case = self.hits.opened(request, seed_of(turn))
        case.least = turn.least
        if turn.patience != 0:
            await self.prefetch(request, case, turn.patience)
        if turn.rest is not None:
            self.did("rest")
            request.rest()
            await asyncio.sleep(turn.rest)
            request.rematch()
            self.hits.matched(request, case)
        return case

    async def _run(self, forwards: BaseForwards[Any], turn: ClientTurn, request: BaseRequest) -> None:
        """Run a request's forwards, and close it."""
        try:
            await forwards.run()
        except _Aborted:
            self._draws.count("request.abort")
        finally:
            self.did("close")
            if not turn.leaves:
                request.close(after=self.stream)

    def _count(self, request: BaseRequest) -> None:
        hit, served = request.hit, self.ledger.served
        served["nowhere"] += len(request.tokens) - hit.tokens
        served.update({tier.name.lower(): tokens for tier, tokens in hit.by_tier.items()})

    async def prefetch(self, request: BaseRequest, case: HitCase, patience: float | None) -> None:
        """Prefetch; with a `patience`, cancel after that time."""
        self.did("prefetch")
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                with self.hits.prefetching(request, case, patient=patience is None):
                    await request.prefetch()


class ChaosEngine(BaseChaosEngine[Request]):
    """Serves requests on a cache with device memory of its own."""

    async def serve(self, turn: ClientTurn) -> None:
        """Run one request, from match to release."""
        self.did("open")
        request = self.request(turn)
        async with request:
            case = await self._matched(request, turn)
            if turn.admit:
                self.did("admit")
                matched = request.hit.tokens
                await request.admit()
                if request.hit.tokens < matched:
                    case.reached = 0  # it let go of its match while it waited
            self.did("load")
            with self.hits.loading(request, case):
                ticket = request.load()
            forwards = Forwards(self, request, turn, ticket)  # with the weights of now
            await ticket.submitted()
            self._count(request)
            await self._run(forwards, turn, request)


class _Aborted(Exception):
    """The client gave up, as its script demands."""


class BaseForwards(ABC, Generic[RequestKind]):
    """One request's forwards on the compute stream.

    The first forward after a copy runs layer by layer, each after that layer's fences, as in an engine.
    """

    def __init__(
        self, engine: BaseChaosEngine[RequestKind], request: RequestKind, turn: ClientTurn, ticket: Ticket
    ) -> None:
        self._engine = engine
        self._request = request
        self._turn = turn
        self._seed = seed_of(turn)
        self._oracle, self._identity = engine.oracle, engine.identity
        self._paces = iter(turn.paces)
        self._left = turn.abort
        self._tickets = [ticket]  # copies enqueued since the last forward
        self._forwards = 0
        self._restored = True  # the states are still those of the prefix
        self.done = request.hit.tokens

    async def run(self) -> None:
        """Prefill, decode, publish."""
        engine, request, turn = self._engine, self._request, self._turn
        for stop in sorted({*request.cuts, *turn.stops, len(request.tokens)}):
            await self._forward(stop)
        for token in turn.output:
            engine.did("append")
            request.append([token])
            await self._forward(len(request.tokens))  # which are more than one if it was suspended
        await self._end()
        if turn.durable:
            await engine.promised(request, turn, self.done, self._identity)

    async def _end(self) -> None:
        self._engine.did("checkpoint")
        await self._follow(self._publish(self.done, final=self._turn.final))

    @abstractmethod
    async def _forward(self, stop: int) -> None:
        """Compute up to `stop` tokens, each forward followed by its pace."""

    @abstractmethod
    def _publish(self, length: int, *, final: bool = False) -> Ticket: ...

    @abstractmethod
    def _read(self) -> list[PoolSlots]:
        """The slots that the next forward reads: those of the tokens computed so far."""

    @abstractmethod
    def _written(self, length: int) -> list[PoolSlots]:
        """The slots that a forward to `length` tokens writes."""

    def _count_down(self) -> None:
        """
        Raises:
            _Aborted: the client gives up before this forward.
        """
        if self._left == 0:
            raise _Aborted
        self._left = self._left and self._left - 1

    def _digests(self) -> list[bytes]:
        if self._engine.page_tokens is not None:
            self._engine.page_tokens.note(self._request.tokens, self._seed)
            return page_digests(self._request.tokens, self._engine.cache.spec.page_size, self._seed)
        return self._engine.names.of(self._request.tokens, self._turn)

    def _compute(self, length: int) -> None:
        """Run a forward to `length` tokens, whose slots are reserved: check what it reads, write the rest."""
        engine, tickets = self._engine, self._tickets
        read, written = self._read(), self._written(length)
        where = f"{self.done} tokens into a prompt of {len(self._turn.prompt)}, tenant {self._turn.tenant}"
        layers: Sequence[int | None] = range(engine.cache.spec.layers) if tickets else [None]
        for layer in layers:
            if layer is not None:
                for ticket in tickets:
                    ticket.fence(layer).wait_on(engine.stream)
            for part in read:
                engine.expect(part, layer, where, self._oracle)
            for part in written:
                engine.write(part, layer, self._oracle)
        self._tickets, self._restored, self.done = [], False, length

    async def _follow(self, ticket: Ticket) -> None:
        """Order the next forward after a copy."""
        await ticket.submitted()
        self._tickets.append(ticket)

    @staticmethod
    async def _pause(pace: Pace) -> None:
        if pace.pause:
            await asyncio.sleep(pace.pause)


class Forwards(BaseForwards[Request]):
    """The forwards of one request in the cache's own device memory."""

    async def _end(self) -> None:
        if self._turn.through:
            self._go_through(self._turn.through)
        else:
            await super()._end()

    def _go_through(self, steps: Sequence[str]) -> None:
        """Suspend the request at its end, and perhaps match it again, and let it rest again."""
        engine, request = self._engine, self._request
        for step in steps:
            engine.did(step)
            match step:
                case "suspend":
                    request.suspend(self.done, after=engine.stream)
                case "rematch":
                    request.rematch()
                case "rest":
                    request.rest()
                case _:
                    raise UsageError(f"{step!r} is nothing that a request goes through")

    async def _forward(self, stop: int) -> None:
        """Compute a chunk of a prompt in as few forwards as capacity allows, each followed by its pace."""
        size = self._engine.cache.spec.page_size
        while self.done < stop:
            length = stop
            try:
                self._engine.did("extend")
                self._request.extend(max(length - self._request.reserved, 0))
            except CapacityError:
                length = min(stop, self.done // size * size + size)
                self._engine.did("reserve")
                await self._request.reserve(max(length - self._request.reserved, 0))
            self._count_down()
            self._compute(length)
            await self._afterwards(next(self._paces, Pace()))
            if self._turn.suspend is not None:
                await self._perhaps_suspend()

    async def _perhaps_suspend(self) -> None:
        """After the forward that the turn names, give everything back, and go on as a match."""
        self._forwards += 1
        if self._forwards != self._turn.suspend:
            return
        await self._suspend(self._turn.away)

    async def _suspend(self, away: float) -> None:
        engine, request = self._engine, self._request
        engine.did("suspend")
        request.suspend(self.done, after=engine.stream)
        await asyncio.sleep(away)
        request.rematch()
        case = engine.hits.opened(request, self._seed)
        if self._turn.patience != 0:
            await engine.prefetch(request, case, self._turn.patience)
        with engine.hits.loading(request, case):
            ticket = request.load()
        self._oracle, self._identity = engine.oracle, engine.identity
        await ticket.submitted()
        self._tickets, self._restored, self.done = [ticket], True, request.hit.tokens

    def _publish(self, length: int, *, final: bool = False) -> Ticket:
        return self._request.checkpoint(length, after=self._engine.stream, final=final)

    def _read(self) -> list[PoolSlots]:
        """The slots that the next forward reads: those of the tokens computed so far."""
        engine, request = self._engine, self._request
        end = self.done // engine.cache.spec.page_size
        digests, parts = self._digests(), []
        for pool in engine.cache.spec.pools:
            if pool.per_token:
                first = max(end - (pool.coverage.pages or end), 0)
                behind = request.first_page(pool.name)
                slots = request.pages(pool.name)[max(first - behind, 0) : end - behind]
                if behind > first or len(slots) != end - first:
                    engine.violated(f"a forward lacks pages {first} to {end} of {pool.name!r}")
                else:
                    parts.append(PoolSlots(pool.name, slots, digests[first:end]))
            elif self._restored and self.done:
                parts.append(PoolSlots(pool.name, [request.state(pool.name)], [self._state(self.done)]))
        return [*parts, *self._inside(self.done, 0)]

    def _written(self, length: int) -> list[PoolSlots]:
        """The slots that a forward to `length` tokens writes."""
        request, spec = self._request, self._engine.cache.spec
        first, last = self.done // spec.page_size, length // spec.page_size
        digests, parts = self._digests(), []
        begun = self.done % spec.page_size if self._engine.page_tokens is not None else 0
        for pool in spec.pools:
            if pool.per_token:
                behind = request.first_page(pool.name)
                slots = request.pages(pool.name)[first - behind : last - behind]
                if begun and slots:
                    parts.append(PoolSlots(pool.name, slots[:1], digests[first : first + 1], begun))
                    parts.append(PoolSlots(pool.name, slots[1:], digests[first + 1 : last]))
                else:
                    parts.append(PoolSlots(pool.name, slots, digests[first:last]))
            else:
                parts.append(PoolSlots(pool.name, [request.state(pool.name)], [self._state(length)]))
        return [*parts, *self._inside(length, begun if first == last else 0)]

    def _state(self, length: int) -> bytes:
        """What identifies the states at a length."""
        if length % self._engine.cache.spec.page_size == 0:
            return self._digests()[length // self._engine.cache.spec.page_size - 1]
        return _GARBAGE if self._engine.page_tokens is None else self._ends(length)[-1]

    def _ends(self, length: int) -> list[bytes]:
        return page_digests(self._request.tokens[:length], 1, self._seed)

    def _inside(self, length: int, first: int) -> list[PoolSlots]:
        """The page that a length ends inside, with the tokens from number `first` in it."""
        spec, request = self._engine.cache.spec, self._request
        whole, rest = divmod(length, spec.page_size)
        if self._engine.page_tokens is None or not rest:
            return []
        self._engine.page_tokens.note(request.tokens[:length], self._seed)
        end = self._ends(length)[-1:]
        pools = [pool.name for pool in spec.pools if pool.per_token]
        slots = [request.pages(name)[whole - request.first_page(name)] for name in pools]
        return [PoolSlots(name, [slot], end, first, rest) for name, slot in zip(pools, slots, strict=True)]

    async def _afterwards(self, pace: Pace) -> None:
        engine, request, done = self._engine, self._request, self.done
        if pace.snapshot and done % engine.cache.spec.page_size == 0:
            engine.did("snapshot")
            await self._follow(request.snapshot(done, after=engine.stream))
        if pace.checkpoint:
            engine.did("checkpoint")
            await self._follow(self._publish(done))
        for share in pace.advance:
            engine.did("advance")
            request.advance(done * share // 100, after=engine.stream)
        if pace.again is not None and not engine.has_states:
            engine.did("checkpoint")
            await self._follow(self._publish(done * pace.again // 100))
        await self._pause(pace)
