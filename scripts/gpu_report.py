"""What `make gpu` runs on a machine with an NVIDIA GPU: tests, round trips, benches; JSON, tables and a log.

Whoever reads these need not be at the machine: all that a step printed is in the log, and all of it is on
disk after each step. Each step is a process of its own, because an error of the device ends every later use
of it in the same one; and this one never calls CUDA, where a sick machine hangs.

Without a GPU it says so, and runs nothing: the same code runs on a CPU in `make test`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple, TypedDict

from gpu_goals import POOLS, SMALL_POOLS, Goal, goals, rows_of
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).parents[1]
SUITES: dict[str, tuple[str, str]] = {
    "streams": ("tests/streams", ""),
    "pinned memory": ("tests/pools", ""),
    "kernels": ("tests/kernels", ""),
    "plain copies": ("tests/transfer", "plain"),
    "batched copies": ("tests/transfer", "batch"),
    "copies by kernel": ("tests/transfer", "kernel"),
    "transfers": ("tests/transfer", "not plain and not batch and not kernel"),
    "whole cache": ("tests/cache/test_front_door_on_a_gpu.py", ""),
}
"""By what they are for, packages whose tests of a GPU are run, and which of those (pytest's `-k`)."""

_COPIES: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "transfer": (POOLS, {"device": "cuda", "row_mib": 256}),
    "transfer by plain": (SMALL_POOLS, {"device": "cuda", "row_mib": 16, "rounds": 1, "path": "plain"}),
    **{  # also what "transfer" did not choose
        f"transfer by {path}": (("mha",), {"device": "cuda", "row_mib": 256, "rounds": 5, "path": path})
        for path in ("batch", "kernel")
    },
}
BENCHES: dict[str, tuple[str, dict[str, object]]] = {
    "overlap": ("overlap", {"device": "cuda", "layers": 16, "layer_mib": 64}),
    **{
        f"{name}, {pool}": ("transfer", {**options, "pool": pool})
        for name, (pools, options) in _COPIES.items()
        for pool in pools
    },
}
"""By name, a module of `asynchicache_lab.bench` and options of it; a pool that fails leaves the others' rows.

What goals need comes first: the time for all steps may be up before the last one."""

