"""Bytes between a `transformers.DynamicCache` and pool memory, and caches joined into a batch.

Only copies are made in either direction. Transformers updates recurrent states in place, so memory
that was shared with a cache would be overwritten by that cache's next decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from asynchicache.errors import UnsupportedModelError, UsageError
from asynchicache.integrations.transformers.layers import PoolMap, StateMemory

_Layer: TypeAlias = DynamicLayer | LinearAttentionLayer | DummyLayer

_KINDS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)
"""Exactly these: a subclass (sliding window, sparse attention) keeps more than is copied here."""


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache with the layers that `config` asks for.

    Raises:
        UnsupportedModelError: a layer is of a kind whose content is not copied here.
    """
    cache = DynamicCache(config=config)
    _check_kinds(cache)
    return cache


def write_pages(
    cache: DynamicCache, pools: PoolMap, first_page: int, slots: Sequence[int], *, row: int = 0
) -> None:
    """Copy whole pages of one sequence from `cache` to pool memory.

    Args:
        cache: of one or more sequences.
        pools: where to.
        first_page: index of the first page to copy; it begins at token `first_page * page_size`.
        slots: where the pages go, in order; as many pages as slots are copied.
        row: which sequence of the batch.

    Raises:
        UsageError: the cache does not hold these pages, or a slot is not the pool's.
    """
    pools.check_pages(slots)
    _check_row(cache, row)
    size = pools.spec.page_size
    start, stop = first_page * size, (first_page + len(slots)) * size
    if first_page < 0 or stop > cache.get_seq_length():
        raise UsageError(f"tokens {start} to {stop} are not all among the cache's {cache.get_seq_length()}")
    with torch.no_grad():
        for layer, memory in pools.tokens.items():
            held = cache.layers[layer]
            _scatter(memory.keys, slots, held.keys[row, :, start:stop])
            _scatter(memory.values, slots, held.values[row, :, start:stop])


def write_states(cache: DynamicCache, pools: PoolMap, slot: int, *, row: int = 0) -> None:
    """Copy the states of one sequence, which stand for all of the tokens now in `cache`.

    Recurrent layers keep no history: a state at a page's end can only be taken by ending a forward
    there.

    Args:
        cache: of one or more sequences.
        pools: where to.
        slot: the state slot that takes all layers.
        row: which sequence of the batch.

    Raises:
        UsageError: the cache has no states yet, or the slot is not the pool's.
    """
    pools.check_state(slot)
    _check_row(cache, row)
    with torch.no_grad():
        for layer, memory in pools.states.items():
            held = cache.layers[layer]
            if not held.has_previous_state[0]:
                raise UsageError(f"layer {layer} has no state yet; run a forward first")
            memory.conv[slot].copy_(_fitting(held.conv_states[0][row], memory.conv))
            if memory.recurrent is not None:
                memory.recurrent[slot].copy_(_fitting(held.recurrent_states[0][row], memory.recurrent))


def restore(
    config: PreTrainedConfig,
    pools: PoolMap,
    kv_slots: Sequence[int],
    tokens: int,
    state_slot: int | None,
) -> DynamicCache:
    """A new cache of one sequence that holds exactly the first `tokens` tokens.

    Args:
        config: of the model that will read the cache.
        pools: where from.
        kv_slots: the slots of the sequence's pages from its beginning; further ones are not read.
        tokens: whole pages; 0 gives an empty cache.
        state_slot: the states after `tokens` tokens; None exactly if the model has none, or
            `tokens` is 0.

    Raises:
        UsageError: tokens are no whole pages, slots are too few or not the pool's, a state is
            missing or too many.
    """
    pages, rest = divmod(tokens, pools.spec.page_size)
    if tokens < 0 or rest or pages > len(kv_slots):
        raise UsageError(f"{tokens} tokens are not whole pages within {len(kv_slots)} slots")
    _check_state_slot(pools, tokens, state_slot)
    pools.check_pages(kv_slots[:pages])
    cache = new_cache(config)
    if len(cache) != pools.spec.layers:
        raise UsageError(f"the config has {len(cache)} layers, the spec {pools.spec.layers}")
    with torch.no_grad():
        if pages:
            _restore_pages(cache, pools, kv_slots[:pages])
        if state_slot is not None:
            for layer, memory in pools.states.items():
                _restore_state(cache.layers[layer], memory, state_slot)
    return cache


