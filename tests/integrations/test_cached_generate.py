"""`generate` behind `prefix_cached`: the model's own results, from less computation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from asynchicache import CacheConfig, CapacityError, MissReason, PrefixCachedModel, UsageError
from asynchicache.errors import ClosedError, InvalidTokensError
from asynchicache.integrations.transformers.demo_model import randomize_weights
from asynchicache.integrations.transformers.generate import CachedGenerate, prefix_cached
from integrations.zoo import ALL, PAGE, random_tokens, tiny_model, tiny_spec
from integrations.zoo_configs import MODELS

PROMPT, ANSWER, QUESTION = 54, 20, 11
DEFAULT = ("lfm3", "llama")
NO_REPEATS = {"no_repeat_ngram_size": 1, "min_new_tokens": ANSWER, "do_sample": False}
"""None twice: random weights would soon repeat one for ever."""


@contextmanager
def cached_model(name: str, slots: int = 32) -> Iterator[CachedGenerate]:
    config = CacheConfig(device_slots={pool.name: slots for pool in tiny_spec(name).owners})
    with prefix_cached(tiny_model(name), config=config, page_size=PAGE) as cached:
        yield cached


def uncached(name: str, ids: torch.Tensor, **options: object) -> torch.Tensor:
    return tiny_model(name).generate(ids, attention_mask=torch.ones_like(ids), **options)


def check_two_turns(name: str) -> None:
    first = torch.tensor([random_tokens(PROMPT)])
    options = {"max_new_tokens": ANSWER, **NO_REPEATS}
    with cached_model(name) as cached:
        text = cached.generate(first, **options)
        assert torch.equal(text, uncached(name, first, **options))
        assert cached.hit.tokens == 0
        second = torch.cat([text, torch.tensor([random_tokens(QUESTION, seed=1)])], dim=1)
        assert torch.equal(cached.generate(second, **options), uncached(name, second, **options))
        assert cached.hit.tokens == (PROMPT + ANSWER - 1) // PAGE * PAGE
        assert cached.statistics().served.requests == 2


@pytest.mark.parametrize("name", DEFAULT)
def test_two_turns(name: str) -> None:
    check_two_turns(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ALL if name not in DEFAULT])
def test_two_turns_of_every_other_model(name: str) -> None:
    check_two_turns(name)


def test_options_and_results_are_those_of_generate() -> None:
    ids = torch.tensor([random_tokens(PROMPT)])
    options = {"max_new_tokens": 8, "do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    with cached_model("llama") as cached:
        for _ in range(2):  # cold, then resumed
            torch.manual_seed(3)
            ours = cached.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            torch.manual_seed(3)
            theirs = uncached("llama", ids, **options)
            assert torch.equal(ours.sequences, theirs.sequences)
            torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-4, rtol=1e-4)
        assert cached.hit.tokens == 3 * PAGE


def test_what_the_cache_cannot_hold_is_generated_nevertheless() -> None:
    ids = torch.tensor([random_tokens(5 * PAGE)])
    for slots in (4, 5):  # too few for the prompt, for the output
        with cached_model("llama", slots) as cached:
            expected = uncached("llama", ids, max_new_tokens=PAGE)
            assert torch.equal(cached.generate(ids, max_new_tokens=PAGE), expected)
            reason = MissReason.DEVICE_CAPACITY if slots == 4 else MissReason.COLD
            assert cached.hit.reason is reason


class Fails(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: object) -> torch.Tensor:
        raise RuntimeError("made to fail")


def test_a_model_that_raises_leaves_the_cache_usable() -> None:
    ids = torch.tensor([random_tokens(PROMPT)])
    with cached_model("qwen3_5") as cached:
        with pytest.raises(RuntimeError, match="made to fail"):
            cached.generate(ids, max_new_tokens=4, stopping_criteria=[Fails()])
        assert torch.equal(cached.generate(ids, max_new_tokens=4), uncached("qwen3_5", ids, max_new_tokens=4))


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int64), {}, r"\[2, 3\]; generate takes a tensor \[1, length\]"),
        ([1, 2], {}, "are list"),
        (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.tensor([[0, 1, 1]])}, "hides tokens"),
        (torch.ones(1, 3, dtype=torch.int64), {"num_beams": 2}, "num_beams 2 must be 1"),
        (torch.ones(1, 3, dtype=torch.int64), {"use_cache": False}, "use_cache False"),
        (torch.ones(1, 3, dtype=torch.int64), {"past_key_values": ()}, "past_key_values=...+the cache gives"),
    ],
)
def test_what_is_not_served(ids: object, options: dict[str, object], message: str) -> None:
    with cached_model("llama") as cached, pytest.raises(UsageError, match=message):
        cached.generate(ids, **options)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [9.0] * 8,
        "original_max_position_embeddings": 4 * PAGE,
    },
}


def rotating(kind: str) -> LlamaForCausalLM:
    """A model whose keys depend on the length of the sequence beyond 64 tokens."""
    longest = 4 * PAGE if kind == "dynamic" else 64 * PAGE
    config = LlamaConfig(
        **{**MODELS["llama"][1], "max_position_embeddings": longest}, rope_parameters=ROPES[kind]
    )
    model = LlamaForCausalLM(config)
    randomize_weights(model, seed=1)
    return model.eval()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ROPES)
async def test_requests_whose_keys_would_depend_on_their_length(kind: str) -> None:
    config = CacheConfig(device_slots={"kv": 64})
    async with PrefixCachedModel.open(rotating(kind), config=config, page_size=PAGE) as served:
        with pytest.raises(CapacityError, match=r"60 \+ 5 tokens: beyond 64, the rotary embedding"):
            served.generate(random_tokens(60), max_new_tokens=5)
        answer = served.generate(random_tokens(60), max_new_tokens=4, stop_token_ids=())
        assert len([token async for token in answer]) == 4


@pytest.mark.parametrize("kind", ROPES)
def test_keys_that_depend_on_the_length_of_the_sequence(kind: str) -> None:
    """Pages of a short prompt are not those of a long one, and the other way round."""
    model = rotating(kind)
    twin = copy.deepcopy(model)  # its frequencies also depend on what it was asked before
    tokens = random_tokens(8 * PAGE, seed=4)
    hits = []
    with prefix_cached(model, config=CacheConfig(device_slots={"kv": 64}), page_size=PAGE) as cached:
        for length in (3 * PAGE, 7 * PAGE, 3 * PAGE + 5, 7 * PAGE + 5, 4 * PAGE - 6):  # the last crosses it
            ids = torch.tensor([tokens[:length]])
            options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            assert torch.equal(cached.generate(ids, **options), twin.generate(ids, **options))
            hits.append(cached.hit.tokens)
    assert hits == [0, 0, 3 * PAGE, 0, 3 * PAGE]


def test_misuse() -> None:
    with cached_model("llama") as cached, pytest.raises(InvalidTokensError, match="empty"):
        cached.generate(torch.ones(1, 0, dtype=torch.int64))
    with pytest.raises(ClosedError):
        cached.generate(torch.ones(1, 3, dtype=torch.int64))
