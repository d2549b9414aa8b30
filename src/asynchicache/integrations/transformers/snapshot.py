"""Bytes between a `transformers.DynamicCache` and pool memory.

Only copies are made in either direction. Transformers updates recurrent states in place, so memory
that was shared with a cache would be overwritten by that cache's next decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from asynchicache.errors import UnsupportedModelError, UsageError
from asynchicache.integrations.transformers.layers import PageMemory, PoolMap, StateMemory
from asynchicache.integrations.transformers.rows import (
    KINDS,
    check_states,
    fill_rows,
    fill_states,
    first_held,
    held_fields,
    rows_of,
    states_of,
)


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache with the layers that `config` asks for.

    Layers with a window keep what left it, until `trim_windows`: a forward of many tokens would drop
    rows before their pages could be copied. What the model computes is the same.

    Raises:
        UnsupportedModelError: a layer is of a kind whose content is not copied here.
    """
    cache = DynamicCache(config=config)
    check_kinds(cache)
    for layer in _windows(cache):
        layer.activate_past_recording()
    return cache


def check_kinds(cache: DynamicCache) -> None:
    """
    Raises:
        UnsupportedModelError: a layer is of a kind whose content is not copied here.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) not in KINDS:
            raise UnsupportedModelError(
                f"cache layer {index} is a {type(layer).__name__}; what it keeps is not copied here"
            )


def trim_windows(cache: DynamicCache, page_size: int, *, pages: int = 0) -> None:
    """Let layers with a window drop the rows that no later forward sees and that are whole pages.

    Call it when the pages so far were written; without it memory grows as with full attention.

    Args:
        cache: of sequences of the same length.
        page_size: tokens of a page.
        pages: whole pages to keep nevertheless, because they are written later.
    """
    for layer in _windows(cache):
        if layer.is_initialized:
            tail = layer.cumulative_length % page_size
            keep = max(layer.sliding_window - 1, tail + pages * page_size)
            layer.keys, layer.values = (held[:, :, -keep:].clone() for held in (layer.keys, layer.values))


def _windows(cache: DynamicCache) -> list[DynamicSlidingWindowLayer]:
    return [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]


# From a cache


def write_pages(
    cache: DynamicCache,
    pools: PoolMap,
    first_page: int,
    slots: Sequence[int],
    *,
    pool: str | None = None,
    row: int = 0,
) -> None:
    """Copy whole pages of one sequence from `cache` to pool memory.

    Args:
        cache: of one or more sequences.
        pools: where to.
        first_page: index of the first page to copy; it begins at token `first_page * page_size`.
        slots: where the pages go, in order; as many pages as slots are copied.
        pool: whose slots these are; by default those of the pool that covers every page.
        row: which sequence of the batch.

    Raises:
        UsageError: the cache does not hold these pages, or a slot or the pool is not there.
    """
    name = pools.spec.pools[0].name if pool is None else pool
    if name not in pools.pages:
        raise UsageError(f"{name!r} is none of the pools with pages: {list(pools.pages)}")
    pools.check_slots(name, slots)
    _check_row(cache, row)
    size = pools.spec.page_size
    start, stop = first_page * size, (first_page + len(slots)) * size
    if first_page < 0 or stop > cache.get_seq_length():
        raise UsageError(f"tokens {start} to {stop} are not all among the cache's {cache.get_seq_length()}")
    with torch.no_grad():
        for index, memory in pools.pages[name].items():
            _write_layer(cache.layers[index], index, memory, slots, start, row)


def _write_layer(
    layer: DynamicLayer, index: int, memory: PageMemory, slots: Sequence[int], start: int, row: int
) -> None:
    fields, first = held_fields(layer), first_held(layer)
    if fields != set(memory):
        raise UsageError(
            f"layer {index} keeps {sorted(fields)}, its pool {sorted(memory)}; "
            "the spec was made for another model"
        )
    if start < first:
        raise UsageError(
            f"layer {index} dropped the tokens before {first}, so those from {start} cannot be written: "
            "make the cache with new_cache or restore, and write pages before trim_windows"
        )
    for name, target in memory.items():
        _scatter(target, slots, rows_of(layer, name, row)[start - first :])


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
        UsageError: the cache has no states yet, or others than the pool, or the slot is not the pool's.
    """
    _check_row(cache, row)
    found = {index: states_of(cache.layers[index], row) for index in pools.states}
    write_saved_states(SavedStates(cache.get_seq_length(), found), pools, slot)


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The states of one sequence after `tokens` tokens, by layer, `[1, ...]` each."""

    tokens: int
    layers: Mapping[int, StateMemory]


def save_states(cache: DynamicCache, tokens: int, *, row: int = 0) -> SavedStates:
    """Copies of the states of now, of a sequence that has `tokens` tokens; for a decode loop that does not
    know yet where it will end."""
    layers = {
        index: StateMemory(*({n: held.clone() for n, held in kind.items()} for kind in states_of(layer, row)))
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionLayer)
    }
    return SavedStates(tokens, layers)


def write_saved_states(saved: SavedStates, pools: PoolMap, slot: int) -> None:
    """As `write_states`, from copies that were made before."""
    pools.check_state(slot)
    with torch.no_grad():
        for index, memory in pools.states.items():
            found = saved.layers[index]
            check_states(found, index, memory)
            for held, target in ((found.conv, memory.conv), (found.recurrent, memory.recurrent)):
                for number, states in held.items():
                    target[number][slot].copy_(_fitting(states[0], target[number]))


def _check_row(cache: DynamicCache, row: int) -> None:
    batch = next((len(x.keys) for x in cache.layers if isinstance(x, DynamicLayer) and x.is_initialized), 0)
    if not 0 <= row < batch:
        raise UsageError(f"row {row} is not among the cache's {batch} sequences")


# To a cache


def restore(
    config: PreTrainedConfig,
    pools: PoolMap,
    kv_slots: Sequence[int],
    tokens: int,
    state_slot: int | None,
    *,
    window_slots: Sequence[int] = (),
) -> DynamicCache:
    """A new cache of one sequence that holds exactly the first `tokens` tokens.

    Args:
        config: of the model that will read the cache.
        pools: where from.
        kv_slots: the slots of the sequence's pages from its beginning; further ones are not read.
        tokens: whole pages; 0 gives an empty cache.
        state_slot: the states after `tokens` tokens; None exactly if the model has none, or
            `tokens` is 0.
        window_slots: of the pool of windows, if the model has one: the last pages before `tokens`, in
            order, as many as the pool's coverage asks, or all if there are fewer.

    Raises:
        UsageError: tokens are no whole pages, slots are too few or not the pool's, a state is
            missing or too many.
    """
    pages, rest = divmod(tokens, pools.spec.page_size)
    if tokens < 0 or rest or pages > len(kv_slots):
        raise UsageError(f"{tokens} tokens are not whole pages within {len(kv_slots)} slots")
    _check_state_slot(pools, tokens, state_slot)
    cache = new_cache(config)
    if len(cache) != pools.spec.layers:
        raise UsageError(f"the config has {len(cache)} layers, the spec {pools.spec.layers}")
    slots = _page_slots(pools, kv_slots[:pages], window_slots)
    with torch.no_grad():
        if pages:
            _restore_pages(cache, pools, slots, tokens)
        if state_slot is not None:
            for layer, memory in pools.states.items():
                fill_states(cache.layers[layer], memory, state_slot)
    return cache


def _check_state_slot(pools: PoolMap, tokens: int, state_slot: int | None) -> None:
    if (state_slot is not None) != bool(pools.states and tokens):
        given = "no state slot" if state_slot is None else f"state slot {state_slot}"
        raise UsageError(f"{given} for {tokens} tokens of a model with {len(pools.states)} recurrent layers")
    if state_slot is not None:
        pools.check_state(state_slot)


def _page_slots(
    pools: PoolMap, kv_slots: Sequence[int], window_slots: Sequence[int]
) -> Mapping[str, Sequence[int]]:
    """By pool, the slots of the last pages of the prefix."""
    slots: dict[str, Sequence[int]] = {}
    for name in pools.pages:
        needed = pools.spec.pool(name).coverage.pages
        slots[name] = kv_slots if needed is None else window_slots
        if needed is not None and len(window_slots) != min(needed, len(kv_slots)):
            raise UsageError(
                f"{len(window_slots)} slots of {name!r} for a prefix of {len(kv_slots)} pages, whose last "
                f"{min(needed, len(kv_slots))} are needed"
            )
        pools.check_slots(name, slots[name])
    return slots


def _restore_pages(
    cache: DynamicCache, pools: PoolMap, slots: Mapping[str, Sequence[int]], tokens: int
) -> None:
    for name, layers in pools.pages.items():
        for index, memory in layers.items():
            rows = {field: _gather(held, slots[name]) for field, held in memory.items()}
            fill_rows(cache.layers[index], rows, tokens)


# Copies


def _scatter(memory: torch.Tensor, slots: Sequence[int], rows: torch.Tensor) -> None:
    """The first rows of `[tokens, *shape]` to `slots` of `memory` `[slots, page_size, *shape]`."""
    rows = _fitting(rows[: len(slots) * memory.shape[1]], memory[:, 0])
    pages = rows.reshape(len(slots), *memory.shape[1:])
    memory.index_copy_(0, _index(memory, slots), pages.to(memory.device))


def _gather(memory: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """The rows of some pages, `[tokens, *shape]`."""
    return memory.index_select(0, _index(memory, slots)).flatten(0, 1)


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
