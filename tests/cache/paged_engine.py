"""An engine with device memory of its own: it allocates pages, computes into them, and names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynchicache import CacheConfig, EngineCache, EngineRequest, Hit, PrefetchOptions, PrefetchPolicy
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.specs import ModelSpec
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array

PAGE = 4
SPEC = synthetic_spec(PAGE)
PAGES = {"kv": 64, "mamba": 16, "swa": 64}
HOST = {"kv": 32, "mamba": 8, "swa": 16}


def spec_of(*pools: str, window_pages: int = 2) -> ModelSpec:
    return synthetic_spec(PAGE, pools, window_pages=window_pages)


def config(spec: ModelSpec = SPEC, **options: object) -> CacheConfig:
    """A small host tier, copies on the loop, patience for reads."""
    defaults: dict[str, object] = {
        "host_slots": {pool.name: HOST[pool.name] for pool in spec.owners},
        "inline": True,
        "prefetch": PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        "weight_version": "test",
    }
    return CacheConfig(**(defaults | options))


def paged(spec: ModelSpec = SPEC) -> PagedMemory:
    return PagedMemory(spec, {pool.name: PAGES[pool.name] for pool in spec.owners})


class PagedEngine:
    """Serves prompts on one cache, computes what is not restored, and frees its pages afterwards."""

    def __init__(self, cache: EngineCache, memory: PagedMemory) -> None:
        self.cache = cache
        self.memory = memory
        self.spec = cache.spec

    async def serve(self, tokens: Sequence[int], *, namespace: str | None = None, own: int = 0) -> Hit:
        """Serve one prompt; `own`: pages that the engine has itself, and does not ask for."""
        digests = page_digests(token_array(tokens), PAGE, namespace_seed(namespace))
        tables = {pool.name: self._table(pool.name, len(tokens)) for pool in self.spec.owners}
        async with self.cache.request(tokens, namespace=namespace) as request:
            hit = await request.prefetch()
            whole = hit.tokens // PAGE
            into = {name: self.named(name, tables[name], whole, own) for name in tables}
            await request.load(into={name: pages for name, pages in into.items() if pages})
            for name, pages in into.items():
                self._check(name, pages, digests[:whole])
            await self._compute(request, tables, digests, len(tokens), whole)
        await self.cache.drain()
        assert self.cache.verify() == []
        for name, pages in tables.items():
            self.memory.give(name, pages)
        return hit

    def _table(self, pool: str, tokens: int) -> list[int]:
        return self.memory.take(pool, -(-tokens // PAGE) if self.spec.pool(pool).per_token else 2)

    def named(self, name: str, table: Sequence[int], whole: int, own: int = 0) -> list[int]:
        """The pages that a hit of `whole` pages needs and the engine lacks."""
        pool = self.spec.pool(name)
        if not pool.per_token:
            return list(table[:1]) if whole else []
        return list(table[max(own, whole - (pool.coverage.pages or whole)) : whole])

    def _check(self, name: str, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        if pages:
            assert self.memory.count_wrong(name, pages, digests[-len(pages) :]) == 0

    async def _compute(
        self,
        request: EngineRequest,
        tables: Mapping[str, list[int]],
        digests: Sequence[bytes],
        tokens: int,
        whole: int,
    ) -> None:
        """Compute the rest in two forwards, of which the first ends at the last page boundary."""
        for name, table in tables.items():
            pages = table[whole : len(digests)] if self.spec.pool(name).per_token else table[1:]
            of_pages = digests[whole:] if self.spec.pool(name).per_token else digests[-1:]
            self.memory.compute(name, pages, of_pages)
        end = len(digests) * PAGE
        named = {
            name: table[: len(digests)] if self.spec.pool(name).per_token else table[1:]
            for name, table in tables.items()
        }
        await request.checkpoint(end, pages=named)
        if tokens > end:
            await request.checkpoint(tokens, pages=named)
