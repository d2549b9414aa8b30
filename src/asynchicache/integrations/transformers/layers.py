"""Pool memory by layer, in the terms of transformers' cache layers.

A `PoolMap` binds a `ModelSpec` to the tensors of its device pools. Per-token content of a cache layer maps to
`LayerTensors`, per-sequence content to `StateMemory`; a hybrid layer has both, an MLP neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from asynchicache.errors import ConfigError, UnsupportedModelError, UsageError
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec

LayerTensors = dict[str, torch.Tensor]
"""One layer of a pool of pages: memory `[slots, entries, *shape]` by the field name of transformers' cache
layer (`keys`, `values`, `indexer_keys`, `indexer_position_ids`; `compressed_kv.NAME` in a dict)."""

_PAGE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "keys": ("keys",),
    "values": ("values",),
    "latent": ("keys", "values"),
    "index_keys": ("indexer_keys",),
    "index_positions": ("indexer_position_ids",),
    "csa": ("compressed_kv.compressor",),
    "csa_index": ("compressed_kv.indexer",),
    "hca": ("compressed_kv.compressor",),
}
"""Fields of a cache layer by tensor of the pool; the latent's two sections are two fields."""

_STATE_FIELDS: Mapping[str, tuple[str, int | str]] = {
    "conv": ("conv", 0),
    "recurrent": ("recurrent", 0),
    "ngram_conv": ("conv", 1),
    "ngram_tokens": ("conv", 2),
    "window": ("tail", "window"),
    "overlap_kv": ("tail", "overlap_kv.compressor"),
    "overlap_gate": ("tail", "overlap_gate.compressor"),
    "overlap_index_kv": ("tail", "overlap_kv.indexer"),
    "overlap_index_gate": ("tail", "overlap_gate.indexer"),
}
"""Kind of state and its number or field in the cache layer, by tensor of the pool."""


class StateMemory(NamedTuple):
    """One layer of a pool of states, by transformers' number of the state in its layer, or its field.

    Attributes:
        conv: `[slots, channels, kernel]`, or `[slots, kernel]` of token ids.
        recurrent: `[slots, heads, ...]`; empty if the layer has convolution states only.
        tail: last rows of a compressing layer: its `window`, and the `overlap_kv` and `overlap_gate` of each
            kind of entry, `[slots, rows, width]`; empty for other layers.
    """

    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]
    tail: dict[str, torch.Tensor]


class PoolMap:
    """The tensors of the device pools, by layer of the rank's own model: a pipeline stage counts its from 0.

    Args:
        pools: pool name -> tensor name -> memory, `[layers, slots, entries, *shape]` for pages,
            `[layers, slots, *shape]` for states; `layers` counts the layers that have the tensor.

    Attributes:
        pages: pool that owns slots -> layer -> memory of its pages, including pools that share the slots.
        states: layer -> memory of its states; empty for a model without recurrent or compressing layers.
        slots: pool that owns slots -> number of slots.

    Raises:
        ConfigError: memory is missing, or its shape or dtype differs from the spec.
        UnsupportedModelError: transformers' layers have no counterpart of a pool.
    """

    def __init__(self, spec: ModelSpec, pools: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.spec = spec
        self.pages: dict[str, dict[int, LayerTensors]] = {}
        self.states: dict[int, StateMemory] = {}
        self.slots: dict[str, int] = {}
        for pool in spec.pools:
            owner = pool.slots_of or pool.name
            memory = _checked_pool(pool, spec.page_size, pools)
            slots = next(iter(memory.values())).shape[1]
            if self.slots.setdefault(owner, slots) != slots:
                raise ConfigError(f"pool {pool.name!r} has {slots} slots, {owner!r} {self.slots[owner]}")
            if pool.per_token:
                _add_pages(self.pages.setdefault(owner, {}), pool, memory, spec.stage.start)
            else:
                _add_states(self.states, pool, memory, spec.stage.start)

    def check_slots(self, pool: str, slots: Sequence[int]) -> None:
        """Raise `UsageError` if the pool does not have a slot."""
        count = self.slots[pool]
        if slots and not 0 <= min(slots) <= max(slots) < count:
            raise UsageError(
                f"{pool} slots {min(slots)} to {max(slots)} are not all among the pool's {count}"
            )

    def check_state(self, slot: int) -> None:
        """Raise `UsageError` if the state pool does not have `slot`, or there is no such pool."""
        states = next((pool.name for pool in self.spec.owners if not pool.per_token), None)
        if states is None:
            raise UsageError(f"state slot {slot}: model {self.spec.model!r} has no states")
        self.check_slots(states, (slot,))


def _checked_pool(
    pool: PoolSpec, page_size: int, pools: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    given = pools.get(pool.name, {})
    missing = [tensor.name for tensor in pool.tensors if tensor.name not in given]
    if missing:
        raise ConfigError(f"pool {pool.name!r} has no memory for {', '.join(missing)}")
    memory = {tensor.name: given[tensor.name] for tensor in pool.tensors}
    slots = {tensor.shape[1] if tensor.ndim > 1 else None for tensor in memory.values()}
    for spec in pool.tensors:
        _check_tensor(pool, spec, page_size, memory[spec.name])
    if len(slots) != 1:
        raise ConfigError(f"pool {pool.name!r}: its tensors have different numbers of slots")
    return memory


def _check_tensor(pool: PoolSpec, spec: TensorSpec, page_size: int, memory: torch.Tensor) -> None:
    item = pool.item_shape(spec, page_size)
    shape, dtype = tuple(memory.shape), str(memory.dtype).removeprefix("torch.")
    if shape[:1] != (len(spec.layers),) or shape[2:] != item or dtype != spec.dtype:
        raise ConfigError(
            f"pool {pool.name!r}: {spec.name} is {dtype} {list(shape)}; the spec wants "
            f"{spec.dtype} [{len(spec.layers)}, slots, {', '.join(map(str, item))}]"
        )


def _add_pages(
    layers: dict[int, LayerTensors], pool: PoolSpec, memory: Mapping[str, torch.Tensor], start: int
) -> None:
    """Add views of each layer's part of the memory, one per section."""
    for spec in pool.tensors:
        fields = _PAGE_FIELDS.get(spec.name, ())
        if len(fields) != max(len(spec.sections), 1):
            raise UnsupportedModelError(
                f"pool {pool.name!r}: transformers' cache layers keep no {spec.name} "
                f"of {max(len(spec.sections), 1)} sections"
            )
        for index, layer in enumerate(spec.layers):
            parts = torch.split(memory[spec.name][index], list(spec.sections or spec.shape[-1:]), dim=-1)
            layers.setdefault(layer - start, {}).update(zip(fields, parts, strict=True))


def _add_states(
    states: dict[int, StateMemory], pool: PoolSpec, memory: Mapping[str, torch.Tensor], start: int
) -> None:
    for spec in pool.tensors:
        if spec.name not in _STATE_FIELDS:
            raise UnsupportedModelError(f"pool {pool.name!r}: transformers' cache layers keep no {spec.name}")
        kind, field = _STATE_FIELDS[spec.name]
        for index, layer in enumerate(spec.layers):
            held = states.setdefault(layer - start, StateMemory({}, {}, {}))
            getattr(held, kind)[field] = memory[spec.name][index]
