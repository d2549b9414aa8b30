"""The torch page copies, against copies of one page at a time."""

from __future__ import annotations

import pytest
import torch

from asynchicache.errors import UsageError
from asynchicache.kernels import reference
from asynchicache.kernels.items import PoolItems, word_dtype
from asynchicache.kernels.reference import ReferenceKernels
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.specs import PoolSpec, TensorSpec

KV = PoolSpec("kv", (TensorSpec("keys", (0, 2), (5,), "uint8"), TensorSpec("scales", (2,), (), "float32")))
PAGE_SIZE, DEVICE_SLOTS, HOST_SLOTS = 3, 7, 6
LAYERS = [tensor.layers for tensor in KV.tensors]


def _bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _pool(layout: HostLayout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Host and device views of random bytes."""
    place = SlotLayout.of(KV, PAGE_SIZE, layout)
    slab = _bytes(place.nbytes(HOST_SLOTS))
    strides = [place.strides(tensor.name, HOST_SLOTS) for tensor in KV.tensors]
    host = [slab.as_strided(one.shape, one.stride, one.offset) for one in strides]
    return host, [_bytes(one.layers, DEVICE_SLOTS, one.units, one.unit_bytes, seed=1) for one in strides]


def _copy(
    items: PoolItems, rows: range, host_slots: torch.Tensor, device_slots: torch.Tensor, *, to_device: bool
) -> None:
    addresses = host_slots.data_ptr(), device_slots.data_ptr()
    ReferenceKernels(items).copy(rows, *addresses, len(host_slots), to_device=to_device, stream=0)


@pytest.mark.parametrize("layout", list(HostLayout))
def test_pages_of_the_rows_are_copied_to_the_host(layout: HostLayout) -> None:
    host, device = _pool(layout)
    expected = [items.clone() for items in host]
    for device_slot, host_slot in ((6, 0), (0, 5), (3, 2)):
        expected[0][1, host_slot] = device[0][1, device_slot]
        expected[1][0, host_slot] = device[1][0, device_slot]
    items = PoolItems.of(host, device, LAYERS)

    _copy(items, items.span(1, 3), torch.tensor([0, 5, 2]), torch.tensor([6, 0, 3]), to_device=False)

    assert all(torch.equal(found, wanted) for found, wanted in zip(host, expected, strict=True))


@pytest.mark.parametrize("layout", list(HostLayout))
def test_a_copy_back_undoes_a_copy(layout: HostLayout) -> None:
    host, device = _pool(layout)
    back = [torch.zeros_like(items) for items in device]
    device_slots, host_slots = torch.tensor([1, 5, 2]), torch.tensor([4, 0, 3])

    _copy(PoolItems.of(host, device, LAYERS), range(3), host_slots, device_slots, to_device=False)
    _copy(PoolItems.of(host, back, LAYERS), range(3), host_slots, device_slots, to_device=True)

    for found, original in zip(back, device, strict=True):
        assert torch.equal(found[:, device_slots], original[:, device_slots])
        assert not found[:, [0, 3, 4, 6]].any()


def test_rows_are_in_the_order_of_the_models_layers() -> None:
    items = PoolItems.of(*_pool(HostLayout.PAGE_FIRST_DIRECT), LAYERS)

    assert items.rows == ((0, 0, 0), (2, 0, 1), (2, 1, 0))
    assert items.span(0, 2) == range(1)
    assert items.span(1, 2) == range(1, 1)
    assert items.span(1, 9) == range(1, 3)


@pytest.mark.parametrize(("chunk", "pages"), [(1, 6), (1 << 20, 6)])
def test_pages_are_copied_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int, pages: int) -> None:
    monkeypatch.setattr(reference, "CACHE_BYTES", chunk)
    source, destination = _bytes(2, 6, 3, 5), torch.zeros(2, 6, 3, 5, dtype=torch.uint8)
    order = torch.tensor([5, 0, 3, 1, 4, 2])

    reference.copy_pages(source, destination, order, torch.arange(pages))

    assert torch.equal(destination, source[:, order])


def test_copy_run_copies_between_strided_views() -> None:
    source = _bytes(6, 3, 1, 5).transpose(0, 1)
    destination = torch.zeros(3, 7, 1, 5, dtype=torch.uint8)

    reference.copy_run(source[1:, 2:5], destination[1:, 4:7])

    assert torch.equal(destination[1:, 4:7], source[1:, 2:5])
    assert not destination[0].any()
    assert not destination[:, :4].any()


def test_copies_between_devices_are_contiguous_and_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would stage others too early, and layers may be pinned one by one."""
    copied: list[tuple[int, ...]] = []

    def copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        assert source.is_contiguous()
        assert destination.is_contiguous()
        copied.append(tuple(source.shape))

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    host, device = _bytes(2, 6, 3, 5), torch.empty(2, 6, 3, 5, dtype=torch.uint8, device="meta")

    reference.copy_run(host, device)
    reference.copy_run(host[:, 1:3], device[:, 4:6])
    assert copied == [(6, 3, 5)] * 2 + [(2, 3, 5)] * 2

    copied.clear()
    reference.copy_run(host.transpose(0, 1)[:, :1], device.transpose(0, 1)[:, :1])
    assert copied == [(1, 3, 5)] * 6


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
    assert word_dtype(*sizes) is word


def test_units_that_follow_one_another_become_one() -> None:
    memory = torch.zeros(2, 4, 3, 8, dtype=torch.uint8)
    items = PoolItems.of([memory], [memory.clone()])

    assert items.host[0].shape == (2, 4, 1, 3)
    assert items.host[0].dtype is torch.int64


@pytest.mark.parametrize(
    ("host", "device", "message"),
    [
        (
            torch.zeros(1, 2, 1, 4),
            torch.zeros(1, 2, 1, 4, dtype=torch.uint8),
            "host items of tensor 0 are torch.float32",
        ),
        (torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(1, 2, 1, 4, dtype=torch.uint8), "2-D; uint8, 4-D"),
        (_bytes(1, 2, 4, 4).transpose(2, 3), _bytes(1, 2, 4, 4), "a unit is not contiguous"),
        (_bytes(1, 2, 1, 4), _bytes(1, 2, 1, 8), r"on the host, \(1, 2, 1, 8\) on the device"),
        (_bytes(1, 2, 1, 4).to("meta"), _bytes(1, 2, 1, 4), "host items of tensor 0 lie on meta"),
    ],
)
def test_views_that_kernels_cannot_use_are_refused(
    host: torch.Tensor, device: torch.Tensor, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        PoolItems.of([host], [device])


def test_device_items_must_be_as_many_and_on_one_device() -> None:
    host = _bytes(1, 2, 1, 4)

    with pytest.raises(UsageError, match="2 tensors on the host, 1 on the device"):
        PoolItems.of([host, host], [host])

    with pytest.raises(UsageError, match=r"cpu.*meta.*; one device"):
        PoolItems.of([host, host], [host, host.to("meta")])
