"""`make gpu`: all of it small on a CPU, what it says without a GPU, its steps, and its goals."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from asynchicache_lab.bench.transfer import ALL, _cases
from asynchicache_lab.bench.transfer import POOLS as TRANSFER_POOLS
from asynchicache_lab.gpu import __main__ as hour
from asynchicache_lab.gpu import parts, steps
from asynchicache_lab.gpu.goals import POOLS, SMALL_POOLS, bench_goals, goals
from asynchicache_lab.gpu.report import GpuReport, present
from asynchicache_lab.gpu.steps import Ran, Step, run

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    not (ROOT / "scripts").exists(), reason="a source distribution has no scripts"
)


def _make_gpu(folder: Path, *words: str) -> dict[str, Any]:
    """What it writes down."""
    command = [sys.executable, "-m", "asynchicache_lab.gpu", "--folder", str(folder), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    found = _make_gpu(tmp_path, "--part", "two")

    assert (found["ok"], found["unfinished"], found["machine"]["cuda"]) == (True, [], False)
    assert found["parts"] == {}
    assert "sees no CUDA device: nothing was run" in found["skipped"]
    assert "sees no CUDA device: nothing was run" in (tmp_path / "gpu.txt").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_keeps_what_was_found_on_one(tmp_path: Path) -> None:
    report = GpuReport(tmp_path)
    report.found["machine"] = {"cuda": True, "device": "a GPU", "torch": "2"}
    report.begin("two").write_text("of the GPU")
    report.add("two", Ran(name="host", ok=False, seconds=1.0, detail="it broke", rows=[{"a": 1}]))
    report.end("two")

    found = _make_gpu(tmp_path, "--part", "two")

    assert found.pop("skipped")
    assert found == report.found
    assert (tmp_path / "two.log").read_text() == "of the GPU"
    assert all(
        words in (tmp_path / "gpu.txt").read_text() for words in ("a GPU", "it broke", "nothing was run")
    )


def _run_dry(part: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each step of a part."""
    found = _make_gpu(folder, "--part", part, "--dry")
    assert [ran["name"] for ran in found["parts"][part]] == [
        step.name for step in parts.steps(part, dry=True)
    ]
    assert all(ran["ok"] for ran in found["parts"][part])
    return {ran["name"]: ran["rows"] for ran in found["parts"][part]}


def test_part_one_probes_the_driver_and_runs_marked_tests(tmp_path: Path) -> None:
    found = _run_dry("one", tmp_path)

    assert list(dict.fromkeys(row["section"] for row in found["probe"])) == [
        "calls",
        "plain",
        "busy",
        "options",
        "strided",
        "lengths",
    ]
    assert not [row for row in found["probe"] if "failed" in row or "refused" in row]
    assert {"copy paths", "pinning"} <= {row.get("name") for row in found["doctor"]}
    assert " passed" in (tmp_path / "one.log").read_text()


def test_part_two_tells_latency_and_bandwidth_and_the_hosts_time_by_part(tmp_path: Path) -> None:
    found = _run_dry("two", tmp_path)

    for row in found["host"]:
        assert min(row["submit_us_a_layer"], row["first_layer_us"], row["gb_s"]) > 0
        assert row["functions"]
    assert found["overlap"][-1]["first_layer_us"] > 0
    assert {row["direction"] for row in found["transfer, swa"][-1]["rows"]} == {"load", "backup"}
    assert "bench transfer" in (tmp_path / "gpu.txt").read_text()


def test_part_three_brings_prompts_back_from_every_tier_and_after_kills(tmp_path: Path) -> None:
    found = _run_dry("three", tmp_path)

    for name in ("dense", "hybrid", "windows"):
        rows = {row["what"]: row for row in found["models"] if row.get("model") == name and "tiers" in row}
        assert {what: list(row["tiers"]) for what, row in rows.items()} == {
            "computed": [],
            "device": ["device"],
            "host": ["host"],
            "storage": ["storage"],
            "restart": ["storage"],
        }
        assert all(row["same"] for what, row in rows.items() if what != "computed")
    cached = {
        row["what"]: row["cached"] for row in found["serve"] if row.get("length") == 128 and "cached" in row
    }
    assert cached["computed"] == 0
    assert min(cached[what] for what in ("cached", "after SIGTERM", "after SIGKILL")) >= 128


