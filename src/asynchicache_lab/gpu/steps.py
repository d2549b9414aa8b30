"""Steps of the GPU hour: each a process of its own, with a limit, whose output is on disk as it comes.

An error of a device ends every later use of it in the same process; and this one never calls CUDA, where a
sick machine hangs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

ROOT = Path(__file__).parents[3]

_KILL_SECONDS = 5
_ENVIRONMENT = {
    # Plugins that the machine's own pytest brings may not suit the one that is carried.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_asyncio.plugin,pytest_timeout",
    "PYTHONFAULTHANDLER": "1",  # what a process that dies was doing is printed, by each of its threads
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",  # nothing is asked of a network that may not be there
}


class Step(NamedTuple):
    """What to run.

    Attributes:
        name: unique within its part.
        command: words; torch's Python runs it from the checkout.
        seconds: most that it may take.
        wants: what it must print to be in order: `rows`, `tests` that ran, or nothing.
    """

    name: str
    command: Sequence[str]
    seconds: float = 140
    wants: str = ""


class Ran(TypedDict):
    """How a step ended: its rows are the JSON objects that it printed, and its detail the end of the rest."""

    name: str
    ok: bool
    seconds: float
    detail: str
    rows: list[dict[str, Any]]


def run(step: Step, log: Path, left: float) -> Ran:
    """Run a step; append all that it prints to `log`, as it prints it.

    Args:
        step: what to run.
        log: a file.
        left: seconds until the end of all steps; one that comes too late fails at once.
    """
    started, seconds = time.monotonic(), max(0.0, min(step.seconds, left))
    with log.open("ab") as file:
        words = [word if len(word) < 200 else "..." for word in step.command]
        file.write(f"\n=== {step.name}: {' '.join(words)}\n".encode())
        file.flush()
        start = file.tell()
        code = _code(step.command, file.fileno(), seconds)
        if code == 124:
            file.write(f"\nnot done after {seconds:.0f} s\n".encode())
    said = log.read_bytes()[start:].decode(errors="replace")
    rows, rest = _parted(said)
    ok = code == 0 and _has(step.wants, rows, rest)
    detail = rest.strip()[-2000:] if not ok or step.wants != "rows" else ""
    return Ran(name=step.name, ok=ok, seconds=time.monotonic() - started, detail=detail, rows=rows)


def _code(command: Sequence[str], out: int, seconds: float) -> int:
    """The exit code; 124 for what was killed, after it was asked where it was."""
    words = ["env", *(f"{name}={value}" for name, value in _ENVIRONMENT.items()), *command]
    process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)  # noqa: S603
    with suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    for number in (signal.SIGABRT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):  # a driver may hold it for ever
            process.wait(_KILL_SECONDS)
    return 124


def _parted(said: str) -> tuple[list[dict[str, Any]], str]:
    """The rows, and all other lines."""
    rows, rest = [], []
    for line in said.splitlines():
        with suppress(json.JSONDecodeError):  # what was cut within a line
            found = json.loads(line) if line.startswith("{") else None
            if isinstance(found, dict):
                rows.append(found)
                continue
        rest.append(line)
    return rows, "\n".join(rest)


def _has(wants: str, rows: Sequence[object], rest: str) -> bool:
    if wants == "tests":
        return re.search(r"\b[1-9]\d* passed", rest) is not None
    return bool(rows) or wants != "rows"
