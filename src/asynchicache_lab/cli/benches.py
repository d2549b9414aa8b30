"""Runs the benches that need no more of the command line than a bar, and shows what they report."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from asynchicache.cli.output import CommandResult, Output, result_of
from asynchicache.errors import ConfigError

if TYPE_CHECKING:
    from asynchicache_lab.bench import options as flags
    from asynchicache_lab.bench.ranks.options import RanksOptions
    from asynchicache_lab.bench.serve.options import HandoverOptions, ServeBenchOptions
    from asynchicache_lab.bench.soak.options import SoakOptions


class Bench(NamedTuple):
    """The function of a command.

    Attributes:
        run: `module:function` below `bench`, of the options and of what moves a bar; returns a report or
            awaits it.
        doing: what the bar counts.
    """

    run: str
    doing: str

    @property
    def work(self) -> Callable[..., Any]:
        return cast("Callable[..., Any]", resolve_name(f"asynchicache_lab.bench.{self.run}"))

    def __call__(self, options: Any, output: Output) -> CommandResult:
        with output.bar(self.doing) as advance:
            report = self.work(options, advance)
            return result_of(asyncio.run(report) if inspect.iscoroutine(report) else report)


multiturn = Bench("multiturn:run_multiturn", "turns")
shared_prefix = Bench("shared_prefix:run_shared_prefix", "prompts")
bridge = Bench("bridge:run_bridge", "rounds")
host = Bench("host:run_host", "rounds")
transfer = Bench("transfer:run_transfer", "pools and layouts")
overlap = Bench("overlap:run_overlap", "shares")
storage = Bench("storage.run:run_storage", "rounds")
stores = Bench("stores.run:run_stores", "requests")
_processes = Bench("ranks.run:run_ranks", "requests")
_simulated = Bench("ranks.simulation:simulate", "requests")
_serve = Bench("serve.run:run_serve", "rounds")
_handover = Bench("serve.handover:run_handover", "prompts")


def ranks(options: RanksOptions, output: Output) -> CommandResult:
    return _simulated(options, output) if options.simulated else _processes(options, output)


def tree(options: flags.TreeOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench import tree as bench

    with output.console.status(f"tree, {options.scenario}"):
        result = bench.run_tree(
            options.scenario, options.page_size, options.fill, options.window, options.seed
        )
    return CommandResult(result, bench.present(result))


def stall(options: flags.StallOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.stall import run_stall

    with output.console.status("moving pages"):
        report = asyncio.run(run_stall(options))
    return result_of(report)


def soak(options: SoakOptions, output: Output) -> CommandResult:
    from asynchicache_lab.bench.soak.run import run_soak

    with output.bar("seconds") as advance, asyncio.Runner(loop_factory=_loop_factory(options.loop)) as runner:
        report = runner.run(run_soak(options, advance))
    return result_of(report)


def serve(options: ServeBenchOptions, output: Output) -> CommandResult:
    """Conversations with servers of their own processes; `ConfigError` as of `handover`."""
    return _of_servers(_serve, options, output)


def handover(options: HandoverOptions, output: Output) -> CommandResult:
    """Prompts that one server computes and another one answers.

    Raises:
        ConfigError: a package is missing, or a server does not start.
    """
    return _of_servers(_handover, options, output)


def _of_servers(bench: Bench, options: object, output: Output) -> CommandResult:
    try:
        from transformers.utils.logging import set_verbosity_error

        import_module("asynchicache_lab.bench.serve.run")
    except ModuleNotFoundError as error:
        raise ConfigError(f"it needs {error.name}: pip install 'asynchicache[serve]'") from error
    set_verbosity_error()
    return bench(options, output)


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
