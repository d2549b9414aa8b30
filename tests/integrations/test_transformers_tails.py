"""Prefixes that end inside a page, on every model class: the tokens of the uncached model, bit for bit."""

from __future__ import annotations

import pytest

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from integrations.served import answer, begin, read, serving, uncached
from integrations.zoo import ALL, PAGE, random_tokens, tiny_spec

PROMPT, ANSWER, QUESTION = 54, 20, 11

DEFAULT = ("llama", "qwen3_5", "gemma3")
"""Attention alone, with states, and with windows."""


def ends_anywhere(name: str) -> bool:
    paged = [pool for pool in tiny_spec(name).pools if pool.per_token]
    return all(tensor.tokens_per_entry == 1 for pool in paged for tensor in pool.tensors)


async def check_turns(name: str) -> None:
    """Each turn resumes at the last token that the turn before computed; another prompt leaves it there."""
    first = random_tokens(PROMPT)
    async with serving(name, prefill_chunk=24, tails=True) as served:
        assert served.cache.tails == ends_anywhere(name)
        said = await answer(served, first, ANSWER)
        assert said == uncached(name, first, ANSWER)
        for seed in (1, 2):
            second = [*first, *said, *random_tokens(QUESTION, seed=seed)]
            turn = begin(served, second, ANSWER)
            assert await read(turn) == uncached(name, second, ANSWER)
            computed = PROMPT + ANSWER - 1
            assert turn.cached_tokens >= (computed if ends_anywhere(name) else computed // PAGE * PAGE)
        again = begin(served, first, ANSWER)
        assert await read(again) == said


@pytest.mark.asyncio
@pytest.mark.parametrize("name", DEFAULT)
async def test_a_conversation_goes_on_at_its_last_token(name: str) -> None:
    await check_turns(name)


@pytest.mark.asyncio
@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ALL if name not in DEFAULT])
async def test_a_conversation_of_every_other_model(name: str) -> None:
    await check_turns(name)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", DEFAULT)
async def test_a_conversation_goes_on_at_its_last_token_after_a_restart(name: str) -> None:
    first, store, said = random_tokens(PROMPT), MemoryStore(), list[int]()
    computed = PROMPT + ANSWER - 1
    for turn in range(3):
        async with serving(name, prefill_chunk=24, tails=True, storage=MemoryBackend(store)) as served:
            prompt = first if not turn else [*first, *said, *random_tokens(QUESTION, seed=turn)]
            generation = begin(served, prompt, ANSWER)
            words = await read(generation)
        assert words == uncached(name, prompt, ANSWER)
        if not turn:
            said = words
        else:
            whole = computed // PAGE * PAGE
            assert generation.cached_tokens == (computed if ends_anywhere(name) else whole)
