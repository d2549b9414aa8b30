"""Copies of a plan: how runs are cut, and that kernels move what runs move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from asynchicache.errors import ConfigError
from asynchicache.kernels import reference
from asynchicache.kernels.select import PageKernels
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import KERNEL_PAGES, PageCopier, PoolMemory, cut_runs, expand_runs, pieces
from asynchicache.transfer.plan import CacheOperation, Direction, TensorPart, merge

KV = PoolSpec(
    "kv", (TensorSpec("keys", (0, 1, 2), (3,), "bfloat16"), TensorSpec("scales", (1,), (), "uint8"))
)
SLOTS = KERNEL_PAGES + 4


def _memory(page_size: int = 5) -> PoolMemory:
    device, host = DevicePool(KV, page_size, SLOTS), HostPool(KV, page_size, SLOTS + 3, pin=False)
    generator = torch.Generator().manual_seed(1)
    for tensor in KV.tensors:
        for items in (device.items(tensor.name), host.items(tensor.name)):
            items.copy_(torch.randint(0, 256, items.shape, dtype=torch.uint8, generator=generator))
    return PoolMemory(device, host)


@pytest.mark.parametrize("chunk_bytes", [1, 10, 25, 40, 65, 1 << 20])
def test_pieces_cover_every_item_once_and_fit_a_chunk(chunk_bytes: int) -> None:
    part, item_bytes = TensorPart("kv", "keys", 2, 5), 10
    runs = np.array([[0, 10, 7], [20, 3, 1]], np.int64)

    found = [
        (layer, source + slot, destination + slot)
        for piece in pieces(part, runs, item_bytes, chunk_bytes)
        for layer in range(piece.start, piece.stop)
        for source, destination, slots in piece.runs.tolist()
        for slot in range(slots)
    ]

    pages = [(slot, slot + 10) for slot in range(7)] + [(20, 3)]
    assert sorted(found) == sorted((layer, *page) for layer in (2, 3, 4) for page in pages)
    largest = max(piece.items for piece in pieces(part, runs, item_bytes, chunk_bytes))
    assert largest * item_bytes <= max(chunk_bytes, item_bytes)


def test_runs_that_fit_a_chunk_are_one_piece() -> None:
    runs = np.array([[0, 10, 6], [30, 2, 1]], np.int64)

    assert [piece.runs.tolist() for piece in pieces(TensorPart("kv", "keys", 0, 3), runs, 10, 210)] == [
        runs.tolist()
    ]


def test_a_run_is_cut_into_runs_and_a_rest() -> None:
    runs = np.array([[0, 10, 7], [30, 2, 3]], np.int64)

    assert cut_runs(runs, 3).tolist() == [[0, 10, 3], [3, 13, 3], [6, 16, 1], [30, 2, 3]]
    assert runs.tolist() == [[0, 10, 7], [30, 2, 3]]


def test_runs_expand_to_their_pages() -> None:
    sources, destinations = expand_runs(np.array([[3, 10, 3], [9, 2, 1]], np.int64))

    assert sources.tolist() == [3, 4, 5, 9]
    assert destinations.tolist() == [10, 11, 12, 2]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("pages", [KERNEL_PAGES // 2, KERNEL_PAGES // 2 + 1, KERNEL_PAGES])
def test_kernels_move_what_runs_move(
    operation: Callable[..., CacheOperation], direction: Direction, pages: int
) -> None:
    if direction is Direction.FORK:
        pages //= 2
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2)).tolist()
    wish = operation(direction, kv=(order[:pages], order[-pages:]))
    results = []
    for kernels in ({}, {"kv": PageKernels(reference.gather, reference.scatter)}):
        memory, device = _memory(), EmulatedDevice(InlineDriver())
        plan = merge([wish], {"kv": memory.extent}, 3, 1)
        copier = PageCopier({"kv": memory}, kernels=kernels, chunk_bytes=64)
        for group in plan.groups:
            copier.enqueue(device.stream("copies"), plan, group)
        assert device.error is None
        results.append(memory)

    for tensor in KV.tensors:
        by_runs, by_kernels = results
        assert torch.equal(by_runs.device.items(tensor.name), by_kernels.device.items(tensor.name))
        assert torch.equal(by_runs.host.items(tensor.name), by_kernels.host.items(tensor.name))


def test_a_pool_without_host_slots_can_be_forked(operation: Callable[..., CacheOperation]) -> None:
    memory = PoolMemory(DevicePool(KV, 5, 2), HostPool(KV, 5, 0, pin=False))
    memory.device.items("keys")[:, 0] = 7
    plan = merge([operation(Direction.FORK, kv=([0], [1]))], {"kv": memory.extent}, 3, None)

    PageCopier({"kv": memory}).enqueue(EmulatedDevice(InlineDriver()).stream("fork"), plan, plan.groups[0])

    assert (memory.device.items("keys") == 7).all()


def test_both_tiers_must_be_of_one_pool() -> None:
    with pytest.raises(ConfigError, match="are not one pool"):
        PoolMemory(DevicePool(KV, 4, 2), HostPool(KV, 5, 2, pin=False))