def test_every_bench_has_such_options() -> None:
    benches = [step for step in parts.steps("two", dry=False) if "asynchicache_lab.gpu.bench" in step.command]

    options = importlib.import_module("asynchicache_lab.bench.options")
    for step in benches:
        of, given = step.command[-2:]
        assert getattr(options, f"{of.capitalize()}Options")(**json.loads(given)).device == "cuda:0"
    assert set(POOLS) == set(TRANSFER_POOLS)
    assert len(benches) == len(POOLS) + len(parts.OVERLAPS) + 3


def test_what_goals_need_is_measured_first() -> None:
    names = [step.name for step in parts.steps("two", dry=False)]

    assert names[3 : 6 + len(POOLS)] == [*parts.OVERLAPS, *(f"transfer, {pool}" for pool in POOLS)]
    assert {case.name for case in _cases(ALL) if case.singly} == set(SMALL_POOLS)


def test_every_test_of_a_gpu_is_in_a_suite() -> None:
    suites = [ROOT / path for path, _ in parts.SUITES.values()]
    marked = [file for file in (ROOT / "tests").rglob("*.py") if "pytest.mark." + "gpu" in file.read_text()]

    assert marked
    assert [file for file in marked if not any(file.is_relative_to(suite) for suite in suites)] == []
    assert all(suite.exists() for suite in suites)


def test_a_part_ends_within_ten_minutes() -> None:
    """Killing what hangs in the last step included."""
    assert hour.PART_SECONDS + 2 * steps._KILL_SECONDS < 600
    assert {step.wants for part in parts.PARTS for step in parts.steps(part, dry=False)} == {
        "",
        "rows",
        "tests",
    }


def _python(code: str, *, seconds: float = 60, wants: str = "rows") -> Step:
    return Step("sample", [sys.executable, "-c", code], seconds, wants)


def test_a_step_keeps_its_rows_however_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, wait, log = tmp_path / "begun", subprocess.Popen.wait, tmp_path / "log"
    os.mkfifo(begun)
    tells = "print('words'); print('{\"a\": 1}', flush=True); import os, time; "

    good = run(_python(tells), log, 60)
    assert (good["ok"], good["rows"], good["detail"]) == (True, [{"a": 1}], "")
    assert not run(_python("print('words')"), log, 60)["ok"]  # there must be rows

    dies = run(_python(tells + "print('{\"b\": '); os.abort()"), log, 60)
    assert (dies["ok"], dies["rows"]) == (False, [{"a": 1}])
    assert "Fatal Python error: Aborted" in dies["detail"]

    def wait_once_begun(process: subprocess.Popen[bytes], timeout: float) -> int:
        if timeout != 7:
            return wait(process, 60)  # after a signal
        begun.read_text()
        return wait(process, 0.1)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_begun)
    hangs = run(_python(tells + f"open({str(begun)!r}, 'w').close(); time.sleep(600)", seconds=7), log, 60)
    assert (hangs["ok"], hangs["rows"]) == (False, [{"a": 1}])
    assert "not done after 7 s" in hangs["detail"]
    assert "in <module>" in log.read_text()  # where it hung


def test_a_step_that_comes_too_late_or_is_not_there_is_named(tmp_path: Path) -> None:
    late = run(_python("import time; time.sleep(600)"), tmp_path / "log", -1)
    assert not late["ok"]
    assert "not done after 0 s" in late["detail"]

    missing = run(Step("sample", ["no-such-program"], 5), tmp_path / "log", 60)
    assert not missing["ok"]
    assert "no-such-program" in missing["detail"]


