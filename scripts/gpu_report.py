"""What `make gpu` runs on a machine with an NVIDIA GPU: tests, round trips, benches; one JSON, one table.

Without a GPU it says so, in both, and runs nothing: the same code runs on a CPU in `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SUITES = {
    "conformance": "tests/streams",
    "kernels": "tests/kernels",
    "pools": "tests/pools",
    "round trips": "tests/transfer",
}
"""Rooms whose tests of a GPU are run, by what they are for."""

BENCHES: dict[str, tuple[str, dict[str, object]]] = {
    "transfer": ("transfer", {"device": "cuda", "row_mib": 256}),
    "transfer by single copies": (
        "transfer",
        {"device": "cuda", "row_mib": 16, "rounds": 1, "path": "plain"},
    ),
    "overlap": ("overlap", {"device": "cuda", "layers": 16, "layer_mib": 64}),
}
"""By name, a module of `asynchicache.bench` and options of it."""

# Not through the command line, which wants the package installed; a process of its own, because an error
# of the device ends every later use of it in the same one.
_RUN_BENCH = """
import asyncio, json, sys
from importlib import import_module
name, options = sys.argv[1], json.loads(sys.argv[2])
bench = import_module(f"asynchicache.bench.{name}")
made = getattr(bench, f"{name.capitalize()}Options")(**options)
report = asyncio.run(getattr(bench, f"run_{name}")(made, lambda done, total: None))
print(json.dumps(report.as_json()))
sys.exit(not report.ok)
"""
SECONDS, TOTAL_SECONDS = 140, 570
"""Most that one step may take, and all of them: a machine that hangs does not hang the report."""

_KILL_SECONDS = 5
_LARGE, _SMALL = 64 << 10, range(4 << 10, (16 << 10) + 1)
_WANTED_SHARE, _WANTED_GAIN, _WANTED_OVERLAP, _WANTED_HOST_US = 0.9, 3.0, 1.10, 20.0


class Step(TypedDict):
    """One thing that was run."""

    name: str
    ok: bool
    seconds: float
    detail: str


class Goal(TypedDict):
    """A figure and what it is to be; a miss is reported and fails nothing."""

    name: str
    value: float
    wanted: float
    met: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("gpu-report"), help="where the report is written")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": describe_machine(), "steps": [], "benches": {}, "goals": []}
    if torch.cuda.is_available():
        run_all(report, folder)
    else:
        report["skipped"] = f"torch {torch.__version__} sees no CUDA device: nothing was run"
    ok = all(step["ok"] for step in report["steps"])
    report["ok"] = ok
    (folder / "gpu.json").write_text(json.dumps(report, indent=2) + "\n")
    with (folder / "gpu.txt").open("w") as file:
        for console in (Console(file=file, width=140), Console()):
            present(report, console)
    return 0 if ok else 1


def describe_machine() -> dict[str, object]:
    found: dict[str, object] = {
        "cuda": torch.cuda.is_available(),
        "device": None,
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
    return found


def run_all(report: dict[str, Any], folder: Path) -> None:
    end = time.monotonic() + TOTAL_SECONDS
    for name, path in SUITES.items():
        report["steps"].append(run_suite(name, path, folder, seconds=seconds_until(end)))
    for name, (module, options) in BENCHES.items():
        step, result = run_bench(name, module, options, seconds=seconds_until(end))
        report["steps"].append(step)
        report["benches"][name] = result
    report["goals"] = list(goals(report["benches"]))


def seconds_until(end: float) -> float:
    """What a step that starts now may take; a step that comes too late fails at once, and is named."""
    return max(0.0, min(SECONDS, end - time.monotonic()))


def run_suite(name: str, path: str, folder: Path, *, marks: str = "gpu", seconds: float = SECONDS) -> Step:
    """The tests of one room that are marked so; some must run, and none may fail."""
    file = folder.absolute() / f"{path.replace('/', '-')}.xml"
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", f"--junitxml={file}"]
    took, code, output = _run([sys.executable, "-m", "pytest", *options, path], seconds)
    counts = _counts(file)
    ran = counts["tests"] - counts["skipped"]
    ok = code == 0 and ran > 0
    words = f"{ran} ran, {counts['skipped']} skipped, {counts['failures'] + counts['errors']} failed"
    return Step(name=name, ok=ok, seconds=took, detail=words if ok else f"{words}\n{output[-2000:]}")


def _counts(file: Path) -> dict[str, int]:
    names = ("tests", "skipped", "failures", "errors")
    if not file.exists():
        return dict.fromkeys(names, 0)
    suite = ElementTree.parse(file).getroot().find("testsuite")  # noqa: S314 - pytest wrote it
    return {name: int(suite.get(name, 0)) if suite is not None else 0 for name in names}


def run_bench(
    name: str, module: str, options: dict[str, object], *, seconds: float = SECONDS
) -> tuple[Step, dict[str, Any]]:
    """One bench on the GPU, whose bytes must be right."""
    took, code, output = _run([sys.executable, "-c", _RUN_BENCH, module, json.dumps(options)], seconds)
    result: dict[str, Any] = {}
    if code == 0:
        result = json.loads(output)
    detail = f"{len(result['rows'])} rows, bytes right" if result else output[-2000:]
    return Step(name=f"bench {name}", ok=code == 0, seconds=took, detail=detail), result


def _run(command: list[str], seconds: float) -> tuple[float, int, str]:
    """Seconds, exit code, and standard output; with the error output where the code is not 0."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)  # noqa: S603 - our own
        try:
            code = run.wait(seconds)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(run.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
                run.wait(_KILL_SECONDS)
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    output = texts[0] if code == 0 else "".join(texts)
    late = f"not done after {seconds:.0f} s\n" if code == 124 else ""
    return time.perf_counter() - started, code, late + output


def goals(benches: dict[str, dict[str, Any]]) -> Iterator[Goal]:
    """What the benches are held against; nothing where a bench did not run."""
    rows = benches["transfer"].get("rows", [])
    for direction in ("load", "backup"):
        ratios = [
            row["ratio"] for row in rows if row["direction"] == direction and row["run_bytes"] >= _LARGE
        ]
        if ratios:
            yield _goal(f"{direction}: share of a plain copy, runs of 64 KiB up", min(ratios), _WANTED_SHARE)
    single = {_key(row): row["gb_s"] for row in benches["transfer by single copies"].get("rows", [])}
    gains = [
        row["gb_s"] / single[_key(row)] for row in rows if row["run_bytes"] in _SMALL and _key(row) in single
    ]
    if gains:
        yield _goal("gain over single copies, runs of 4 to 16 KiB", min(gains), _WANTED_GAIN)
    overlap = benches["overlap"].get("rows", [])
    if overlap:
        shares = [row["layerwise_ms"] / row["ideal_ms"] for row in overlap]
        yield _goal("layer-wise loading, of the ideal", max(shares), _WANTED_OVERLAP, least=False)
        host = benches["overlap"]["submit_us_per_layer"]
        yield _goal("host, microseconds a layer", host, _WANTED_HOST_US, least=False)


def _goal(name: str, value: float, wanted: float, *, least: bool = True) -> Goal:
    met = value >= wanted if least else value <= wanted
    return Goal(name=name, value=round(value, 3), wanted=wanted, met=met)


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    return row["pool"], row["layout"], row["direction"], row["page_bytes"]


def present(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['device'] or 'no GPU'}, torch {machine['torch']}, CUDA {machine['cuda_runtime']}"
    )
    if "skipped" in report:
        console.print(report["skipped"])
        return
    steps = Table("step", "ok", "seconds", "detail", title="steps")
    for step in report["steps"]:
        steps.add_row(step["name"], _yes(step["ok"]), f"{step['seconds']:.0f}", step["detail"])
    console.print(steps)
    found = Table("goal", "value", "wanted", "met", title="goals")
    for goal in report["goals"]:
        found.add_row(goal["name"], f"{goal['value']:.2f}", f"{goal['wanted']:.2f}", _yes(goal["met"]))
    console.print(found)
    console.print(_rates(report["benches"]["transfer"].get("rows", [])))


def _rates(rows: list[dict[str, Any]]) -> Table:
    """Medians over pools, by layout, direction and path."""
    table = Table("layout", "direction", "path", "rows", "GB/s", "ratio", title="bench transfer")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["layout"], row["direction"], row["path"]), []).append(row)
    for names, some in sorted(groups.items()):
        rates = [f"{median(row[name] for row in some):.2f}" for name in ("gb_s", "ratio")]
        table.add_row(*names, str(len(some)), *rates)
    return table


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    sys.exit(main())
