"""Expected page contents, computed from the page's identity, so that a wrong page is detected.

`bytes = f(identity, page digest, pool, tensor, layer)`: a test can check that a page is complete and has
the right tokens, tenant, weights and shard.
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
    """Writes expected bytes to device slots, and counts slots that hold other bytes."""

    def __init__(
        self,
        spec: ModelSpec,
        tensor: Callable[[str, str], torch.Tensor],
        identity: Callable[[str], str] = _nothing_more,
    ) -> None:
        """
        Args:
            spec: the model's pools.
            tensor: returns the device tensor of a pool and name; contiguous, on the CPU,
                `[layers, slots, ...]`.
            identity: returns what else distinguishes a pool's pages: weight version, salt, shard. Default:
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
        """Fill `slots[i]` with the expected page (or state) of `digests[i]`.

        Args:
            pool: the pool of the slots.
            slots, digests: see above.
            layer: write only this layer, as its forward pass does. Default: all layers.
        """
        if slots:
            for part in self._parts[pool]:
                rows = part.rows(layer)
                part.content[rows][:, slots] = part.expected(digests)[rows]

    def count_wrong(
        self, pool: str, slots: Sequence[int], digests: Sequence[bytes], *, layer: int | None = None
    ) -> int:
        """Count the slots that differ in any byte from the expected pages of `digests`. If `layer` is given,
        compare only that layer."""
        if not slots:
            return 0
        wrong = np.zeros(len(slots), dtype=bool)
        for part in self._parts[pool]:
            rows = part.rows(layer)
            wrong |= (part.content[rows][:, slots] != part.expected(digests)[rows]).any(axis=(0, 2))
        return int(wrong.sum())


class HostOracle:
    """Checks whole pages in host memory or storage against their expected bytes."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: HostLayout,
        identity: Callable[[str], str] = _nothing_more,
    ) -> None:
        """
        Args:
            spec: the model's pools.
            layout: a layout with contiguous slots.
            identity: see `ByteOracle`.
        """
        self._patterns = {
            pool.name: [Pattern(spec, pool, known, identity(pool.name)) for known in pool.tensors]
            for pool in spec.pools
        }
        self._layouts = {pool.name: SlotLayout.of(pool, spec.page_size, layout) for pool in spec.pools}

    def holds(self, pool: str, page: memoryview, digest: bytes) -> bool:
        """Whether `page`, a slot of the pool, holds the expected bytes of `digest`."""
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
    """Expected contents of one tensor of a pool.

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
        """Expected bytes, `[layers, pages, item]`."""
        return _rows(digests)[None, :, self._columns] ^ self._salts


class _TensorBytes:
    """One tensor of one pool on the device, as bytes `[layers, slots, item]`."""

    def __init__(self, pattern: Pattern, tensor: torch.Tensor) -> None:
        layers, slots = tensor.shape[:2]
        self.content: Bytes = tensor.view(torch.uint8).view(layers, slots, -1).numpy()
        self.expected = pattern.expected
        self._layers = pattern.tensor.layers

    def rows(self, layer: int | None) -> slice:
        """Rows of a model layer in the tensor; empty if absent, all rows for None."""
        if layer is None:
            return slice(None)
        return slice(bisect_left(self._layers, layer), bisect_right(self._layers, layer))


def _rows(digests: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), DIGEST_BYTES)
