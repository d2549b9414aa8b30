"""Stop conditions of a generation."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asynchicache.errors import UsageError
from asynchicache.options import check_kind
from asynchicache.types import check_number

FinishReason = Literal["stop", "length", "cancelled"]


class StopRule:
    """Decides where the output of one request ends.

    Transformers' `StopStringCriteria` is unsuitable: it decodes the whole vocabulary for each new set of
    strings, which takes seconds for 128,000 tokens and would block the event loop.

    Args:
        max_new_tokens: most tokens, at least 1.
        token_ids: tokens that end the output.
        strings: the output ends with the token that completes one of these.
        vocabulary: how many ids the model has; `token_ids` are of them.

    Raises:
        UsageError: `max_new_tokens` is below 1, an id is outside the vocabulary, a string is empty, or there
            are strings and no tokenizer.
    """

    def __init__(
        self,
        max_new_tokens: int,
        token_ids: Collection[int],
        strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        vocabulary: int = sys.maxsize,
    ) -> None:
        check_number("max_new_tokens", max_new_tokens)
        check_kind("stop_token_ids", token_ids, Collection, "a collection of token ids")
        for token in token_ids:
            check_number("stop_token_ids:", token)
            if not 0 <= token < vocabulary:
                raise UsageError(f"stop_token_ids: {token} never comes: the model knows {vocabulary}, from 0")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {max_new_tokens} must be 1 at least")
        if strings and tokenizer is None:
            raise UsageError("stop strings need a tokenizer: give one to PrefixCachedModel.open")
        if not all(isinstance(text, str) and text for text in strings) or isinstance(strings, str):
            raise UsageError(f"stop {strings!r} must be a list of strings, none of them empty")
        self.max_new_tokens = max_new_tokens
        self._ids = frozenset(token_ids)
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # A token stands for at least one byte; one more token, as the previous may begin a character.
        self._tail = max((len(text.encode()) for text in strings), default=0) + 1

    def reached(self, generated: Sequence[int]) -> FinishReason | None:
        """Return why the output ends with its last token; None if it continues."""
        if generated[-1] in self._ids or self._spelt(generated):
            return "stop"
        return "length" if len(generated) >= self.max_new_tokens else None

    def _spelt(self, generated: Sequence[int]) -> bool:
        if self._tokenizer is None or not self._strings:
            return False
        text = self._tokenizer.decode(list(generated[-self._tail :]))
        return any(string in text for string in self._strings)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end tokens of the model's generation config and of the tokenizer."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ids = {ends} if isinstance(ends, int) else set(ends or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
