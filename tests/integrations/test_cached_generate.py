"""`generate` behind `prefix_cached`: the model's own results, from less computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import StoppingCriteria

from asynchicache import CacheConfig, MissReason, UsageError
from asynchicache.errors import ClosedError, InvalidTokensError
from asynchicache.integrations.transformers.generate import CachedGenerate, prefix_cached
from integrations.zoo import ALL, PAGE, random_tokens, tiny_model, tiny_spec

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


def test_misuse() -> None:
    with cached_model("llama") as cached, pytest.raises(InvalidTokensError, match="empty"):
        cached.generate(torch.ones(1, 0, dtype=torch.int64))
    with pytest.raises(ClosedError):
        cached.generate(torch.ones(1, 3, dtype=torch.int64))
