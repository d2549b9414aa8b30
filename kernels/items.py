"""Where the items of a pool lie in both tiers, as strided views of one integer dtype.

An item is one layer of one slot of one tensor. Words are integers, so that no bit pattern (a NaN,
say) is touched on the way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asynchicache.errors import UsageError

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Integer dtypes, widest first."""


def word_dtype(*sizes: int) -> torch.dtype:
    """The widest integer dtype whose size in bytes divides all of `sizes`."""
    return next(word for word in WORDS if all(size % word.itemsize == 0 for size in sizes))


class LayerRow(NamedTuple):
    """One layer of one tensor.

    Attributes:
        layer: of the model.
        tensor: index of the tensor in its pool.
        local: index of the layer in the tensor.
    """

    layer: int
    tensor: int
    local: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolItems:
    """The items of one pool in both tiers.

    Attributes:
        host: by tensor, int `[layers, host_slots, units, words]`; an item is `units` runs of `words`.
        device: by tensor, int `[layers, device_slots, units, words]`, all on one device.
        rows: every layer of every tensor, by the model's layers.
    """

    host: tuple[torch.Tensor, ...]
    device: tuple[torch.Tensor, ...]
    rows: tuple[LayerRow, ...]

    @classmethod
    def of(
        cls,
        host: Sequence[torch.Tensor],
        device: Sequence[torch.Tensor],
        layers: Sequence[Sequence[int]] | None = None,
    ) -> PoolItems:
        """Views of bytes, uint8 `[layers, slots, units, unit_bytes]`, as words as wide as they allow.

        Args:
            host: by tensor, in host memory.
            device: by tensor; the same shapes but for the slots.
            layers: by tensor, the model's layer of each of its own. Default: 0, 1, 2, ...

        Raises:
            UsageError: different numbers of tensors, another dtype, shapes that differ, units that are not
                contiguous, host items that are not in host memory, or tensors on several devices.
        """
        if len(host) != len(device):
            raise UsageError(f"{len(host)} tensors on the host, {len(device)} on the device")
        for index, (ours, theirs) in enumerate(zip(host, device, strict=True)):
            _check_pair(index, ours, theirs)
        if len({items.device for items in device}) != 1:
            raise UsageError(
                f"device items lie on {sorted(str(items.device) for items in device)}; one device"
            )
        pairs = [_merge_units(*pair) for pair in zip(host, device, strict=True)]
        word = word_dtype(*(size for pair in pairs for items in pair for size in _sizes(items)))
        numbers = layers or [range(items.shape[0]) for items in host]
        rows = sorted(LayerRow(n, t, i) for t, local in enumerate(numbers) for i, n in enumerate(local))
        return cls(
            tuple(ours.view(word) for ours, _ in pairs),
            tuple(theirs.view(word) for _, theirs in pairs),
            tuple(rows),
        )

    def span(self, start: int, stop: int) -> range:
        """The rows of layers `start` to `stop - 1` of the model, as indices."""
        first, last = (bisect_left(self.rows, layer, key=lambda row: row.layer) for layer in (start, stop))
        return range(first, last)


def _check_pair(index: int, host: torch.Tensor, device: torch.Tensor) -> None:
    for name, items in (("host", host), ("device", device)):
        if items.dtype != torch.uint8 or items.dim() != 4:
            raise UsageError(f"{name} items of tensor {index} are {items.dtype}, {items.dim()}-D; uint8, 4-D")
        if items.shape[3] > 1 and items.stride(3) != 1:
            raise UsageError(f"{name} items of tensor {index}: a unit is not contiguous: {items.stride()}")
    (layers, _, *unit), (other_layers, _, *other_unit) = host.shape, device.shape
    if (layers, unit) != (other_layers, other_unit):
        raise UsageError(
            f"tensor {index} is {tuple(host.shape)} on the host, {tuple(device.shape)} on the device"
        )
    if host.device.type != "cpu":
        raise UsageError(f"host items of tensor {index} lie on {host.device}")


def _merge_units(host: torch.Tensor, device: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with one unit per item, if units are adjacent on both sides."""
    _, _, units, size = host.shape
    if units == 1 or any(items.stride(2) != size for items in (host, device)):
        return host, device
    return host.flatten(2).unsqueeze(2), device.flatten(2).unsqueeze(2)


def _sizes(items: torch.Tensor) -> list[int]:
    """The sizes that a word must divide: unit, start, and the strides of dimensions longer than 1."""
    strides = [items.stride(i) for i in range(3) if items.shape[i] > 1]
    return [int(items.shape[3]), int(items.storage_offset()), items.data_ptr(), *strides]
