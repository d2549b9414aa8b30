"""A cache over a store that is too small for all it serves: what a restart finds there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asynchicache import HybridCache
from asynchicache.backends.file import open_backend
from asynchicache.backends.file.segments import SegmentShape
from asynchicache.hashing import page_digests
from asynchicache.layouts import ALIGNMENT
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.protocol import (
    OptionalVerbs,
    PoolBinding,
    PoolEngine,
    StorageBackend,
)
from asynchicache.types import token_array
from cache.engine import PAGE, SPEC, Engine, config

PAGES, STATES = 64, 16
SHARED = list(range(1, 8 * PAGE + 1))


def prompt(conversation: int) -> list[int]:
    """Eight pages that all begin with, and eight of its own."""
    own = 1000 * (conversation + 1)
    return [*SHARED, *range(own, own + 8 * PAGE)]


class Kept:
    """A backend that remembers the engines that it gave out, so that a test can speak to them."""

    def __init__(self, backend: StorageBackend) -> None:
        self.name = backend.name
        self.pools: list[tuple[SlotBinding, PoolEngine]] = []
        self._backend = backend

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        engine = await self._backend.open_pool(binding)
        assert isinstance(binding, SlotBinding)
        self.pools.append((binding, engine))
        return engine

    async def touch(self, tokens: Sequence[int]) -> None:
        """What the core says of a path that is used: its end first, its beginning last, in every pool."""
        digests = page_digests(token_array(tokens), PAGE)[::-1]
        for binding, engine in self.pools:
            await OptionalVerbs(engine).touch([binding.key(digest) for digest in digests])

    async def aclose(self) -> None:
        await self._backend.aclose()


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[HybridCache, Kept]]:
    shape = SegmentShape.of(ALIGNMENT)
    bounds = {"kv": shape.pool_bytes(PAGES), "mamba": shape.pool_bytes(STATES)}
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=4, seed=0)
        stack.push_async_callback(port.aclose)
        store = Kept(open_backend({"path": folder, "capacity_bytes": bounds}, port))
        stack.push_async_callback(store.aclose)
        options = config(device_slots={"kv": 512, "mamba": 64})
        cache = await stack.enter_async_context(HybridCache.open(SPEC, options, storage=store))
        yield cache, store


@pytest.mark.asyncio
async def test_the_newest_conversations_that_fit_are_back_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as (cache, store):
        for conversation in range(20):
            await store.touch(prompt(conversation))
            await Engine(cache).serve(prompt(conversation))
            await store.touch(prompt(conversation))
    async with opened(tmp_path) as (cache, _):
        hits = []
        for conversation in range(20):
            async with cache.request([*prompt(conversation), 1]) as request:
                hits.append((await request.prefetch()).tokens // PAGE)

        assert hits[13:] == [16] * 7
        assert set(hits[:13]) == {8}  # what all of them begin with, and its state


def test_states_stand_on_the_pages_of_their_tokens() -> None:
    assert [SPEC.depends_on(pool.name) for pool in SPEC.pools] == [None, "kv"]


@pytest.mark.asyncio
async def test_the_cache_tells_its_storage_what_stands_on_what(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, store):
        assert {binding.pool: binding.depends_on for binding, _ in store.pools} == {"kv": None, "mamba": "kv"}
