"""What commands report: numbers for programs, tables for people, and whether every check held.

Tables fit into 80 columns: words may wrap there, figures never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from rich.console import RenderableType
from rich.table import Table

Advance: TypeAlias = Callable[[int, int], None]
"""Receives progress: parts done, and parts there are."""


class Report(Protocol):
    """The interface of a report for the command line."""

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


def add_figures(table: Table, *headings: str) -> None:
    """Add columns of numbers, which are never cut or wrapped. Long headings should contain a line break."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """A table of name and value, one per row; both may contain markup."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right", overflow="fold")  # fold, not cut: paths may exceed a line
    for row in rows:
        table.add_row(*row)
    return table
