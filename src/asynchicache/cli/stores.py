"""`verify` and `clear`: what lies in the folder of a file store."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asynchicache.backends.file.clear import Cleared, clear_store
from asynchicache.backends.file.verify import StoreReport, verify_store
from asynchicache.cli.options import ClearOptions, VerifyOptions
from asynchicache.cli.output import CommandResult, Output
from asynchicache.reports import facts


def verify(options: VerifyOptions, output: Output) -> CommandResult:
    """Read every page; not ok if one cannot be read, or something is damaged and was not repaired."""
    with output.console.status(escape(f"reading {options.path}")):
        report = verify_store(Path(options.path), repair=options.repair)
    return CommandResult(report.as_json(), _report(report), report.ok)


def clear(options: ClearOptions, output: Output) -> CommandResult:
    """Remove the pools that are named."""
    cleared = clear_store(Path(options.path), options.pool, options.fingerprint)
    return CommandResult(cleared._asdict(), _cleared(cleared))


def _report(report: StoreReport) -> RenderableType:
    numbers = {
        "whole pages": report.pages,
        "damaged": report.corrupt,
        "repaired": report.repaired,
        "unfinished": report.unfinished,
        "named twice": report.orphaned,
        "pools not read": report.unread,
        "bytes": report.bytes,
    }
    table = facts([(name, f"{number:,}") for name, number in numbers.items()], f"pools: {len(report.pools)}")
    return Group(table, *map(Text, report.problems))  # as they are: brackets are no markup


def _cleared(cleared: Cleared) -> RenderableType:
    """What was removed; where nothing was, what is there: the name may have been mistyped."""
    table = Table(title="cleared" if cleared.pools else "nothing to clear; pools", show_header=False)
    table.add_column(overflow="fold")
    for name in cleared.pools or cleared.kept or ["none is there"]:
        table.add_row(Text(name))  # as it is: brackets are no markup
    if cleared.pools:
        table.add_row(f"{cleared.bytes:,} bytes")
    return table
