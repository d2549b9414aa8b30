"""Triton page copies against the torch reference; run by `test_triton_copy.py`, in its own process.

Triton decides when it is imported whether its interpreter runs the kernels, so the process of the
other tests, which may have imported it already, cannot be used.
"""

from __future__ import annotations

import os

import pytest
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import DeviceError
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.pointers import HostPointers, SamePointers
from asynchicache.kernels.reference import ReferenceKernels
from asynchicache.kernels.select import PageKernels
from asynchicache.kernels.triton_copy import LANES, CudaLaunch, TritonKernels, interpreted
from asynchicache.layouts import POISON, HostLayout, SlotLayout
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAN = 0x7FC1  # a bfloat16 NaN with a payload that arithmetic would lose

MHA = PoolSpec("kv", tuple(TensorSpec(name, (0, 1, 3), (2, 8), "bfloat16") for name in ("keys", "values")))
MLA = PoolSpec("kv", (TensorSpec("latent", (0, 1, 2), (9,), "bfloat16"),))
DSA = PoolSpec("dsa", (TensorSpec("index", (1, 2), (5,), "uint8"), TensorSpec("scale", (2,), (), "float32")))
ENTRIES = PoolSpec(
    "kv",
    (
        TensorSpec("three", (0, 2), (9,), "bfloat16", tokens_per_entry=3),
        TensorSpec("one", (1,), (5,), "uint8"),
    ),
)
SWA = PoolSpec("swa", (TensorSpec("keys", (1,), (4,), "float32"),), coverage=trailing_pages(2))
MAMBA = PoolSpec(
    "mamba",
    (TensorSpec("conv", (0, 3), (7, 3), "bfloat16"), TensorSpec("recurrent", (0, 3), (2, 3, 5), "float32")),
    coverage=trailing_pages(1),
    per_token=False,
)
LARGE = PoolSpec("kv", (TensorSpec("keys", (0,), (LANES + 1,), "int64"),))  # of several blocks
POOLS = {"mha": MHA, "mla": MLA, "dsa": DSA, "entries": ENTRIES, "swa": SWA, "mamba": MAMBA, "large": LARGE}
PAGE_SIZES = {"large": 2}
PAGES = {"large": 2}


def _pointers() -> HostPointers:
    return SamePointers() if INTERPRETED else CudaDriver.load(0)


def _kernels(items: PoolItems, pointers: HostPointers | None = None) -> TritonKernels:
    major, minor = (0, 0) if INTERPRETED else torch.cuda.get_device_capability()
    launch = interpreted if INTERPRETED else CudaLaunch(CudaDriver.load(0), 10 * major + minor)
    return TritonKernels(items, pointers or _pointers(), launch)


def _host(spec: PoolSpec, layout: SlotLayout, slots: int, fill: torch.Tensor) -> list[torch.Tensor]:
    """Views of one slab that holds `fill`, pinned on a GPU."""
    slab = fill.clone()
    slab = slab if INTERPRETED else slab.pin_memory()
    found = [layout.strides(tensor.name, slots) for tensor in spec.tensors]
    return [slab.as_strided(strides.shape, strides.stride, strides.offset) for strides in found]


def _device(host: list[torch.Tensor], slots: int, fill: int | torch.Generator) -> list[torch.Tensor]:
    shapes = [(items.shape[0], slots, *items.shape[2:]) for items in host]
    if isinstance(fill, int):
        return [torch.full(shape, fill, dtype=torch.uint8) for shape in shapes]
    return [torch.randint(0, 256, shape, dtype=torch.uint8, generator=fill) for shape in shapes]


def _noise(nbytes: int, generator: torch.Generator) -> torch.Tensor:
    """Random bytes, every other word a NaN."""
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    noise[: nbytes // 4 * 4].view(torch.int16)[::2] = NAN
    return noise


def _slots(count: int, capacity: int, seed: int) -> torch.Tensor:
    return torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:count]


def _case(name: str) -> tuple[PoolSpec, int, int]:
    return POOLS[name], PAGE_SIZES.get(name, 3), PAGES.get(name, 5)


