"""Log probabilities of tokens, as the model itself gives them: before temperature, top-p and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from asynchicache.errors import UsageError
from asynchicache.types import check_number

_ROWS = 32
"""Rows that are converted at once: of a large vocabulary, a row takes half a megabyte."""


class TokenScore(NamedTuple):
    """The log probability of one token, given those before it.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens in its place, with theirs, the likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_scores(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """Score each of `tokens` `[n]` by the logits in its place, `[n, vocabulary]`.

    Args:
        logits: of the model, in any floating dtype; `log_softmax` is computed in float32.
        tokens: one for each row.
        top: how many of the likeliest tokens to name.
    """
    scores: list[TokenScore] = []
    for begin in range(0, len(tokens), _ROWS):
        rows = logits[begin : begin + _ROWS].float().log_softmax(-1)
        chosen = tokens[begin : begin + _ROWS]
        places = torch.tensor(chosen, device=rows.device).unsqueeze(1)
        own = rows.gather(1, places)[:, 0].tolist()
        best = rows.topk(min(top, rows.shape[-1]))
        likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for token, logprob, (ids, values) in zip(chosen, own, likeliest, strict=True):
            scores.append(TokenScore(token, logprob, tuple(zip(ids, values, strict=True))))
    return scores


def check_scores(logprobs: int | None, vocabulary: int, *, prompt: bool) -> None:
    """
    Raises:
        UsageError: `logprobs` is no number of tokens, or the prompt is to be scored without it.
    """
    if logprobs is None:
        if prompt:
            raise UsageError("prompt_logprobs without logprobs: say how many likely tokens, or 0")
        return
    check_number("logprobs", logprobs)
    if not 0 <= logprobs <= vocabulary:
        raise UsageError(f"logprobs {logprobs} must be 0 to {vocabulary}, the tokens that the model knows")
