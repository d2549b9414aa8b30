"""Variants of a model's pools: quantised, or with the pools of a draft model.

Both are only data. Scales are additional tensors of a page, and a draft's pools share the target's slots, so
all code that moves pages also moves scales and draft pages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from asynchicache.errors import ConfigError
from asynchicache.specs.pools import PoolSpec, TensorSpec
from asynchicache.types import Coverage

_QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
_FLOATS = ("float64", "float32", "bfloat16", "float16")


# Quantised keys and values


def quantise(
    pools: Sequence[PoolSpec], names: Collection[str] | None, dtype: str, scale_dtype: str
) -> tuple[PoolSpec, ...]:
    """Return quantised pools; arguments and errors as `ModelSpec.with_quantised_kv`."""
    if dtype not in _QUANTISED:
        raise ConfigError(f"keys and values quantised to {dtype!r}; it must be one of {list(_QUANTISED)}")
    if scale_dtype not in _FLOATS:
        raise ConfigError(f"scales of {scale_dtype!r}; it must be one of {list(_FLOATS)}")
    allowed = [pool.name for pool in pools if pool.per_token]
    if names is None:
        names = [pool.name for pool in pools if pool.per_token and pool.slots_of is None]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"pool {name!r} cannot be quantised; pools with pages are {allowed}")
    return tuple(_quantised(pool, dtype, scale_dtype) if pool.name in names else pool for pool in pools)


def _quantised(pool: PoolSpec, dtype: str, scale_dtype: str) -> PoolSpec:
    tensors: list[TensorSpec] = []
    for tensor in pool.tensors:
        if tensor.dtype in _QUANTISED:
            raise ConfigError(f"pool {pool.name!r}: {tensor.name} is {tensor.dtype} already")
        if tensor.dtype not in _FLOATS:
            tensors.append(tensor)  # integers, such as positions, stay exact
            continue
        tensors += [replace(tensor, dtype=dtype), _scale(tensor, scale_dtype)]
    return replace(pool, tensors=tuple(tensors))


def _scale(tensor: TensorSpec, dtype: str) -> TensorSpec:
    """Return the scales of a tensor: one per entry and head, and per section because ranges differ."""
    sections = sum(width > 0 for width in tensor.sections)
    shape = (*tensor.shape[:-1], sections) if sections > 1 else tensor.shape[:-1]
    return TensorSpec(
        f"{tensor.name}_scale",
        tensor.layers,
        shape,
        dtype,
        tokens_per_entry=tensor.tokens_per_entry,
        cut=tensor.cut,
    )


# Draft models


def draft_pools(
    owners: Sequence[PoolSpec], pools: Sequence[PoolSpec], first_layer: int, prefix: str
) -> tuple[PoolSpec, ...]:
    """Return the pools of a draft model, on the slots of the target's pools.

    Args:
        first_layer: number of the draft's first layer.
        prefix: prefix of the pools' names.

    Raises:
        ConfigError: no pool of the target covers the pages that a pool of the draft needs.
    """
    return tuple(_draft_pool(owners, pool, first_layer, prefix) for pool in pools)


def _draft_pool(owners: Sequence[PoolSpec], pool: PoolSpec, first_layer: int, prefix: str) -> PoolSpec:
    hosts = [owner for owner in owners if _keeps(owner, pool)]
    if not hosts:
        raise ConfigError(
            f"draft pool {pool.name!r} needs {_words(pool)}; no pool of the target keeps as much: "
            f"{[owner.name for owner in owners]}"
        )
    host = min(hosts, key=lambda owner: owner.coverage.pages or float("inf"))
    tensors = (replace(t, layers=tuple(layer + first_layer for layer in t.layers)) for t in pool.tensors)
    return replace(
        pool,
        name=f"{prefix}_{pool.name}",
        tensors=tuple(tensors),
        coverage=host.coverage,
        slots_of=host.name,
    )


def _keeps(owner: PoolSpec, pool: PoolSpec) -> bool:
    return owner.per_token == pool.per_token and _covers(owner.coverage, pool.coverage)


def _covers(wide: Coverage, narrow: Coverage) -> bool:
    return wide.pages is None or (narrow.pages is not None and wide.pages >= narrow.pages)


def _words(pool: PoolSpec) -> str:
    if not pool.per_token:
        return "a state"
    return "every page" if pool.coverage.pages is None else f"the last {pool.coverage.pages} pages"
