"""Tables that fit into 80 columns: words may wrap there, figures never."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


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
