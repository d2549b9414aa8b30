"""Pools without a model."""

from __future__ import annotations

from collections.abc import Sequence

from asynchicache.errors import ConfigError
from asynchicache.hashing import DIGEST_BYTES
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

POOL_NAMES = ("kv", "mamba", "swa", "dsa")


def synthetic_spec(
    page_size: int, names: Sequence[str] = ("kv", "mamba"), *, window_pages: int = 1
) -> ModelSpec:
    """A hybrid model with a few bytes a layer, and pools of the kinds that real ones have.

    With attention and states, a token costs four bytes and a state 64: a bench holds a hundred thousand
    tokens in little memory, and what it measures is the cache, not the copying.

    Args:
        page_size: tokens of a page.
        names: the pools, of `POOL_NAMES`; the first is `kv`.
        window_pages: pages that a prefix needs of `swa`.

    Raises:
        ConfigError: a name twice or unknown, or another one first.
    """
    if names[0] != "kv" or len(set(names)) < len(names) or not set(names) <= set(POOL_NAMES):
        raise ConfigError(f"pools {','.join(names)!r}: kv, then any of {POOL_NAMES[1:]}, each once at most")
    keys = TensorSpec("keys", (1, 3), (1,), "uint8")
    values = TensorSpec("values", (1, 3), (1,), "uint8")
    state = TensorSpec("recurrent", (0, 2), (DIGEST_BYTES,), "uint8")
    index = TensorSpec("index", (1, 3), (1,), "uint8")
    pools = {
        "kv": PoolSpec("kv", (keys, values)),
        "mamba": PoolSpec("mamba", (state,), coverage=trailing_pages(1), per_token=False),
        "swa": PoolSpec("swa", (keys, values), coverage=trailing_pages(window_pages)),
        "dsa": PoolSpec("dsa", (index,), slots_of="kv"),
    }
    return ModelSpec("synthetic", page_size, 4, tuple(pools[name] for name in names))
