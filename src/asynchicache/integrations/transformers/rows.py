"""Uniform access to the token rows and states of transformers' cache layers of all supported kinds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.layers import StateMemory

KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    DummyLayer,
    DeepseekV4HCACache,
    DeepseekV4CSACache,
)
"""Exact types: a subclass may have content that is not copied here."""

CacheLayer = DynamicLayer | LinearAttentionLayer | DummyLayer


def held_fields(layer: DynamicLayer) -> set[str]:
    """Return the per-token fields of a layer, named as in `layers.LayerTensors`."""
    if isinstance(layer, DeepseekV4HCACache):
        return {f"compressed_kv.{name}" for name, held in layer.compressed_kv.items() if held is not None}
    names = {"keys", "values"} if layer.is_initialized else set()
    if isinstance(layer, DynamicIndexedLayer):
        names |= {"indexer_keys"} if layer.is_indexer_initialized else set()
        names |= {"indexer_position_ids"} if layer.indexer_position_ids is not None else set()
    return names


def first_held(layer: DynamicLayer) -> int:
    """Return the index of the first token whose rows a layer still has; 0 unless its pages are a window."""
    if isinstance(layer, DeepseekV4HCACache):
        return 0
    held: int = layer.keys.shape[-2] if layer.is_initialized else 0
    return int(layer.get_seq_length()) - held


def rows_of(layer: DynamicLayer, field: str, row: int) -> torch.Tensor:
    """Return one field of one sequence, for all tokens that the layer holds: `[entries, *shape]`."""
    name, _, entry = field.partition(".")
    held: torch.Tensor = getattr(layer, name)[entry] if entry else getattr(layer, name)
    if entry:  # [batch, entries, width]
        return held[row]
    if field == "indexer_keys":  # [batch, tokens, width]
        return held[row]
    if field == "indexer_position_ids":  # [3, batch, tokens]
        return held[:, row].T
    return held[row].transpose(0, 1)  # [batch, heads, tokens, dim]


def fill_rows(layer: DynamicLayer, rows: Mapping[str, torch.Tensor], tokens: int, inside: int) -> None:
    """Copy the last rows of a sequence of `tokens` tokens to an empty layer.

    Args:
        layer: an empty layer.
        rows: by field, `[entries, *shape]`; for a window layer at least all rows in the window.
        tokens: length of the sequence.
        inside: tokens of its last page, if that is not full; they are kept even if they left the window,
            because the page is written again when it is.
    """
    if isinstance(layer, DeepseekV4HCACache):
        _fill_entries(layer, rows)
        return
    fields = {name: rows[name].transpose(0, 1).contiguous()[None] for name in ("keys", "values")}
    if isinstance(layer, DynamicSlidingWindowLayer):
        keep = min(tokens, max(layer.sliding_window - 1, inside))
        fields = {name: held[:, :, -keep:] for name, held in fields.items()}
    layer.update(fields["keys"], fields["values"])
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens
    if "indexer_keys" in rows:
        layer.update_indexer(rows["indexer_keys"][None])
    if "indexer_position_ids" in rows:
        layer.indexer_position_ids = rows["indexer_position_ids"].T[:, None].clone()


def _fill_entries(layer: DeepseekV4HCACache, rows: Mapping[str, torch.Tensor]) -> None:
    for name in layer.compressed_kv:
        layer.update_compressor_states(name, rows[f"compressed_kv.{name}"][None])


# States


def has_tails(cache: DynamicCache) -> bool:
    """Return whether windows belong to the states of a prefix (DeepSeek-V4), not to its pages."""
    return any(isinstance(layer, DeepseekV4HCACache) for layer in cache.layers)


def states_of(layer: LinearAttentionLayer | DynamicSlidingWindowLayer, row: int) -> StateMemory:
    """Return the states of one sequence `[1, ...]`, as views where the layer holds them in that form."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return StateMemory({}, {}, _tail_of(layer, row))
    conv, recurrent = layer.is_conv_states_initialized, layer.is_recurrent_states_initialized
    return StateMemory(
        {number: layer.conv_states[number][row : row + 1] for number, known in conv.items() if known},
        {
            number: layer.recurrent_states[number][row : row + 1]
            for number, known in recurrent.items()
            if known
        },
        {},
    )


def _tail_of(layer: DynamicSlidingWindowLayer, row: int) -> dict[str, torch.Tensor]:
    """Return the last rows of a compressing layer, or of a plain window beside such layers.

    Raises:
        UsageError: a run of tokens is open, whose inputs no pool keeps.
    """
    if not layer.is_initialized:
        return {}
    window = layer.keys[row : row + 1, 0]  # keys are values too
    missing = layer.sliding_window - 1 - window.shape[1]  # the sequence is shorter than the window
    found = {"window": pad(window, (0, 0, missing, 0))}
    for name, held in getattr(layer, "buffer_kv", {}).items():
        if held is not None and held.shape[1]:
            raise UsageError(f"{held.shape[1]} tokens after the last entry of {name!r}: end a page there")
    for name, held in getattr(layer, "overlap_kv", {}).items():
        if held is not None:
            found[f"overlap_kv.{name}"] = held[row : row + 1]
            found[f"overlap_gate.{name}"] = _widened(layer.overlap_gate[name][row : row + 1])
    return found


def _widened(gate: torch.Tensor) -> torch.Tensor:
    """Return a gate in float32, as it is stored; the model casts it back without a loss."""
    return gate.float() if gate.itemsize < torch.float32.itemsize else gate


def check_states(found: StateMemory, index: int, memory: StateMemory) -> None:
    """
    Raises:
        UsageError: the layer has other states than the pool, or none yet.
    """
    if not any(found):
        raise UsageError(f"layer {index} has no state yet; run a forward first")
    if [set(kind) for kind in found] != [set(kind) for kind in memory]:
        raise UsageError(
            f"layer {index} keeps states {_names(found)}, its pool {_names(memory)}; "
            "the spec was made for another model"
        )


def _names(states: StateMemory) -> str:
    return " and ".join(str(sorted(kind)) for kind in states if kind)


def fill_states(layer: LinearAttentionLayer, memory: StateMemory, slot: int, tokens: int) -> None:
    """Fill a layer with the states after `tokens` tokens, by its update methods, which copy them."""
    for number, conv in memory.conv.items():
        layer.update_conv_state(conv[slot : slot + 1], state_idx=number)
    for number, recurrent in memory.recurrent.items():
        layer.update_recurrent_state(recurrent[slot : slot + 1], state_idx=number)
    if memory.tail:
        _fill_tail(layer, {name: held[slot] for name, held in memory.tail.items()}, tokens)


def _fill_tail(layer: DynamicSlidingWindowLayer, rows: Mapping[str, torch.Tensor], tokens: int) -> None:
    window = rows["window"][-min(tokens, layer.sliding_window - 1) :][None, None]
    layer.update(window, window)
    layer.cumulative_length = tokens
    for name in getattr(layer, "overlap_kv", {}):
        layer.overlap_kv[name] = rows[f"overlap_kv.{name}"][None].clone()
        layer.overlap_gate[name] = rows[f"overlap_gate.{name}"][None].clone()
