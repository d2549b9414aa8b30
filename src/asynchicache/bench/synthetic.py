"""Pools without a model, and tokens for them; the bytes that belong in them are `testing.oracle`'s."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np

from asynchicache.errors import ConfigError
from asynchicache.hashing import page_digests
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.testing.oracle import DIGEST_BYTES, ByteOracle
from asynchicache.types import trailing_pages

POOL_NAMES = ("kv", "mamba", "swa", "dsa")
VOCABULARY = 151_936
"""Of the Qwen tokenizers, so that token ids look like those of real traffic."""


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


class Transcript:
    """The tokens of one conversation so far, with the digests of their whole pages."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.tokens: array[int] = array("q")
        self.digests: list[bytes] = []

    def extend(self, tokens: array[int]) -> None:
        self.tokens.extend(tokens)
        done = len(self.digests)
        rest = memoryview(self.tokens)[done * self._page_size :]
        self.digests += page_digests(rest, self._page_size, self.digests[-1] if done else b"")


def draw_tokens(rng: random.Random, index: int, count: int) -> array[int]:
    """`count` ids that count up, modulo the vocabulary, from `index` and an offset drawn from `rng`.

    The synthetic prompts of SGLang's `bench_multiturn.py --disable-random-sample`: cheap to make,
    and two of them share a page only if they share their start.
    """
    start = rng.randrange(VOCABULARY) + index
    ids = array("q")
    ids.frombytes(((np.arange(count, dtype=np.int64) + start) % VOCABULARY).tobytes())
    return ids


__all__ = [
    "DIGEST_BYTES",
    "POOL_NAMES",
    "VOCABULARY",
    "ByteOracle",
    "Transcript",
    "draw_tokens",
    "synthetic_spec",
]
