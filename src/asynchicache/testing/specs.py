"""Pools without a model."""

from __future__ import annotations

from collections.abc import Sequence

from asynchicache.errors import ConfigError
from asynchicache.hashing import HASH_BYTES
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

POOL_NAMES = ("kv", "mamba", "swa", "dsa")


def synthetic_spec(
    page_size: int,
    names: Sequence[str] = ("kv", "mamba"),
    *,
    window_pages: int = 1,
    token_bytes: int = 1,
    state_bytes: int = HASH_BYTES,
) -> ModelSpec:
    """A hybrid model with a few bytes per layer, and the kinds of pools that real models have.

    With attention and states, a token takes four bytes and a state 64. So a bench can hold a hundred thousand
    tokens in little memory, and measures the cache rather than copying.

    Args:
        page_size: tokens of a page.
        names: the pools, from `POOL_NAMES`; the first must be `kv`.
        window_pages: pages of `swa` that a prefix needs.
        token_bytes, state_bytes: bytes of a token's keys in one layer, and of a layer's state.

    Raises:
        ConfigError: a name is repeated or unknown, or `kv` is not first.
    """
    if names[0] != "kv" or len(set(names)) < len(names) or not set(names) <= set(POOL_NAMES):
        raise ConfigError(f"pools {','.join(names)!r}: kv, then any of {POOL_NAMES[1:]}, each once at most")
    keys = TensorSpec("keys", (1, 3), (token_bytes,), "uint8")
    values = TensorSpec("values", (1, 3), (token_bytes,), "uint8")
    state = TensorSpec("recurrent", (0, 2), (state_bytes,), "uint8")
    index = TensorSpec("index", (1, 3), (1,), "uint8")
    pools = {
        "kv": PoolSpec("kv", (keys, values)),
        "mamba": PoolSpec("mamba", (state,), coverage=trailing_pages(1), per_token=False),
        "swa": PoolSpec("swa", (keys, values), coverage=trailing_pages(window_pages)),
        "dsa": PoolSpec("dsa", (index,), slots_of="kv"),
    }
    return ModelSpec("synthetic", page_size, 4, tuple(pools[name] for name in names))
