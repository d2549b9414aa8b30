"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asynchicache.errors import ConfigError

_MAX_SEED = 2**64 - 1
_COLDEST = torch.finfo(torch.float32).tiny  # what is smaller may be 0 to a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The likeliest token, or one that is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token, whatever the rest says.
        top_p: draw among the likeliest tokens whose probabilities reach this sum. Default: 1, all.
        top_k: draw among so many of the likeliest tokens. Default: 0, all.
        seed: of the draws, 0 to 2**64 - 1; None draws one.

    Raises:
        ConfigError: a value is out of its range; names it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
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
    """Chooses the tokens of one sequence; drawing goes on where it was."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """A token id by its logits `[vocabulary]`.

        Raises:
            RuntimeError: the best of them is no finite number: the model has failed.
        """
        if self._sampling.temperature == 0:
            return _likeliest(logits)
        scores = logits.detach().to("cpu", torch.float32)
        # Below the likeliest's 0 a division may overflow: to minus infinity, which is no probability.
        scores = (scores - scores.max()) / max(self._sampling.temperature, _COLDEST)
        # In the order of the vocabulary: among ranks the smallest error would swap two close tokens.
        likely = self._limited(scores).softmax(-1)
        return int(torch.multinomial(likely, 1, generator=self._generator))

    def _limited(self, scores: torch.Tensor) -> torch.Tensor:
        """`scores` without those that `top_k` and `top_p` leave out."""
        if not self._sampling.top_k and self._sampling.top_p == 1:
            return scores
        ranked, tokens = scores.sort(descending=True)
        reached = ranked[: self._sampling.top_k or len(ranked)].softmax(-1).cumsum(-1)
        # The first token whose predecessors reach the sum already is out; the likeliest never is.
        kept = tokens[: 1 + int((reached[:-1] < self._sampling.top_p).sum())]
        return torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept])


def _likeliest(logits: torch.Tensor) -> int:
    """`argmax` takes NaN for the largest number, and finds token 0 where all are minus infinity."""
    token = logits.argmax()
    best = float(logits[token])
    if not math.isfinite(best):
        raise RuntimeError(f"the model gave {best} as its likeliest token's logit; there is no next token")
    return int(token)
