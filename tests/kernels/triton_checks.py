"""Triton page copies against the torch reference; run by `test_triton_copy.py`, in its own process.

Triton decides when it is imported whether its interpreter runs the kernels, so the process of the
other tests, which may have imported it already, cannot be used.
"""

from __future__ import annotations

import os

import pytest
import torch

from asynchicache.kernels import reference, triton_copy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
POISON = 0xDD
NAN = 0x7FC1  # a bfloat16 NaN with a payload that arithmetic would lose

# layers, words, pages, dtype: odd sizes, one item, exact blocks, more than one block of each kind
CASES = [
    (1, 1, 1, torch.uint8),
    (3, 37, 5, torch.int16),
    (2, triton_copy.BLOCK_WORDS, triton_copy.BLOCK_PAGES, torch.int64),
    (2, triton_copy.BLOCK_WORDS + 1, triton_copy.BLOCK_PAGES + 1, torch.int32),
    (1, 2 * triton_copy.BLOCK_WORDS - 1, 2 * triton_copy.BLOCK_PAGES + 3, torch.int16),
]


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full((*shape, dtype.itemsize), POISON, dtype=torch.uint8).view(dtype).squeeze(-1)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    items = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    items = items.view(dtype).squeeze(-1)
    if dtype == torch.int16:
        items[..., ::2] = NAN
    return items


def _host_view(slots: int, layers: int, words: int, dtype: torch.dtype, fill: torch.Tensor) -> torch.Tensor:
    """Strided like a host slot: other tensors before it, padding behind it; pinned on a GPU."""
    stride = layers * words + 11
    memory = _poisoned((slots * stride + 5,), dtype)
    if not INTERPRETED:
        memory = memory.pin_memory()
    view = memory.as_strided((slots, layers, words), (stride, words, 1), 5)
    view.copy_(fill)
    return view


def _slots(count: int, capacity: int, seed: int) -> torch.Tensor:
    return torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize(("layers", "words", "pages", "dtype"), CASES)
def test_gather_equals_reference(layers: int, words: int, pages: int, dtype: torch.dtype) -> None:
    device_items = _filled((layers, pages + 4, words), dtype, 1)
    poison = _poisoned((pages + 3, layers, words), dtype)
    expected = _host_view(pages + 3, layers, words, dtype, poison)
    found = _host_view(pages + 3, layers, words, dtype, poison)
    device_slots, host_slots = _slots(pages, pages + 4, 2), _slots(pages, pages + 3, 3)

    reference.gather(device_items, expected, device_slots, host_slots)
    triton_copy.gather(device_items.to(DEVICE), found, device_slots, host_slots)
    _synchronize()

    assert torch.equal(_whole(found), _whole(expected))


@pytest.mark.parametrize(("layers", "words", "pages", "dtype"), CASES)
def test_scatter_equals_reference(layers: int, words: int, pages: int, dtype: torch.dtype) -> None:
    host_items = _host_view(pages + 3, layers, words, dtype, _filled((pages + 3, layers, words), dtype, 4))
    expected = _poisoned((layers, pages + 4, words), dtype)
    found = expected.clone().to(DEVICE)
    device_slots, host_slots = _slots(pages, pages + 4, 5), _slots(pages, pages + 3, 6)

    reference.scatter(host_items, expected, host_slots, device_slots)
    triton_copy.scatter(host_items, found, host_slots, device_slots)
    _synchronize()

    assert torch.equal(found.cpu(), expected)


def test_no_pages_copy_nothing() -> None:
    device_items = _poisoned((1, 2, 3), torch.int32).to(DEVICE)
    host_items = _host_view(2, 1, 3, torch.int32, _filled((2, 1, 3), torch.int32, 7))
    none = torch.empty(0, dtype=torch.int64)

    triton_copy.scatter(host_items, device_items, none, none)

    assert torch.equal(device_items.cpu(), _poisoned((1, 2, 3), torch.int32))


def _whole(view: torch.Tensor) -> torch.Tensor:
    """Everything that the memory of a view holds: a stray write outside the view counts too."""
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())


def _synchronize() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()
