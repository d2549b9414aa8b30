"""The result of a bench: numbers for programs, tables for people, and whether every check held."""

from __future__ import annotations

from typing import Protocol

from rich.console import RenderableType


class BenchReport(Protocol):
    """The interface of a bench's report for the command line."""

    @property
    def ok(self) -> bool:
        """Whether every byte was right and no check failed; determines the exit code."""
        ...

    def as_json(self) -> dict[str, object]:
        """The numbers by name. Names are stable for use by programs."""
        ...

    def present(self) -> RenderableType:
        """Tables for people."""
        ...