@pytest.mark.parametrize(
    ("path", "ok"),
    [("test_good.py", True), ("test_bad.py", False), ("test_none.py", False), ("test_dies.py", False)],
)
def test_a_suite_must_run_something_and_fail_nothing(tmp_path: Path, path: str, ok: bool) -> None:
    (tmp_path / "test_good.py").write_text("def test_one(): assert 1 + 1 == 2\n")
    (tmp_path / "test_bad.py").write_text("def test_one(): assert 1 + 1 == 3\n")
    (tmp_path / "test_none.py").write_text("import pytest\ndef test_one(): pytest.skip('no GPU')\n")
    (tmp_path / "test_dies.py").write_text("import os\ndef test_one(): os.abort()\n")

    ran = run(parts.suite("sample", str(tmp_path / path), "", marks="not gpu"), tmp_path / "log", 100)

    assert ran["ok"] is ok
    assert "test_one" in (tmp_path / "log").read_text()


def test_a_machine_that_dies_at_the_first_look_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = [
        Step("machine", [sys.executable, "-c", "import os; os.abort()"], 60, "rows"),
        _python("print('{')"),
    ]
    monkeypatch.setattr(hour, "steps", lambda part, dry: dying)
    monkeypatch.setattr(sys, "argv", ["gpu", "--part", "one", "--folder", str(tmp_path)])

    assert hour.main() == 1

    found = json.loads((tmp_path / "gpu.json").read_text())
    ended = [(ran["name"], ran["ok"]) for ran in found["parts"]["one"]]
    assert ended == [("machine", False), ("sample", False)]
    assert "Aborted" in (tmp_path / "one.log").read_text()


