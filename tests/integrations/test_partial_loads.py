"""A model reads the end of a prefix from storage while it computes the beginning."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
import torch

from asynchicache import CacheConfig, HybridCache, MissReason, PrefetchOptions, Request, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import CapacityError
from asynchicache.integrations.transformers.generate import prefix_cached
from asynchicache.tree.node import FULL_HOST
from integrations.served import answer, begin, read, serving, uncached
from integrations.zoo import PAGE, random_tokens, tiny_model

BOTH = PrefetchOptions(load_or_compute=True, partial_loads=True)
PAGES = 12
PROMPT = random_tokens(PAGES * PAGE + 3)


def measure(cache: HybridCache) -> None:
    """A page takes as long to read as half of it takes to compute, whatever real ones take."""
    costs = cache._controller.costs
    nbytes = cache._controller.planner.state.free[FULL_HOST].slot_bytes
    for count in range(1, 20):
        costs.computed(count * PAGE, 0, count * 1e-2)
        costs.read(count * nbytes, 0, count * 5e-3)
    costs.read = lambda *_: None
    costs.computed = lambda *_: None


async def stored(name: str) -> MemoryStore:
    store = MemoryStore()
    async with serving(name, storage=MemoryBackend(store)) as served:
        await answer(served, PROMPT, 1)
    return store


@pytest.mark.asyncio
async def test_the_end_of_a_prompt_is_read_while_its_beginning_is_computed() -> None:
    store = await stored("llama")
    async with serving("llama", storage=MemoryBackend(store), prefetch=BOTH) as served:
        measure(served.cache)
        turn = begin(served, [*PROMPT, 1], 4)
        assert await read(turn) == uncached("llama", [*PROMPT, 1], 4)
        assert 0 < turn.cached_tokens < PAGES * PAGE, "what it computed itself is no hit"
        assert turn.tokens_by_tier == {Tier.STORAGE: turn.cached_tokens}
        assert turn.miss_reason is MissReason.NONE
        assert served.cache.statistics().pages_read == turn.cached_tokens // PAGE


@pytest.mark.asyncio
async def test_many_at_once_get_the_tokens_of_the_uncached_model() -> None:
    store = await stored("llama")
    prompts = [[*PROMPT[: PAGE * n + 5], n] for n in (4, 6, 8, 10, 12, 12)]
    async with serving("llama", storage=MemoryBackend(store), prefetch=BOTH, slots=96) as served:
        measure(served.cache)
        said = await asyncio.gather(*(answer(served, prompt, 4) for prompt in prompts))
        assert said == [uncached("llama", prompt, 4) for prompt in prompts]
        assert served.cache.statistics().pages_read > 0


@pytest.mark.asyncio
async def test_a_request_that_cannot_be_suspended_computes_all_of_its_prompt() -> None:
    def refuse(request: Request, length: int) -> None:
        raise CapacityError(f"{length} tokens cannot be suspended")

    store = await stored("llama")
    with patch.object(Request, "suspend", refuse):
        async with serving("llama", storage=MemoryBackend(store), prefetch=BOTH) as served:
            measure(served.cache)
            turn = begin(served, [*PROMPT, 1], 4)
            assert await read(turn) == uncached("llama", [*PROMPT, 1], 4)
            assert turn.cached_tokens == 0


@pytest.mark.asyncio
async def test_a_client_that_leaves_while_the_beginning_is_computed_leaves_nothing() -> None:
    store = await stored("llama")
    async with serving("llama", storage=MemoryBackend(store), prefetch=BOTH, prefill_chunk=8) as served:
        measure(served.cache)
        for turns_of_the_loop in range(12):
            async with served.generate([*PROMPT, 1], max_new_tokens=2):
                for _ in range(turns_of_the_loop):
                    await asyncio.sleep(0)
            await served.drain()
            assert served.cache.verify(idle=True) == []


def test_generate_reads_and_computes_too() -> None:
    store = asyncio.run(stored("llama"))
    options = CacheConfig(
        device_slots={"kv": 64}, host_slots={"kv": 64}, weight_version="test", prefetch=BOTH
    )
    ids = torch.tensor([[*PROMPT, 1]])
    with prefix_cached(
        tiny_model("llama"), config=options, page_size=PAGE, storage=MemoryBackend(store)
    ) as model:
        measure(model._cache)
        output = model.generate(ids, max_new_tokens=4, do_sample=False)
        mask = torch.ones_like(ids)
        expected = tiny_model("llama").generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert torch.equal(output, expected)
        assert 0 < model.hit.tokens < PAGES * PAGE
