"""Clients that do everything a request allows, in any order, on a model with windows and states.

What a forward reads is checked where it would read it: on the compute stream. Which pools there are,
how large they are, what storage does and who is cancelled follows from the world's seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from asynchicache import (
    CacheConfig,
    CapacityError,
    HybridCache,
    ModelSpec,
    PrefetchOptions,
    PrefetchPolicy,
    Request,
    WritePolicy,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import StorageError, UsageError
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.storage.limits import PoolLimits
from asynchicache.streams.base import Stream
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.seeded import SeededWorld
from asynchicache.types import token_array, trailing_pages

PAGE = 4
LAYERS = 2
LONGEST = 14
"""Pages of the longest sequence."""

KEYS = TensorSpec("keys", (1,), (3,), "uint8")
INDEX = TensorSpec("index", (1,), (1,), "uint8")
LOCAL = TensorSpec("keys", (0,), (2,), "uint8")
STATE = TensorSpec("recurrent", (0, 1), (8,), "uint8")
PROMPTS = [[family * 100 + n for n in range(24)] for family in range(3)]
GARBAGE = b"\xff" * 32


def draw_spec(world: SeededWorld) -> ModelSpec:
    """Attention, mostly with windows of one or two lengths, mostly with states."""
    chance = world.random
    window = chance.choice([1, 2, 3, LONGEST + 4])
    pools = [PoolSpec("kv", (KEYS,))]
    if chance.random() < 0.3:
        pools.append(PoolSpec("dsa", (INDEX,), slots_of="kv"))
    if chance.random() < 0.6:
        pools.append(PoolSpec("mamba", (STATE,), coverage=trailing_pages(1), per_token=False))
    pools.append(PoolSpec("swa", (LOCAL,), coverage=trailing_pages(window)))
    if chance.random() < 0.3:
        pools.append(PoolSpec("near", (LOCAL,), coverage=trailing_pages(chance.choice([1, 2]))))
    if chance.random() < 0.2:
        pools.append(PoolSpec("draft", (KEYS,), coverage=trailing_pages(window), slots_of="swa"))
    return ModelSpec("hostile", PAGE, LAYERS, tuple(pools))


def draw_config(world: SeededWorld, spec: ModelSpec) -> CacheConfig:
    """Small pools, some of which are kept off the host; any policy."""
    chance = world.random
    device, host = {}, {}
    for pool in spec.owners:
        window = pool.coverage.pages or 0
        if not pool.per_token:
            device[pool.name] = chance.randrange(4, 9)
        elif window:
            device[pool.name] = window + chance.randrange(2, 12)
        else:
            device[pool.name] = chance.randrange(LONGEST + 2, 30)
        host[pool.name] = chance.choice([0, window + chance.randrange(1, 8), 60])
    host["kv"] = chance.choice([0, 20, 60, 60])
    return CacheConfig(
        device_slots=device,
        host_slots=host,
        write_policy=chance.choice(list(WritePolicy)),
        eviction=chance.choice(["size", "size", "lru", "fifo"]),
        checkpoints=chance.choice(["prompt+output+branch", "prompt+branch+8", "none"]),
        prefetch=PrefetchOptions(
            policy=chance.choice(list(PrefetchPolicy)), base_seconds=0.003, max_seconds=0.01
        ),
        storage_limits=PoolLimits(deadline=0.005, cooldown=0.01, closing=0.005, clearing=0.005),
        store_bytes=chance.choice([1 << 10, 1 << 20]),
        weight_version="test",
    )


class Forwards:
    """One request's forwards on the compute stream."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self.done = request.hit.tokens

    def digests(self) -> list[bytes]:
        return page_digests(token_array(self._request.tokens), PAGE, namespace_seed(None))

    def check(self, *, states: bool) -> None:
        """What the next forward reads is what was computed for these tokens."""
        request, end = self._request, self.done // PAGE
        digests = self.digests()
        for pool in self._engine.cache.spec.pools:
            if pool.per_token:
                first = max(end - (pool.coverage.pages or end), 0)
                behind = request.first_page(pool.name)
                assert behind <= first, "a page that a forward needs was given back"
                slots = request.pages(pool.name)[first - behind : end - behind]
                assert len(slots) == end - first
                self._engine.expect(pool.name, slots, digests[first:end])
            elif states and end:
                self._engine.expect(pool.name, [request.state(pool.name)], digests[end - 1 : end])

    def compute(self, length: int) -> None:
        """A forward to `length` tokens, for which there is room."""
        self.check(states=False)
        request, first, last = self._request, self.done // PAGE, length // PAGE
        digests = self.digests()
        for pool in self._engine.cache.spec.pools:
            if pool.per_token:
                behind = request.first_page(pool.name)
                slots = request.pages(pool.name)[first - behind : last - behind]
                self._engine.write(pool.name, slots, digests[first:last])
            else:
                state = GARBAGE if length % PAGE else digests[last - 1]
                self._engine.write(pool.name, [request.state(pool.name)], [state])
        self.done = length


