"""Page copies in plain torch: the definition of right for every kernel, and the CPU's data path.

Shapes everywhere: device items `[layers, device_slots, words]`, host items
`[host_slots, layers, words]`, of one integer dtype, so that no bit pattern (a NaN, say) is touched.
Both may be views with any strides but the last, which is 1.
"""

from __future__ import annotations

import torch

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Integer dtypes, widest first."""


def word_dtype(*sizes: int) -> torch.dtype:
    """The widest integer dtype whose size divides all of `sizes`, in bytes."""
    return next(word for word in WORDS if all(size % word.itemsize == 0 for size in sizes))


def gather(
    device_items: torch.Tensor,
    host_items: torch.Tensor,
    device_slots: torch.Tensor,
    host_slots: torch.Tensor,
) -> None:
    """Copy device pages to host pages: `device_slots[i]` to `host_slots[i]`, every layer.

    Args:
        device_items: `[layers, device_slots, words]`, read.
        host_items: `[host_slots, layers, words]`, written.
        device_slots: int64 `[pages]`.
        host_slots: int64 `[pages]`, without duplicates.
    """
    pages = device_items.index_select(1, device_slots.to(device_items.device))
    host_items.index_copy_(0, host_slots, pages.transpose(0, 1).to(host_items.device))


def scatter(
    host_items: torch.Tensor,
    device_items: torch.Tensor,
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
) -> None:
    """Copy host pages to device pages: `host_slots[i]` to `device_slots[i]`, every layer.

    Args:
        host_items: `[host_slots, layers, words]`, read.
        device_items: `[layers, device_slots, words]`, written.
        host_slots: int64 `[pages]`.
        device_slots: int64 `[pages]`, without duplicates.
    """
    pages = host_items.index_select(0, host_slots).to(device_items.device)
    device_items.index_copy_(1, device_slots.to(device_items.device), pages.transpose(0, 1))


def copy_run(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy a run of neighbouring pages, every layer, in the order of the current stream.

    Args:
        source: `[layers, pages, words]`.
        destination: the same shape.
    """
    if source.device == destination.device:
        destination.copy_(source)
        return
    # Torch moves a strided tensor between devices through a temporary that it fills at the time of
    # the call, so earlier work of the stream would not be seen. Each item by itself is contiguous.
    for source_layer, destination_layer in zip(source, destination, strict=True):
        for source_item, destination_item in zip(source_layer, destination_layer, strict=True):
            destination_item.copy_(source_item, non_blocking=True)
