"""Expected page contents, computed from the page's identity, so that a wrong page is detected.

`bytes = f(identity, page digest, pool, tensor, layer)`: a test can check that a page is complete and has
the right tokens, tenant, weights and shard.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asynchicache.hashing import HASH_BYTES, page_digests, tail_digests
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec

PageBytes: TypeAlias = npt.NDArray[np.uint8]


def _nothing_more(pool: str) -> str:
    return ""


class PrefixEnd(NamedTuple):
    """The end of a prefix inside a page: the prefix's digest, and its tokens in that page."""

    digest: bytes
    tokens: int


class PageTokens:
    """The prefix digests of the tokens of pages, so that bytes can be expected token by token.

    Then `bytes = f(identity, digest of the prefix up to a token, ...)`: pages that go on differently behind a
    shared beginning have the same bytes in it.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tokens: dict[bytes, bytes] = {}
        self._ends: dict[bytes, PrefixEnd] = {}
        self._noted: set[tuple[bytes, bytes]] = set()

    def note(self, tokens: array[int], seed: bytes) -> None:
        """Know the pages of a sequence from now on, and its ends: the digest of a prefix, and that of a tail,
        stand for the page that it ends in, up to there."""
        if (seed, words := tokens.tobytes()) in self._noted:
            return
        self._noted.add((seed, words))
        size, each = self._page_size, page_digests(tokens, 1, seed)
        pages = page_digests(tokens, size, seed)
        for number, digest in enumerate(pages):
            self._tokens[digest] = _hashes(each[number * size : (number + 1) * size])
        for end, digest in enumerate(each, start=1):
            page = _hashes(each[(end - 1) // size * size : end])
            self._tokens.setdefault(digest, page.ljust(size * HASH_BYTES, b"\0"))
            if end % size:
                filled = tokens[end - end % size : end] + array("q", [-1] * (size - end % size))
                (tail,) = tail_digests([filled.tobytes()], pages[end // size - 1] if end >= size else seed)
                self._tokens[tail] = self._tokens[digest]
                self._ends[tail] = PrefixEnd(digest, end % size)

    def end(self, digest: bytes) -> PrefixEnd | None:
        """The prefix that a tail ends; None if it is the digest of something else."""
        return self._ends.get(digest)

    def rows(self, digests: Sequence[bytes]) -> PageBytes:
        """Digests of the tokens of pages, `[pages, tokens, HASH_BYTES]`; its own if a page is unknown."""
        tokens = [self._tokens.get(digest, digest[-HASH_BYTES:] * self._page_size) for digest in digests]
        rows = np.frombuffer(b"".join(tokens), np.uint8)
        return rows.reshape(len(digests), self._page_size, HASH_BYTES)


class ByteOracle:
    """Writes expected bytes to device slots, and counts slots that hold other bytes.

    Attributes:
        page_tokens: the tokens of pages, if bytes are expected token by token.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensor: Callable[[str, str], torch.Tensor],
        identity: Callable[[str], str] = _nothing_more,
        page_tokens: PageTokens | None = None,
    ) -> None:
        """
        Args:
            page_tokens: see above.
            tensor: returns the device tensor of a pool and name; contiguous, on the CPU,
                `[layers, slots, ...]`.
            identity: returns what else distinguishes a pool's pages: weight version, salt, shard. Default:
                nothing.
        """
        self.page_tokens = page_tokens
        self._parts = {
            pool.name: [
                _TensorBytes(
                    Pattern(spec, pool, known, identity(pool.name), page_tokens),
                    tensor(pool.name, known.name),
                )
                for known in pool.tensors
            ]
            for pool in spec.pools
        }

    def write(
        self,
        pool: str,
        slots: Sequence[int],
        digests: Sequence[bytes],
        first: int = 0,
        last: int | None = None,
        *,
        layer: int | None = None,
    ) -> None:
        """Fill `slots[i]` with the expected page (or state) of `digests[i]`.

        Args:
            pool: the pool of the slots.
            slots, digests: see above.
            first, last: with page tokens, write only these tokens of each page, up to and without `last`.
            layer: write only this layer, as its forward pass does. Default: all layers.
        """
        if slots:
            for part in self._parts[pool]:
                rows, columns = part.rows(layer), part.columns(first, last)
                part.content[rows][:, slots, columns] = part.expected(digests)[rows][:, :, columns]

    def count_wrong(
        self,
        pool: str,
        slots: Sequence[int],
        digests: Sequence[bytes],
        first: int = 0,
        last: int | None = None,
        *,
        layer: int | None = None,
    ) -> int:
        """Count the slots that differ in any byte from the expected pages of `digests`. If `layer` is given,
        compare only that layer; `first` and `last` as of `write`."""
        if not slots:
            return 0
        wrong = np.zeros(len(slots), dtype=bool)
        for part in self._parts[pool]:
            rows, columns = part.rows(layer), part.columns(first, last)
            expected = part.expected(digests)[rows][:, :, columns]
            wrong |= (part.content[rows][:, slots, columns] != expected).any(axis=(0, 2))
        return int(wrong.sum())


