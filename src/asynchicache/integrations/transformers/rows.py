"""Uniform access to the token rows and states of transformers' cache layers of all supported kinds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.layers import StateMemory

KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    DummyLayer,
)
"""Exact types: a subclass may have content that is not copied here."""

CacheLayer = DynamicLayer | LinearAttentionLayer | DummyLayer


def held_fields(layer: DynamicLayer) -> set[str]:
    """Return the per-token fields of a layer, named as in `layers.PageMemory`."""
    names = {"keys", "values"} if layer.is_initialized else set()
    if isinstance(layer, DynamicIndexedLayer):
        names |= {"indexer_keys"} if layer.is_indexer_initialized else set()
        names |= {"indexer_position_ids"} if layer.indexer_position_ids is not None else set()
    return names


def first_held(layer: DynamicLayer) -> int:
    """Return the index of the first token whose keys a layer still has; 0 unless it has a window."""
    held: int = layer.keys.shape[-2] if layer.is_initialized else 0
    return int(layer.get_seq_length()) - held


def rows_of(layer: DynamicLayer, field: str, row: int) -> torch.Tensor:
    """Return one field of one sequence, for all tokens that the layer holds: `[tokens, *shape]`."""
    held: torch.Tensor = getattr(layer, field)
    if field == "indexer_keys":  # [batch, tokens, width]
        return held[row]
    if field == "indexer_position_ids":  # [3, batch, tokens]
        return held[:, row].T
    return held[row].transpose(0, 1)  # [batch, heads, tokens, dim]


def fill_rows(layer: DynamicLayer, rows: Mapping[str, torch.Tensor], tokens: int) -> None:
    """Copy the last rows of a sequence of `tokens` tokens to an empty layer.

    Args:
        layer: an empty layer.
        rows: by field, `[at most tokens, *shape]`; for a window layer at least all rows in the window.
        tokens: length of the sequence.
    """
    fields = {name: rows[name].transpose(0, 1).contiguous()[None] for name in ("keys", "values")}
    if isinstance(layer, DynamicSlidingWindowLayer):
        fields = {name: held[:, :, -min(tokens, layer.sliding_window - 1) :] for name, held in fields.items()}
    layer.update(fields["keys"], fields["values"])
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens
    if "indexer_keys" in rows:
        layer.update_indexer(rows["indexer_keys"][None])
    if "indexer_position_ids" in rows:
        layer.indexer_position_ids = rows["indexer_position_ids"].T[:, None].clone()


# States


def states_of(layer: LinearAttentionLayer, row: int) -> StateMemory:
    """Return the states of one sequence, as views `[1, ...]`."""
    conv, recurrent = layer.is_conv_states_initialized, layer.is_recurrent_states_initialized
    return StateMemory(
        {number: layer.conv_states[number][row : row + 1] for number, known in conv.items() if known},
        {
            number: layer.recurrent_states[number][row : row + 1]
            for number, known in recurrent.items()
            if known
        },
    )


def check_states(found: StateMemory, index: int, memory: StateMemory) -> None:
    """
    Raises:
        UsageError: the layer has other states than the pool, or none yet.
    """
    if not found.conv:
        raise UsageError(f"layer {index} has no state yet; run a forward first")
    if (set(found.conv), set(found.recurrent)) != (set(memory.conv), set(memory.recurrent)):
        raise UsageError(
            f"layer {index} keeps states {sorted(found.conv)} and {sorted(found.recurrent)}, its pool "
            f"{sorted(memory.conv)} and {sorted(memory.recurrent)}; the spec was made for another model"
        )


def fill_states(layer: LinearAttentionLayer, memory: StateMemory, slot: int) -> None:
    """Fill an empty layer through its update methods, which copy and mark the state as present."""
    for number, conv in memory.conv.items():
        layer.update_conv_state(conv[slot : slot + 1], state_idx=number)
    for number, recurrent in memory.recurrent.items():
        layer.update_recurrent_state(recurrent[slot : slot + 1], state_idx=number)