class Engine:
    """Serves prompts on one cache, on a compute stream that copies are ordered with by fences."""

    def __init__(self, world: SeededWorld, cache: HybridCache) -> None:
        self.world = world
        self.cache = cache
        self.wrong: list[str] = []
        self.restored = 0
        self._oracle = ByteOracle(cache.spec, cache.device_tensor)
        self.stream: Stream = cache.device.stream("compute")
        self._states = any(not pool.per_token for pool in cache.spec.pools)

    def expect(self, pool: str, slots: Sequence[int], digests: Sequence[bytes]) -> None:
        def look() -> None:
            count = self._oracle.count_wrong(pool, slots, digests)
            self.wrong += [f"{count} of {len(slots)} slots of {pool!r}"] if count else []

        self.stream.launch(look)

    def write(self, pool: str, slots: Sequence[int], digests: Sequence[bytes]) -> None:
        self.stream.launch(lambda: self._oracle.write(pool, slots, digests))

    async def serve(self, tokens: Sequence[int]) -> None:
        """One request, with whatever its seed makes it do."""
        chance = self.world.random
        request = self.cache.request(tokens)
        async with request:
            if chance.random() < 0.7:
                await self._prefetch(request)
            if chance.random() < 0.5:
                await request.admit()
            await self._follow(request.load())
            self.restored += request.hit.tokens
            forwards = Forwards(self, request)
            forwards.check(states=True)
            try:
                await self._compute_all(request, forwards)
            finally:
                request.close(after=self.stream)

    async def _prefetch(self, request: Request) -> None:
        """Prefetch, or begin to and lose patience."""
        if self.world.random.random() < 0.2:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.world.random.uniform(0, 0.003)):
                    await request.prefetch()
        else:
            await request.prefetch()

    async def _compute_all(self, request: Request, forwards: Forwards) -> None:
        prompt = len(request.tokens)
        stops = {*request.cuts, prompt}
        stops |= {self.world.random.randrange(1, prompt + 1) for _ in range(2)}
        for stop in sorted(stops):
            await self._forward(request, forwards, stop)
        if self.world.random.random() < 0.5:
            for _ in range(self.world.random.randrange(12)):  # decoding, a token at a time
                request.append([self.world.random.randrange(2)])
                await self._forward(request, forwards, forwards.done + 1)
        final = self.world.random.random() < 0.5
        await self._follow(request.checkpoint(forwards.done, after=self.stream, final=final))
        if self.world.random.random() < 0.15:
            await request.durable()

    async def _forward(self, request: Request, forwards: Forwards, stop: int) -> None:
        """A chunk of a prompt in as many forwards as its room allows, then some of what may follow one."""
        while forwards.done < stop:
            length = stop
            missing = max(length - request.reserved, 0)
            try:
                request.extend(missing)
            except CapacityError:
                length = min(stop, forwards.done // PAGE * PAGE + PAGE)
                await request.reserve(max(length - request.reserved, 0))
            forwards.compute(length)
            await self._afterwards(request, forwards)

    async def _afterwards(self, request: Request, forwards: Forwards) -> None:
        chance, done = self.world.random, forwards.done
        if chance.random() < 0.3 and done % PAGE == 0:
            await self._follow(request.snapshot(done, after=self.stream))
            self._snapshot = done
        if chance.random() < 0.5:
            await self._follow(request.checkpoint(done, after=self.stream))
        for _ in range(chance.choice([0, 1, 1, 2])):
            request.advance(chance.choice([done, done, chance.randrange(done + 1)]), after=self.stream)
        if not self._states and chance.random() < 0.2:
            await self._follow(request.checkpoint(chance.randrange(done + 1), after=self.stream))
        if chance.random() < 0.3:
            await self.world.sleep(2e-4)

    async def _follow(self, ticket) -> None:
        await ticket.submitted()
        for layer in range(LAYERS):
            ticket.fence(layer).wait_on(self.stream)


async def client(engine: Engine, turns: int) -> None:
    chance = engine.world.random
    for _ in range(turns):
        await engine.world.sleep(5e-4)
        prompt = chance.choice(PROMPTS)[: chance.randrange(1, 25)]
        tail = [chance.randrange(1000, 1003) for _ in range(chance.randrange(12))]
        with suppress(CapacityError):  # everyone waited for everyone, and this one gave way
            await engine.serve([*prompt, *tail])


async def operator(world: SeededWorld, cache: HybridCache, stores: Sequence[Faulty]) -> None:
    """Attaches, detaches, clears and flushes, whatever goes on."""
    chance = world.random
    while True:
        await world.sleep(2e-3)
        for faulty in stores:
            faulty.release()
        with suppress(UsageError, StorageError):
            match chance.randrange(5):
                case 0:
                    await cache.detach_storage()
                case 1:
                    await cache.attach_storage(Latency(chance.choice(stores), 5e-4, sleep=world.sleep))
                case 2:
                    await cache.clear_storage()
                case 3:
                    await cache.flush()
                case _:
                    cache.statistics()


def draw_store(world: SeededWorld) -> Faulty:
    odd = world.random.choice([0.0, 0.03, 0.1])
    hang = world.random.choice([0.0, 0.05])
    rates = FaultRates(fail=odd, raises=odd, partial=odd, lie=odd, swap=odd, hang=hang)
    return Faulty(MemoryBackend(MemoryStore()), rates, world.random)


async def hostile(world: SeededWorld) -> int:
    """Everybody at once; restored tokens. Nothing is wrong, lost or left at the end."""
    spec = draw_spec(world)
    config = draw_config(world, spec)
    stores = [draw_store(world), draw_store(world)]
    storage = Latency(stores[0], 5e-4, sleep=world.sleep)
    async with world.open_cache(spec, config, storage=storage) as cache:
        engine = Engine(world, cache)
        tasks = [asyncio.create_task(client(engine, 6), name=f"client-{n}") for n in range(4)]
        meddling = asyncio.create_task(operator(world, cache, stores), name="operator")
        if world.random.random() < 0.3:
            await world.sleep(3e-3)
            tasks[0].cancel()
        await asyncio.wait(tasks)
        meddling.cancel()
        await asyncio.wait([meddling])
        for store in stores:
            store.rates = FaultRates()
            store.release()
        for task in tasks:
            if not task.cancelled():
                task.result()
        await cache.drain()
        assert cache.verify() == []
        assert engine.wrong == []
        books = cache._parts.planner.inventory
        assert not books.requests
        assert not books.tier_copies
    assert len(asyncio.all_tasks()) == 1, "closing leaves no task behind"
    return engine.restored
