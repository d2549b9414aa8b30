"""`generate` on restored caches: the tokens of an uncached run, and second turns resumed inside the first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from asynchicache import HybridCache, Request
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import prefill
from integrations.tiers import loaded, open_tiers, publish
from integrations.zoo import ALL, FEW, PAGE, random_tokens, tiny_model

pytestmark = pytest.mark.asyncio

PROMPT, ANSWER, QUESTION = 70, 40, 21
FED_BY_PREFILL = ("jamba",)
"""Its `generate` would feed what is behind the prefix in one forward, which drops the state."""


class PageTap(StoppingCriteria):
    """Never stops; calls `save(tokens)` whenever the model's memory holds whole pages of them."""

    def __init__(self, save: Callable[[list[int]], None]) -> None:
        self._save = save

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: object) -> torch.Tensor:
        held = input_ids[0, :-1].tolist()  # the last token was not fed yet
        if len(held) % PAGE == 0:
            self._save(held)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(
    name: str, tokens: list[int], held: DynamicCache | None, tap: PageTap | None = None
) -> list[int]:
    """`ANSWER` greedy tokens, none twice: random weights would soon repeat one for ever."""
    ids = torch.tensor([tokens])
    output = tiny_model(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),  # a mask inferred from the padding token would drop some
        past_key_values=held,
        stopping_criteria=[tap] if tap else None,
        do_sample=False,
        max_new_tokens=ANSWER,
        min_new_tokens=ANSWER,
        no_repeat_ngram_size=1,
    )
    return output[0, len(tokens) :].tolist()


async def turn(
    name: str, cache: HybridCache, bridge: CacheBridge, tokens: list[int]
) -> tuple[int, list[int]]:
    """One turn of a conversation: how much was restored, and the answer. The model has its own thread."""
    loop = asyncio.get_running_loop()
    async with loaded(cache, tokens) as request:
        held, hit = bridge.restore(request), request.hit.tokens
        await fill(name, request, bridge, held)

        async def keep(known: list[int]) -> None:
            request.append(known[len(request.tokens) :])
            await publish(request, bridge, held, request.reserved, len(known))

        def save(known: list[int]) -> None:
            if len(known) > request.reserved:
                asyncio.run_coroutine_threadsafe(keep(known), loop).result()

        answer = await asyncio.to_thread(generate, name, tokens, held, PageTap(save))
    await cache.drain()
    return hit, answer


async def fill(name: str, request: Request, bridge: CacheBridge, held: DynamicCache) -> None:
    """Prefill up to the last whole page of the prompt, and publish that; the rest is left to `generate`."""
    tokens, done = list(request.tokens), request.hit.tokens
    ends = {*request.cuts, (len(tokens) - 1) // PAGE * PAGE}
    if name in FED_BY_PREFILL:
        ends.add(len(tokens) - 1)
    for end in sorted(end for end in ends if end > done):
        prefill(tiny_model(name), held, tokens, done, end)
        await publish(request, bridge, held, done, end)
        done = end


async def check_two_turns(name: str) -> None:
    prompt = random_tokens(PROMPT)
    async with open_tiers(name) as (cache, bridge):
        hit, answer = await turn(name, cache, bridge, prompt)
        assert (hit, answer) == (0, generate(name, prompt, None))
        await cache.flush()
        second = [*prompt, *answer, *random_tokens(QUESTION, seed=1)]
        hit, answer = await turn(name, cache, bridge, second)
        assert PROMPT < hit <= PROMPT + ANSWER  # inside of what was generated
        assert answer == generate(name, second, None)
        assert len(set(answer)) == ANSWER


@pytest.mark.parametrize("name", FEW)
async def test_two_turns(name: str) -> None:
    await check_two_turns(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ALL if name not in FEW])
async def test_two_turns_of_every_other_model(name: str) -> None:
    await check_two_turns(name)


async def test_jamba_needs_prefill() -> None:
    """Why: with more than a token to go its own `generate` answers something else."""
    prompt = random_tokens(PROMPT)
    async with open_tiers("jamba") as (cache, bridge):
        await turn("jamba", cache, bridge, prompt)
        async with loaded(cache, prompt) as request:
            assert request.hit.tokens == 4 * PAGE
            held = bridge.restore(request)
        assert generate("jamba", prompt, held) != generate("jamba", prompt, None)