def _all_and_each(items: PoolItems) -> list[range]:
    """All layers at once, and one layer after the other."""
    return [range(len(items.rows)), *(items.span(layer, layer + 1) for layer in range(4))]


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("name", POOLS)
def test_copies_to_the_host_equal_the_reference(name: str, layout: HostLayout) -> None:
    spec, page_size, pages = _case(name)
    place, slots = SlotLayout.of(spec, page_size, layout), pages + 3
    poison = torch.full((place.nbytes(slots),), POISON, dtype=torch.uint8)
    wanted, found = _host(spec, place, slots, poison), _host(spec, place, slots, poison)
    device = _device(wanted, pages + 4, torch.Generator().manual_seed(1))
    device_slots, host_slots = _slots(pages, pages + 4, 2), _slots(pages, slots, 3)
    layers = [tensor.layers for tensor in spec.tensors]
    reference = ReferenceKernels(PoolItems.of(wanted, device, layers))
    items = PoolItems.of(found, [items.to(DEVICE) for items in device], layers)
    kernels = _kernels(items)

    for rows in _all_and_each(items):
        for views in (wanted, found):
            views[0].untyped_storage().fill_(POISON)
        _copy(reference, rows, host_slots, device_slots, to_device=False)
        _copy(kernels, rows, host_slots.to(DEVICE), device_slots.to(DEVICE), to_device=False)

        assert torch.equal(_whole(found), _whole(wanted))


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("name", POOLS)
def test_copies_to_the_device_equal_the_reference(name: str, layout: HostLayout) -> None:
    spec, page_size, pages = _case(name)
    place, slots = SlotLayout.of(spec, page_size, layout), pages + 3
    host = _host(spec, place, slots, _noise(place.nbytes(slots), torch.Generator().manual_seed(4)))
    wanted = _device(host, pages + 4, POISON)
    found = [items.clone().to(DEVICE) for items in wanted]
    device_slots, host_slots = _slots(pages, pages + 4, 5), _slots(pages, slots, 6)
    layers = [tensor.layers for tensor in spec.tensors]
    reference = ReferenceKernels(PoolItems.of(host, wanted, layers))
    items = PoolItems.of(host, found, layers)
    kernels = _kernels(items)

    for rows in _all_and_each(items):
        for tensor in (*wanted, *found):
            tensor.fill_(POISON)
        _copy(reference, rows, host_slots, device_slots, to_device=True)
        _copy(kernels, rows, host_slots.to(DEVICE), device_slots.to(DEVICE), to_device=True)

        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_addresses_beyond_32_bits_are_reached() -> None:
    """Slots 2**31 words apart; the pages between are never touched, so they take no memory."""
    stride, words = 2**31 + 7, 15  # odd, so a word is one byte
    host = _sparse(stride + words).as_strided((1, 2, 1, words), (0, stride, 0, 1))
    host[0, 1] = 7
    device = torch.zeros(1, 1, 1, words, dtype=torch.uint8, device=DEVICE)
    kernels = _kernels(PoolItems.of([host], [device]))

    _copy(kernels, range(1), torch.tensor([1]).to(DEVICE), torch.tensor([0]).to(DEVICE), to_device=True)

    assert (device == 7).all()


def _sparse(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not INTERPRETED)


def test_a_gpu_that_calls_host_memory_otherwise_gets_no_kernel() -> None:
    class Elsewhere:
        def device_address(self, address: int) -> int:
            return address + 4096

    host = torch.zeros(1, 2, 1, 8, dtype=torch.uint8)

    with pytest.raises(DeviceError, match="by another address"):
        _kernels(PoolItems.of([host], [host.to(DEVICE)]), Elsewhere())


def test_an_item_too_large_to_count_gets_no_kernel() -> None:
    host = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(1, 1, 2**31, 1)  # all of them one byte

    with pytest.raises(DeviceError, match="an item of 2147483648 words"):
        _kernels(PoolItems.of([host], [host[:, :, :1].to(DEVICE).expand(host.shape)]), SamePointers())


def test_no_pages_copy_nothing() -> None:
    host, device = torch.zeros(1, 2, 1, 3), torch.full((1, 2, 1, 3), 9)
    host, device = host.to(torch.uint8), device.to(torch.uint8).to(DEVICE)
    host = host if INTERPRETED else host.pin_memory()
    kernels = _kernels(PoolItems.of([host], [device]))
    none = torch.empty(0, dtype=torch.int64).to(DEVICE)

    _copy(kernels, range(1), none, none, to_device=True)

    assert (device == 9).all()


def _whole(views: list[torch.Tensor]) -> torch.Tensor:
    """Everything that the slab of some views holds: a stray write outside of them counts too."""
    return torch.empty(0, dtype=torch.uint8).set_(views[0].untyped_storage())


def _copy(
    kernels: PageKernels,
    rows: range,
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
    *,
    to_device: bool,
) -> None:
    """Copy pages, and wait until they are there."""
    stream = 0 if INTERPRETED else torch.cuda.current_stream().cuda_stream
    addresses = host_slots.data_ptr(), device_slots.data_ptr()
    kernels.copy(rows, *addresses, len(host_slots), to_device=to_device, stream=stream)
    if not INTERPRETED:
        torch.cuda.synchronize()
