"""The bytes that belong in a page: a function of what the page is, so that any other page is seen.

`bytes = f(identity, page digest, pool, tensor, layer)`: whoever is given a page can tell whether it is
the right one, whole, of the right tokens, tenant, weights and shard.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asynchicache.hashing import DIGEST_BYTES
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec

Bytes: TypeAlias = npt.NDArray[np.uint8]


def _nothing_more(pool: str) -> str:
    return ""


class ByteOracle:
    """Writes the bytes that belong in device slots, and counts the slots that hold others."""

    def __init__(
        self,
        spec: ModelSpec,
        tensor: Callable[[str, str], torch.Tensor],
        identity: Callable[[str], str] = _nothing_more,
    ) -> None:
        """
        Args:
            spec: the model's pools.
            tensor: by pool and name, the device tensor, contiguous, on the CPU, `[layers, slots, ...]`.
            identity: by pool, what else makes its pages differ: weight version, salt, shard. Default:
                nothing.
        """
        self._parts = {
            pool.name: [
                _TensorBytes(Pattern(spec, pool, known, identity(pool.name)), tensor(pool.name, known.name))
                for known in pool.tensors
            ]
            for pool in spec.pools
        }

    def write(
        self, pool: str, slots: Sequence[int], digests: Sequence[bytes], *, layer: int | None = None
    ) -> None:
        """Fill `slots[i]` with what the page (or state) of `digests[i]` consists of.

        Args:
            pool: whose slots.
            slots, digests: see above.
            layer: the only layer of the model to write, as the forward of that layer does. Default: all.
        """
        if slots:
            for part in self._parts[pool]:
                rows = part.rows(layer)
                part.content[rows][:, slots] = part.expected(digests)[rows]

    def count_wrong(
        self, pool: str, slots: Sequence[int], digests: Sequence[bytes], *, layer: int | None = None
    ) -> int:
        """How many of `slots` differ in a byte from what `digests` demand; of one layer only, if `layer` is
        given."""
        if not slots:
            return 0
        wrong = np.zeros(len(slots), dtype=bool)
        for part in self._parts[pool]:
            rows = part.rows(layer)
            wrong |= (part.content[rows][:, slots] != part.expected(digests)[rows]).any(axis=(0, 2))
        return int(wrong.sum())


class HostOracle:
    """Tells whether whole pages in host memory, or in storage, hold the bytes that belong in them."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: HostLayout,
        identity: Callable[[str], str] = _nothing_more,
    ) -> None:
        """
        Args:
            spec: the model's pools.
            layout: one in which slots are whole.
            identity: as of `ByteOracle`.
        """
        self._patterns = {
            pool.name: [Pattern(spec, pool, known, identity(pool.name)) for known in pool.tensors]
            for pool in spec.pools
        }
        self._layouts = {pool.name: SlotLayout.of(pool, spec.page_size, layout) for pool in spec.pools}

    def holds(self, pool: str, page: memoryview, digest: bytes) -> bool:
        """Whether `page`, a slot of the pool, is the page of `digest`."""
        content = np.frombuffer(page, np.uint8)
        layout = self._layouts[pool]
        for pattern in self._patterns[pool]:
            strides = layout.strides(pattern.tensor.name, 1)
            found = np.lib.stride_tricks.as_strided(
                content[strides.offset :], strides.shape, strides.stride, writeable=False
            )
            if not np.array_equal(found.reshape(strides.layers, 1, -1), pattern.expected([digest])):
                return False
        return True


class Pattern:
    """What one tensor of a pool holds.

    Attributes:
        tensor: the tensor.
    """

    def __init__(self, spec: ModelSpec, pool: PoolSpec, tensor: TensorSpec, identity: str) -> None:
        self.tensor = tensor
        self._columns = np.arange(pool.item_bytes(tensor, spec.page_size)) % DIGEST_BYTES
        names = [f"{identity}{pool.name}/{tensor.name}/{layer}" for layer in tensor.layers]
        salts = _rows([sha256(name.encode()).digest() for name in names])
        self._salts = salts[:, None, self._columns]  # [layers, 1, item]

    def expected(self, digests: Sequence[bytes]) -> Bytes:
        """Bytes of an item by layer and page, `[layers, pages, item]`."""
        return _rows(digests)[None, :, self._columns] ^ self._salts


class _TensorBytes:
    """One tensor of one pool on the device, as bytes `[layers, slots, item]`."""

    def __init__(self, pattern: Pattern, tensor: torch.Tensor) -> None:
        layers, slots = tensor.shape[:2]
        self.content: Bytes = tensor.view(torch.uint8).view(layers, slots, -1).numpy()
        self.expected = pattern.expected
        self._layers = pattern.tensor.layers

    def rows(self, layer: int | None) -> slice:
        """Where a layer of the model is in the tensor, if it is; everything for None."""
        if layer is None:
            return slice(None)
        return slice(bisect_left(self._layers, layer), bisect_right(self._layers, layer))


def _rows(digests: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), DIGEST_BYTES)
