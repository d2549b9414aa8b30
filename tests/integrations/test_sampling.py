"""Tokens from logits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from asynchicache.integrations.transformers.sampling import GREEDY, Sampler, Sampling

LOGITS = torch.tensor([0.5, 0.05, 0.25, 0.2]).log()


def draws(count: int, **values: float) -> Counter[int]:
    sampler = Sampler(Sampling(temperature=1.0, seed=1, **values))
    return Counter(sampler.choose(LOGITS) for _ in range(count))


def test_the_likeliest() -> None:
    assert Sampler(GREEDY).choose(LOGITS) == 0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=1)], ids=["greedy", "drawn"])
def test_logits_that_are_no_numbers_are_no_token(sampling: Sampling, broken: float) -> None:
    """A model that overflows must not seem to say token 0."""
    with pytest.raises(RuntimeError):
        Sampler(sampling).choose(torch.full((4,), broken))


def test_tokens_that_cannot_be_are_no_failure() -> None:
    assert Sampler(GREEDY).choose(torch.tensor([-torch.inf, 1.0, -torch.inf])) == 1


def test_draws_follow_the_probabilities() -> None:
    found = draws(4000)
    shares = [found[token] / 4000 for token in range(4)]
    assert shares == pytest.approx([0.5, 0.05, 0.25, 0.2], abs=0.03)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.6}, {0, 2}),
        ({"top_p": 0.94}, {0, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the two that are left the first has two thirds
    ],
)
def test_few_are_left(values: dict[str, float], kept: set[int]) -> None:
    assert set(draws(300, **values)) == kept


@pytest.mark.parametrize(
    "values",
    [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8}, {"temperature": 0.3, "top_p": 0.5}],
)
def test_draws_are_those_of_a_plain_computation(values: dict[str, float]) -> None:
    """Sort, cut and draw by hand: the warpers leave the same tokens, with the same probabilities."""
    sampling = Sampling(**{"temperature": 0.8, "seed": 3, **values})
    sampler, generator = Sampler(sampling), torch.Generator().manual_seed(3)
    seeded = torch.Generator().manual_seed(0)
    for _ in range(40):
        logits = torch.randn(2000, generator=seeded) * 3
        scores = (logits - logits.max()) / sampling.temperature
        ranked, tokens = scores.sort(descending=True)
        reached = ranked[: sampling.top_k or len(ranked)].softmax(-1).cumsum(-1)
        kept = tokens[: 1 + int((reached[:-1] < sampling.top_p).sum())]
        left = torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept]).softmax(-1)
        assert sampler.choose(logits) == int(torch.multinomial(left, 1, generator=generator))


def test_a_seed_says_all() -> None:
    first, second = (Sampler(Sampling(temperature=2.0, seed=5)) for _ in range(2))
    assert [first.choose(LOGITS) for _ in range(50)] == [second.choose(LOGITS) for _ in range(50)]


def test_close_logits_swap_nothing() -> None:
    """Two runs of a model differ in their last bits; the tokens are to be the same."""
    close = torch.full((1000,), 1.0) + torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e-4
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-6
    one, other = (Sampler(Sampling(temperature=1.0, seed=5)) for _ in range(2))
    assert [one.choose(close) for _ in range(50)] == [other.choose(close + noise) for _ in range(50)]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 1e-320])
def test_next_to_no_temperature_takes_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([1.0, 40.0, -7.0, 39.0, -torch.inf])
    assert Sampler(Sampling(temperature=temperature)).choose(logits) == 1
    assert Sampler(Sampling(temperature=temperature)).choose(-logits[:-1]) == 2


@pytest.mark.parametrize("top_p", [1e-30, 1e-50, 1e-320])
def test_the_likeliest_is_within_any_top_p(top_p: float) -> None:
    assert Sampler(Sampling(temperature=1, top_p=top_p)).choose(LOGITS) == 0
