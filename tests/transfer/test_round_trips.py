"""Round trips of every pool, in every host layout, by every copy path, to the byte; on a GPU too."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from asynchicache.kernels.select import copy_methods
from asynchicache.layouts import HostLayout
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.base import Device
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import KERNEL_PIECES, PageCopier, PoolMemory
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction, merge
from asynchicache.types import PoolTransfer, trailing_pages

PAGE_SIZE, SLOTS, LAYERS = 6, 24, 4


def _tensors(*tensors: tuple[str, tuple[int, ...], tuple[int, ...], str]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(*tensor) for tensor in tensors)


POOLS = [
    PoolSpec(
        "mha", _tensors(("keys", (0, 1, 3), (2, 8), "bfloat16"), ("values", (0, 1, 3), (2, 8), "bfloat16"))
    ),
    PoolSpec("mla", _tensors(("latent", (0, 1, 2), (9,), "bfloat16"))),
    PoolSpec("dsa", _tensors(("index", (1, 2), (5,), "uint8"), ("scale", (2,), (), "float32"))),
    PoolSpec(
        "entries",
        (
            TensorSpec("six", (0, 2), (9,), "bfloat16", tokens_per_entry=6),
            TensorSpec("two", (1, 2, 3), (5,), "uint8", tokens_per_entry=2),
            TensorSpec("one", (3,), (2, 4), "float16"),
        ),
    ),
    PoolSpec("swa", _tensors(("keys", (1, 3), (3, 4), "float16")), coverage=trailing_pages(2)),
    PoolSpec("fp8", _tensors(("keys", (0, 2), (2, 4), "float8_e4m3fn"), ("scales", (0, 2), (2,), "float32"))),
    PoolSpec(
        "mamba",
        _tensors(("conv", (0, 2), (7, 3), "bfloat16"), ("recurrent", (0, 2), (2, 3, 5), "float32")),
        coverage=trailing_pages(1),
        per_token=False,
    ),
]
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened: Device = EmulatedDevice(InlineDriver()) if request.param == "cpu" else CudaDevice(0)
    yield opened
    opened.close()


@pytest.mark.parametrize("path", list(CopyPath), ids=lambda path: path.value)
@pytest.mark.parametrize("layout", list(HostLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.name)
def test_what_comes_back_is_what_left(
    pool: PoolSpec, layout: HostLayout, path: CopyPath, device: Device
) -> None:
    host = HostPool(pool, PAGE_SIZE, SLOTS + 2, pin=device.name != "cpu", layout=layout)
    memory = PoolMemory(DevicePool(pool, PAGE_SIZE, SLOTS, device.name, poison=True), host)
    methods = copy_methods(memory.items(), pinned=host.pinned)
    if path.value in methods.lacking:
        pytest.skip(methods.lacking[path.value])
    before = _randomize(memory)
    _settle(device)
    rng = random.Random(3)
    pages, places = rng.sample(range(SLOTS), KERNEL_PIECES), rng.sample(range(SLOTS + 2), KERNEL_PIECES)
    back = rng.sample(range(SLOTS), KERNEL_PIECES)

    _move(device, memory, path, Direction.BACKUP, pages, places)
    for tensor in pool.tensors:
        memory.device.items(tensor.name).fill_(0xDD)
    _settle(device)
    _move(device, memory, path, Direction.LOAD, places, back)

    for name, items in before.items():
        found = memory.device.items(name).cpu()
        assert torch.equal(found[:, back], items[:, pages])
        rest = [slot for slot in range(SLOTS) if slot not in back]
        assert (found[:, rest] == 0xDD).all()
    host.close()


def _randomize(memory: PoolMemory) -> dict[str, torch.Tensor]:
    """Fill the device with random bytes, NaNs among them; a copy of them, by tensor."""
    generator, found = torch.Generator().manual_seed(7), {}
    for tensor in memory.device.spec.tensors:
        items = memory.device.items(tensor.name)
        found[tensor.name] = torch.randint(0, 256, items.shape, dtype=torch.uint8, generator=generator)
        items.copy_(found[tensor.name])
    return found


def _settle(device: Device) -> None:
    """Our streams are not ordered with what torch does outside of them."""
    if device.name != "cpu":
        torch.cuda.synchronize()


def _move(
    device: Device,
    memory: PoolMemory,
    path: CopyPath,
    direction: Direction,
    sources: list[int],
    destinations: list[int],
) -> None:
    """Copy pages layer by layer, and wait."""
    name = memory.device.spec.name
    operation = CacheOperation(direction, (PoolTransfer(name, sources, destinations),))
    plan = merge([operation], {name: memory.extent}, LAYERS, 1)
    copier = PageCopier({name: memory}, force=path)
    copies = copier.prepare(plan)
    stream, event = device.stream("copies"), device.event()
    for group in plan.groups:
        copier.enqueue(stream, copies, group)
    stream.record(event)
    event.synchronize()
    assert device.error is None
