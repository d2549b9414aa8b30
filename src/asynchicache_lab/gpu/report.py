"""The report of the GPU hour: `gpu.json`, the same as tables in `gpu.txt`, and a log of all output.

Whoever reads these need not be at the machine. They are written anew after each step, and parts that ran
before stay in them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asynchicache_lab.gpu.goals import POOLS, Goal, goals
from asynchicache_lab.gpu.steps import Ran

_FILE = "gpu.json"


class GpuReport:
    """What was found so far, in a folder.

    Attributes:
        found: as in `gpu.json`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._before = b"", ""
        self.found: dict[str, Any] = {"ok": False, "machine": {}, "parts": {}, "unfinished": [], "goals": []}
        with suppress(OSError, ValueError):
            self.found |= json.loads((folder / _FILE).read_text())
        self.found.pop("skipped", None)

    def begin(self, part: str) -> Path:
        """Forget what a part found before, unless it is skipped; its log."""
        log = self._folder / f"{part}.log"
        self._before = log.read_bytes() if log.exists() else b"", json.dumps(self.found)
        self.found["parts"][part] = []
        self.found["unfinished"] = sorted({*self.found["unfinished"], part})
        log.write_text("")
        return log

    def skip(self, part: str, machine: Mapping[str, Any]) -> None:
        """Nothing of a part was run, on a machine without a GPU: what was found elsewhere is kept."""
        said, found = self._before
        (self._folder / f"{part}.log").write_bytes(said)
        self.found = json.loads(found)
        self.found["machine"] = self.found["machine"] or machine
        self.found["skipped"] = f"torch {machine['torch']} sees no CUDA device: nothing was run"
        self.write()

    def add(self, part: str, ran: Ran) -> None:
        self.found["parts"][part].append(ran)
        Console().print(Text(f"{ran['name']}: {'ok' if ran['ok'] else 'FAILED'}, {ran['seconds']:.0f} s"))
        self.write()

    def end(self, part: str) -> None:
        """All steps of a part have been run."""
        self.found["unfinished"].remove(part)
        self.write()

    @property
    def ok(self) -> bool:
        ended = [ran["ok"] for steps in self.found["parts"].values() for ran in steps]
        return all(ended) and not self.found["unfinished"]

    def write(self) -> None:
        """All of it, as it is now."""
        self.found["ok"] = self.ok
        self.found["goals"] = list(goals(rows_by_step(self.found["parts"])))
        new = self._folder / f".{_FILE}"
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        new.replace(self._folder / _FILE)  # at once: this process may be killed at any time
        with (self._folder / "gpu.txt").open("w") as file:
            present(self.found, Console(file=file, width=140))


def rows_by_step(parts: Mapping[str, Sequence[Ran]]) -> dict[str, list[dict[str, Any]]]:
    """What each step printed, of all parts."""
    return {ran["name"]: ran["rows"] for steps in parts.values() for ran in steps}


def present(found: Mapping[str, Any], console: Console) -> None:
    machine = found["machine"]
    versions = f"torch {machine.get('torch')}, CUDA {machine.get('cuda_runtime')}"
    console.print(Text(f"{machine.get('device') or 'no GPU'}, {versions}"))
    if "skipped" in found:
        console.print(found["skipped"])
    if not found["parts"] and "skipped" in found:
        return
    for part, steps in found["parts"].items():
        console.print(_steps(part, steps))
        if part in found["unfinished"]:
            console.print(Text(f"part {part} has not come to its end"))
    console.print(_goals(found["goals"]))
    rows = rows_by_step(found["parts"])
    if copies := [row for pool in POOLS for row in last(rows.get(f"transfer, {pool}", [])).get("rows", [])]:
        console.print(_rates(copies))
    for name in ("host", "models", "serve"):
        if name in rows:
            console.print(_rows(name, rows[name]))


def last(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last report of a bench."""
    return rows[-1] if rows else {}


def _steps(part: str, steps: Sequence[Ran]) -> Table:
    table = Table("step", "ok", "seconds", "detail", title=f"part {part}")
    for ran in steps:
        lines = ran["detail"].splitlines()[-1:] if ran["ok"] else ran["detail"].splitlines()[-8:]
        cut = "\n".join(line[:100] for line in lines)  # the log has it all
        table.add_row(ran["name"], _yes(ran["ok"]), f"{ran['seconds']:.0f}", Text(cut))
    return table


def _goals(found: Sequence[Goal]) -> Table:
    table = Table("goal", "value", "wanted", "met", "worst row", title="goals")
    for goal in found:
        value = "" if goal["value"] is None else f"{goal['value']:.2f}"
        met = "not shown" if goal["met"] is None else _yes(goal["met"])
        table.add_row(goal["name"], value, f"{goal['wanted']:.2f}", met, goal["note"])
    return table


def _rates(rows: Sequence[dict[str, Any]]) -> Table:
    """Medians over pools and layouts, by length of runs, direction and path."""
    table = Table("run", "direction", "path", "rows", "GB/s", "ratio", title="bench transfer")
    groups: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run_bytes"], row["direction"], row["path"]), []).append(row)
    for (run_bytes, *names), some in sorted(groups.items()):
        rates = [f"{median(row[name] for row in some):.2f}" for name in ("gb_s", "ratio")]
        table.add_row(f"{run_bytes:,}", *names, str(len(some)), *rates)
    return table


def _rows(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of figures as they are, without what is long."""
    shown = [
        {key: value for key, value in row.items() if not isinstance(value, list)}
        for row in rows
        if row.keys() & {"ttft_ms", "gb_s", "failed"}
    ]
    columns = list(dict.fromkeys(key for row in shown for key in row))
    table = Table(*columns, title=name)
    for row in shown:
        table.add_row(*(Text(str(row.get(key, ""))[:40]) for key in columns))
    return table


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"
