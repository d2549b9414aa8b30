"""Runs the benches that need no more of the command line than a bar, and shows what they report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from asynchicache.cli.output import CommandResult, Output, result_of
from asynchicache.errors import ConfigError

if TYPE_CHECKING:
    from asynchicache_lab.bench import options as flags
    from asynchicache_lab.bench.ranks.options import RanksOptions
    from asynchicache_lab.bench.serve.options import ServeBenchOptions
    from asynchicache_lab.bench.soak.options import SoakOptions
    from asynchicache_lab.bench.storage.options import StorageBenchOptions


def multiturn(options: flags.MultiturnOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.multiturn import run_multiturn

    with output.bar("turns") as advance:
        report = asyncio.run(run_multiturn(options, advance))
    return result_of(report)


def shared_prefix(options: flags.SharedPrefixOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.shared_prefix import run_shared_prefix

    with output.bar("prompts") as advance:
        report = asyncio.run(run_shared_prefix(options, advance))
    return result_of(report)


def tree(options: flags.TreeOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench import tree as bench

    with output.console.status(f"tree, {options.scenario}"):
        result = bench.run_tree(
            options.scenario, options.page_size, options.fill, options.window, options.seed
        )
    return CommandResult(result, bench.present(result))


def bridge(options: flags.BridgeOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.bridge import run_bridge

    with output.console.status("crossing the bridge"):
        report = asyncio.run(run_bridge(options))
    return result_of(report)


def stall(options: flags.StallOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.stall import run_stall

    with output.console.status("moving pages"):
        report = asyncio.run(run_stall(options))
    return result_of(report)


def transfer(options: flags.TransferOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.transfer import run_transfer

    with output.bar("pools and layouts") as advance:
        report = asyncio.run(run_transfer(options, advance))
    return result_of(report)


def overlap(options: flags.OverlapOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.overlap import run_overlap

    with output.bar("shares") as advance:
        report = asyncio.run(run_overlap(options, advance))
    return result_of(report)


def ranks(options: RanksOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.ranks.run import run_ranks

    if options.simulated:
        from asynchicache_lab.bench.ranks.simulation import simulate

        with output.bar("requests") as advance:
            return result_of(simulate(options, advance))
    with output.bar("requests") as advance:
        report = asyncio.run(run_ranks(options, advance))
    return result_of(report)


def storage(options: StorageBenchOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.storage.run import run_storage

    with output.bar("rounds") as advance:
        report = asyncio.run(run_storage(options, advance))
    return result_of(report)


def soak(options: SoakOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.soak.run import run_soak

    with output.bar("seconds") as advance, asyncio.Runner(loop_factory=_loop_factory(options.loop)) as runner:
        report = runner.run(run_soak(options, advance))
    return result_of(report)


def serve(options: ServeBenchOptions, output: Output) -> CommandResult:
    """Conversations with servers of their own processes.

    Raises:
        ConfigError: a package is missing, or a server does not start.
    """
    try:
        from transformers.utils.logging import set_verbosity_error

        from asynchicache_lab.bench.serve.run import run_serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench serve needs {error.name}: pip install 'asynchicache[serve]'") from error
    set_verbosity_error()
    with output.bar("rounds") as advance:
        report = asyncio.run(run_serve(options, advance))
    return result_of(report)


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """
    Raises:
        ConfigError: uvloop is not installed.
    """
    if name != "uvloop":
        return None
    try:
        import uvloop
    except ImportError as error:
        raise ConfigError("--loop uvloop: pip install 'asynchicache[uvloop]'") from error
    return uvloop.new_event_loop