def _check_state_slot(pools: PoolMap, tokens: int, state_slot: int | None) -> None:
    if (state_slot is not None) != bool(pools.states and tokens):
        given = "no state slot" if state_slot is None else f"state slot {state_slot}"
        raise UsageError(f"{given} for {tokens} tokens of a model with {len(pools.states)} recurrent layers")
    if state_slot is not None:
        pools.check_state(state_slot)


def _restore_pages(cache: DynamicCache, pools: PoolMap, slots: Sequence[int]) -> None:
    for layer, memory in pools.tokens.items():
        cache.layers[layer].update(_gather(memory.keys, slots), _gather(memory.values, slots))


def _restore_state(layer: LinearAttentionLayer, memory: StateMemory, slot: int) -> None:
    """Fill an empty layer through its own methods: they copy, and mark the state as present."""
    layer.update_conv_state(memory.conv[slot : slot + 1])
    if memory.recurrent is not None:
        layer.update_recurrent_state(memory.recurrent[slot : slot + 1])


def _scatter(memory: torch.Tensor, slots: Sequence[int], rows: torch.Tensor) -> None:
    """`rows` `[heads, pages * page_size, dim]` to `slots` of `memory` `[slots, page_size, heads, dim]`."""
    heads, _, dim = rows.shape
    pages = rows.reshape(heads, len(slots), memory.shape[1], dim).permute(1, 2, 0, 3)
    memory.index_copy_(0, _index(memory, slots), _fitting(pages, memory).to(memory.device))


def _gather(memory: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """Pages as transformers keeps them, `[1, heads, tokens, dim]`."""
    pages = memory.index_select(0, _index(memory, slots))
    return pages.permute(2, 0, 1, 3).flatten(1, 2).unsqueeze(0)


def _index(memory: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64, device=memory.device)


def _fitting(source: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """`source`, if its items are those of `memory`; a copy would broadcast or convert in silence."""
    item = memory.shape[1:]
    if source.shape[-len(item) :] != item or source.dtype != memory.dtype:
        raise UsageError(
            f"the cache holds {source.dtype} {list(source.shape[-len(item) :])} where the pool's memory "
            f"is {memory.dtype} {list(item)}; the spec was made for another model or dtype"
        )
    return source


# Batches.


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
        _check_kinds(cache)
    joined = DynamicCache()
    joined.layer_class_to_replicate = None  # every layer is given; none is to be made on demand
    with torch.no_grad():
        joined.layers = [_join(layers) for layers in zip(*(c.layers for c in caches), strict=True)]
    return joined


def _join(layers: Sequence[_Layer]) -> _Layer:
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1:
        raise UsageError(f"layers of kinds {sorted(k.__name__ for k in kinds)} cannot be one batch")
    joined: _Layer = kinds.pop()()
    if isinstance(joined, DynamicLayer) and layers[0].is_initialized:
        joined.update(torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers]))
    if isinstance(joined, LinearAttentionLayer) and layers[0].has_previous_state[0]:
        joined.update_conv_state(torch.cat([x.conv_states[0] for x in layers]))
        if layers[0].is_recurrent_states_initialized[0]:
            joined.update_recurrent_state(torch.cat([x.recurrent_states[0] for x in layers]))
    return joined


def _check_row(cache: DynamicCache, row: int) -> None:
    batch = next((len(x.keys) for x in cache.layers if isinstance(x, DynamicLayer) and x.is_initialized), 0)
    if not 0 <= row < batch:
        raise UsageError(f"row {row} is not among the cache's {batch} sequences")


def _check_kinds(cache: DynamicCache) -> None:
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _KINDS or getattr(layer, "number_of_states", 1) != 1:
            raise UnsupportedModelError(
                f"cache layer {index} is a {type(layer).__name__}; what it keeps is not copied here"
            )