# Neither goes through the command line, which wants the package installed.
_LOOK_ROUND = """
import json, os, platform, torch
from importlib.metadata import distributions
found = {
    "cuda": torch.cuda.is_available(), "device": None, "torch": torch.__version__,
    "cuda_runtime": torch.version.cuda, "python": platform.python_version(), "kernel": platform.release(),
    "cores": len(os.sched_getaffinity(0)),
    "packages": dict(sorted((str(one.metadata["Name"]), one.version) for one in distributions())),
}
if found["cuda"]:
    made = torch.cuda.get_device_properties(0)
    found |= {"device": made.name, "properties": str(made), "memory": torch.cuda.mem_get_info(0)}
    found["devices"] = torch.cuda.device_count()
print(json.dumps(found))
"""
_RUN_DOCTOR = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)  # which path is left out, and why
from asynchicache.cli import doctor
from asynchicache.transfer.calibration import measured_paths
names = ("torch", "triton", "device", "pinning", "copy_paths", "memory_limits")
checks = [getattr(doctor, f"check_{name}")() for name in names]
rates = [
    {"direction": shape.direction.value, "tokens": shape.tokens, "run_bytes": shape.nbytes,
     "gb_s": {path.value: rate for path, rate in found.items()}}
    for shape, found in measured_paths("cuda:0").rates.items()
]
print(json.dumps({"checks": [check._asdict() for check in checks], "rates": rates}))
sys.exit(not all(check.ok for check in checks))
"""
_RUN_BENCH = """
import asyncio, json, sys, time
from importlib import import_module
name, options = sys.argv[1], json.loads(sys.argv[2])
bench = import_module(f"asynchicache_lab.bench.{name}")
made = getattr(bench, f"{name.capitalize()}Options")(**options)
started = time.perf_counter()
def advance(done, total):
    print(f"{done} of {total} after {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
def tell(report, whole=False):
    print(json.dumps({**report.as_json(), "whole": whole}), flush=True)
report = asyncio.run(getattr(bench, f"run_{name}")(made, advance, tell))
tell(report, whole=True)
sys.exit(not report.ok)
"""
_SYSTEM = (["nvidia-smi"], ["nvidia-smi", "-q"], ["nvidia-smi", "topo", "-m"], ["lscpu"], ["free", "-m"])
"""What says more of a machine, for the log; any of it may be missing."""

SECONDS, TOTAL_SECONDS = 140, 540
"""Most that one step may take, and all of them: a machine that hangs does not hang the report."""

_LOOK_SECONDS, _SYSTEM_SECONDS, _KILL_SECONDS = 120, 15, 5  # the first look reads torch from a cold disk
# Plugins that the machine's own pytest brings may not suit the one that is carried. What a process that dies
# was doing is printed, by each of its threads.
_ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_asyncio.plugin,pytest_timeout",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}


class Step(TypedDict):
    """One thing that was run."""

    name: str
    ok: bool
    seconds: float
    detail: str


class Ran(NamedTuple):
    """How a process ended: its seconds, exit code, standard output, and error output."""

    seconds: float
    code: int
    out: str
    err: str

    @property
    def end(self) -> str:
        """The last it said."""
        return (self.out + self.err)[-2000:]


class Report:
    """What was found so far, in a folder."""

    def __init__(self, folder: Path) -> None:
        """An empty one; what the folder has of an older one is overwritten."""
        folder.mkdir(parents=True, exist_ok=True)
        empty: dict[str, Any] = {"machine": {}, "steps": [], "doctor": {}, "benches": {}, "goals": []}
        self.found = {"ok": False, **empty}
        self._folder = folder
        self.log = folder / "gpu.log"
        self.log.write_text("")

    def add(self, step: Step) -> None:
        self.found["steps"].append(step)
        Console().print(Text(f"{step['name']}: {'ok' if step['ok'] else 'FAILED'}, {step['seconds']:.0f} s"))
        self.write()

    def write(self) -> None:
        """All of it, as it is now."""
        self.found["goals"] = list(goals(self.found["benches"]))
        (self._folder / "gpu.json").write_text(json.dumps(self.found, indent=2) + "\n")
        with (self._folder / "gpu.txt").open("w") as file:
            present(self.found, Console(file=file, width=140))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("gpu-report"), help="where the report is written")
    report = Report(parser.parse_args().folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what dies here would write gigabytes
    end = time.monotonic() + TOTAL_SECONDS
    looked = look_round(report)
    if looked["ok"] and not report.found["machine"]["cuda"]:
        version = report.found["machine"]["torch"]
        report.found["skipped"] = f"torch {version} sees no CUDA device: nothing was run"
    else:
        report.add(looked)
        run_all(report, end)
    report.found["ok"] = all(step["ok"] for step in report.found["steps"])
    report.write()
    present(report.found, Console())
    return 0 if report.found["ok"] else 1


def look_round(report: Report) -> Step:
    """What the machine is; its step fails where torch, or the driver, does not come up."""
    for command in _SYSTEM:
        _run(command, _SYSTEM_SECONDS, report.log)
    step, report.found["machine"] = _run_for_json(
        "machine", [sys.executable, "-c", _LOOK_ROUND], _LOOK_SECONDS, report.log
    )
    step["detail"] = step["detail"] or str(report.found["machine"].get("device"))
    return step


def run_all(report: Report, end: float) -> None:
    """Every step, each within what is left until `end`."""
    for name, (path, which) in SUITES.items():
        report.add(run_suite(name, path, report.log, which=which, seconds=seconds_until(end)))
    command = [sys.executable, "-c", _RUN_DOCTOR]
    step, report.found["doctor"] = _run_for_json("doctor", command, seconds_until(end), report.log)
    report.add(step)
    for name, (module, options) in BENCHES.items():
        step, result = run_bench(name, module, options, report.log, seconds=seconds_until(end))
        report.found["benches"][name] = result
        report.add(step)


def seconds_until(end: float) -> float:
    """What a step that starts now may take; a step that comes too late fails at once, and is named."""
    return max(0.0, min(SECONDS, end - time.monotonic()))


def run_suite(
    name: str, path: str, log: Path, *, which: str = "", marks: str = "gpu", seconds: float = SECONDS
) -> Step:
    """The tests of one package that are marked so; some must run, and none may fail."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        options = ["-v", "-m", marks, "-k", which, "-p", "no:cacheprovider", f"--junitxml={file}"]
        ran = _run([sys.executable, "-m", "pytest", *options, "--durations=5", path], seconds, log)
        counts = _counts(file)
    executed = counts["tests"] - counts["skipped"]
    ok = ran.code == 0 and executed > 0
    words = f"{executed} ran, {counts['skipped']} skipped, {counts['failures'] + counts['errors']} failed"
    return Step(name=name, ok=ok, seconds=ran.seconds, detail=words if ok else f"{words}\n{ran.end}")


def _counts(file: Path) -> dict[str, int]:
    names = ("tests", "skipped", "failures", "errors")
    if not file.exists():
        return dict.fromkeys(names, 0)
    suite = ElementTree.parse(file).getroot().find("testsuite")  # noqa: S314 - pytest wrote it
    return {name: int(suite.get(name, 0)) if suite is not None else 0 for name in names}


def run_bench(
    name: str, module: str, options: dict[str, object], log: Path, *, seconds: float = SECONDS
) -> tuple[Step, dict[str, Any]]:
    """One bench on the GPU, whose bytes must be right; its figures are kept where they are not, and those
    that it had, with `whole` false, where it did not come to its end."""
    command = [sys.executable, "-c", _RUN_BENCH, module, json.dumps(options)]
    step, result = _run_for_json(f"bench {name}", command, seconds, log)
    if result:
        words = f"{len(result['rows'])} rows, bytes {'right' if result['ok'] else 'WRONG'}"
        step["detail"] = words if result["whole"] else f"{words}, not the rest\n{step['detail']}"
    return step, result


def _run_for_json(
    name: str, command: Sequence[str], seconds: float, log: Path
) -> tuple[Step, dict[str, Any]]:
    """Run what prints JSON objects, a line each, of which the last counts; its detail is how it ended where
    it did not end well."""
    ran = _run(command, seconds, log)
    found: dict[str, Any] = {}
    for line in ran.out.splitlines():
        with suppress(json.JSONDecodeError):  # what was cut within a line
            found = json.loads(line)
    ok = ran.code == 0 and bool(found)
    return Step(name=name, ok=ok, seconds=ran.seconds, detail="" if ok else ran.end), found


def _run(command: Sequence[str], seconds: float, log: Path) -> Ran:
    """Run a command, and write down all that it said."""
    started = time.perf_counter()
    environment = os.environ | _ENVIRONMENT
    with _text_file() as out, _text_file() as err:
        try:
            run = subprocess.Popen(  # noqa: S603 - our own
                command, cwd=ROOT, stdout=out, stderr=err, start_new_session=True, env=environment
            )
            code = _wait(run, seconds)
        except OSError as error:  # there is no such program
            print(error, file=err)
            code = 127
        if code == 124:
            print(f"not done after {seconds:.0f} s", file=err)
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    ran = Ran(time.perf_counter() - started, code, *texts)
    with log.open("a") as file:
        words = [word if len(word) < 200 else "..." for word in command]
        print(f"\n=== {' '.join(words)}\n=== exit {code}, {ran.seconds:.1f} s", file=file)
        print(ran.out, ran.err, sep="\n", file=file)
    return ran


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _wait(run: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit code; 124 for what had to be killed, after it was asked where it was."""
    with suppress(subprocess.TimeoutExpired):
        return run.wait(seconds)
    for number in (signal.SIGABRT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(run.pid, number)
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
            run.wait(_KILL_SECONDS)
    return 124


def present(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    versions = f"torch {machine.get('torch')}, CUDA {machine.get('cuda_runtime')}"
    console.print(Text(f"{machine.get('device') or 'no GPU'}, {versions}"))
    if "skipped" in report:
        console.print(report["skipped"])
        return
    steps = Table("step", "ok", "seconds", "detail", title="steps")
    for step in report["steps"]:
        last = "\n".join(line[:100] for line in step["detail"].splitlines()[-8:])  # gpu.log has it all
        steps.add_row(step["name"], _yes(step["ok"]), f"{step['seconds']:.0f}", Text(last))
    console.print(steps)
    console.print(_goals(report["goals"]))
    for name in _COPIES:
        if rows := rows_of(report["benches"], name):
            console.print(_rates(name, rows))


def _goals(found: Sequence[Goal]) -> Table:
    table = Table("goal", "value", "wanted", "met", "worst row", title="goals")
    for goal in found:
        value = "" if goal["value"] is None else f"{goal['value']:.2f}"
        met = "not shown" if goal["met"] is None else _yes(goal["met"])
        table.add_row(goal["name"], value, f"{goal['wanted']:.2f}", met, goal["note"])
    return table


def _rates(name: str, rows: list[dict[str, Any]]) -> Table:
    """Medians over pools and layouts, by length of runs, direction and path."""
    table = Table("run", "direction", "path", "rows", "GB/s", "ratio", title=f"bench {name}")
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run_bytes"], row["direction"], row["path"]), []).append(row)
    for (run_bytes, *names), some in sorted(groups.items()):
        rates = [f"{median(row[name] for row in some):.2f}" for name in ("gb_s", "ratio")]
        table.add_row(f"{run_bytes:,}", *names, str(len(some)), *rates)
    return table


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


if __name__ == "__main__":
    sys.exit(main())
