"""`bench transfer` and `bench overlap`: what they report, and that they see a copy that goes wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
import torch
from rich.console import Console

from asynchicache.errors import ConfigError
from asynchicache.kernels.batch import RunBatch, memmove_batch
from asynchicache.layouts import HostLayout
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.transfer.copies import PageCopier
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation
from asynchicache_lab.bench.copy_rig import CopyRig
from asynchicache_lab.bench.cores import OwnCores, on_core, one_torch_thread, single_threaded, two_cores
from asynchicache_lab.bench.overlap import SHARES, OverlapOptions, OverlapReport, _OverlapRunner, run_overlap
from asynchicache_lab.bench.transfer import POOLS, TransferOptions, TransferReport, run_transfer

SMALL = {"row_mib": 1, "rounds": 1}


def _ignore(done: int, total: int) -> None:
    """No bar here."""


@pytest.mark.asyncio
async def test_every_pool_and_layout_has_a_row_each_way() -> None:
    report = await run_transfer(TransferOptions(**SMALL), _ignore)
    result = json.loads(json.dumps(report.as_json()))

    assert (result["device"], result["ok"]) == ("cpu", True)
    sizes = {name: len(page_sizes) for name, (_, page_sizes) in POOLS.items()}
    assert len(result["rows"]) == sum(sizes.values()) * len(HostLayout) * 2
    assert {row["layout"] for row in result["rows"]} == {layout.value for layout in HostLayout}
    assert all(min(row["gb_s"], row["limit_gb_s"], row["ratio"]) > 0 for row in result["rows"])
    runs = {(row["pool"], row["layout"]): row["run_bytes"] for row in result["rows"]}
    assert runs["mla", "page_first"] == 1152
    assert runs["mla", "page_first_direct"] == 64 * 1152


@pytest.mark.asyncio
async def test_small_pages_and_runs_are_held_against_single_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def copy(batch: RunBatch) -> None:
        lengths.extend(batch.sizes.tolist())
        memmove_batch(batch)

    monkeypatch.setattr("asynchicache_lab.bench.plain_copies.memmove_batch", copy)
    report = await run_transfer(TransferOptions(**SMALL, pool="dsa", path="batch"), _ignore)

    for row in report.rows:
        small = row.layout != "page_first"  # whose runs are 132 bytes, of pages of 33 KiB
        assert (row.gain is not None, row.singles_gb_s is not None) == (small, small)
    assert set(lengths) == {8448}
    runs = 4 * ((1 << 20) // (4 * 8448))  # of a MiB of pages with four layers each
    assert len(lengths) == runs * 2 * 2 * 2  # layouts, directions, and rounds with the first one
    assert report.ok


@pytest.mark.asyncio
async def test_what_there_is_is_told_after_each_case() -> None:
    found: list[TransferReport] = []
    report = await run_transfer(TransferOptions(**SMALL, pool="swa"), _ignore, found.append)

    assert [len(one.rows) for one in found] == [2, 4, 6]
    assert found[-1] == report


@pytest.mark.asyncio
async def test_medians_of_rounds_count_and_both_sides_take_turns_in_coming_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    ours, limits = (
        iter([9.0, 1.0, 2.0, 8.0] * 6),
        iter([9.0, 2.0, 2.0, 4.0] * 6),
    )  # seconds, the warming round first

    async def seconds(rig: CopyRig, operation: CacheOperation) -> float:
        order.append("ours")
        await copy(rig, operation)
        return next(ours)

    async def seconds_on_stream(rig: CopyRig, work: object) -> float:
        order.append("limit")
        return next(limits)

    copy = CopyRig.seconds
    monkeypatch.setattr(CopyRig, "seconds", seconds)
    monkeypatch.setattr(CopyRig, "seconds_on_stream", seconds_on_stream)
    report = await run_transfer(TransferOptions(row_mib=1, rounds=3, pool="swa"), _ignore)

    row = report.rows[0]
    nbytes = 4 * row.page_bytes  # a MiB of them
    assert row.gb_s == pytest.approx(nbytes / 2.0 / 1e9)
    assert row.limit_gb_s == pytest.approx(nbytes / 2.0 / 1e9)
    assert row.ratio == pytest.approx(1.0)  # of 2.0, 1.0 and 0.5
    assert order[:8] == ["ours", "limit", "limit", "ours"] * 2
    assert report.ok


@pytest.mark.asyncio
@pytest.mark.parametrize("path", list(CopyPath))
async def test_a_pool_and_a_path_can_be_chosen(path: CopyPath) -> None:
    report = await run_transfer(TransferOptions(**SMALL, pool="swa", path=path.value), _ignore)

    assert {(row.pool, row.path) for row in report.rows} == {("swa", path.value)}
    written = StringIO()
    Console(file=written, width=140).print(report.present())
    assert path.value in written.getvalue()


@pytest.mark.asyncio
async def test_copies_that_do_nothing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageCopier, "enqueue", lambda *_: None)

    assert not (await run_transfer(TransferOptions(**SMALL, pool="swa"), _ignore)).ok


@pytest.mark.asyncio
async def test_overlap_has_a_row_for_each_share_of_compute() -> None:
    cores = os.sched_getaffinity(0)
    found: list[OverlapReport] = []
    report = await run_overlap(OverlapOptions(layers=3, layer_mib=1, rounds=1), _ignore, found.append)
    result = json.loads(json.dumps(report.as_json()))

    assert (result["device"], result["ok"], len(result["rows"])) == ("cpu", True, len(SHARES))
    assert [len(one.rows) for one in found] == [1, 2, 3]
    assert found[-1] == report
    assert result["submit_us_per_layer"] > 0
    assert result["first_layer_us"] > 0
    assert os.sched_getaffinity(0) == cores
    for row in result["rows"]:
        whole = {"layerwise_ms", "serial_ms", "compute_ms", "transfer_ms", "together_ms"}
        assert set(row) == {*whole, "ideal_ms", "ideal_together_ms"}
        assert all(row[name] > 0 for name in whole)
        ideal = max(row["compute_ms"], row["transfer_ms"]) + row["transfer_ms"] / 3
        assert row["ideal_ms"] == pytest.approx(ideal)
        assert row["ideal_together_ms"] == pytest.approx(row["together_ms"] + row["transfer_ms"] / 3)


@pytest.mark.asyncio
async def test_what_overlap_compares_takes_turns_at_being_first(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[str] = []
    timed = _OverlapRunner._timed

    async def noted(runner: _OverlapRunner, run: Callable[[], Awaitable[object]]) -> float:
        if isinstance(run, partial):
            orders.append(run.func.__name__)
        return await timed(runner, run)

    monkeypatch.setattr(_OverlapRunner, "_timed", noted)
    await run_overlap(OverlapOptions(layers=2, layer_mib=1, rounds=4), _ignore)

    compared, rounds = set(orders), len(SHARES) * 5
    assert compared == {"_layerwise", "_serial", "_forward", "_load", "_together"}
    assert len(orders) == rounds * len(compared)
    for position in range(5):
        assert set(orders[position:25:5]) == compared


@pytest.mark.asyncio
async def test_overlap_leaves_the_core_of_the_copies_to_them() -> None:
    before, seen = os.sched_getaffinity(0), []
    options = OverlapOptions(layers=2, layer_mib=1, rounds=1)
    await run_overlap(options, lambda done, total: seen.append(os.sched_getaffinity(0)))

    assert seen == [{sorted(before)[1]} if len(before) > 1 else before] * len(SHARES)


def test_torch_has_its_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_compute_takes_no_thread_of_the_copies() -> None:
    device, matrix, threads = EmulatedDevice(ThreadDriver()), torch.ones(192, 192), []
    with one_torch_thread(), closing(device):
        stream = single_threaded(device, "compute")
        for work in (lambda: None, lambda: torch.mm(matrix, matrix)):
            stream.launch(work)
            stream.launch(lambda: threads.append(len(list(Path("/proc/self/task").iterdir()))))
        event = device.event()
        stream.record(event)
        event.synchronize()
    assert threads[0] == threads[1]


def test_streams_stay_on_cores_of_their_own() -> None:
    cores = two_cores(["load"], ["compute"])
    assert len(set(cores.values())) == min(2, len(os.sched_getaffinity(0))) or not cores
    device, found = EmulatedDevice(OwnCores({**cores, "compute": min(os.sched_getaffinity(0))})), {}
    with closing(device):
        for name in ("compute", "elsewhere"):
            stream = device.stream(name)
            stream.launch(lambda name=name: found.update({name: os.sched_getaffinity(0)}))
            event = device.event()
            stream.record(event)
            event.synchronize()
    assert found == {"compute": {min(os.sched_getaffinity(0))}, "elsewhere": os.sched_getaffinity(0)}


def test_threads_that_are_started_meanwhile_stay_on_the_core() -> None:
    before, found = os.sched_getaffinity(0), []
    for core in (min(before), None):
        with on_core(core):
            thread = Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
    assert found == [{min(before)}, before]
    assert os.sched_getaffinity(0) == before


@pytest.mark.asyncio
async def test_a_layer_that_is_computed_on_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageCopier, "enqueue", lambda *_: None)

    assert not (await run_overlap(OverlapOptions(layers=2, layer_mib=1, rounds=1), _ignore)).ok


@pytest.mark.parametrize(
    ("options", "message"), [({"row_mib": 0}, "--row-mib 0"), ({"rounds": 0}, "--rounds 0")]
)
def test_options_outside_their_rule_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferOptions(**options)
