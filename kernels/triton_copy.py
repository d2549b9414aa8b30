"""Page copies in Triton: one launch for many small pages, straight from and to pinned host memory.

A copy engine needs runs of some 28 KiB to reach the bus's speed; below that a kernel is faster
(https://github.com/vllm-project/vllm/pull/42212). Shapes as in `asynchicache.kernels.reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_PAGES = 4
BLOCK_WORDS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _copy_pages_kernel(
    source: tl.tensor,
    destination: tl.tensor,
    source_slots: tl.tensor,
    destination_slots: tl.tensor,
    pages: int,
    words: int,
    source_layer_stride: int,
    source_slot_stride: int,
    destination_layer_stride: int,
    destination_slot_stride: int,
    block_pages: tl.constexpr,
    block_words: tl.constexpr,
) -> None:
    # Grid [page blocks, layers, word blocks]. Offsets are int64: pools are larger than 2**31 words.
    layer = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0).to(tl.int64) * block_pages + tl.arange(0, block_pages)
    word = tl.program_id(2).to(tl.int64) * block_words + tl.arange(0, block_words)
    source_slot = tl.load(source_slots + page, mask=page < pages, other=0)
    destination_slot = tl.load(destination_slots + page, mask=page < pages, other=0)

    # [block_pages, block_words]
    mask = (page < pages)[:, None] & (word < words)[None, :]
    source_item = layer * source_layer_stride + source_slot * source_slot_stride
    destination_item = layer * destination_layer_stride + destination_slot * destination_slot_stride
    values = tl.load(source + source_item[:, None] + word[None, :], mask=mask, other=0)
    tl.store(destination + destination_item[:, None] + word[None, :], values, mask=mask)


def gather(
    device_items: torch.Tensor,
    host_items: torch.Tensor,
    device_slots: torch.Tensor,
    host_slots: torch.Tensor,
) -> None:
    """`reference.gather` in one launch on the current stream; `host_items` must be pinned."""
    _copy_pages(device_items, host_items.transpose(0, 1), device_slots, host_slots, device_items.device)


def scatter(
    host_items: torch.Tensor,
    device_items: torch.Tensor,
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
) -> None:
    """`reference.scatter` in one launch on the current stream; `host_items` must be pinned."""
    _copy_pages(host_items.transpose(0, 1), device_items, host_slots, device_slots, device_items.device)


def _copy_pages(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_slots: torch.Tensor,
    destination_slots: torch.Tensor,
    device: torch.device,
) -> None:
    """Copy `[layers, slots, words]` views; slots are brought to `device`, where the kernel runs."""
    layers, _, words = source.shape
    pages = len(source_slots)
    if not pages:
        return
    grid = (triton.cdiv(pages, BLOCK_PAGES), layers, triton.cdiv(words, BLOCK_WORDS))
    _copy_pages_kernel[grid](
        source,
        destination,
        source_slots.to(device, non_blocking=True),
        destination_slots.to(device, non_blocking=True),
        pages,
        words,
        source.stride(0),
        source.stride(1),
        destination.stride(0),
        destination.stride(1),
        block_pages=BLOCK_PAGES,
        block_words=BLOCK_WORDS,
    )
