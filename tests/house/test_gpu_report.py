"""`make gpu`: what it says without a GPU, its steps on a CPU, and the packages that it asks to be carried."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from asynchicache_lab.bench.transfer import ALL, _cases
from asynchicache_lab.bench.transfer import POOLS as TRANSFER_POOLS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_report.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no scripts")


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # as it is for a script
        spec.loader.exec_module(module)
        yield module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["ok"], found["machine"]["cuda"], found["steps"]) == (True, False, [])
    assert "sees no CUDA device: nothing was run" in found["skipped"]
    assert "sees no CUDA device: nothing was run" in (tmp_path / "gpu.txt").read_text()


def test_a_bench_is_run_in_a_process_of_its_own(report: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log"
    step, result = report.run_bench("overlap", "overlap", {"layers": 2, "layer_mib": 1, "rounds": 1}, log)
    assert (step["ok"], len(result["rows"]), result["device"]) == (True, 3, "cpu")
    assert (result["whole"], result["pinned"]) == (True, False)
    assert step["detail"] == "3 rows, bytes right"
    assert "3 of 3 after" in log.read_text()

    step, result = report.run_bench("overlap", "overlap", {"layers": 0}, log)
    assert (step["ok"], result) == (False, {})
    assert "--layers 0" in step["detail"]
    assert "Traceback" in log.read_text()


def test_every_bench_has_such_options(report: ModuleType) -> None:
    for module, options in report.BENCHES.values():
        bench = importlib.import_module(f"asynchicache_lab.bench.{module}")
        assert getattr(bench, f"{module.capitalize()}Options")(**options).device == "cuda"
    assert set(report.POOLS) == set(TRANSFER_POOLS)


def test_every_test_of_a_gpu_is_in_a_suite(report: ModuleType) -> None:
    suites = [ROOT / path for path, _ in report.SUITES.values()]
    marked = [file for file in (ROOT / "tests").rglob("*.py") if "pytest.mark." + "gpu" in file.read_text()]

    assert marked
    assert [file for file in marked if not any(file.is_relative_to(suite) for suite in suites)] == []
    assert all(suite.exists() for suite in suites)


def test_a_step_that_hangs_or_comes_too_late_is_named(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, wait = tmp_path / "begun", report._wait
    os.mkfifo(begun)
    hangs = (
        f"import time\ndef test_one(): print('here'); open({str(begun)!r}, 'w').close(); time.sleep(600)\n"
    )
    (tmp_path / "test_hangs.py").write_text(hangs)

    def wait_once_begun(run: subprocess.Popen[bytes], seconds: float) -> int:
        begun.read_text()
        return wait(run, 0.1)

    monkeypatch.setattr(report, "_KILL_SECONDS", 60)
    monkeypatch.setattr(report, "_wait", wait_once_begun)
    step = report.run_suite(
        "sample", str(tmp_path / "test_hangs.py"), tmp_path / "log", marks="not gpu", seconds=5
    )
    assert not step["ok"]
    assert "not done after 5 s" in step["detail"]
    assert "in test_one" in (tmp_path / "log").read_text()  # where it hung

    now = time.monotonic()
    assert report.seconds_until(now - 1) == 0
    assert report.seconds_until(now + 3600) == report.SECONDS


@pytest.mark.parametrize(
    ("path", "ok"),
    [("test_good.py", True), ("test_bad.py", False), ("test_none.py", False), ("test_dies.py", False)],
)
def test_a_suite_must_run_something_and_fail_nothing(
    report: ModuleType, tmp_path: Path, path: str, ok: bool
) -> None:
    (tmp_path / "test_good.py").write_text("def test_one(): assert 1 + 1 == 2\n")
    (tmp_path / "test_bad.py").write_text("def test_one(): assert 1 + 1 == 3\n")
    (tmp_path / "test_none.py").write_text("import pytest\ndef test_one(): pytest.skip('no GPU')\n")
    (tmp_path / "test_dies.py").write_text("import os\ndef test_one(): os.abort()\n")
    log = tmp_path / "log"

    step = report.run_suite("sample", str(tmp_path / path), log, marks="not gpu")

    assert step["ok"] is ok
    assert "test_one" in log.read_text()


def test_a_machine_that_dies_at_the_first_look_is_reported(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_LOOK_ROUND", "import os; os.abort()")
    monkeypatch.setattr(report, "_RUN_DOCTOR", "print('{')")
    monkeypatch.setattr(report, "SUITES", {})
    monkeypatch.setattr(report, "BENCHES", {})
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--folder", str(tmp_path)])

    assert report.main() == 1

    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(step["name"], step["ok"]) for step in found["steps"]] == [("machine", False), ("doctor", False)]
    assert "Aborted" in (tmp_path / "gpu.log").read_text()


def test_what_was_found_is_on_disk_after_each_step(report: ModuleType, tmp_path: Path) -> None:
    made = report.Report(tmp_path)
    made.add({"name": "first", "ok": False, "seconds": 1.0, "detail": "[it] broke"})

    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [step["name"] for step in found["steps"]] == ["first"]
    assert not found["ok"]
    assert "[it] broke" in (tmp_path / "gpu.txt").read_text()


def _row(run_bytes: int, ratio: float, **given: object) -> dict[str, object]:
    names = {"direction": "load", "layout": "layer_first", "pool": "mha", "path": "batch", "pinned": True}
    sizes = {"page_bytes": 8 * run_bytes, "run_bytes": run_bytes, "singles_gb_s": None, "gain": None}
    return {**names, **sizes, "gb_s": 50.0 * ratio, "limit_gb_s": 50.0, "ratio": ratio, **given}


def _bench(*rows: dict[str, object], **given: object) -> dict[str, object]:
    return {"ok": True, "whole": True, "rows": [*rows], **given}


def _benches() -> dict[str, dict[str, object]]:
    """All that goals are held against, and in each row no more than they want."""
    times = {"layerwise_ms": 10.5, "serial_ms": 20.0, "compute_ms": 9.0, "transfer_ms": 9.0, "ideal_ms": 10.0}
    return {
        "transfer, mha": _bench(
            _row(4096, 0.6, gain=3.5), _row(65536, 0.95), _row(65536, 0.92, direction="backup")
        ),
        **{f"transfer, {pool}": _bench(_row(1 << 20, 0.93, pool=pool)) for pool in ("dsa", "mla", "swa")},
        "transfer, mamba": _bench(_row(1 << 20, 0.91, pool="mamba")),
        "overlap": _bench(times, pinned=True, submit_us_per_layer=15.0),
    }


LOAD_PAGES, LOAD_RUNS, BACKUP_PAGES, BACKUP_RUNS = (
    f"{direction}: share of a plain copy, {size}s of 64 KiB up"
    for direction in ("load", "backup")
    for size in ("page", "run")
)
SINGLES = "times the speed of single copies, pages or runs of 4 to 16 KiB"
IDEAL, SERIAL = "layer-wise loading, of the ideal", "layer-wise loading, of loading first"
HOST = "host, microseconds a layer"


def _found(report: ModuleType, benches: dict[str, dict[str, object]]) -> dict[str, tuple[object, object]]:
    return {goal["name"]: (goal["value"], goal["met"]) for goal in report.goals(benches)}


def test_figures_are_held_against_goals(report: ModuleType) -> None:
    benches = _benches()

    assert _found(report, benches) == {
        LOAD_PAGES: (0.91, True),
        LOAD_RUNS: (0.91, True),
        BACKUP_PAGES: (0.92, True),
        BACKUP_RUNS: (0.92, True),
        SINGLES: (3.5, True),
        IDEAL: (1.05, True),
        SERIAL: (0.525, True),
        HOST: (15.0, True),
    }
    text = io.StringIO()
    machine = {"device": "a GPU", "torch": "2", "cuda_runtime": "12"}
    goals = list(report.goals(benches))
    report.present(
        {"machine": machine, "steps": [], "goals": goals, "benches": benches}, Console(file=text, width=140)
    )
    assert IDEAL in text.getvalue()
    assert "65,536" in text.getvalue()


def test_loading_layer_wise_must_be_faster_than_loading_first(report: ModuleType) -> None:
    benches = _benches()
    benches["overlap"]["rows"][0]["serial_ms"] = 10.5

    found = _found(report, benches)

    assert found[IDEAL] == (1.05, True)
    assert found[SERIAL] == (1.0, False)


def test_large_pages_of_short_runs_count(report: ModuleType) -> None:
    benches = _benches()
    benches["transfer, mha"]["rows"].append(_row(2048, 0.4, page_bytes=65536, layout="page_first"))

    goals = {goal["name"]: goal for goal in report.goals(benches)}

    assert (goals[LOAD_PAGES]["value"], goals[LOAD_PAGES]["met"]) == (0.4, False)
    assert goals[LOAD_PAGES]["note"] == "mha, page_first, 65,536 B in 2,048, batch"
    assert goals[LOAD_RUNS]["met"]


def test_without_pinned_memory_no_goal_is_met(report: ModuleType) -> None:
    benches = _benches()
    for bench in benches.values():
        bench |= {"pinned": False, "rows": [{**row, "pinned": False} for row in bench["rows"]]}

    goals = list(report.goals(benches))

    assert {goal["met"] for goal in goals} == {None}
    assert all("host memory was not pinned" in goal["note"] for goal in goals)
    text = io.StringIO()
    machine = {"device": "a GPU", "torch": "2", "cuda_runtime": "12"}
    found = {"machine": machine, "steps": [], "goals": goals, "benches": benches}
    report.present(found, Console(file=text, width=180))
    assert text.getvalue().count("not shown") == len(goals)


@pytest.mark.parametrize("state", [{}, {"whole": False}, {"ok": False}])
def test_a_goal_is_not_met_by_some_of_its_rows(report: ModuleType, state: dict[str, object]) -> None:
    benches = _benches()
    benches["transfer, mamba"] = benches["transfer, mamba"] | state if state else {}
    benches["transfer, mha"]["rows"][2]["ratio"] = 0.8

    goals = {goal["name"]: goal for goal in report.goals(benches)}

    assert goals[LOAD_PAGES]["met"] is None
    assert "cut or wrong: transfer, mamba" in goals[LOAD_PAGES]["note"]
    assert goals[BACKUP_PAGES]["met"] is False  # what is missing cannot mend that
    assert goals[SINGLES]["met"]
    assert {goal["met"] for goal in report.goals({})} == {None}


def test_what_goals_need_is_measured_first(report: ModuleType) -> None:
    needed = ["overlap", *(f"transfer, {pool}" for pool in report.POOLS)]

    assert list(report.BENCHES)[: len(needed)] == needed
    assert {case.name for case in _cases(ALL) if case.singly} == set(report.SMALL_POOLS)


def test_a_bench_that_is_cut_leaves_its_rows(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes too long is aborted; here it aborts itself, after its first case."""
    cut = report._RUN_BENCH.replace(
        "def advance(done, total):", "def advance(done, total):\n    import os; os.abort()"
    )
    monkeypatch.setattr(report, "_RUN_BENCH", cut)

    options = {"row_mib": 1, "rounds": 1, "pool": "swa", "path": "batch"}
    step, result = report.run_bench("transfer", "transfer", options, tmp_path / "log")

    assert not step["ok"]
    assert "2 rows, bytes right, not the rest" in step["detail"]
    assert "Fatal Python error: Aborted" in (tmp_path / "log").read_text()
    assert ([row["direction"] for row in result["rows"]], result["whole"]) == (["load", "backup"], False)


def test_what_is_carried_is_what_is_tested_here() -> None:
    carried = [line for line in _lines("requirements-gpu.txt") if not line.startswith("#")]

    assert carried
    assert set(carried) <= set(_lines("constraints.txt"))


def _lines(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()
