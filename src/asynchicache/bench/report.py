"""The result of a bench: numbers for programs, tables for people, and whether every check held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from rich.console import RenderableType

Advance: TypeAlias = Callable[[int, int], None]
"""Receives progress: parts done, and parts there are."""


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
