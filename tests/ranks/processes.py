"""Followers as processes, and an engine that sends them each forward through their standard input."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from asynchicache import CacheConfig, EngineCache, HybridCache
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.ranks.group import RankGroup
from asynchicache.ranks.options import RankLimits
from asynchicache.specs import ModelSpec
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array
from ranks.launch import Follower, launch

PAGE = 4
SPEC = synthetic_spec(PAGE, ("kv",))
REPLICATED = replace(SPEC, pools=(replace(SPEC.pools[0], replicated=True),))
TOKEN = "of this test"
PAGES = {"kv": 16}
"""Pages of an engine that owns its device memory, on every rank."""


def spec_of(*, replicated: bool) -> ModelSpec:
    return REPLICATED if replicated else SPEC


def shard(spec: ModelSpec, rank: int, pool: str) -> str:
    return "" if spec.pool(pool).replicated else f"shard {rank}/{pool}"


def config(rank: int, ranks: int, *, paged: bool = False) -> CacheConfig:
    return CacheConfig(
        device_slots={} if paged else {"kv": 64},
        host_slots={"kv": 64},
        weight_version="test",
        rank=rank,
        ranks=ranks,
    )


class ProcessGroup:
    """A leader in this process, and its followers."""

    def __init__(
        self,
        group: RankGroup,
        cache: HybridCache | EngineCache,
        followers: Sequence[Follower],
        engine: PagedMemory | None = None,
    ) -> None:
        self.group = group
        self.cache = cache
        self.followers = followers
        self._engine = engine
        tensors = cache.device_tensor if engine is None else engine.tensor
        self._oracle = ByteOracle(cache.spec, tensors, lambda pool: shard(cache.spec, 0, pool))

    async def serve(self, tokens: Sequence[int]) -> int:
        """Serve a prompt on all ranks; the tokens of its hit, whose bytes are right on each of them."""
        digests = page_digests(token_array(tokens), PAGE, namespace_seed(None))
        async with self.cache.request(tokens) as request:
            await request.prefetch()
            await request.load()
            hit = request.hit.tokens
            await request.reserve(len(tokens) - request.reserved)
            pages, known = list(request.pages("kv")), hit // PAGE
            whole = len(tokens) // PAGE
            wrong = await self._forward(
                pages[:known], digests[:known], pages[known:whole], digests[known:whole]
            )
            assert wrong == 0
            await request.checkpoint(len(tokens))
        return hit

    async def serve_paged(self, tokens: Sequence[int]) -> int:
        """As `serve`, in pages of the engine, which it uses again as soon as the cache allows."""
        assert self._engine is not None
        digests, whole = page_digests(token_array(tokens), PAGE, namespace_seed(None)), len(tokens) // PAGE
        pages = self._engine.take("kv", whole)
        try:
            async with self.cache.request(tokens) as request:
                await request.prefetch()
                await request.load(into={"kv": pages[: request.hit.tokens // PAGE]})
                hit = request.hit.tokens
                known = hit // PAGE
                wrong = await self._forward(
                    pages[:known], digests[:known], pages[known:], digests[known:whole]
                )
                assert wrong == 0
                await request.checkpoint(whole * PAGE, pages={"kv": pages})
            return hit
        finally:
            self._engine.give("kv", pages)

    async def _forward(
        self, reads: list[int], known: Sequence[bytes], writes: list[int], fresh: Sequence[bytes]
    ) -> int:
        step = self.group.mark()
        wrong = self._oracle.count_wrong("kv", reads, known)
        self._oracle.write("kv", writes, fresh)
        line = {"step": step, "reads": [_part(reads, known)], "writes": [_part(writes, fresh)]}
        if self.group.failure is None:
            wrong += sum(await asyncio.gather(*(self._tell(one, line) for one in self.followers)))
        return wrong

    async def _tell(self, follower: Follower, line: object) -> int:
        assert follower.stdin is not None
        assert follower.stdout is not None
        try:
            follower.stdin.write(json.dumps(line).encode() + b"\n")
            await follower.stdin.drain()
            return int(await follower.stdout.readline() or 0)
        except ConnectionError:  # killed: what it held is nobody's
            return 0


def _part(slots: list[int], digests: Sequence[bytes]) -> tuple[str, list[int], list[str]]:
    return "kv", slots, [digest.hex() for digest in digests]


@asynccontextmanager
async def processes(
    folder: Path, ranks: int, *, replicated: bool = False, paged: bool = False, **limits: float
) -> AsyncIterator[ProcessGroup]:
    """`paged`: engines own the device memory."""
    address = f"unix:{folder / 'group'}"
    kind = "replicated" if replicated else "paged" if paged else "sharded"
    followers = [
        await launch("follower_process.py", address, str(rank), str(ranks), kind, piped=True, quiet=True)
        for rank in range(1, ranks)
    ]
    spec = spec_of(replicated=replicated)
    engine = PagedMemory(spec, PAGES, poison=False) if paged else None
    try:
        async with (
            RankGroup.listen(address, TOKEN, RankLimits(**limits)) as group,
            HybridCache.open(
                spec,
                config(0, ranks, paged=paged),
                engine=None if engine is None else engine.memory,
                group=group,
            ) as cache,
        ):
            for follower in followers:
                assert follower.stdout is not None
                assert await follower.stdout.readline() == b"joined\n"
            yield ProcessGroup(group, cache, followers, engine)
    finally:
        for follower in followers:
            if follower.returncode is None:
                follower.kill()
            await follower.wait()
