"""Log probabilities are the model's own, cold and warm, of answers and of prompts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from asynchicache.errors import CacheError, ConfigError, UsageError
from asynchicache.integrations.transformers.generation import Generation
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.integrations.transformers.scores import TokenScore, token_scores
from integrations.served import DRAWN, answer, begin, read, serving
from integrations.zoo import PAGE, VOCABULARY, random_tokens, tiny_model

pytestmark = pytest.mark.asyncio

PROMPT = random_tokens(9 * PAGE + 5)
COUNT = PAGE + 3


def own(name: str, tokens: list[int]) -> torch.Tensor:
    """What one forward of the model alone gives each token but the first, `[n - 1]`."""
    with torch.no_grad():
        logits = tiny_model(name)(torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))[:, 0]


def scored(served: PrefixCachedModel, tokens: list[int], **options: Any) -> Generation:
    return served.generate(
        tokens, max_new_tokens=COUNT, sampling=DRAWN, stop_token_ids=(), logprobs=2, **options
    )


def check(scores: list[TokenScore], tokens: list[int], expected: torch.Tensor) -> None:
    assert [score.token for score in scores] == tokens
    found = torch.tensor([score.logprob for score in scores])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    for score in scores:
        (_, best), (_, second) = score.top
        assert best >= max(second, score.logprob)
        assert dict(score.top).get(score.token, score.logprob) == score.logprob


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "jamba"])
async def test_scores_are_those_of_the_model_cold_and_warm(name: str) -> None:
    """States, windows, and states that forbid pieces; drawn tokens are scored before temperature."""
    async with serving(name, prefill_chunk=48) as served:
        for warm in (False, True):
            turn = scored(served, PROMPT)
            said = await read(turn)
            assert (turn.cached_tokens > 0) == warm
            assert turn.prompt_scores is None
            check(turn.scores, said, own(name, [*PROMPT, *said])[len(PROMPT) - 1 :])

        turn = scored(served, PROMPT, prompt_logprobs=True)
        assert await read(turn) == said
        assert turn.cached_tokens == 0
        assert turn.prompt_scores is not None
        whole = own(name, [*PROMPT, *said])
        check(turn.prompt_scores, PROMPT[1:], whole[: len(PROMPT) - 1])
        check(turn.scores, said, whole[len(PROMPT) - 1 :])


async def test_a_prompt_that_was_scored_is_in_the_cache() -> None:
    async with serving("gemma3") as served:
        turn = scored(served, PROMPT, prompt_logprobs=True)
        said = await read(turn)
        history = [*PROMPT, *said, 1]
        again = begin(served, history, 2)
        await read(again)
        assert again.cached_tokens == (len(PROMPT) + COUNT - 1) // PAGE * PAGE


async def test_no_one_pays_who_asks_for_no_scores() -> None:
    async with serving("gemma3") as served:
        turn = begin(served, PROMPT[:20], 2)
        await read(turn)
        assert (turn.scores, turn.prompt_scores) == ([], None)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prompt_logprobs": True}, UsageError, "prompt_logprobs without logprobs"),
        ({"logprobs": -1}, UsageError, f"0 to {VOCABULARY}"),
        ({"logprobs": VOCABULARY + 1}, UsageError, f"0 to {VOCABULARY}"),
        ({"logprobs": True}, ConfigError, "whole number"),
    ],
)
async def test_scores_of_nothing_are_refused(
    options: dict[str, Any], error: type[CacheError], words: str
) -> None:
    async with serving("gemma3") as served:
        with pytest.raises(error, match=words):
            served.generate([1], max_new_tokens=1, **options)
        await answer(served, [1], 1)


async def test_a_long_row_of_scores_is_that_of_each_row() -> None:
    logits = torch.randn(70, 11, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = [row % 11 for row in range(70)]
    scores = token_scores(logits, tokens, 0)
    assert scores == [
        token_scores(row.unsqueeze(0), [token], 0)[0] for row, token in zip(logits, tokens, strict=True)
    ]
    assert all(score.top == () and math.isfinite(score.logprob) for score in scores)
