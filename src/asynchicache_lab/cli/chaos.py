"""`asynchicache chaos`: the seeded search, and what it found as scripts that replay it."""

from __future__ import annotations

import os
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from asynchicache.cli.output import CommandResult, Output
from asynchicache.reports import add_figures
from asynchicache_lab.chaos.costs import KINDS as COSTS
from asynchicache_lab.chaos.faults import KINDS
from asynchicache_lab.chaos.options import ChaosOptions
from asynchicache_lab.chaos.run import run_script
from asynchicache_lab.chaos.script import Script
from asynchicache_lab.chaos.search import Finding, Findings, reduce, script_of, search
from asynchicache_lab.ranks.chaos import search_ranks

_SHRUNK = 3
"""Findings that are cut down; of more, the seeds are enough to begin with."""


def run(options: ChaosOptions, output: Output) -> CommandResult:
    """Search, or replay; not ok if anything is violated."""
    if options.ranks:
        return _search_ranks(options, output)
    if options.script:
        findings = _replay(Script.load(Path(options.script)))
    elif options.seed is not None:
        findings = _replay(script_of(options.seed, paged=options.engine_memory))
    else:
        with output.bar("seeds") as advance:
            seeds = range(options.first, options.first + options.seeds)
            findings = search(
                seeds, options.jobs or os.cpu_count() or 1, advance, paged=options.engine_memory
            )
    paths = {} if options.script else _write_scripts(findings, options, output)
    return CommandResult(_as_json(findings, paths), _present(findings, paths), not findings.violations)


def _search_ranks(options: ChaosOptions, output: Output) -> CommandResult:
    seeds = (
        [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    )
    with output.bar("seeds") as advance:
        found = search_ranks(seeds, options.jobs or os.cpu_count() or 1, advance)
    figures = {
        "seeds": found.seeds,
        "requests": found.requests,
        "tokens_by_tier": dict(sorted(found.tiers.items())),
        "groups_lost_on_purpose": found.lost,
        "cpu_seconds": round(found.cpu_seconds, 1),
        "violations": [{"seed": seed, "violations": words} for seed, words in found.violations.items()],
    }
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in figures.items() if name != "violations"]
    lines.append(
        "violations: " + (f"[red]{len(found.violations)} seeds[/red]" if found.violations else "none")
    )
    for seed, words in found.violations.items():
        lines.append(f"[red]seed {seed}[/red]: asynchicache chaos --ranks --seed {seed}")
        lines += [f"    {escape(one)}" for one in words[:5]]
    return CommandResult(figures, "\n".join(lines), not found.violations)


def _replay(script: Script) -> Findings:
    findings = Findings()
    findings.add(script, run_script(script))
    return findings


def _write_scripts(findings: Findings, options: ChaosOptions, output: Output) -> dict[int, Path]:
    """Cut down the first findings, and write their scripts; the files, by seed."""
    folder = Path(options.found)
    paths: dict[int, Path] = {}
    for index, finding in enumerate(findings.violations[:_SHRUNK]):
        with output.console.status(f"cutting down seed {finding.seed}"):
            findings.violations[index] = smaller = reduce(finding, paged=options.engine_memory)
        if smaller.script is not None:
            folder.mkdir(parents=True, exist_ok=True)
            paths[finding.seed] = folder / f"{finding.seed}.json"
            paths[finding.seed].write_text(smaller.script.text(), encoding="utf-8")
    return paths


def _as_json(findings: Findings, paths: dict[int, Path]) -> dict[str, object]:
    return {
        "seeds": findings.seeds,
        "operations": findings.operations.total(),
        "operations_by_name": dict(sorted(findings.operations.items())),
        "faults": {kind: findings.faults[kind] for kind in KINDS},
        "models": dict(sorted(findings.families.items())),
        "tokens_by_tier": dict(sorted(findings.served.items())),
        "storage_pages": {kind: findings.costs[kind] for kind in COSTS},
        "cpu_seconds": round(findings.cpu_seconds, 1),
        "violations": [
            {"seed": found.seed, "violations": found.violations, "script": _path(paths, found)}
            for found in findings.violations
        ],
    }


def _path(paths: dict[int, Path], found: Finding) -> str | None:
    return str(paths[found.seed]) if found.seed in paths else None


def _present(findings: Findings, paths: dict[int, Path]) -> RenderableType:
    """What was done, what went wrong on purpose, and what is violated."""
    table = Table("fault", title=f"{findings.seeds:,} seeds", box=SIMPLE)
    add_figures(table, "times")
    for kind in KINDS:
        table.add_row(kind, f"{findings.faults[kind]:,}")
    done = findings.operations.total()
    words = [
        f"{done:,} operations, {done / findings.seeds:,.0f} a seed; "
        f"{findings.cpu_seconds / findings.seeds:.3f} s of processor time a seed",
        _costs(findings),
        "violations: " + (f"[red]{len(findings.violations)} seeds[/red]" if findings.violations else "none"),
    ]
    return Group(table, *words, *(_finding(found, _path(paths, found)) for found in findings.violations))


def _costs(findings: Findings) -> str:
    """What was asked of storage, and how much of it for nothing."""
    costs = findings.costs
    needless = ("asked_twice", "read_twice", "read_needlessly", "written_twice")
    return (
        f"pages of storage: {costs['asked']:,} asked for, {costs['read']:,} read, "
        f"{costs['written']:,} written; "
        f"{costs['read_in_vain']:,} read while others computed them, "
        f"{sum(costs[kind] for kind in needless):,} for nothing"
    )


def _finding(found: Finding, path: str | None) -> RenderableType:
    replay = f"asynchicache chaos --seed {found.seed}"
    if path is not None:
        replay += f", or cut down: asynchicache chaos --script {escape(path)}"
    lines = [f"[red]seed {found.seed}[/red]: {replay}"]
    lines += [f"    {escape(violation)}" for violation in found.violations[:5]]
    return "\n".join(lines)
