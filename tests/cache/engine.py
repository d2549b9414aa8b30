"""A serving engine without a model: it writes the bytes that belong in each page, and checks what it gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynchicache import CacheConfig, Hit, HybridCache, PrefetchOptions, PrefetchPolicy, Request
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array

PAGE = 4
SPEC = synthetic_spec(PAGE)
LONG_SPEC = synthetic_spec(64, ("kv", "mamba"))
LONG: dict[str, object] = {"device_bytes": "64MiB", "host_bytes": "64MiB", "device_slots": {}}
"""Settings with room for a prompt of 32k tokens of `LONG_SPEC`."""


def config(**options: object) -> CacheConfig:
    """Small pools, threads for copies, patience for reads."""
    defaults: dict[str, object] = {
        "device_slots": {"kv": 32, "mamba": 8},
        "prefetch": PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        "weight_version": "test",
    }
    return CacheConfig(**(defaults | options))


class Engine:
    """Serves prompts on one cache."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.oracle = ByteOracle(cache.spec, cache.device_tensor)

    async def serve(
        self,
        tokens: Sequence[int],
        *,
        namespace: str | None = None,
        outputs: Iterable[int] = (),
        prefetch: bool = True,
    ) -> Hit:
        """Serve one prompt, publish it and its outputs in whole pages, and say what was restored."""
        async with self.cache.request(tokens, namespace=namespace) as request:
            if prefetch:
                await request.prefetch()
            await request.load()
            self.check(request, namespace)
            hit = request.hit
            outputs = list(outputs)
            if outputs:
                request.append(outputs)
            for cut in [*request.cuts, len(tokens) + len(outputs)]:
                await self.compute(request, cut, namespace)
        await self.cache.drain()
        assert self.cache.verify() == []
        return hit

    def digests(self, request: Request, namespace: str | None) -> list[bytes]:
        return page_digests(token_array(request.tokens), PAGE, namespace_seed(namespace))

    def check(self, request: Request, namespace: str | None = None) -> None:
        """What was restored is what was computed, to the byte."""
        pages = request.hit.tokens // PAGE
        digests = self.digests(request, namespace)[:pages]
        for pool in self.cache.spec.pools if pages else ():
            if pool.per_token:
                first = request.first_page(pool.name)
                assert first <= max(pages - (pool.coverage.pages or pages), 0)
                slots = request.pages(pool.name)[: pages - first]
                assert self.oracle.count_wrong(pool.name, slots, digests[first:]) == 0
            else:
                assert self.oracle.count_wrong(pool.name, [request.state(pool.name)], digests[-1:]) == 0

    async def compute(self, request: Request, length: int, namespace: str | None = None) -> None:
        """Run a forward up to `length` tokens and publish its end."""
        done = request.reserved
        request.extend(max(length - done, 0))
        self.write(request, done, length, namespace)
        await request.checkpoint(length)

    def write(self, request: Request, done: int, length: int, namespace: str | None = None) -> None:
        """What a forward from `done` to `length` tokens would write."""
        digests = self.digests(request, namespace)
        first, last = done // PAGE, length // PAGE
        for pool in self.cache.spec.pools:
            if pool.per_token:
                behind = request.first_page(pool.name)
                slots = request.pages(pool.name)[first - behind : last - behind]
                self.oracle.write(pool.name, slots, digests[first:last])
            elif length % PAGE == 0:
                self.oracle.write(pool.name, [request.state(pool.name)], [digests[last - 1]])


async def long_turn(cache: HybridCache, tokens: Sequence[int]) -> tuple[int, bool]:
    """One prompt, of whose bytes nobody cares: how much was restored, and whether all is durable."""
    async with cache.request(tokens) as request:
        hit = await request.prefetch()
        await request.load()
        for cut in sorted(request.cuts):
            if cut > request.reserved:
                request.extend(cut - request.reserved)
                await request.checkpoint(cut)
        durable = await request.durable()
    return hit.tokens, durable
