"""Copies between a `transformers.DynamicCache` and pool memory.

Memory is never shared: transformers updates recurrent states in place, so the next decode step of a cache
would overwrite shared pool memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from asynchicache.errors import UnsupportedModelError, UsageError
from asynchicache.integrations.transformers.layers import LayerTensors, PoolMap, StateMemory
from asynchicache.integrations.transformers.rows import (
    KINDS,
    check_states,
    fill_rows,
    fill_states,
    first_held,
    has_tails,
    held_fields,
    rows_of,
    states_of,
)

_Field = TypeVar("_Field", int, str)


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return an empty cache with the layers of `config`.

    Window layers keep rows that left the window until `trim_windows`: otherwise a forward of many tokens
    would drop rows before their pages are copied. The model's results do not change. Windows without pages
    (DeepSeek-V4) keep no such rows.

    Raises:
        UnsupportedModelError: a layer is of an unsupported kind.
    """
    cache = DynamicCache(config=config)
    check_kinds(cache)
    for layer in _paged_windows(cache):
        layer.activate_past_recording()
    return cache


def check_kinds(cache: DynamicCache) -> None:
    """
    Raises:
        UnsupportedModelError: a layer is of an unsupported kind.
    """
    for index, layer in enumerate(cache.layers):
        if type(layer) not in KINDS:
            raise UnsupportedModelError(
                f"cache layer {index} is a {type(layer).__name__}; what it keeps is not copied here"
            )


def trim_windows(cache: DynamicCache, page_size: int, *, pages: int = 0) -> None:
    """Drop rows of window layers that no later forward reads and that belong to complete pages.

    Call it after those pages were written; without it memory grows as with full attention.

    Args:
        cache: a cache of sequences of equal length.
        page_size: tokens per page.
        pages: complete pages to keep, because they are written later.
    """
    for layer in _paged_windows(cache):
        if layer.is_initialized:
            tail = layer.cumulative_length % page_size
            keep = max(layer.sliding_window - 1, tail + pages * page_size)
            layer.keys, layer.values = (held[:, :, -keep:].clone() for held in (layer.keys, layer.values))


def release_windows(cache: DynamicCache) -> None:
    """Make window layers what they are without `new_cache`: no pages are copied from them any more."""
    for layer in _paged_windows(cache):
        layer.record_past = False
        if layer.is_initialized:
            keep = layer.sliding_window - 1
            layer.keys, layer.values = layer.keys[:, :, -keep:], layer.values[:, :, -keep:]


def _paged_windows(cache: DynamicCache) -> list[DynamicSlidingWindowLayer]:
    if has_tails(cache):
        return []
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
    tokens: int | None = None,
) -> None:
    """Copy whole pages of one sequence from `cache` to pool memory.

    Args:
        cache: a cache of one or more sequences.
        pools: the destination.
        first_page: index of the first page to copy; it begins at token `first_page * page_size`.
        slots: destination slots, one per page, in order.
        pool: the pool of `slots`. Default: the pool that covers every page.
        row: index of the sequence in the batch.
        tokens: end of the copied tokens, if that is inside the last page. Default: its end.

    Raises:
        UsageError: the cache does not hold these pages, they do not end at `tokens`, or a slot or the pool
            does not exist.
    """
    name = pools.spec.pools[0].name if pool is None else pool
    if name not in pools.pages:
        raise UsageError(f"{name!r} is none of the pools with pages: {list(pools.pages)}")
    pools.check_slots(name, slots)
    _check_row(cache, row)
    size = pools.spec.page_size
    start, stop = first_page * size, (first_page + len(slots)) * size if tokens is None else tokens
    if first_page < 0 or stop > cache.get_seq_length():
        raise UsageError(f"tokens {start} to {stop} are not all among the cache's {cache.get_seq_length()}")
    if not start <= stop <= start + len(slots) * size:
        raise UsageError(f"{len(slots)} pages from token {start} on cannot end at {stop}")
    with torch.no_grad():
        places = _SlotNumbers(slots)
        for index, memory in pools.pages[name].items():
            _write_layer(cache.layers[index], index, memory, places, start, stop, row, size)


