"""The result of a bench: numbers for programs, tables for people, and whether every check held."""

from __future__ import annotations

from typing import Protocol

from rich.console import RenderableType


class BenchReport(Protocol):
    """What the command line needs of any bench's report."""

    @property
    def ok(self) -> bool:
        """Whether every byte was right and no check failed; the exit code follows from it."""
        ...

    def as_json(self) -> dict[str, object]:
        """The numbers by name; names are stable, for programs."""
        ...

    def present(self) -> RenderableType:
        """Tables for people."""
        ...
