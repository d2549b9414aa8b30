"""Which path is chosen, what is measured of each, and how a choice reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from asynchicache.errors import CallRefusedError, CapacityError
from asynchicache.kernels.reference import ReferenceKernels
from asynchicache.kernels.select import CopyMethods
from asynchicache.transfer import calibration, copies
from asynchicache.transfer.calibration import ITEM_BYTES, TOKEN_BYTES, best, measured_paths
from asynchicache.transfer.copies import PageCopier
from asynchicache.transfer.paths import CopyPath, PathTable, RunShape, cpu_table, table_for
from asynchicache.transfer.plan import Direction

BATCH, KERNEL, PLAIN = CopyPath
LOAD, BACKUP = Direction.LOAD, Direction.BACKUP
TABLE = PathTable(
    {
        RunShape(LOAD, False, 1 << 10): {BATCH: 1.0, KERNEL: 3.0, PLAIN: 2.0},
        RunShape(LOAD, False, 64 << 10): {BATCH: 3.0, KERNEL: 2.0, PLAIN: 1.0},
        RunShape(LOAD, True, 1 << 10): {BATCH: 1.0, KERNEL: 2.0, PLAIN: 3.0},
        RunShape(BACKUP, False, 1 << 10): {KERNEL: 1.0, PLAIN: 2.0},
    }
)


@pytest.mark.parametrize(
    ("nbytes", "path"), [(0, KERNEL), (7 << 10, KERNEL), (9 << 10, BATCH), (1 << 30, BATCH)]
)
def test_the_nearest_length_decides(nbytes: int, path: CopyPath) -> None:
    assert TABLE.choose(RunShape(LOAD, False, nbytes), CopyPath) is path


def test_runs_of_single_tokens_are_another_matter() -> None:
    assert TABLE.choose(RunShape(LOAD, True, 1 << 10), CopyPath) is PLAIN


def test_only_paths_that_are_there_are_chosen() -> None:
    assert TABLE.choose(RunShape(LOAD, False, 1 << 10), [BATCH, PLAIN]) is PLAIN
    assert TABLE.choose(RunShape(BACKUP, False, 1 << 10), [BATCH]) is PLAIN
    assert PathTable().choose(RunShape(LOAD, False, 1 << 10), CopyPath) is PLAIN


@pytest.mark.parametrize(("rate", "path"), [(10.5, BATCH), (11.5, KERNEL)])
def test_a_kernel_that_is_hardly_faster_leaves_the_processors_to_the_model(
    rate: float, path: CopyPath
) -> None:
    table = PathTable({RunShape(LOAD, False, 1 << 10): {BATCH: 10.0, KERNEL: rate}}, kernel_gain=1.1)

    assert table.choose(RunShape(LOAD, False, 1 << 10), CopyPath) is path
    assert table.choose(RunShape(LOAD, False, 1 << 10), [KERNEL, PLAIN]) is KERNEL


@pytest.mark.parametrize(("least", "found", "rounds"), [(0.0, 3.0, 3), (9.0, 2.0, 4)])
def test_the_fastest_round_counts_but_for_the_first(least: float, found: float, rounds: int) -> None:
    seconds = [1.0, 4.0, 3.0, 2.0, 1.0]

    assert best(lambda: seconds.pop(0), least) == found
    assert len(seconds) == 5 - rounds


def test_a_choice_is_told_in_words() -> None:
    assert TABLE.summary(LOAD) == "kernel to 1 KiB, then batch"
    assert TABLE.summary(BACKUP) == "plain"
    assert PathTable().summary(LOAD) == "plain"
    assert cpu_table().summary(LOAD) == "kernel to 1 KiB, then batch"


def test_every_path_that_may_be_best_on_this_machine_is_measured_once() -> None:
    table = measured_paths("cpu")

    lengths = {(True, nbytes) for nbytes in TOKEN_BYTES} | {(False, nbytes) for nbytes in ITEM_BYTES}
    assert set(table.rates) == {RunShape(way, *shape) for way in (LOAD, BACKUP) for shape in lengths}
    for shape, rates in table.rates.items():
        assert set(rates) == (set(CopyPath) if shape.tokens else {BATCH, KERNEL})
        assert min(rates.values()) > 0
    assert measured_paths("cpu") is table


def test_long_runs_go_by_memmove_on_this_machine() -> None:
    assert measured_paths("cpu").choose(RunShape(LOAD, False, 1 << 20), [BATCH, PLAIN]) is BATCH


def test_a_device_without_room_to_measure_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(calibration, "_scratch", no_room)

    found = calibration.measured_paths.__wrapped__("cpu")

    assert found == PathTable()
    assert PageCopier({}, table=found).table == cpu_table()


def test_a_path_that_the_device_refuses_is_left_out_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a driver that has batches may refuse them for a card. It is not asked again for each length."""
    asked: list[object] = []

    def refuse(*given: object) -> None:
        asked.append(given)
        raise CallRefusedError("cuMemcpyBatchAsync returned error 801")

    monkeypatch.setattr(
        copies, "copy_methods", lambda items, pinned: CopyMethods(ReferenceKernels(items), refuse)
    )

    found = calibration.measured_paths.__wrapped__("cpu")

    assert {path for rates in found.rates.values() for path in rates} == {KERNEL, PLAIN}
    assert found.choose(RunShape(LOAD, False, 1 << 20), CopyPath) is KERNEL
    assert len(asked) == 1
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "copies by batch are left out on cpu: " in warned[0]
    assert "cuMemcpyBatchAsync returned error 801" in warned[0]


@pytest.mark.parametrize("measured", [None, PathTable()])
def test_on_a_gpu_no_kernel_runs_unless_it_was_measured(measured: PathTable | None) -> None:
    table = table_for(measured, on_gpu=True)

    assert {table.choose(RunShape(LOAD, False, nbytes), CopyPath) for nbytes in (1, 1 << 10, 1 << 20)} == {
        PLAIN
    }


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_was_measured_decides(on_gpu: bool) -> None:
    assert table_for(TABLE, on_gpu=on_gpu) is TABLE


def test_a_copier_of_a_gpus_pages_has_no_rates_of_a_cpu() -> None:
    class Memory:
        device = SimpleNamespace(device=torch.device("cuda"))

    with pytest.MonkeyPatch.context() as without_gpu:
        without_gpu.setattr(copies, "_Pool", lambda *_: SimpleNamespace(available=[]))

        assert PageCopier({"kv": Memory()}).table == PathTable()  # type: ignore[dict-item]