def test_a_part_that_is_killed_keeps_what_it_found(tmp_path: Path) -> None:
    """The steps that were done are in the report, and what the one that ran had printed is in the log."""
    first = """print('{"cuda": true, "a": 1}')"""
    second = """print('{"b": 2}', flush=True); import os; os.kill(os.getppid(), 9)"""
    code = f"""
import sys
from asynchicache_lab.gpu import __main__ as hour
from asynchicache_lab.gpu.steps import Step
python = [sys.executable, "-c"]
hour.steps = lambda part, dry: [Step("machine", [*python, {first!r}]), Step("kills", [*python, {second!r}])]
sys.argv = ["gpu", "--part", "one", "--folder", {str(tmp_path)!r}]
hour.main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ran.returncode == -9, ran.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["ok"], found["unfinished"]) == (False, ["one"])
    assert "part one has not come to its end" in (tmp_path / "gpu.txt").read_text()
    (done,) = found["parts"]["one"]
    assert (done["name"], done["rows"]) == ("machine", [{"cuda": True, "a": 1}])
    assert '{"b": 2}' in (tmp_path / "one.log").read_text()


def test_what_was_found_is_on_disk_after_each_step_and_parts_add_up(tmp_path: Path) -> None:
    first = GpuReport(tmp_path)
    first.begin("one")
    first.add("one", Ran(name="first", ok=False, seconds=1.0, detail="[it] broke", rows=[{"a": 1}]))

    later = GpuReport(tmp_path)
    later.begin("two")
    later.add("two", Ran(name="second", ok=True, seconds=1.0, detail="", rows=[]))

    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {part: [ran["name"] for ran in ran_] for part, ran_ in found["parts"].items()} == {
        "one": ["first"],
        "two": ["second"],
    }
    assert not found["ok"]
    assert found["parts"]["one"][0]["rows"] == [{"a": 1}]
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


def _found(benches: dict[str, dict[str, object]]) -> dict[str, tuple[object, object]]:
    return {goal["name"]: (goal["value"], goal["met"]) for goal in bench_goals(benches)}


def test_figures_are_held_against_goals() -> None:
    benches = _benches()

    assert _found(benches) == {
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
    goals = list(bench_goals(benches))
    present({"machine": machine, "parts": {}, "goals": goals}, Console(file=text, width=140))
    assert IDEAL in text.getvalue()
    assert "65,536" in text.getvalue()


def test_loading_layer_wise_must_be_faster_than_loading_first() -> None:
    benches = _benches()
    benches["overlap"]["rows"][0]["serial_ms"] = 10.5

    found = _found(benches)

    assert found[IDEAL] == (1.05, True)
    assert found[SERIAL] == (1.0, False)


def test_large_pages_of_short_runs_count() -> None:
    benches = _benches()
    benches["transfer, mha"]["rows"].append(_row(2048, 0.4, page_bytes=65536, layout="page_first"))

    goals = {goal["name"]: goal for goal in bench_goals(benches)}

    assert (goals[LOAD_PAGES]["value"], goals[LOAD_PAGES]["met"]) == (0.4, False)
    assert goals[LOAD_PAGES]["note"] == "mha, page_first, 65,536 B in 2,048, batch"
    assert goals[LOAD_RUNS]["met"]


def test_without_pinned_memory_no_goal_is_met() -> None:
    benches = _benches()
    for bench in benches.values():
        bench |= {"pinned": False, "rows": [{**row, "pinned": False} for row in bench["rows"]]}

    goals = list(bench_goals(benches))

    assert {goal["met"] for goal in goals} == {None}
    assert all("host memory was not pinned" in goal["note"] for goal in goals)
    text = io.StringIO()
    machine = {"device": "a GPU", "torch": "2", "cuda_runtime": "12"}
    found = {"machine": machine, "parts": {}, "goals": goals}
    present(found, Console(file=text, width=180))
    assert text.getvalue().count("not shown") == len(goals)


@pytest.mark.parametrize("state", [{}, {"whole": False}, {"ok": False}])
def test_a_goal_is_not_met_by_some_of_its_rows(state: dict[str, object]) -> None:
    benches = _benches()
    benches["transfer, mamba"] = benches["transfer, mamba"] | state if state else {}
    benches["transfer, mha"]["rows"][2]["ratio"] = 0.8

    goals = {goal["name"]: goal for goal in bench_goals(benches)}

    assert goals[LOAD_PAGES]["met"] is None
    assert "cut or wrong: transfer, mamba" in goals[LOAD_PAGES]["note"]
    assert goals[BACKUP_PAGES]["met"] is False  # what is missing cannot mend that
    assert goals[SINGLES]["met"]
    assert {goal["met"] for goal in bench_goals({})} == {None}


def test_a_hit_from_the_host_is_held_against_computing() -> None:
    """Of the dense model at one length, and only where the tokens did come from the host."""
    row = {"model": "dense", "length": 8192, "cached": 8192, "tiers": {"host": 8192}}
    computed, host = {**row, "what": "computed", "ttft_ms": 400.0}, {**row, "what": "host", "ttft_ms": 30.0}
    others = [{**host, "model": "hybrid", "ttft_ms": 300.0}, {**host, "length": 2048, "ttft_ms": 300.0}]

    def judged(rows: Sequence[dict[str, Any]]) -> tuple[object, object]:
        (*_, goal) = goals({"models": [{"model": "dense", "what": "built"}, *rows]})
        return goal["value"], goal["met"]

    assert judged([computed, host, *others]) == (0.075, True)
    assert judged([computed, {**host, "ttft_ms": 50.0}]) == (0.125, False)
    assert judged([computed, {**host, "tiers": {"device": 8192}}]) == (None, None)
    assert judged([]) == (None, None)


def test_what_is_carried_is_what_is_tested_here() -> None:
    carried = [line for line in _lines("requirements-gpu.txt") if not line.startswith("#")]

    assert carried
    assert set(carried) <= set(_lines("constraints.txt"))


def _lines(name: str) -> list[str]:
    return (ROOT / name).read_text().splitlines()
