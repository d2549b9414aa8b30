"""The runs of a transfer: every byte of its pages once, group by group, in as few calls as layers allow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asynchicache.kernels.batch import MAX_RUNS, RunBatch, memmove_batch
from asynchicache.kernels.select import CopyMethods
from asynchicache.layouts import HostLayout
from asynchicache.pools.device import DevicePages, DevicePool
from asynchicache.pools.engine import EnginePages
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import FIRST_RUNS, PageCopier, PoolMemory
from asynchicache.transfer.launch_table import TableLayout, TableTensor
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction, TransferPlan, merge
from asynchicache.types import PoolTransfer

LAYERS, SLOTS = 6, 80
KV = PoolSpec("kv", tuple(TensorSpec(name, (0, 2, 3, 5), (6,), "uint8") for name in ("keys", "values")))
CONV, ALL = TensorSpec("conv", (1, 4), (5,), "uint8"), TensorSpec("all", (0, 1, 2), (4,), "uint8")
STATE = PoolSpec("state", (CONV, ALL))
BETWEEN = [Direction.LOAD, Direction.BACKUP]

Copied: TypeAlias = np.ndarray
"""Addresses of bytes, `[bytes, 2]`: to, from."""


def _ours(spec: PoolSpec, page_size: int) -> DevicePages:
    return DevicePool(spec, page_size, SLOTS)


def _layer_by_layer(spec: PoolSpec, page_size: int) -> DevicePages:
    """A tensor of its own for each layer, at unequal distances."""
    tensors = {
        tensor.name: [_bytes(SLOTS, spec.item_bytes(tensor, page_size) + 0) for _ in tensor.layers]
        for tensor in spec.tensors
    }
    return EnginePages.of_tensors(spec, page_size, tensors)


def _layers_in_pages(spec: PoolSpec, page_size: int) -> DevicePages:
    """All layers of a page one behind the other: a cross-layer layout."""
    tensors = {
        tensor.name: _bytes(SLOTS, len(tensor.layers), spec.item_bytes(tensor, page_size)).transpose(0, 1)
        for tensor in spec.tensors
    }
    return EnginePages.of_tensors(spec, page_size, tensors)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


ENGINES = {"ours": _ours, "layer by layer": _layer_by_layer, "layers in pages": _layers_in_pages}


class _Rig:
    """Pools whose batches are written down, and carried out."""

    def __init__(self, layout: HostLayout, engine: str, page_size: int, chunk_bytes: int = 1 << 20) -> None:
        self.memories = {
            spec.name: PoolMemory(
                ENGINES[engine](spec, page_size), HostPool(spec, page_size, SLOTS, pin=False, layout=layout)
            )
            for spec in (KV, STATE)
        }
        self.shapes = {name: memory.extent for name, memory in self.memories.items()}
        self.copier = PageCopier(self.memories, force=CopyPath.BATCH, chunk_bytes=chunk_bytes)
        self.batches: list[RunBatch] = []
        for pool in self.copier._pools.values():
            pool.methods = CopyMethods(batch=self._copy)

    def _copy(self, batch: RunBatch, stream: int) -> None:
        self.batches.append(batch)
        memmove_batch(batch)

    def groups(self, plan: TransferPlan) -> list[list[RunBatch]]:
        """The batches of each group."""
        stream, copies, found = EmulatedDevice(InlineDriver()).stream("s"), self.copier.prepare(plan), []
        for layers in plan.groups:
            self.batches = []
            self.copier.enqueue(stream, copies, layers)
            found.append(self.batches)
        assert stream.machine.error is None
        return found

    def wanted(self, plan: TransferPlan, layers: range) -> Copied:
        """From where each layer of each page lies."""
        found: list[Copied] = []
        for name, (sources, destinations) in plan.columns.items():
            items = self.memories[name].items()
            rows = items.span(layers.start, layers.stop)
            for row in items.rows[rows.start : rows.stop]:
                ends = items.host[row.tensor][row.local], items.device[row.tensor][row.local]
                of, to = ends if plan.direction is Direction.LOAD else reversed(ends)
                found.append(_pairs(_starts(of, sources), _starts(to, destinations), of[0, 0].nbytes))
        return _ordered(found)


def _starts(view: torch.Tensor, slots: np.ndarray) -> np.ndarray:
    """Addresses of all units of some slots of a layer, `[slots, units, words]`."""
    slot, unit, word = (step * view.element_size() for step in view.stride())
    assert word == view.element_size()
    return (view.data_ptr() + slots[:, None] * slot + np.arange(view.shape[1]) * unit).ravel()


def _pairs(sources: np.ndarray, destinations: np.ndarray, sizes: np.ndarray | int) -> Copied:
    """Byte by byte."""
    counts = np.broadcast_to(sizes, sources.shape)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([np.repeat(side, counts) + within for side in (destinations, sources)], axis=1)


def _ordered(parts: list[Copied]) -> Copied:
    found = np.concatenate([np.empty((0, 2), np.int64), *parts])
    found = found[found[:, 0].argsort()]
    assert (np.diff(found[:, 0]) > 0).all(), "a byte is written twice"
    return found


def _copied(batches: list[RunBatch]) -> Copied:
    return _ordered([_pairs(batch.sources, batch.destinations, batch.sizes) for batch in batches])


def _operation(direction: Direction, pages: dict[str, int], seed: int) -> CacheOperation:
    """Pages in no order; every second time those of the first ones that follow one another."""
    rng = random.Random(seed)
    transfers = []
    for pool, count in pages.items():
        sides = [rng.sample(range(SLOTS), count) if seed % 2 else range(count) for _ in range(2)]
        transfers.append(PoolTransfer(pool, *sides))
    return CacheOperation(direction, tuple(transfers))


@given(
    layout=st.sampled_from(HostLayout),
    engine=st.sampled_from(sorted(ENGINES)),
    direction=st.sampled_from(BETWEEN),
    page_size=st.integers(1, 3),
    pages=st.fixed_dictionaries({"kv": st.integers(0, SLOTS), "state": st.integers(0, 40)}),
    seed=st.integers(0, 1 << 20),
    group_bytes=st.sampled_from([1, 700, 2000, None]),
    chunk_bytes=st.sampled_from([1, 40, 900, 1 << 20]),
)
def test_each_group_is_every_byte_of_its_layers_once(
    layout: HostLayout,
    engine: str,
    direction: Direction,
    page_size: int,
    pages: dict[str, int],
    seed: int,
    group_bytes: int | None,
    chunk_bytes: int,
) -> None:
    operation = _operation(direction, pages, seed)
    if operation.empty:
        return
    rig = _Rig(layout, engine, page_size, chunk_bytes)
    plan = merge([operation], rig.shapes, LAYERS, group_bytes)

    for layers, batches in zip(plan.groups, rig.groups(plan), strict=True):
        assert np.array_equal(_copied(batches), rig.wanted(plan, layers))
        assert all(0 < batch.stop - batch.start <= MAX_RUNS for batch in batches)
        large = [batch for batch in batches if batch.sizes.sum() > chunk_bytes]
        assert all(len(batch.sizes) == 1 for batch in large), "only a run alone is longer than a chunk"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_is_one_call(engine: str) -> None:
    """Whatever it consists of; of more pages than the first launch has, the first layer is two."""
    rig = _Rig(HostLayout.PAGE_FIRST_DIRECT, engine, 2)
    few, many = (
        rig.groups(merge([_operation(Direction.LOAD, {"kv": n, "state": 9}, 1)], rig.shapes, LAYERS, 1))
        for n in (16, 80)
    )

    assert [len(batches) for batches in few] == [1] * LAYERS
    assert [len(batches) for batches in many] == [2, *[1] * (LAYERS - 1)]
    first, rest = many[0]
    assert len(first.sizes) <= FIRST_RUNS < len(rest.sizes)


@pytest.mark.parametrize(
    ("layout", "page_size", "runs"),
    [(HostLayout.PAGE_FIRST_DIRECT, 2, 1), (HostLayout.LAYER_FIRST, 2, 4), (HostLayout.PAGE_FIRST, 1, 1)],
)
def test_layers_that_follow_one_another_on_both_sides_are_one_run(
    layout: HostLayout, page_size: int, runs: int
) -> None:
    """A page of a backup is so many runs of a tensor. A load, whose layers come one by one, has them all."""
    rig = _Rig(layout, "layers in pages", page_size)
    wish = CacheOperation(Direction.BACKUP, (PoolTransfer("kv", [5, 9], [7, 3]),))
    (backup,) = rig.groups(merge([wish], rig.shapes, LAYERS, None))
    load = rig.groups(merge([CacheOperation(Direction.LOAD, wish.transfers)], rig.shapes, LAYERS, 1))

    assert sum(len(batch.sizes) for batch in backup) == runs * len(KV.tensors) * 2
    assert [sum(len(batch.sizes) for batch in batches) for batches in load] == [4] * 4


def test_slots_that_are_contiguous_on_both_sides_are_one_run() -> None:
    spec = PoolSpec("kv", (TensorSpec("all", tuple(range(4)), (1024,), "uint8"),))  # 4 KiB: without padding
    memory = PoolMemory(
        EnginePages.of_tensors(spec, 1, {"all": _bytes(9, 4, 1024).transpose(0, 1)}),
        HostPool(spec, 1, 9, pin=False),
    )
    copier, found = PageCopier({"kv": memory}, force=CopyPath.BATCH), list[RunBatch]()
    copier._pools["kv"].methods = CopyMethods(batch=lambda batch, stream: found.append(batch))
    wish = CacheOperation(Direction.BACKUP, (PoolTransfer("kv", [5, 2, 4, 3], [7, 1, 6, 5]),))
    plan = merge([wish], {"kv": memory.extent}, 4, None)

    copier.enqueue(EmulatedDevice(InlineDriver()).stream("s"), copier.prepare(plan), range(4))

    assert [batch.sizes.tolist() for batch in found] == [[4096, 3 * 4096]]


def test_a_tensor_without_bytes_has_no_runs() -> None:
    nothing = TableTensor("state", (0, 1), *(torch.zeros(2, 4, 1, 0, dtype=torch.uint8) for _ in "12"))

    assert TableLayout.of([nothing], [range(2)], 100) == ((), {})


def test_rows_share_what_is_known_of_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynchicache.kernels.batch.GIL_HELD_BYTES", 1)
    rig = _Rig(HostLayout.PAGE_FIRST_DIRECT, "ours", 2)
    plan = merge([_operation(Direction.LOAD, {"kv": 5}, 1)], rig.shapes, LAYERS, 1)
    looked: list[object] = []
    end_of_rows = _patched(monkeypatch, looked)

    batches = [batch for group in rig.groups(plan) for batch in group]

    assert len(batches) == 4
    assert len({id(batch.pattern) for batch in batches}) == 1
    assert len(looked) == len(batches[0].pattern.rows or ())
    assert end_of_rows


def _patched(monkeypatch: pytest.MonkeyPatch, looked: list[object]) -> Callable[..., int]:
    from asynchicache.kernels import batch

    original = batch._end_of_rows
    monkeypatch.setattr(batch, "_end_of_rows", lambda *args: (looked.append(args), original(*args))[1])
    return original


@pytest.mark.parametrize("pages", [1024, 4096])
def test_the_first_launch_is_worked_out_of_the_first_pages_alone(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that grows with the transfer comes after it."""
    spec = PoolSpec("kv", tuple(TensorSpec(name, (0, 1), (8,), "uint8") for name in ("keys", "values")))
    worked: list[int] = []
    for layout in HostLayout:
        memory = PoolMemory(DevicePool(spec, 1, pages), HostPool(spec, 1, pages, pin=False, layout=layout))
        copier = PageCopier({"kv": memory}, force=CopyPath.BATCH)
        slots = random.Random(1).sample(range(pages), pages)
        plan = merge(
            [CacheOperation(Direction.LOAD, (PoolTransfer("kv", slots, slots),))], {"kv": memory.extent}, 2, 1
        )
        seen: list[int] = []
        _watch_arrays(monkeypatch, seen)
        copier._pools["kv"].methods = CopyMethods(batch=lambda batch, stream, seen=seen: seen.append(-1))

        copier.enqueue(EmulatedDevice(InlineDriver()).stream("s"), copier.prepare(plan), plan.groups[0])

        before = seen[: seen.index(-1)]
        assert max(before) <= FIRST_RUNS
        assert max(seen) >= pages - FIRST_RUNS
        worked.append(sum(before))
    assert max(worked) <= 20 * FIRST_RUNS


def _watch_arrays(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> None:
    """Write down how many pages are worked on, wherever it grows with them."""
    from asynchicache.kernels.batch import ItemShape
    from asynchicache.transfer import launch_table

    of_slots, of_runs, runs_of = ItemShape.of_slots, ItemShape.of_runs, launch_table.runs_of

    def watched(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: np.ndarray) -> object:
            seen.append(len(args[-1]))
            return function(*args)

        return call

    monkeypatch.setattr(ItemShape, "of_slots", watched(of_slots))
    monkeypatch.setattr(ItemShape, "of_runs", watched(of_runs))
    monkeypatch.setattr(launch_table, "runs_of", watched(runs_of))
