"""Join caches into one batch, and select sequences of a batch.

Sequences of a batch end at the same position; shorter ones have padding on the left, which a mask hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.rows import CacheLayer
from asynchicache.integrations.transformers.snapshot import check_kinds


def stack(caches: Sequence[DynamicCache], *, padded: bool = False) -> DynamicCache:
    """Copy caches to one batch, with their rows in order.

    Args:
        caches: caches of one or more sequences each.
        padded: whether their lengths may differ.

    Raises:
        UsageError: no caches, or their lengths or layers differ.
        UnsupportedModelError: a layer is of an unsupported kind.
    """
    lengths = {cache.get_seq_length() for cache in caches}
    if not caches or (len(lengths) != 1 and not padded) or len({len(cache) for cache in caches}) != 1:
        raise UsageError(f"caches of lengths {sorted(lengths)} cannot be one batch")
    for cache in caches:
        check_kinds(cache)
    with torch.no_grad():
        return _cache([_join(layers) for layers in zip(*(c.layers for c in caches), strict=True)])


def select(cache: DynamicCache, rows: Sequence[int], drop: int = 0) -> DynamicCache:
    """Copy some sequences of a batch.

    Args:
        rows: indices of the sequences, in order; at least one.
        drop: tokens of padding to remove on the left of all of them.
    """
    with torch.no_grad():
        return _cache([_select(layer, list(rows), drop) for layer in cache.layers])


def _cache(layers: list[CacheLayer]) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = None  # all layers are given; transformers must not add any
    cache.layers = layers
    return cache


def _join(layers: Sequence[CacheLayer]) -> CacheLayer:
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1:
        raise UsageError(f"layers of kinds {sorted(k.__name__ for k in kinds)} cannot be one batch")
    joined = _empty_like(layers[0])
    if isinstance(joined, DynamicLayer) and layers[0].is_initialized:
        _join_rows(joined, layers)
    if isinstance(joined, LinearAttentionLayer):
        _join_states(joined, layers)
    return joined


def _empty_like(layer: CacheLayer) -> CacheLayer:
    if isinstance(layer, DeepseekV4HCACache):
        rates = dict.fromkeys(_COMPRESSING, layer.compress_rate)
        return type(layer)(SimpleNamespace(sliding_window=layer.sliding_window, compress_rates=rates))
    if isinstance(layer, DynamicSlidingWindowLayer):
        empty = type(layer)(sliding_window=layer.sliding_window)
        empty.record_past = layer.record_past
        return empty
    if isinstance(layer, LinearAttentionLayer):
        return type(layer)(number_of_states=layer.number_of_states)
    return type(layer)()


def _join_rows(joined: DynamicLayer, layers: Sequence[DynamicLayer]) -> None:
    same = len({layer.get_seq_length() for layer in layers}) == 1
    # With equal lengths, keep only rows that all windows have; otherwise pad shorter sequences.
    held = (min if same else max)(layer.keys.shape[-2] for layer in layers)
    joined.update(
        torch.cat([_wide(layer.keys, held, -2) for layer in layers]),
        torch.cat([_wide(layer.values, held, -2) for layer in layers]),
    )
    if isinstance(joined, DynamicSlidingWindowLayer):
        joined.cumulative_length = max(layer.cumulative_length for layer in layers)
    if isinstance(joined, DeepseekV4HCACache):
        if not same:
            raise UsageError(f"sequences of {type(joined).__name__} layers must have equal lengths")
        _join_entries(joined, layers)
    if isinstance(joined, DynamicIndexedLayer) and layers[0].is_indexer_initialized:
        joined.update_indexer(torch.cat([_wide(layer.indexer_keys, held, -2) for layer in layers]))
    if isinstance(joined, DynamicIndexedLayer) and layers[0].indexer_position_ids is not None:
        positions = [_wide(layer.indexer_position_ids, held, -1) for layer in layers]
        joined.indexer_position_ids = torch.cat(positions, dim=1)


_COMPRESSING = ("heavily_compressed_attention", "compressed_sparse_attention")
_ENTRY_FIELDS = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")


def _join_entries(joined: DeepseekV4HCACache, layers: Sequence[DeepseekV4HCACache]) -> None:
    """Join what compressing layers keep beside their window; of sequences of equal length."""
    joined.entry_count = dict(layers[0].entry_count)
    for field in _ENTRY_FIELDS:
        for name in getattr(joined, field, {}):
            held = [tensor for layer in layers if (tensor := getattr(layer, field)[name]) is not None]
            # A restored row has no buffer where others have an empty one.
            getattr(joined, field)[name] = torch.cat(held) if len(held) == len(layers) else None


def _wide(rows: torch.Tensor, held: int, dim: int) -> torch.Tensor:
    """Return the last `held` rows along dimension -1 or -2, with zeros on the left if there are fewer."""
    missing = held - rows.shape[dim]  # a negative padding cuts
    return pad(rows, (missing, 0) if dim == -1 else (0, 0, missing, 0)) if missing else rows


def _join_states(joined: LinearAttentionLayer, layers: Sequence[LinearAttentionLayer]) -> None:
    for number, known in layers[0].has_previous_state.items():
        if known:
            joined.update_conv_state(torch.cat([x.conv_states[number] for x in layers]), state_idx=number)
        if layers[0].is_recurrent_states_initialized[number]:
            states = torch.cat([x.recurrent_states[number] for x in layers])
            joined.update_recurrent_state(states, state_idx=number)


def _select(layer: CacheLayer, rows: list[int], drop: int) -> CacheLayer:
    chosen = _empty_like(layer)
    if isinstance(chosen, DynamicLayer) and layer.is_initialized:
        _select_rows(chosen, layer, rows, drop)
    if isinstance(chosen, LinearAttentionLayer):
        for number, known in layer.has_previous_state.items():
            if known:
                chosen.update_conv_state(layer.conv_states[number][rows], state_idx=number)
            if layer.is_recurrent_states_initialized[number]:
                chosen.update_recurrent_state(layer.recurrent_states[number][rows], state_idx=number)
    return chosen


def _select_rows(chosen: DynamicLayer, layer: DynamicLayer, rows: list[int], drop: int) -> None:
    kept = min(layer.keys.shape[-2], int(layer.get_seq_length()) - drop)
    chosen.update(layer.keys[rows, :, -kept:], layer.values[rows, :, -kept:])
    if isinstance(chosen, DynamicSlidingWindowLayer):
        chosen.cumulative_length = layer.cumulative_length - drop
    if isinstance(chosen, DeepseekV4HCACache):
        chosen.entry_count = dict(layer.entry_count)
        for field in _ENTRY_FIELDS:
            for name, held in getattr(layer, field, {}).items():
                getattr(chosen, field)[name] = None if held is None else held[rows]
    if isinstance(chosen, DynamicIndexedLayer) and layer.is_indexer_initialized:
        chosen.update_indexer(layer.indexer_keys[rows, -kept:])
    if isinstance(chosen, DynamicIndexedLayer) and layer.indexer_position_ids is not None:
        chosen.indexer_position_ids = layer.indexer_position_ids[:, rows, -kept:]
