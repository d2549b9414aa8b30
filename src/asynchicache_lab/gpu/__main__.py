"""`make gpu`: runs the parts of the GPU hour, each within its time, and writes a report after each step."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

from rich.console import Console

from asynchicache_lab.gpu.parts import PARTS, steps
from asynchicache_lab.gpu.report import GpuReport, present
from asynchicache_lab.gpu.steps import run

PART_SECONDS = 560
"""Of a part: a machine that hangs does not hang the report."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="one of them; all, one after the other, if not given")
    parser.add_argument("--dry", action="store_true", help="run all of it small, on a CPU")
    where = "where the report is written: gpu-report; build/gpu-report if it is dry"
    parser.add_argument("--folder", type=Path, help=where)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what dies here would write gigabytes
    report = GpuReport(given.folder or Path("build/gpu-report" if given.dry else "gpu-report"))
    for part in [given.part] if given.part else PARTS:
        run_part(report, part, dry=given.dry)
    report.write()
    present(report.found, Console())
    return 0 if report.ok or "skipped" in report.found else 1


def run_part(report: GpuReport, part: str, *, dry: bool) -> None:
    """Every step within what is left of the part's time; without a GPU only a look, unless it is dry."""
    log, end = report.begin(part), time.monotonic() + PART_SECONDS
    for step in steps(part, dry=dry):
        ran = run(step, log, end - time.monotonic())
        if step.name == "machine" and ran["rows"]:
            machine = ran["rows"][0]
            if not machine["cuda"] and not dry:
                report.skip(part, machine)
                return
            report.found["machine"] = machine
        report.add(part, ran)
    report.end(part)


if __name__ == "__main__":
    sys.exit(main())
