"""Forwards of a transformers model on a cache, with explicit positions and mask."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache.errors import InvalidTokensError, UsageError
from asynchicache.integrations.transformers.weights import no_model
from asynchicache.options import check_kind
from asynchicache.types import as_count, token_array

_FED_ONE_BY_ONE = frozenset({"jamba"})
"""Mamba-1: its scan of several tokens starts from a zero state and ignores the cached one."""

_UNPADDED = frozenset({"deepseek_v4"})
"""Padding would take part in compressed entries, and shift the runs of tokens that they are made of."""


def prefill(
    model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """Run `tokens[start:stop]` of one sequence on a cache that holds `tokens[:start]`.

    Uses one forward; after a prefix, one forward per token if the model would ignore its state (Jamba).

    Args:
        cache: extended in place to `stop` tokens.
        tokens: the sequence from its beginning.
        start: tokens in the cache.
        stop: end, at most `len(tokens)`; states can be saved only there.

    Returns:
        logits after token `stop - 1`, `[vocabulary]`.

    Raises:
        UsageError: the range is empty or not within the tokens, or the cache has another length.
        InvalidTokensError: a token is no id of the model's vocabulary.
    """
    check_kind("model", model, torch.nn.Module, no_model(model))
    if not isinstance(cache, DynamicCache):
        raise UsageError(f"cache {cache!r:.200} is none of transformers: pass what restore() returned")
    start, stop = as_count("prefill", start), as_count("prefill", stop)
    if not 0 <= start < stop <= len(tokens):
        raise UsageError(f"tokens {start} to {stop} are no range within {len(tokens)} tokens")
    piece = known_tokens(tokens[start:stop], vocabulary_of(model))
    return feed(model, cache, piece.tolist(), start)


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many token ids a model has embeddings for.

    A later stage of a pipeline has none: what it gets are hidden states, and any id is as good.
    """
    return getattr(model.get_input_embeddings(), "num_embeddings", sys.maxsize)


def known_tokens(tokens: Iterable[int], vocabulary: int) -> array[int]:
    """
    Raises:
        InvalidTokensError: as of `token_array`, or an id is outside the model's vocabulary.
    """
    ids = token_array(tokens)
    if max(ids) >= vocabulary:
        raise InvalidTokensError(f"token id {max(ids)}: the model knows {vocabulary}, from 0")
    return ids


def feed(
    model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int], start: int, *, every: bool = False
) -> torch.Tensor:
    """As `prefill`, from the new `tokens` alone; at least one, after `start` tokens in the cache.

    Returns:
        logits after the last token, `[vocabulary]`; with `every`, after each of `tokens`, `[n, vocabulary]`.
    """
    step = 1 if start and feeds_one_by_one(model) else len(tokens)
    kept: list[torch.Tensor] = []
    for begin in range(0, len(tokens), step):
        ids = torch.tensor([tokens[begin : begin + step]], dtype=torch.int64, device=model.device)
        logits = _forward(model, cache, ids, start + begin, logits=ids.shape[1] if every else 1)[0]
        kept = [*kept, logits] if every else [logits]
    return torch.cat(kept) if every else kept[0][-1]


def feeds_one_by_one(model: PreTrainedModel) -> bool:
    """Return whether the model must compute one token at a time after a prefix."""
    return model.config.get_text_config(decoder=True).model_type in _FED_ONE_BY_ONE


def steady_tokens(model: PreTrainedModel) -> int | None:
    """Return up to which length keys follow from the tokens before them alone; None for any length.

    Beyond it, some rotary embeddings depend on the length of the longest sequence of a forward.
    """
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    found = given.values() if given and all(isinstance(one, dict) for one in given.values()) else [given]
    limits = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    steady = [
        one.get(limit) or getattr(config, limit)
        for one in found
        if (limit := limits.get(one.get("rope_type", "")))
    ]
    return min(steady, default=None)


def pads(model: PreTrainedModel) -> bool:
    """Return whether sequences of different lengths can be one batch, padded on the left."""
    return model.config.get_text_config(decoder=True).model_type not in _UNPADDED


def decode(
    model: PreTrainedModel,
    cache: DynamicCache,
    last_tokens: Sequence[int],
    length: int,
    *,
    padding: Sequence[int] = (),
) -> torch.Tensor:
    """Run one decode step of a batch whose sequences all end at the end of the cache.

    Args:
        cache: extended in place to `length + 1` tokens.
        last_tokens: the next token of each sequence.
        length: tokens in the cache, including padding.
        padding: padding tokens on the left of each sequence. Default: none.

    Returns:
        logits after these tokens, `[batch, vocabulary]`.

    Raises:
        UsageError: the cache has another length.
    """
    ids = torch.tensor(last_tokens, dtype=torch.int64, device=model.device).unsqueeze(1)
    return _forward(model, cache, ids, length, padding if any(padding) else ())[:, -1]


def _forward(
    model: PreTrainedModel,
    cache: DynamicCache,
    ids: torch.Tensor,
    start: int,
    padding: Sequence[int] = (),
    *,
    logits: int = 1,
) -> torch.Tensor:
    """Return logits after the last of `ids` `[batch, n]`, which follow `start` cached tokens.

    Args:
        logits: after how many of them, `[batch, logits, vocabulary]`.
    """
    held = cache.get_seq_length()
    if held != start:
        raise UsageError(f"the cache holds {held} tokens, not {start}")
    batch, stop = len(ids), start + ids.shape[1]
    before = torch.tensor(padding or [0] * batch, device=ids.device).unsqueeze(1)
    with torch.no_grad():  # inference mode would mark the cache's tensors, and generate could not update them
        output = model(
            input_ids=ids,
            # Without explicit positions, Bamba restarts them at 0 in every forward.
            position_ids=torch.arange(start, stop, device=ids.device).expand(batch, -1) - before,
            # A mask inferred from the padding token's id would drop that token from a prompt.
            attention_mask=(torch.arange(stop, device=ids.device).expand(batch, -1) >= before).long(),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits,
        )
    kept: torch.Tensor = output.logits[:, -logits:]
    return kept
