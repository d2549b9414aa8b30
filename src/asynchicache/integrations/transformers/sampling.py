"""Choose the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from asynchicache.errors import ConfigError
from asynchicache.options import check_fields

_MAX_SEED = 2**64 - 1
_COLDEST = torch.finfo(torch.float32).tiny  # a kernel may flush a smaller number to 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token and ignores the other options.
        top_p: sample from the likeliest tokens whose probabilities sum up to this. Default: 1, all.
        top_k: sample from the k likeliest tokens and any with the same logit as the k-th. Default: 0, all.
        seed: seed of the sequence's random numbers, 0 to 2**64 - 1. Default: None, a random one.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature} must be 0 or more, and finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} must be above 0, and 1 at most")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} must be a number of tokens, or 0 for all")
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise ConfigError(f"seed {self.seed} must be 0 to 2**64 - 1")


GREEDY = Sampling()


class Sampler:
    """Chooses the tokens of one sequence, with its own random number generator."""

    def __init__(self, sampling: Sampling) -> None:
        self._greedy = sampling.temperature == 0
        self._warpers = _warpers(sampling)
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Choose a token id by its logits `[vocabulary]`.

        Raises:
            RuntimeError: the largest logit is not finite: the model has failed.
        """
        if self._greedy:
            return _likeliest(logits)
        scores = logits.detach().to("cpu", torch.float32)
        # The maximum is 0; division by a small temperature may overflow to -inf, which is probability 0.
        likely = self._warpers(None, (scores - scores.max()).unsqueeze(0)).softmax(-1)
        # Draw in vocabulary order: sorted by probability, a rounding error could swap two close tokens.
        return int(torch.multinomial(likely[0], 1, generator=self._generator))


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return transformers' warpers, in the order in which its `generate` applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(max(float(sampling.temperature), _COLDEST))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def _likeliest(logits: torch.Tensor) -> int:
    # argmax treats NaN as the largest number, and returns 0 if all logits are minus infinity.
    token = logits.argmax()
    best = float(logits[token])
    if not math.isfinite(best):
        raise RuntimeError(f"the model gave {best} as its likeliest token's logit; there is no next token")
    return int(token)
