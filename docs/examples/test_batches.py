"""Tests of the engine in batches.py, over real models: dense, with windows, and hybrid."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import torch
from batches import Batch, Engine
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from asynchicache import HybridCache, InvalidTokensError, ModelSpec
from asynchicache.integrations.transformers.demo_model import randomize_weights
from asynchicache.testing.interrupts import Interrupted, cancel_this_task

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 8,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
STATES = {"layer_types": ["linear_attention", "full_attention"]}
NO_END = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
RULES = [token * 7 % 98 for token in range(21)]  # a beginning that all prompts share
PROMPTS = [[*RULES, *range(5, 5 + more)] for more in (1, 4, 11, 12, 30)] + [RULES[:3]]


@pytest.fixture(params=["dense", "windows", "hybrid"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    sizes = SIZES | NO_END | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    build = {
        "dense": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "windows": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **WINDOWS)),
        "hybrid": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **STATES, **DELTA)),
    }
    model = build[request.param]().eval()
    randomize_weights(model, seed=1)
    return model


@pytest.fixture
def opened(model, small_cache):
    spec = ModelSpec.from_config(model.config, page_size=8)
    return small_cache(spec, device_slots={pool.name: 80 for pool in spec.owners})


def alone(model: PreTrainedModel, prompt: Sequence[int], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
    return found[0, len(prompt) :].tolist()


async def answer(engine: Engine, prompt: Sequence[int], most: int = 20) -> list[int]:
    return [token async for token in engine.generate(prompt, most)]


def hits(cache: HybridCache) -> int:
    return sum(cache.statistics().served.hit_tokens.values())


@pytest.mark.asyncio
async def test_rows_of_a_batch_are_answered_as_alone(model, opened):
    async with opened as cache, Engine(model, cache, most_rows=4) as engine:
        turns, before = PROMPTS, 0
        for most in (20, 9):
            before = hits(cache)
            got = await asyncio.gather(*(answer(engine, prompt, most + n) for n, prompt in enumerate(turns)))
            assert got == [alone(model, prompt, most + n) for n, prompt in enumerate(turns)]
            turns = [[*prompt, *more, 1, 2, 3] for prompt, more in zip(turns, got, strict=True)]
        # Of each second prompt all whole pages that the first turn computed.
        assert hits(cache) - before == sum((len(one) + 19 + n) // 8 * 8 for n, one in enumerate(PROMPTS))


@pytest.mark.asyncio
async def test_a_forward_that_fails_ends_its_rows_and_no_others(model, opened, monkeypatch):
    async with opened as cache, Engine(model, cache) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(Batch, "change", lambda batch, rows: torch.zeros(2) + torch.zeros(3))
            got = await asyncio.gather(
                *(answer(engine, prompt) for prompt in PROMPTS), return_exceptions=True
            )
            assert all("must match the size" in str(error) for error in got)
        assert await answer(engine, PROMPTS[0]) == alone(model, PROMPTS[0], 20)
        with pytest.raises(InvalidTokensError, match="99 is outside"):
            await answer(engine, [*RULES, 99])


@pytest.mark.asyncio
@pytest.mark.parametrize("model", ["hybrid"], indirect=True)
async def test_a_client_may_leave_at_every_await_and_after_any_token(model, opened):
    async with opened as cache, Engine(model, cache) as engine:
        right = alone(model, PROMPTS[2], 20)
        for at in range(1, 300):
            leaving = Interrupted(answer(engine, [*RULES, 1]), at, cancel_this_task)
            staying = answer(engine, PROMPTS[2]) if at % 5 == 0 else asyncio.sleep(0, right)
            _, got = await asyncio.gather(as_a_task(leaving), staying, return_exceptions=True)
            assert got == right
            if not leaving.struck:
                break
        assert at > 20
        assert engine.rows == []
        tokens = engine.generate(PROMPTS[1], 20)
        assert await anext(tokens) == alone(model, PROMPTS[1], 1)[0]
        await tokens.aclose()
        assert engine.rows == []


async def as_a_task(client: Interrupted) -> None:
    await client
