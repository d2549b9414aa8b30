"""The torch page copies, against copies of one page at a time."""

from __future__ import annotations

import pytest
import torch

from asynchicache.kernels import reference
from asynchicache.kernels.select import page_kernels

LAYERS, DEVICE_SLOTS, HOST_SLOTS, WORDS = 3, 7, 6, 5


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)


def test_gather_copies_each_page_of_every_layer() -> None:
    device_items, host_items = (
        _numbers(LAYERS, DEVICE_SLOTS, WORDS),
        torch.zeros(HOST_SLOTS, LAYERS, WORDS).long(),
    )
    expected = host_items.clone()
    for device_slot, host_slot in ((6, 0), (0, 5), (3, 2)):
        expected[host_slot] = device_items[:, device_slot]

    reference.gather(device_items, host_items, torch.tensor([6, 0, 3]), torch.tensor([0, 5, 2]))

    assert torch.equal(host_items, expected)


def test_scatter_undoes_gather() -> None:
    device_items = _numbers(LAYERS, DEVICE_SLOTS, WORDS)
    host_items, back = torch.zeros(HOST_SLOTS, LAYERS, WORDS).long(), torch.zeros_like(device_items)
    device_slots, host_slots = torch.tensor([1, 5, 2]), torch.tensor([4, 0, 3])

    reference.gather(device_items, host_items, device_slots, host_slots)
    reference.scatter(host_items, back, host_slots, device_slots)

    expected = torch.zeros_like(device_items)
    expected[:, device_slots] = device_items[:, device_slots]
    assert torch.equal(back, expected)


def test_copy_run_copies_between_strided_views() -> None:
    source = _numbers(HOST_SLOTS, LAYERS, WORDS).transpose(0, 1)
    destination = torch.zeros(LAYERS, DEVICE_SLOTS, WORDS, dtype=torch.int64)

    reference.copy_run(source[1:, 2:5], destination[1:, 4:7])

    assert torch.equal(destination[1:, 4:7], source[1:, 2:5])
    assert not destination[0].any()
    assert not destination[:, :4].any()


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ((16, 8), torch.int64),
        ((16, 4), torch.int32),
        ((6,), torch.int16),
        ((8, 8, 3), torch.uint8),
        ((0, 8), torch.int64),
    ],
)
def test_words_are_as_wide_as_all_sizes_allow(sizes: tuple[int, ...], word: torch.dtype) -> None:
    assert reference.word_dtype(*sizes) is word


def test_there_are_no_kernels_for_memory_that_a_gpu_cannot_reach() -> None:
    assert page_kernels(torch.device("cpu"), pinned=True) is None
    assert page_kernels(torch.device("cuda"), pinned=False) is None
