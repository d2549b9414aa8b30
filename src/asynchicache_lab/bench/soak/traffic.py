"""Endless conversations, and an engine that serves their turns and checks every restored byte.

Forwards run on a compute stream in a separate thread. Only fences order them with copies.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from asynchicache.cache import HybridCache, Request
from asynchicache.errors import ClosedError
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.testing.oracle import ByteOracle
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import Tier, trailing_pages
from asynchicache_lab.bench.soak.model import HitModel
from asynchicache_lab.bench.synthetic import VOCABULARY

PAGE = 16
CHUNK = 8 * PAGE
"""Tokens of one forward, at most."""

LONGEST = 30 * PAGE
"""Tokens of a conversation; then it ends, and another one begins."""

_GARBAGE = b"\xff" * 32  # marks a state inside a page, which must never be served


def soak_spec() -> ModelSpec:
    """Every kind of pool: attention, an index that shares its pages, a sliding window, a state."""
    keys, values = (TensorSpec(name, (1, 3), (64,), "uint8") for name in ("keys", "values"))
    local = TensorSpec("keys", (0,), (64,), "uint8")
    state = TensorSpec("recurrent", (0, 2), (4096,), "uint8")
    pools = (
        PoolSpec("kv", (keys, values)),
        PoolSpec("dsa", (TensorSpec("index", (1,), (16,), "uint8"),), slots_of="kv"),
        PoolSpec("mamba", (state,), coverage=trailing_pages(1), per_token=False),
        PoolSpec("swa", (local,), coverage=trailing_pages(2)),
    )
    return ModelSpec("soak", PAGE, 4, pools)


@dataclass(frozen=True, slots=True)
class Models:
    """Models of the turns' hits.

    Attributes:
        judged: model with storage divided among pools as its engine divides it.
        undivided: model with one bound for all pools; the same object if the engine does not divide storage.
    """

    judged: HitModel
    undivided: HitModel

    @property
    def hit_tokens(self) -> int:
        return self.judged.hit_tokens

    def all(self) -> set[HitModel]:
        return {self.judged, self.undivided}


@dataclass(slots=True, eq=False)
class SoakCounters:
    """Totals of all turns since the start.

    Attributes:
        turns: completed turns; `abandoned`: by their clients; `gave_way`: refused for lack of slots.
        short: tokens by which hits were shorter than the model's, by the cache's reason.
        over: tokens by which hits were longer than the model's.
        not_durable: turns that waited for storage, but whose publications were not stored.
        checked: number of compared pages and states.
        wrong: descriptions of slots with wrong bytes.
    """

    models: Models
    turns: int = 0
    abandoned: int = 0
    gave_way: int = 0
    prompt_tokens: int = 0
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    short: Counter[str] = field(default_factory=Counter)
    over: int = 0
    not_durable: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def hits(self) -> int:
        return self.hit_tokens.total()


@dataclass(slots=True, eq=False)
class SoakConversation:
    """One conversation: its namespace, and its tokens so far."""

    tenant: str
    tokens: array[int]


class ConversationPool:
    """Conversations that wait for their next turn. They have various lengths, and some share a beginning. A
    new conversation replaces one that became too long."""

    def __init__(self, chance: random.Random, count: int) -> None:
        self._chance = chance
        self._begins = [self._ids(10 * PAGE) for _ in range(4)]
        self._waiting = deque(self._new() for _ in range(count))
        for conversation in self._waiting:  # start with mixed lengths, as in the steady state
            conversation.tokens.extend(self._ids(chance.randrange(LONGEST - len(conversation.tokens))))

    def _ids(self, count: int) -> array[int]:
        return array("q", (self._chance.randrange(VOCABULARY) for _ in range(count)))

    def _new(self) -> SoakConversation:
        return SoakConversation(self._chance.choice(("one", "two")), self._chance.choice(self._begins)[:])

    def take(self) -> SoakConversation:
        """A conversation that is not being served, and its user's next tokens."""
        self._waiting.rotate(self._chance.randrange(len(self._waiting)))
        conversation = self._waiting.popleft()
        conversation.tokens.extend(self._ids(self._chance.randrange(8, 40)))
        return conversation

    def answer(self) -> array[int]:
        """Random tokens in place of generated ones."""
        return self._ids(self._chance.randrange(8, 40))

    def give_back(self, conversation: SoakConversation) -> None:
        self._waiting.append(conversation if len(conversation.tokens) < LONGEST else self._new())


