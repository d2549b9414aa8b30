"""Caches of the zoo's models, saved to pool memory and loaded from it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import DynamicCache

from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import new_cache, restore, write_pages, write_states
from integrations.zoo import PAGE, tiny_config, tiny_model

LENGTH = 104  # six whole pages and half of one; crosses the chunks of 64 in which states are computed
BOUNDARIES = range(PAGE, LENGTH, PAGE)
SLOTS = (5, 2, 7, 1, 4, 0)  # of pages, in no order


def filled(name: str, dtype: str, tokens: list[int], stop: int) -> DynamicCache:
    """A cache of `tokens[:stop]`, its forward cut at every page."""
    cache = new_cache(tiny_config(name))
    for start in range(0, stop, PAGE):
        prefill(tiny_model(name, dtype), cache, tokens, start, min(start + PAGE, stop))
    return cache


def save(cache: DynamicCache, pools: PoolMap, boundary: int, *, row: int = 0) -> None:
    for pool in pools.pages:
        write_pages(cache, pools, 0, SLOTS[: boundary // PAGE], pool=pool, row=row)
    if pools.states:
        write_states(cache, pools, 3, row=row)


def window_slots(pools: PoolMap, boundary: int) -> Sequence[int]:
    """Slots of the last pages before `boundary`, as many as a pool of windows needs."""
    needed = max((pool.coverage.pages or 0 for pool in pools.spec.owners if pool.per_token), default=0)
    pages = boundary // PAGE
    return SLOTS[max(pages - needed, 0) : pages] if needed else ()


def load(name: str, pools: PoolMap, boundary: int) -> DynamicCache:
    state = 3 if pools.states else None
    windows = window_slots(pools, boundary)
    return restore(tiny_config(name), pools, SLOTS[: boundary // PAGE], boundary, state, window_slots=windows)
