"""Where a command's results go: rich for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from asynchicache.reports import Advance, Report

STANDARD_OUTPUT = "-"
"""The value of `--json` for which JSON goes to standard output."""


class CommandResult(NamedTuple):
    """What a command has to say: for programs, for people, and whether nothing was violated."""

    result: Mapping[str, object]
    view: RenderableType
    ok: bool = True


def result_of(report: Report) -> CommandResult:
    return CommandResult(report.as_json(), report.present(), report.ok)


class Output:
    """One command's output.

    With `--json -` standard output carries the JSON alone, and what is for people goes to standard
    error.
    """

    def __init__(self, json_target: str | None) -> None:
        self._json_target = json_target
        self.console = Console(stderr=json_target == STANDARD_OUTPUT)

    def show(self, view: RenderableType) -> None:
        self.console.print(view)

    def progress(self, *notes: ProgressColumn) -> Progress:
        """Bars that vanish when the work is done: the tables are what stays."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            *notes,
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,  # elsewhere all that it leaves is an empty line
        )

    @contextmanager
    def bar(self, description: str) -> Iterator[Advance]:
        """One bar, moved by calling what this yields."""
        with self.progress() as progress:
            task = progress.add_task(description, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def write_json(self, result: Mapping[str, object]) -> None:
        """Write `result` where `--json` says; nothing without it.

        Raises:
            OSError: the file cannot be written.
            ValueError: a number is not finite; JSON has no word for that.
        """
        if self._json_target is None:
            return
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
        if self._json_target == STANDARD_OUTPUT:
            sys.stdout.write(text)
        else:
            Path(self._json_target).write_text(text, encoding="utf-8")