def _write_layer(
    layer: DynamicLayer,
    index: int,
    memory: LayerTensors,
    slots: _SlotNumbers,
    start: int,
    stop: int,
    row: int,
    page_size: int,
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
        entry = page_size // target.shape[1]  # tokens per entry
        rows = rows_of(layer, name, row)[(start - first) // entry : (stop - first) // entry]
        _scatter(target, slots, _fitting(rows, target[:, 0], f"layer {index}: {name}"))


def write_states(
    cache: DynamicCache, pools: PoolMap, slot: int, *, row: int = 0, tokens: int | None = None
) -> None:
    """Copy the states of one sequence, which represent all tokens now in `cache`.

    Recurrent layers keep no history, and compressing layers only a window: to get the state at the end of a
    page, end a forward there.

    Args:
        cache: a cache of one or more sequences.
        pools: the destination.
        slot: state slot for all layers.
        row: index of the sequence in the batch.
        tokens: length of the prefix that the states are for. Default: whole pages, which the cache holds.

    Raises:
        UsageError: the cache holds another number of tokens, has no states yet or other states than the pool,
            or the slot does not exist.
    """
    _check_row(cache, row)
    found = {index: states_of(cache.layers[index], row) for index in pools.states}
    held = cache.get_seq_length()
    if held != (held - held % pools.spec.page_size if tokens is None else tokens):
        wanted = "a whole number of pages" if tokens is None else tokens
        raise UsageError(f"the states are those of {held} tokens, not of {wanted}; end a forward there")
    write_saved_states(SavedStates(held, found), pools, slot)


@dataclass(frozen=True, slots=True)
class SavedStates:
    """The states of one sequence after `tokens` tokens, by layer, `[1, ...]` each."""

    tokens: int
    layers: Mapping[int, StateMemory]


def save_states(cache: DynamicCache, tokens: int, *, row: int = 0) -> SavedStates:
    """Copy the current states of a sequence of `tokens` tokens; for decode loops of unknown length."""
    kinds = DynamicSlidingWindowLayer if has_tails(cache) else LinearAttentionLayer
    layers = {
        index: _copied(states_of(layer, row))
        for index, layer in enumerate(cache.layers)
        if isinstance(layer, kinds)
    }
    return SavedStates(tokens, layers)


def _copied(states: StateMemory) -> StateMemory:
    return StateMemory(_clones(states.conv), _clones(states.recurrent), _clones(states.tail))


def _clones(held: Mapping[_Field, torch.Tensor]) -> dict[_Field, torch.Tensor]:
    return {field: tensor.clone() for field, tensor in held.items()}


def write_saved_states(saved: SavedStates, pools: PoolMap, slot: int) -> None:
    """As `write_states`, from saved copies."""
    pools.check_state(slot)
    with torch.no_grad():
        for index, memory in pools.states.items():
            found = saved.layers[index]
            check_states(found, index, memory)
            where = f"layer {index}: "
            _write_states(found.conv, memory.conv, slot, where + "conv")
            _write_states(found.recurrent, memory.recurrent, slot, where + "recurrent")
            _write_states(found.tail, memory.tail, slot, where + "tail")


def _write_states(
    held: Mapping[_Field, torch.Tensor], memory: Mapping[_Field, torch.Tensor], slot: int, where: str
) -> None:
    for field, states in held.items():
        memory[field][slot].copy_(_fitting(states[0], memory[field], f"{where} {field}"))


def _check_row(cache: DynamicCache, row: int) -> None:
    batch = next((len(x.keys) for x in cache.layers if isinstance(x, DynamicLayer) and x.is_initialized), 0)
    if not isinstance(row, int) or not 0 <= row < batch:
        raise UsageError(f"row {row!r} is not among the cache's {batch} sequences")


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
    """Return a new cache of one sequence with exactly the first `tokens` tokens.

    Args:
        config: configuration of the model that will read the cache.
        pools: the source.
        kv_slots: slots of the sequence's pages from its beginning; slots after `tokens` are not read.
        tokens: number of tokens; 0 gives an empty cache. They may end inside a page only without compressed
            entries.
        state_slot: slot of the states after `tokens` tokens; None if and only if the model has no states or
            `tokens` is 0.
        window_slots: slots of the window pool, if the model has one: the last pages before `tokens`, in
            order; the number that the pool's coverage requires, one more if `tokens` end inside a page, or
            all if there are fewer.

    Raises:
        UsageError: `tokens` end inside a page where they must not, slots are too few or do not exist, or
            `state_slot` is missing or unexpected.
    """
    pages = -(-tokens // pools.spec.page_size)
    if tokens < 0 or pages > len(kv_slots) or (tokens % pools.spec.page_size and not _divides(pools)):
        raise UsageError(f"{tokens} tokens are not whole pages within {len(kv_slots)} slots")
    _check_state_slot(pools, tokens, state_slot)
    cache = new_cache(config)
    if len(cache) != len(pools.spec.stage):
        raise UsageError(f"the config has {len(cache)} layers, the spec {len(pools.spec.stage)}")
    slots = _page_slots(pools, kv_slots[:pages], window_slots, tokens)
    with torch.no_grad():
        if pages:
            _restore_pages(cache, pools, slots, tokens)
        if state_slot is not None:
            for layer, memory in pools.states.items():
                fill_states(cache.layers[layer], memory, state_slot, tokens)
    return cache


def _divides(pools: PoolMap) -> bool:
    """Whether the first tokens of a page can be restored alone."""
    tensors = [tensor for pool in pools.spec.pools if pool.per_token for tensor in pool.tensors]
    return all(tensor.tokens_per_entry == 1 for tensor in tensors)


def _check_state_slot(pools: PoolMap, tokens: int, state_slot: int | None) -> None:
    if (state_slot is not None) != bool(pools.states and tokens):
        given = "no state slot" if state_slot is None else f"state slot {state_slot}"
        raise UsageError(
            f"{given} for {tokens} tokens of a model with {len(pools.states)} layers that keep states"
        )
    if state_slot is not None:
        pools.check_state(state_slot)


def _page_slots(
    pools: PoolMap, kv_slots: Sequence[int], window_slots: Sequence[int], tokens: int
) -> Mapping[str, Sequence[int]]:
    """Return the slots of the pages to read, by pool."""
    slots: dict[str, Sequence[int]] = {}
    for name in pools.pages:
        covered = pools.spec.pool(name).coverage.pages
        slots[name] = kv_slots if covered is None else window_slots
        if covered is not None:
            needed = min(covered + (tokens % pools.spec.page_size > 0), len(kv_slots))
            if len(window_slots) != needed:
                raise UsageError(
                    f"{len(window_slots)} slots of {name!r} for a prefix of {len(kv_slots)} pages, whose "
                    f"last {needed} are needed"
                )
        pools.check_slots(name, slots[name])
    return slots


def _restore_pages(
    cache: DynamicCache, pools: PoolMap, slots: Mapping[str, Sequence[int]], tokens: int
) -> None:
    for name, layers in pools.pages.items():
        places = _SlotNumbers(slots[name])
        for index, memory in layers.items():
            rows = {field: _gather(held, places) for field, held in memory.items()}
            inside = tokens % pools.spec.page_size
            if inside:  # of the last page only its first tokens
                behind = pools.spec.page_size - inside
                rows = {field: held[:-behind] for field, held in rows.items()}
            fill_rows(cache.layers[index], rows, tokens, inside)


# Copies


class _SlotNumbers:
    """Slots of pages, brought to a device once for all layers of a pool: to do so waits for the device."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = slots
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return them as int64 `[slots]`."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.slots, dtype=torch.int64, device=device)
        return self._on[device]


def _scatter(memory: torch.Tensor, slots: _SlotNumbers, rows: torch.Tensor) -> None:
    """Copy the first rows of `[entries, *shape]` to `slots` of `memory` `[slots, entries, *shape]`; the last
    page may be given in part."""
    rows = rows[: len(slots.slots) * memory.shape[1]].to(memory.device)
    whole, rest = divmod(len(rows), memory.shape[1])
    pages = rows[: whole * memory.shape[1]].reshape(whole, *memory.shape[1:])
    _bits(memory).index_copy_(0, slots.on(memory.device)[:whole], _bits(pages))
    if rest:
        memory[slots.slots[whole], :rest] = rows[-rest:]


def _gather(memory: torch.Tensor, slots: _SlotNumbers) -> torch.Tensor:
    """Return the rows of some pages, `[entries, *shape]`."""
    return _bits(memory).index_select(0, slots.on(memory.device)).flatten(0, 1).view(memory.dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values of one byte as integers: torch indexes no float8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _fitting(source: torch.Tensor, memory: torch.Tensor, where: str) -> torch.Tensor:
    """Return `source` if its item shape and dtype match `memory`: a copy would silently convert."""
    item = memory.shape[1:]
    held = source.shape[source.ndim - len(item) :]
    if held != item or source.dtype != memory.dtype:
        raise UsageError(
            f"{where} is {source.dtype} {list(held)} in the model and {memory.dtype} {list(item)} in the "
            "pool; the spec was made for another model or dtype"
        )
    return source
