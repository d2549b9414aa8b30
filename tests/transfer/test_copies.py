"""Copies of a plan: how runs are cut, and that kernels move what runs move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynchicache.errors import ConfigError
from asynchicache.kernels.select import CopyMethods
from asynchicache.layouts import HostLayout
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.pools.slabs import Pinner
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import KERNEL_PIECES, PageCopier, PoolMemory, pieces, split_runs
from asynchicache.transfer.launch_table import cut_runs
from asynchicache.transfer.paths import CopyPath, PathTable, RunShape
from asynchicache.transfer.plan import CacheOperation, Direction, TensorPart, TransferPlan, merge
from pools.cuda_runtime import PlayedRuntime

KV = PoolSpec(
    "kv", (TensorSpec("keys", (0, 1, 2), (3,), "bfloat16"), TensorSpec("scales", (1,), (), "uint8"))
)
SLOTS = KERNEL_PIECES + 4


def _memory(page_size: int = 5, layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT) -> PoolMemory:
    device = DevicePool(KV, page_size, SLOTS)
    host = HostPool(KV, page_size, SLOTS + 3, pin=False, layout=layout)
    generator = torch.Generator().manual_seed(1)
    for tensor in KV.tensors:
        for items in (device.items(tensor.name), host.items(tensor.name)):
            items.copy_(torch.randint(0, 256, items.shape, dtype=torch.uint8, generator=generator))
    return PoolMemory(device, host)


def _enqueue_all(copier: PageCopier, plan: TransferPlan) -> None:
    """Carry out a plan of one group."""
    (layers,) = plan.groups
    copier.enqueue(EmulatedDevice(InlineDriver()).stream("copies"), copier.prepare(plan), layers)


@pytest.mark.parametrize("chunk_bytes", [1, 10, 25, 40, 65, 1 << 20])
def test_pieces_cover_every_item_once_and_fit_a_chunk(chunk_bytes: int) -> None:
    part, item_bytes = TensorPart("keys", 2, 5), 10
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

    assert [piece.runs.tolist() for piece in pieces(TensorPart("keys", 0, 3), runs, 10, 210)] == [
        runs.tolist()
    ]


def test_a_run_is_cut_into_runs_and_a_rest() -> None:
    runs = np.array([[0, 10, 7], [30, 2, 3]], np.int64)

    assert cut_runs(runs, 3).tolist() == [[0, 10, 3], [3, 13, 3], [6, 16, 1], [30, 2, 3]]
    assert runs.tolist() == [[0, 10, 7], [30, 2, 3]]


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("chunk_bytes", [16, 64, 1 << 20])
def test_every_path_moves_what_copies_of_single_pages_move(
    operation: Callable[..., CacheOperation], direction: Direction, layout: HostLayout, chunk_bytes: int
) -> None:
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2)).tolist()
    sources, destinations = [3, 4, *order[:5]], order[-7:]
    if direction is Direction.FORK:
        sources = [slot for slot in range(SLOTS) if slot not in destinations][:7]
    wish = operation(direction, kv=(list(dict.fromkeys(sources)), destinations[: len(set(sources))]))
    results = []
    for path in CopyPath:
        memory, device = _memory(layout=layout), EmulatedDevice(InlineDriver())
        expected = _copied(memory, wish)
        plan = merge([wish], {"kv": memory.extent}, 3, 1)
        copier = PageCopier({"kv": memory}, force=path, chunk_bytes=chunk_bytes)
        copies = copier.prepare(plan)
        for group in plan.groups:
            copier.enqueue(device.stream("copies"), copies, group)
        assert device.error is None
        assert all(torch.equal(items, expected[key]) for key, items in _contents(memory).items())
        results.append(copier.nbytes["kv"])

    moved = 0 if direction is Direction.FORK else plan.nbytes
    assert results == [{other: moved * (other is path) for other in CopyPath} for path in CopyPath]


@given(st.data())
def test_runs_are_split_at_the_borders_of_one_side(data: st.DataObject) -> None:
    step, side, slot_bytes = (data.draw(st.integers(*among)) for among in ((1, 9), (0, 1), (1, 5)))
    rows = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 30))
    runs = np.array(data.draw(st.lists(rows, max_size=5)), np.int64).reshape(-1, 3)
    before = runs.copy()

    found = split_runs(runs, side, step * slot_bytes, slot_bytes)

    assert _pages(found) == _pages(runs)
    assert (found[:, side] // step == (found[:, side] + found[:, 2] - 1) // step).all()
    assert len(found) == sum((row[side] + row[2] - 1) // step - row[side] // step + 1 for row in runs)
    assert (runs == before).all()


def _pages(runs: np.ndarray) -> list[tuple[int, int]]:
    return [(of + page, to + page) for of, to, count in runs.tolist() for page in range(count)]


def test_borders_may_lie_within_slots_that_are_not_used() -> None:
    """Registrations of 10 bytes, slots of 4: slots 2 and 7 cross a border."""
    runs = np.array([(0, 50, 2), (3, 60, 4), (8, 70, 4)], np.int64)
    found = split_runs(runs, 0, 10, 4)
    assert found.tolist() == [[0, 50, 2], [3, 60, 2], [5, 62, 2], [8, 70, 2], [10, 72, 2]]


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.BACKUP])
@pytest.mark.parametrize("layout", list(HostLayout))
def test_no_run_lies_in_two_registrations(
    operation: Callable[..., CacheOperation], direction: Direction, layout: HostLayout
) -> None:
    """CUDA refuses such a copy. Slots of a pool with one layer, and without padding, follow one another."""
    spec = PoolSpec("kv", (TensorSpec("keys", (0,), (256,), "float32"),))
    runtime = PlayedRuntime()
    host = HostPool(spec, 4, 10, pin=Pinner(runtime, step_bytes=3 * 4096), layout=layout)
    while host.growing:
        host.grow()
    memory = PoolMemory(DevicePool(spec, 4, 10), host)
    wish = operation(direction, kv=(range(10), range(10)))
    plan = merge([wish], {"kv": memory.extent}, 1, None)
    copier, copied = PageCopier({"kv": memory}, force=CopyPath.BATCH), []
    copier._pools["kv"].methods = CopyMethods(batch=lambda batch, stream: copied.append(batch))

    _enqueue_all(copier, plan)

    (batch,) = copied
    addresses = batch.sources if direction is Direction.LOAD else batch.destinations
    assert batch.nbytes == plan.nbytes
    assert len(batch.sizes) == (1 if layout is HostLayout.LAYER_FIRST else 4)
    assert all(map(runtime.within_one, addresses.tolist(), batch.sizes.tolist()))
    host.close()


def _contents(memory: PoolMemory) -> dict[tuple[str, str], torch.Tensor]:
    found = {}
    for tensor in KV.tensors:
        found[tensor.name, "device"] = memory.device.items(tensor.name).clone()
        found[tensor.name, "host"] = memory.host.items(tensor.name).flatten(2).clone()
    return found


def _copied(memory: PoolMemory, wish: CacheOperation) -> dict[tuple[str, str], torch.Tensor]:
    """What the memory is to hold afterwards, page by page."""
    found = _contents(memory)
    sides = ("device", "host")
    source, destination = (sides[tier] for tier in (wish.direction.source, wish.direction.destination))
    for transfer in wish.transfers:
        for tensor in KV.tensors:
            before = found[tensor.name, source].clone()
            for from_slot, to_slot in zip(transfer.sources, transfer.destinations, strict=True):
                found[tensor.name, destination][:, to_slot] = before[:, from_slot]
    return found


def test_a_path_is_chosen_by_the_length_of_runs(operation: Callable[..., CacheOperation]) -> None:
    table = PathTable(
        {
            RunShape(Direction.LOAD, False, 8): {CopyPath.KERNEL: 2.0, CopyPath.BATCH: 1.0},
            RunShape(Direction.LOAD, False, 256): {CopyPath.KERNEL: 1.0, CopyPath.BATCH: 2.0},
        }
    )
    memory = _memory(layout=HostLayout.LAYER_FIRST)
    copier = PageCopier({"kv": memory}, table=table)
    pages = list(range(KERNEL_PIECES))

    def path(sources: list[int], destinations: list[int], direction: Direction = Direction.LOAD) -> CopyPath:
        wish = operation(direction, kv=(sources, destinations))
        return copier.prepare(merge([wish], {"kv": memory.extent}, 3, None)).paths["kv"]

    assert path(pages, pages) is CopyPath.BATCH  # one long run a layer
    assert path(pages, pages[::-1]) is CopyPath.KERNEL
    assert path(pages[:2], pages[1::-1]) is CopyPath.BATCH  # too few for a kernel
    assert path(pages, pages, Direction.BACKUP) is CopyPath.PLAIN  # nothing was measured


def test_a_forced_path_that_is_not_there_is_refused() -> None:
    lacking = CopyMethods(lacking={"kernel": "Triton cannot be imported"})

    with pytest.raises(ConfigError, match="copy_path 'kernel' is not there for pool 'kv' on cpu: Triton"):
        PageCopier({"kv": _memory()}, force=CopyPath.KERNEL, methods=lambda items, pinned: lacking)


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.BACKUP])
def test_while_there_is_no_room_for_slots_no_kernel_copies(
    operation: Callable[..., CacheOperation], direction: Direction
) -> None:
    memory, device = _memory(), EmulatedDevice(InlineDriver())
    wish = operation(direction, kv=([0, 2, 3], [1, 0, 4]))
    expected, plan = _copied(memory, wish), merge([wish], {"kv": memory.extent}, 3, 1)
    copier = PageCopier({"kv": memory}, force=CopyPath.KERNEL, chunk_bytes=64)
    copier._slots = SimpleNamespace(reserve=lambda numbers: None)
    copies = copier.prepare(plan)

    for group in plan.groups:
        copier.enqueue(device.stream("copies"), copies, group)
    copies.end(None)

    assert device.error is None
    found = _contents(memory)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert copies.paths["kv"] is not CopyPath.KERNEL


def test_a_pool_without_host_slots_can_be_forked(operation: Callable[..., CacheOperation]) -> None:
    memory = PoolMemory(DevicePool(KV, 5, 2), HostPool(KV, 5, 0, pin=False))
    memory.device.items("keys")[:, 0] = 7
    plan = merge([operation(Direction.FORK, kv=([0], [1]))], {"kv": memory.extent}, 3, None)

    _enqueue_all(PageCopier({"kv": memory}), plan)

    assert (memory.device.items("keys") == 7).all()


def test_both_tiers_must_be_of_one_pool() -> None:
    with pytest.raises(ConfigError, match="are not one pool"):
        PoolMemory(DevicePool(KV, 4, 2), HostPool(KV, 5, 2, pin=False))
