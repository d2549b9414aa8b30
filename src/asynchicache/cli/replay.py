"""Runs `replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asynchicache.cli.output import CommandResult, Output, result_of

if TYPE_CHECKING:
    from asynchicache.replay.options import ReplayOptions


def run(options: ReplayOptions, output: Output) -> CommandResult:
    from asynchicache.replay.run import run_replay

    if options.compare:
        from asynchicache.replay.compare import run_comparison

        with output.bar("requests") as advance:
            return result_of(run_comparison(options, advance))
    with output.bar("requests") as advance:
        report = run_replay(options, advance)
    return result_of(report)
