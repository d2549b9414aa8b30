"""`verify` and `clear`: what lies in the folder of a file store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import hexdigits

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asynchicache.backends.file.clear import Cleared, clear_store
from asynchicache.backends.file.verify import StoreReport, verify_store
from asynchicache.bench.options import option
from asynchicache.bench.tables import facts
from asynchicache.cli.output import Outcome, Output
from asynchicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The flags of `verify`."""

    path: str = option("", "folder of the store", positional=True)
    repair: bool = option(False, "forget damaged pages; the store must not be open elsewhere")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ClearOptions:
    """The flags of `clear`.

    Raises:
        ConfigError: it is not said which pools.
    """

    path: str = option("", "folder of the store", positional=True)
    pool: str = option("", "only pools of this name")
    fingerprint: str = option("", "only pools whose fingerprint begins with this, in hex")
    everything: bool = option(False, "all pools of the folder")
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.pool or self.fingerprint or self.everything):
            raise ConfigError("say what to clear: --pool, --fingerprint or --everything")
        if set(self.fingerprint) - set(hexdigits):
            raise ConfigError(f"--fingerprint {self.fingerprint!r} must be hexadecimal digits")
        if self.everything and (self.pool or self.fingerprint):
            raise ConfigError("--everything is more than --pool or --fingerprint: say one of them")


def verify(options: VerifyOptions, output: Output) -> Outcome:
    """Read every page; not ok if one cannot be read, or something is damaged and was not repaired."""
    with output.console.status(escape(f"reading {options.path}")):
        report = verify_store(Path(options.path), repair=options.repair)
    return Outcome(report.as_json(), _report(report), report.ok)


def clear(options: ClearOptions, output: Output) -> Outcome:
    """Remove the pools that are named."""
    cleared = clear_store(Path(options.path), options.pool, options.fingerprint)
    return Outcome(cleared._asdict(), _cleared(cleared))


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
