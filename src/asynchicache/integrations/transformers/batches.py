"""Caches of equal length joined into one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.rows import CacheLayer
from asynchicache.integrations.transformers.snapshot import check_kinds


def stack(caches: Sequence[DynamicCache]) -> DynamicCache:
    """Caches of equal length as one batch, their rows in order; nothing is shared with them.

    Raises:
        UsageError: there are none, or their lengths or layers differ.
        UnsupportedModelError: a layer is of a kind whose content is not copied here.
    """
    lengths = {cache.get_seq_length() for cache in caches}
    if len(lengths) != 1 or len({len(cache) for cache in caches}) != 1:
        raise UsageError(f"caches of lengths {sorted(lengths)} cannot be one batch")
    for cache in caches:
        check_kinds(cache)
    joined = DynamicCache()
    joined.layer_class_to_replicate = None  # every layer is given; none is to be made on demand
    with torch.no_grad():
        joined.layers = [_join(layers) for layers in zip(*(c.layers for c in caches), strict=True)]
    return joined


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
    if isinstance(layer, DynamicSlidingWindowLayer):
        empty = type(layer)(sliding_window=layer.sliding_window)
        empty.record_past = layer.record_past
        return empty
    if isinstance(layer, LinearAttentionLayer):
        return type(layer)(number_of_states=layer.number_of_states)
    return type(layer)()


def _join_rows(joined: DynamicLayer, layers: Sequence[DynamicLayer]) -> None:
    """Rows of all layers; of windows those that every layer still holds."""
    held = min(layer.keys.shape[-2] for layer in layers)
    joined.update(
        torch.cat([layer.keys[:, :, -held:] for layer in layers]),
        torch.cat([layer.values[:, :, -held:] for layer in layers]),
    )
    if isinstance(joined, DynamicSlidingWindowLayer):
        joined.cumulative_length = layers[0].cumulative_length
    if isinstance(joined, DynamicIndexedLayer) and layers[0].is_indexer_initialized:
        joined.update_indexer(torch.cat([layer.indexer_keys for layer in layers]))
    if isinstance(joined, DynamicIndexedLayer) and layers[0].indexer_position_ids is not None:
        joined.indexer_position_ids = torch.cat([layer.indexer_position_ids for layer in layers], dim=1)


def _join_states(joined: LinearAttentionLayer, layers: Sequence[LinearAttentionLayer]) -> None:
    for number, known in layers[0].has_previous_state.items():
        if known:
            joined.update_conv_state(torch.cat([x.conv_states[number] for x in layers]), state_idx=number)
        if layers[0].is_recurrent_states_initialized[number]:
            states = torch.cat([x.recurrent_states[number] for x in layers])
            joined.update_recurrent_state(states, state_idx=number)
