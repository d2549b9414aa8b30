"""A conversation that comes back after a restart, beside new prompts that begin alike."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache import MissReason, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.faults import Latency
from integrations.served import answer, begin, read, serving, uncached
from integrations.zoo import PAGE, random_tokens, tiny_spec

HEAD = 3 * PAGE
"""Tokens, 48 of them, that all prompts begin with."""

PROMPT, ANSWER, QUESTION = 300, 12, 12
"""A turn, and the question of the next: it comes back with 324 tokens. 311 of them were computed, as the
last token of an answer is not fed to the model: 19 whole pages, 304 tokens, the longest hit there is."""


@pytest.mark.asyncio
@pytest.mark.parametrize("others", [6, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
async def test_all_its_whole_pages_are_restored(name: str, others: int) -> None:
    """With reads of one head one after the other it is given the head alone, 48 tokens."""
    store, first = MemoryStore(), random_tokens(PROMPT)
    async with serving(name, storage=MemoryBackend(store)) as served:
        said = await answer(served, first, ANSWER)
    prompt = [*first, *said, *random_tokens(QUESTION, seed=1)]
    assert len(prompt) == 324
    news = [[*first[:HEAD], *random_tokens(PROMPT + QUESTION, seed=2 + number)] for number in range(others)]

    async with serving(name, slots=512, storage=Latency(MemoryBackend(store), 0.002)) as served:
        turns = [begin(served, tokens, 1) for tokens in news]
        turns.insert(others // 2, returning := begin(served, prompt, 1))
        answers = dict(zip(turns, await asyncio.gather(*map(read, turns)), strict=True))

    assert answers[returning] == uncached(name, prompt, 1)
    assert returning.cached_tokens == (PROMPT + ANSWER - 1) // PAGE * PAGE == 304
    assert returning.tokens_by_tier == {Tier.STORAGE: 304}
    assert MissReason.DEADLINE not in {turn.miss_reason for turn in turns}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
async def test_many_prompts_at_once_after_a_restart_lose_nothing_of_a_small_host(name: str) -> None:
    """Sixteen, of which the host holds eight: each has what storage has when its turn comes."""
    store, pages = MemoryStore(), 12
    prompts = [random_tokens(pages * PAGE + 1, seed=100 + number) for number in range(16)]
    slots = {pool.name: 16 * pages if pool.per_token else 24 for pool in tiny_spec(name).owners}
    async with serving(name, device_slots=slots, storage=MemoryBackend(store)) as served:
        for tokens in prompts:
            await answer(served, tokens, 1)
    host = {pool.name: 8 * pages if pool.per_token else 8 for pool in tiny_spec(name).owners}
    device = {pool.name: 4 * pages if pool.per_token else 10 for pool in tiny_spec(name).owners}
    sizes = {"device_slots": device, "host_slots": host}
    async with serving(name, **sizes, storage=Latency(MemoryBackend(store), 0.002)) as served:
        turns = [begin(served, tokens, 1) for tokens in prompts]
        await asyncio.gather(*map(read, turns))
        assert [turn.cached_tokens for turn in turns] == [pages * PAGE] * 16