class Engine:
    """Serves turns on one cache."""

    def __init__(self, cache: HybridCache, served: SoakCounters, *, durable: bool = False) -> None:
        """`durable`: a turn ends when its publications are stored, so that storage keeps up."""
        self._cache = cache
        self._served = served
        self._durable = durable
        self._oracle = ByteOracle(cache.spec, cache.device_tensor)
        self._stream = cache.device.stream("compute")
        self._loop = asyncio.get_running_loop()

    async def serve(self, conversation: SoakConversation, answer: array[int]) -> None:
        """Serve one turn: restore, prefill, decode, publish."""
        request = self._cache.request(conversation.tokens, namespace=conversation.tenant)
        async with request:
            try:
                await self._restore(request, conversation)
                turn = _SoakTurn(self, request, conversation.tenant)
                await turn.prefill()
                await turn.decode(answer)
                await self._computed()
                if self._durable:
                    self._served.not_durable += not await request.durable() and self._is_open()
            finally:
                request.close(after=self._stream)
        self._served.turns += 1

    def _is_open(self) -> bool:
        """Whether the cache still serves: one that closes meanwhile promises nothing, whatever is stored."""
        try:
            self._cache.request((0,))
        except ClosedError:
            return False
        return True

    async def _restore(self, request: Request, conversation: SoakConversation) -> None:
        await request.prefetch()
        await request.admit()
        await self.follow(request.load())
        self._served.prompt_tokens += len(conversation.tokens)
        self._served.hit_tokens.update(request.hit.by_tier)
        models = self._served.models
        expected = {model: model.request(conversation.tenant, conversation.tokens) for model in models.all()}
        short = expected[models.judged] - request.hit.tokens
        if short > 0:
            self._served.short[request.hit.reason.value] += short
        else:
            self._served.over -= short

    async def _computed(self) -> None:
        """Wait until the stream reaches this point, as an engine waits for its tokens."""
        done = self._loop.create_future()
        self.launch(lambda: self._loop.call_soon_threadsafe(_settle, done))
        await done

    async def follow(self, ticket: Ticket) -> None:
        """Make the stream wait for a ticket's operation."""
        for layer in range(self._cache.spec.layers):
            await ticket.submitted(layer)
            ticket.fence(layer).wait_on(self._stream)

    def launch(self, work: Callable[[], object]) -> None:
        self._stream.launch(work)

    def expect(self, pool: str, slots: list[int], digests: list[bytes]) -> None:
        """Compare slots with their expected bytes when the stream reaches this point."""
        served = self._served
        served.checked += len(slots)

        def look() -> None:
            count = self._oracle.count_wrong(pool, slots, digests)
            if count:
                served.wrong.append(f"{count} of {len(slots)} slots of {pool!r}")

        self.launch(look)

    def write(self, pool: str, slots: list[int], digests: list[bytes]) -> None:
        self.launch(lambda: self._oracle.write(pool, slots, digests))

    @property
    def spec(self) -> ModelSpec:
        return self._cache.spec

    def checkpoint(self, request: Request, length: int, *, final: bool = False) -> Ticket:
        return request.checkpoint(length, after=self._stream, final=final)

    def published(self, tenant: str, request: Request, start: int, end: int) -> None:
        """Report a publication to the models. A state was saved if `end` is a page boundary."""
        for model in self._served.models.all():
            model.publish(tenant, request.tokens, start, end, state=end % PAGE == 0)

    def snapshot(self, request: Request, length: int) -> Ticket:
        return request.snapshot(length, after=self._stream)


class _SoakTurn:
    """The forwards of one request."""

    def __init__(self, engine: Engine, request: Request, tenant: str) -> None:
        self._engine = engine
        self._request = request
        self._tenant = tenant
        self._seed = namespace_seed(tenant)
        self._done = self._published = request.hit.tokens

    async def prefill(self) -> None:
        """Check the restored data, and compute the rest of the prompt."""
        self._check()
        prompt = len(self._request.tokens)
        for stop in sorted({*self._request.cuts, prompt, *range(self._done + CHUNK, prompt, CHUNK)}):
            await self._forward(stop)
            await self._publish(stop)

    async def decode(self, answer: array[int]) -> None:
        """Generate, and publish up to the last page boundary, whose state a snapshot keeps."""
        request, engine = self._request, self._engine
        request.append(answer)
        end = len(request.tokens)
        boundary = end // PAGE * PAGE
        if boundary > self._done:
            await self._forward(boundary)
            await engine.follow(engine.snapshot(request, boundary))
            await self._forward(end)
            await self._publish(boundary)
        else:
            await self._forward(end)
            await self._publish(end, final=True)

    async def _publish(self, length: int, *, final: bool = False) -> None:
        ticket = self._engine.checkpoint(self._request, length, final=final)
        self._engine.published(self._tenant, self._request, self._published, length)
        self._published = length
        await self._engine.follow(ticket)

    def _digests(self) -> list[bytes]:
        return page_digests(self._request.tokens, PAGE, self._seed)

    def _check(self) -> None:
        """Check that the restored pages, windows and state are those computed for these tokens."""
        request, end = self._request, self._done // PAGE
        digests = self._digests()
        for pool in self._engine.spec.pools if end else ():
            if pool.per_token:
                first, needed = request.first_page(pool.name), max(end - (pool.coverage.pages or end), 0)
                slots = request.pages(pool.name)[needed - first : end - first]
                self._engine.expect(pool.name, slots, digests[needed:end])
            else:
                self._engine.expect(pool.name, [request.state(pool.name)], digests[end - 1 : end])

    async def _forward(self, length: int) -> None:
        """Write what a forward from the end of the last one to `length` would write."""
        request, first, last = self._request, self._done // PAGE, length // PAGE
        await request.reserve(max(length - request.reserved, 0))
        digests = self._digests()
        for pool in self._engine.spec.pools:
            if pool.per_token:
                behind = request.first_page(pool.name)
                slots = request.pages(pool.name)[first - behind : last - behind]
                self._engine.write(pool.name, slots, digests[first:last])
            else:
                state = _GARBAGE if length % PAGE else digests[last - 1]
                self._engine.write(pool.name, [request.state(pool.name)], [state])
        self._done = length


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