class HostOracle:
    """Checks pages in host memory or storage against their expected bytes; of a tail, its tokens."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: HostLayout,
        identity: Callable[[str], str] = _nothing_more,
        page_tokens: PageTokens | None = None,
    ) -> None:
        """
        Args:
            layout: a layout with contiguous slots.
            identity, page_tokens: see `ByteOracle`.
        """
        self._patterns = {
            pool.name: [
                Pattern(spec, pool, known, identity(pool.name), page_tokens) for known in pool.tensors
            ]
            for pool in spec.pools
        }
        self._layouts = {pool.name: SlotLayout.of(pool, spec.page_size, layout) for pool in spec.pools}
        self._paged = {pool.name for pool in spec.pools if pool.per_token}
        self._page_tokens = page_tokens

    def holds(self, pool: str, page: memoryview, digest: bytes) -> bool:
        """Whether `page`, a slot of the pool, holds the expected bytes of `digest`."""
        end = self._page_tokens.end(digest) if self._page_tokens is not None else None
        for pattern, found, expected in self._parts(pool, page, digest if end is None else end.digest):
            known = slice(end.tokens * pattern.token_bytes if end and pool in self._paged else None)
            if not np.array_equal(found.reshape(expected.shape)[..., known], expected[..., known]):
                return False
        return True

    def fill(self, pool: str, page: memoryview, digest: bytes) -> None:
        """Write the expected bytes of `digest` into a slot of the pool."""
        end = self._page_tokens.end(digest) if self._page_tokens is not None else None
        for _, found, expected in self._parts(pool, page, digest if end is None else end.digest):
            found[...] = expected.reshape(found.shape)

    def _parts(
        self, pool: str, page: memoryview, digest: bytes
    ) -> Iterator[tuple[Pattern, PageBytes, PageBytes]]:
        """Each tensor of a page: its pattern, what is there, and what is expected, `[layers, 1, item]`."""
        content = np.frombuffer(page, np.uint8)
        for pattern in self._patterns[pool]:
            strides = self._layouts[pool].strides(pattern.tensor.name, 1)
            found = np.lib.stride_tricks.as_strided(content[strides.offset :], strides.shape, strides.stride)
            yield pattern, found, pattern.expected([digest])


class Pattern:
    """Expected contents of one tensor of a pool."""

    def __init__(
        self,
        spec: ModelSpec,
        pool: PoolSpec,
        tensor: TensorSpec,
        identity: str,
        page_tokens: PageTokens | None = None,
    ) -> None:
        self.tensor = tensor
        self._page_tokens = page_tokens if pool.per_token else None
        columns = np.arange(pool.item_bytes(tensor, spec.page_size))
        self.token_bytes = len(columns) // spec.page_size
        self._tokens = columns // max(self.token_bytes, 1)
        self._columns = (columns if self._page_tokens is None else columns % self.token_bytes) % HASH_BYTES
        names = [f"{identity}{pool.name}/{tensor.name}/{layer}" for layer in tensor.layers]
        salts = _rows([sha256(name.encode()).digest() for name in names])
        self._salts = salts[:, None, self._columns]  # [layers, 1, item]

    def expected(self, digests: Sequence[bytes]) -> PageBytes:
        """Expected bytes, `[layers, pages, item]`."""
        if self._page_tokens is not None:
            return self._page_tokens.rows(digests)[None, :, self._tokens, self._columns] ^ self._salts
        return _rows(digests)[None, :, self._columns] ^ self._salts


class _TensorBytes:
    """One tensor of one pool on the device, as bytes `[layers, slots, item]`."""

    def __init__(self, pattern: Pattern, tensor: torch.Tensor) -> None:
        layers, slots = tensor.shape[:2]
        self.content: PageBytes = tensor.view(torch.uint8).view(layers, slots, -1).numpy()
        self.expected = pattern.expected
        self._token_bytes = pattern.token_bytes
        self._layers = pattern.tensor.layers

    def columns(self, first: int, last: int | None) -> slice:
        """Columns of some tokens of a page; all of a state."""
        return slice(first * self._token_bytes, None if last is None else last * self._token_bytes)

    def rows(self, layer: int | None) -> slice:
        """Rows of a model layer in the tensor; empty if absent, all rows for None."""
        if layer is None:
            return slice(None)
        return slice(bisect_left(self._layers, layer), bisect_right(self._layers, layer))


def _hashes(digests: Sequence[bytes]) -> bytes:
    """Hashes behind each other, without their namespaces."""
    return b"".join(digest[-HASH_BYTES:] for digest in digests)


def _rows(digests: Sequence[bytes]) -> PageBytes:
    return np.frombuffer(_hashes(digests), np.uint8).reshape(len(digests), HASH_BYTES)
