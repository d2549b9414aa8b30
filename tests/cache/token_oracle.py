"""Expected contents of single tokens, for prefixes that end inside a page.

As `testing.oracle`, but `bytes = f(digest of the prefix up to a token, pool, tensor, layer)`: pages that go
on differently behind a shared beginning have the same bytes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asynchicache.hashing import HASH_BYTES
from asynchicache.specs import ModelSpec, TensorSpec
from asynchicache.testing.oracle import PageBytes

Numbers: TypeAlias = npt.NDArray[np.int64]


class TokenOracle:
    """Writes expected tokens to the pages of a request, and counts those with other bytes."""

    def __init__(self, spec: ModelSpec, tensor: Callable[[str, str], torch.Tensor]) -> None:
        """
        Args:
            spec: the model's pools; an entry of those with pages is one token.
            tensor: returns the device tensor of a pool and name; contiguous, on the CPU,
                `[layers, slots, ...]`.
        """
        self._page_size = spec.page_size
        self._tensors = {
            pool.name: [
                _TokenBytes(pool.name, one, tensor(pool.name, one.name), spec.page_size)
                for one in pool.tensors
            ]
            for pool in spec.pools
            if pool.per_token
        }

    def write(self, pool: str, pages: Sequence[int], first: int, digests: Sequence[bytes]) -> None:
        """Fill tokens from number `first` on, in `pages`, the slots of the sequence from its first page on.

        `digests[i]`: of the prefix up to and with token `first + i`.
        """
        slots, offsets = self._places(pages, first, len(digests))
        for part in self._tensors[pool] if digests else ():
            part.content[:, slots, offsets] = part.expected(digests)

    def count_wrong(self, pool: str, pages: Sequence[int], first: int, digests: Sequence[bytes]) -> int:
        """Count the tokens whose bytes differ in any layer. Arguments as of `write`."""
        wrong = np.zeros(len(digests), dtype=bool)
        slots, offsets = self._places(pages, first, len(digests))
        for part in self._tensors[pool] if digests else ():
            wrong |= (part.content[:, slots, offsets] != part.expected(digests)).any(axis=(0, 2))
        return int(wrong.sum())

    def _places(self, pages: Sequence[int], first: int, count: int) -> tuple[Numbers, Numbers]:
        numbers = np.arange(first, first + count, dtype=np.int64)
        return np.asarray(pages, np.int64)[numbers // self._page_size], numbers % self._page_size


class _TokenBytes:
    """One tensor on the device, as bytes `[layers, slots, tokens of a page, bytes of a token]`."""

    def __init__(self, pool: str, known: TensorSpec, tensor: torch.Tensor, page_size: int) -> None:
        layers, slots = tensor.shape[:2]
        self.content: PageBytes = tensor.view(torch.uint8).view(layers, slots, page_size, -1).numpy()
        names = [f"{pool}/{known.name}/{layer}" for layer in known.layers]
        self._columns = np.arange(self.content.shape[-1]) % HASH_BYTES
        self._salts = np.stack([_bytes_of([sha256(name.encode()).digest()]) for name in names])

    def expected(self, digests: Sequence[bytes]) -> PageBytes:
        """Expected bytes, `[layers, tokens, bytes of a token]`."""
        return (_bytes_of(digests)[None] ^ self._salts)[:, :, self._columns]


def _bytes_of(digests: Sequence[bytes]) -> PageBytes:
    hashes = b"".join(digest[-HASH_BYTES:] for digest in digests)
    return np.frombuffer(hashes, np.uint8).reshape(len(digests), HASH_BYTES)
