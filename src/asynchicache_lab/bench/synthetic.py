"""Synthetic conversation tokens. `testing.oracle` defines the bytes of their pages."""

from __future__ import annotations

import random
from array import array

from asynchicache.hashing import page_digests

VOCABULARY = 151_936
"""Of the Qwen tokenizers, so that token ids look like those of real traffic."""


class Transcript:
    """The tokens of one conversation so far, and the digests of its whole pages."""

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
    """`count` ids that count up, modulo the vocabulary, from `index` plus an offset drawn from `rng`.

    These are the synthetic prompts of SGLang's `bench_multiturn.py --disable-random-sample`. They are cheap
    to generate, and two of them share a page only if they share their start.
    """
    import numpy as np  # local import: a replay imports this module but does not need numpy

    start = rng.randrange(VOCABULARY) + index
    ids = array("q")
    ids.frombytes(((np.arange(count, dtype=np.int64) + start) % VOCABULARY).tobytes())
    return ids
