"""`asynchicache demo`: progress while it runs, tables at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress import Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from asynchicache.cli.output import CommandResult, Output
from asynchicache.errors import ConfigError
from asynchicache.reports import add_figures
from asynchicache_lab.bench.demo.modes import MODES
from asynchicache_lab.bench.demo.options import DemoOptions
from asynchicache_lab.bench.demo.results import CrowdResult, DemoResult, ModeResult, Sample, ServedPrompt


def run(options: DemoOptions, output: Output) -> CommandResult:
    """Run the demo.

    Raises:
        ConfigError: an optional dependency is missing; says how to get it.
    """
    try:
        from transformers.utils.logging import set_verbosity_error

        from asynchicache_lab.bench.demo.run import run_demo
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs {error.name}: pip install 'asynchicache[demo]'") from error
    set_verbosity_error()  # that fused kernels are missing on a CPU is no news here
    logging.getLogger("asynchicache.storage").setLevel(logging.ERROR)  # the second act lets storage fail
    with output.progress(TextColumn("{task.fields[note]}")) as progress:
        result = asyncio.run(run_demo(options, LiveWatcher(progress, options)))
    return CommandResult(result.as_json(), present(result), not result.violations)


class LiveWatcher:
    """One bar a mode, with what its last round came to."""

    def __init__(self, progress: Progress, options: DemoOptions) -> None:
        self._progress = progress
        rounds = options.num_rounds
        self._bars: Mapping[str, TaskID] = {
            mode.name: progress.add_task(mode.name, total=rounds, note="") for mode in MODES
        }

        if options.num_visitors:
            self._crowd = progress.add_task(f"{options.num_visitors} at once", total=None, note="")

    def crowd_seen(self, sample: Sample) -> None:
        served = sum(sample.by_tier.values()) / sample.prompt_tokens if sample.prompt_tokens else 0.0
        ttft = "" if sample.ttft_ms is None else f", first token {sample.ttft_ms:.0f} ms"
        flight = f"{sample.running} running, {sample.waiting} waiting"
        note = f"{flight}, hit rate {served:4.0%}{ttft}, loop gap {sample.gap_ms:.0f} ms"
        self._progress.update(self._crowd, note=note)

    def round_served(self, mode: str, served: Sequence[ServedPrompt]) -> None:
        hit_rate = sum(one.hit_tokens for one in served) / sum(one.prompt_tokens for one in served)
        note = f"hit rate {hit_rate:4.0%}, first token {fmean(one.ttft_ms for one in served):6.1f} ms"
        self._progress.update(self._bars[mode], advance=1, note=note)


def present(result: DemoResult) -> RenderableType:
    """A table for each mode, one that compares them, and what was violated."""
    tables = Columns([_rounds_table(name, mode) for name, mode in result.modes.items()])
    problems = [f"[red]violated:[/red] {escape(violation)}" for violation in result.violations]
    crowd = [] if result.crowd is None else [Text(_crowd_words(result.crowd))]
    return Group(tables, _comparison(result), *crowd, *problems, Text(f"report: {result.report}"))


def _crowd_words(crowd: CrowdResult) -> str:
    if crowd.problems:
        return f"{crowd.clients} clients at once: {len(crowd.problems)} problems"
    gap = max((sample.gap_ms for sample in crowd.samples), default=0.0)
    return (
        f"{crowd.clients} clients at once, storage failing for a while, a restart: {crowd.answers} answers, "
        f"{crowd.hung_up} hung up, nobody got an error; hit rate after the restart "
        f"{crowd.warm_hit_rate:.0%}, longest gap of the event loop {gap:.0f} ms"
    )


def _rounds_table(name: str, mode: ModeResult) -> Table:
    table = Table(title=name, box=SIMPLE)
    add_figures(table, "", "hits", "TTFT, ms")
    for number, round_ in enumerate(mode.rounds):
        table.add_row(str(number), f"{round_.hit_rate:.1%}", f"{round_.ttft_ms:.1f}")
    return table


def _comparison(result: DemoResult) -> Table:
    table = Table(title=f"{result.model}\n{result.workload}", box=SIMPLE)
    table.add_column("mode")
    add_figures(table, "hits", "p50,\nms", "p90,\nms", "device", "host", "storage", "equal")
    for name, mode in result.modes.items():
        tiers = [f"{tokens:,}" for tokens in mode.tokens_by_tier.values()]
        times = f"{mode.ttft_p50:.1f}", f"{mode.ttft_p90:.1f}"
        equal = "yes" if mode.tokens_equal else "[red]no[/red]"
        table.add_row(name, f"{mode.hit_rate:.2%}", *times, *tiers, equal)
    table.add_row("ceiling", f"{float(result.ceiling):.2%}")
    return table
