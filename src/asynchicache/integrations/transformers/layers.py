"""Pool memory, layer by layer, as the cache layers of transformers see it.

A `PoolMap` binds a `ModelSpec` to the tensors of its device pools. What a cache layer keeps per token
(`DynamicLayer`) is mapped to `TokenMemory`, what it keeps per sequence (`LinearAttentionLayer`) to
`StateMemory`; a hybrid layer has both, an MLP neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from asynchicache.errors import ConfigError, UnsupportedModelError, UsageError
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec

_SIDES: Mapping[str, tuple[str, ...]] = {"keys": ("keys", "latent"), "values": ("values", "rope_keys")}
"""Which tensors transformers keeps as a layer's `keys` and `values`; of MLA, latent and RoPE key."""


class TokenMemory(NamedTuple):
    """One layer of a pool of pages; each tensor is `[slots, page_size, heads, dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


class StateMemory(NamedTuple):
    """One layer of a pool of states.

    Attributes:
        conv: `[slots, channels, kernel]`.
        recurrent: `[slots, heads, ...]`, or None where a layer keeps a convolution only.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor | None


class PoolMap:
    """The tensors of the device pools, by global layer.

    Args:
        spec: the model's pools.
        pools: pool name -> tensor name -> memory, `[layers, slots, page_size, *shape]` for pages,
            `[layers, slots, *shape]` for states; `layers` counts the layers that have the tensor.

    Attributes:
        spec: as given.
        tokens: layer -> memory of its pages.
        states: layer -> memory of its states; empty for a model without recurrence.
        page_slots: slots of pages.
        state_slots: slots of states.

    Raises:
        ConfigError: memory is missing, or its shape or dtype is not the spec's.
        UnsupportedModelError: the spec has a pool that transformers' layers do not map to.
    """

    def __init__(self, spec: ModelSpec, pools: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.spec = spec
        self.tokens: dict[int, TokenMemory] = {}
        self.states: dict[int, StateMemory] = {}
        self.page_slots = self.state_slots = 0
        for pool in spec.pools:
            memory = _checked_pool(pool, spec.page_size, pools)
            slots = next(iter(memory.values())).shape[1]
            if pool.per_token:
                self.page_slots = slots
                self.tokens.update(_token_layers(pool, memory))
            else:
                self.state_slots = slots
                self.states.update(_state_layers(pool, memory))

    def check_pages(self, slots: Sequence[int]) -> None:
        """Raise `UsageError` if a slot is not one of the page pool's."""
        _check_slots(slots, self.page_slots, "page")

    def check_state(self, slot: int) -> None:
        """Raise `UsageError` if `slot` is not one of the state pool's, or there is no such pool."""
        _check_slots((slot,), self.state_slots, "state")


def _check_slots(slots: Sequence[int], count: int, what: str) -> None:
    if slots and not 0 <= min(slots) <= max(slots) < count:
        raise UsageError(f"{what} slots {min(slots)} to {max(slots)} are not all among the pool's {count}")


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
    item = (page_size, *spec.shape) if pool.per_token else spec.shape
    shape, dtype = tuple(memory.shape), str(memory.dtype).removeprefix("torch.")
    if shape[:1] != (len(spec.layers),) or shape[2:] != item or dtype != spec.dtype:
        raise ConfigError(
            f"pool {pool.name!r}: {spec.name} is {dtype} {list(shape)}; the spec wants "
            f"{spec.dtype} [{len(spec.layers)}, slots, {', '.join(map(str, item))}]"
        )


def _token_layers(pool: PoolSpec, memory: Mapping[str, torch.Tensor]) -> dict[int, TokenMemory]:
    keys, values = (_one_of(pool, names) for names in _SIDES.values())
    if len(pool.tensors) != len(_SIDES) or keys.layers != values.layers:
        raise UnsupportedModelError(f"pool {pool.name!r} is not one key and one value tensor a layer")
    return {
        layer: TokenMemory(memory[keys.name][index], memory[values.name][index])
        for index, layer in enumerate(keys.layers)
    }


def _one_of(pool: PoolSpec, names: Sequence[str]) -> TensorSpec:
    for tensor in pool.tensors:
        if tensor.name in names:
            return tensor
    raise UnsupportedModelError(f"pool {pool.name!r} has no tensor named {' or '.join(names)}")


def _state_layers(pool: PoolSpec, memory: Mapping[str, torch.Tensor]) -> dict[int, StateMemory]:
    names = [tensor.name for tensor in pool.tensors]
    if names not in (["conv"], ["conv", "recurrent"]) or len({t.layers for t in pool.tensors}) != 1:
        raise UnsupportedModelError(f"pool {pool.name!r} is not conv, or conv and recurrent, a layer")
    recurrent = memory.get("recurrent")
    return {
        layer: StateMemory(memory["conv"][index], None if recurrent is None else recurrent[index])
        for index, layer in enumerate(pool.tensors[0].layers)
    }
