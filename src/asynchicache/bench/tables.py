"""Tables for people, who read them in 80 columns too: words may take a second line there, figures never."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def add_figures(table: Table, *headings: str) -> None:
    """Columns of numbers, which are neither cut nor broken; a heading that is longer than they are has a
    line break."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """What is told once, one fact a row; both sides may hold markup."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right", overflow="fold")  # a path is longer than a line, and no use in part
    for row in rows:
        table.add_row(*row)
    return table
