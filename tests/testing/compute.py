"""A serving engine that computes on a stream of its own, ordered with copies by fences."""

from __future__ import annotations

import asyncio

from asynchicache import CacheConfig, CapacityError, HybridCache, MissReason, TransferError
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.seeded import SeededWorld
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array

PAGE = 4
SPEC = synthetic_spec(PAGE)
CONFIG = CacheConfig(device_slots={"kv": 24, "mamba": 8})
PROMPTS = [[family * 100 + n for n in range(20)] for family in range(4)]


class Engine:
    """Serves prompts on a compute stream, and waits for no copy that a fence can order."""

    def __init__(self, world: SeededWorld, cache: HybridCache) -> None:
        self._world = world
        self._cache = cache
        self._oracle = ByteOracle(SPEC, cache.device_tensor)
        self._compute = cache.device.stream("compute")
        self.wrong = 0
        self.hits: list[int] = []
        self.failures = 0

    async def serve(self, tokens: list[int]) -> MissReason:
        """Serve a prompt; what it is given is checked where a forward would read it."""
        request = self._cache.request(tokens)
        async with request:
            digests = page_digests(token_array(tokens), PAGE, namespace_seed(None))
            ticket = request.load()
            self.hits.append(request.hit.tokens)
            try:
                await self._follow(ticket)
                hit = request.hit.tokens // PAGE
                if hit:
                    self._launch(self._check, "kv", request.pages("kv")[:hit], digests[:hit])
                    self._launch(self._check, "mamba", [request.state("mamba")], digests[hit - 1 : hit])
                await self._prefill(request, digests)
            except (TransferError, CapacityError):  # the latter: too much is in quarantine
                self.failures += 1
            reason = request.hit.reason
            request.close(after=self._compute)
        return reason

    async def _prefill(self, request, digests: list[bytes]) -> None:
        for cut in sorted({*request.cuts, len(digests) * PAGE}):
            first, last = request.reserved // PAGE, cut // PAGE
            await request.reserve(max(cut - request.reserved, 0))
            self._launch(self._oracle.write, "kv", request.pages("kv")[first:last], digests[first:last])
            self._launch(self._oracle.write, "mamba", [request.state("mamba")], digests[last - 1 : last])
            await self._follow(request.checkpoint(cut, after=self._compute))

    async def _follow(self, ticket) -> None:
        for layer in range(SPEC.layers):
            await ticket.submitted(layer)
            ticket.fence(layer).wait_on(self._compute)

    def _launch(self, work, *args) -> None:
        self._compute.launch(lambda: work(*args))

    def _check(self, pool: str, slots: list[int], digests: list[bytes]) -> None:
        self.wrong += self._oracle.count_wrong(pool, slots, digests)


async def clients(world: SeededWorld, engine: Engine, count: int = 4, turns: int = 4) -> None:
    async def client() -> None:
        for _ in range(turns):
            await world.sleep(5e-4)
            await engine.serve([*world.random.choice(PROMPTS), world.random.randrange(1000, 1004)])

    await asyncio.gather(*(client() for _ in range(count)))
