"""When a sequence has been generated to its end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asynchicache.errors import UsageError

FinishReason = Literal["stop", "length", "cancelled"]


class StopRule:
    """Where the output of one request ends.

    Not transformers' `StopStringCriteria`: it decodes the whole vocabulary for each new set of strings, which
    takes seconds for 128,000 tokens and would block the event loop.

    Args:
        max_new_tokens: 1 at least.
        token_ids: any of these is the last token.
        strings: the output ends with the token that completes any of these.
        tokenizer: reads tokens, for the strings.

    Raises:
        UsageError: no tokens wanted, an empty string, or strings without a tokenizer.
    """

    def __init__(
        self,
        max_new_tokens: int,
        token_ids: Collection[int],
        strings: Sequence[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens {max_new_tokens} must be 1 at least")
        if strings and tokenizer is None:
            raise UsageError("stop strings need a tokenizer: give one to PrefixCachedModel.open")
        if isinstance(strings, str) or not all(strings):
            raise UsageError(f"stop {strings!r} must be a list of strings, none of them empty")
        self.max_new_tokens = max_new_tokens
        self._ids = frozenset(token_ids)
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # A token stands for a byte at least. A character may be begun by the token before.
        self._tail = max((len(text.encode()) for text in strings), default=0) + 1

    def reached(self, generated: Sequence[int]) -> FinishReason | None:
        """Why the output ends with its last token, or None if it goes on."""
        if generated[-1] in self._ids or self._spelt(generated):
            return "stop"
        return "length" if len(generated) >= self.max_new_tokens else None

    def _spelt(self, generated: Sequence[int]) -> bool:
        if self._tokenizer is None or not self._strings:
            return False
        text = self._tokenizer.decode(list(generated[-self._tail :]))
        return any(string in text for string in self._strings)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an output, as the model's generation options and its tokenizer say."""
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    ids = {ends} if isinstance(ends, int) else set(ends or ())
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
