"""Page copies in plain torch: the reference for every kernel, and on a CPU the kernel itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch

from asynchicache.kernels.items import PoolItems

CACHE_BYTES = 256 << 10
"""Most bytes gathered before they are scattered: few enough to stay in a core's cache."""


class ReferenceKernels:
    """Copies between the tiers of one pool with torch's index operations."""

    def __init__(self, items: PoolItems) -> None:
        self._items = items

    def copy(
        self, rows: range, host_slots: int, device_slots: int, pages: int, *, to_device: bool, stream: int
    ) -> None:
        """Copy pages on this thread; see `asynchicache.kernels.select.PageKernels`."""
        on_host, on_device = (_numbers_at(address, pages) for address in (host_slots, device_slots))
        for tensor, layers in self._spans(rows):
            host, device = self._items.host[tensor][layers], self._items.device[tensor][layers]
            if to_device:
                copy_pages(host, device, on_host, on_device)
            else:
                copy_pages(device, host, on_device, on_host)

    def _spans(self, rows: range) -> Iterator[tuple[int, slice]]:
        """Rows by tensor; rows that are neighbours in the model are neighbours in each tensor."""
        chosen = sorted(self._items.rows[rows.start : rows.stop], key=lambda row: (row.tensor, row.local))
        for tensor, group in groupby(chosen, key=lambda row: row.tensor):
            local = [row.local for row in group]
            yield tensor, slice(local[0], local[-1] + 1)


def _numbers_at(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address)))


def copy_pages(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_slots: torch.Tensor,
    destination_slots: torch.Tensor,
) -> None:
    """Copy pages between two views `[layers, slots, units, words]`, on one device or on two.

    Args:
        source: read.
        destination: written; the same shape but for the slots.
        source_slots: int64 `[pages]`.
        destination_slots: int64 `[pages]`, without duplicates.
    """
    layers, _, units, words = source.shape
    step = max(1, CACHE_BYTES // max(1, layers * units * words * source.element_size()))
    # Slots become the first dimension: along another one torch would make the whole source contiguous each
    # time.
    source, destination = source.transpose(0, 1), destination.transpose(0, 1)
    for start in range(0, len(source_slots), step):
        chunk = slice(start, start + step)
        pages = source.index_select(0, source_slots[chunk].to(source.device))
        to_slots = destination_slots[chunk].to(destination.device)
        destination.index_copy_(0, to_slots, pages.to(destination.device))


def copy_run(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy a run of neighbouring pages, in the order of the current stream.

    Args:
        source: `[layers, pages, units, words]`.
        destination: the same shape.
    """
    if source.device == destination.device:
        destination.copy_(source, non_blocking=True)
        return
    # Layer by layer: layout `layer_first` pins each layer by itself, and CUDA cannot copy across two
    # registrations.
    for source_layer, destination_layer in zip(source, destination, strict=True):
        _copy_between(source_layer, destination_layer)


def _copy_between(source: torch.Tensor, destination: torch.Tensor) -> None:
    """A copy between devices, in contiguous parts.

    Torch copies a strided tensor between devices through a temporary that it fills at the time of the call,
    so it would miss earlier work of the stream.
    """
    if source.is_contiguous() and destination.is_contiguous():
        destination.copy_(source, non_blocking=True)
        return
    for source_part, destination_part in zip(source, destination, strict=True):
        _copy_between(source_part, destination_part)
