"""`make gpu`: what it says without a GPU, its steps on a CPU, and the packages that it asks to be carried."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console

from asynchicache.bench.transfer import POOLS as TRANSFER_POOLS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_report.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no scripts")


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    assert step["detail"] == "3 rows, bytes right"
    assert "3 of 3 after" in log.read_text()

    step, result = report.run_bench("overlap", "overlap", {"layers": 0}, log)
    assert (step["ok"], result) == (False, {})
    assert "--layers 0" in step["detail"]
    assert "Traceback" in log.read_text()


def test_every_bench_has_such_options(report: ModuleType) -> None:
    for module, options in report.BENCHES.values():
        bench = importlib.import_module(f"asynchicache.bench.{module}")
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
    monkeypatch.setattr(report, "_KILL_SECONDS", 0.5)
    (tmp_path / "test_hangs.py").write_text("import time\ndef test_one(): print('here'); time.sleep(600)\n")
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


def _row(run_bytes: int, gb_s: float, ratio: float, path: str = "batch") -> dict[str, object]:
    sizes = {"page_bytes": 8 * run_bytes, "run_bytes": run_bytes}
    names = {"direction": "load", "layout": "layer_first", "pool": "mha", "path": path}
    return {**names, **sizes, "gb_s": gb_s, "limit_gb_s": gb_s / ratio, "ratio": ratio}


def test_figures_are_held_against_goals(report: ModuleType) -> None:
    times = {"layerwise_ms": 12.0, "serial_ms": 20.0, "compute_ms": 9.0, "transfer_ms": 9.0, "ideal_ms": 10.0}
    benches = {
        "transfer, mha": {"rows": [_row(8192, 30.0, 0.6), _row(65536, 50.0, 0.95)]},
        "transfer, mamba": {"rows": [_row(1 << 20, 52.0, 0.93)]},
        "transfer, mla": {},  # it did not end well
        "transfer by single copies, mha": {"rows": [_row(8192, 5.0, 0.1, "plain")]},
        "overlap": {"rows": [times], "submit_us_per_layer": 15.0},
    }

    found = {goal["name"]: (goal["value"], goal["met"]) for goal in report.goals(benches)}

    assert found == {
        "load: share of a plain copy, runs of 64 KiB up": (0.93, True),
        "gain over single copies, runs of 4 to 16 KiB": (6.0, True),
        "layer-wise loading, of the ideal": (1.2, False),
        "host, microseconds a layer": (15.0, True),
    }
    assert list(report.goals({})) == []
    text = io.StringIO()
    machine = {"device": "a GPU", "torch": "2", "cuda_runtime": "12"}
    goals = list(report.goals(benches))
    report.present(
        {"machine": machine, "steps": [], "goals": goals, "benches": benches}, Console(file=text, width=120)
    )
    assert "layer-wise loading, of the ideal" in text.getvalue()
    assert "65,536" in text.getvalue()


def test_what_is_carried_is_what_is_tested_here() -> None:
    carried = [line for line in _lines("requirements-gpu.txt") if not line.startswith("#")]

    assert carried
    assert set(carried) <= set(_lines("constraints.txt"))


def _lines(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()
