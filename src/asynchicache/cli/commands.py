"""The commands as data: words, flags, and what runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from asynchicache.bench import tree, workload
from asynchicache.bench.bridge import BridgeOptions, run_bridge
from asynchicache.bench.demo.options import DemoOptions
from asynchicache.bench.multiturn import MultiturnOptions, run_multiturn
from asynchicache.bench.options import Options, check_minimums, option
from asynchicache.bench.overlap import OverlapOptions, run_overlap
from asynchicache.bench.replay.options import ReplayOptions
from asynchicache.bench.replay.run import run_replay
from asynchicache.bench.serve.options import ServeBenchOptions
from asynchicache.bench.shared_prefix import SharedPrefixOptions, run_shared_prefix
from asynchicache.bench.soak.options import SoakOptions
from asynchicache.bench.soak.run import run_soak
from asynchicache.bench.stall import StallOptions, run_stall
from asynchicache.bench.storage.options import StorageBenchOptions
from asynchicache.bench.storage.run import run_storage
from asynchicache.bench.transfer import TransferOptions, run_transfer
from asynchicache.cli import chaos, demo, doctor, serve, stores
from asynchicache.cli.output import Outcome, Output
from asynchicache.errors import ConfigError

OptionsT = TypeVar("OptionsT", bound=Options)


class AnyCommand(Protocol):
    """A command, whatever its options are."""

    @property
    def path(self) -> tuple[str, ...]:
        """Its words on the command line."""
        ...

    @property
    def help(self) -> str: ...

    @property
    def options(self) -> type[Options]: ...

    def execute(self, values: Mapping[str, object], output: Output) -> Outcome:
        """Run with options made of `values`.

        Raises:
            UsageError: a value is outside its rule.
        """
        ...


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """One command: its words, a line of help, its options, and what runs it."""

    path: tuple[str, ...]
    help: str
    options: type[OptionsT]
    run: Callable[[OptionsT, Output], Outcome]

    def execute(self, values: Mapping[str, object], output: Output) -> Outcome:
        return self.run(self.options(**values), output)


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The flags of `bench tree`."""

    scenario: str = option("chat", "what is played", choices=workload.SCENARIOS)
    page_size: int = option(64, "tokens of a page, up to 512", minimum=1)
    fill: str = option("fit", "whether all that is computed fits, or half of it", choices=tree.FILLS)
    window: int = option(1024, "tokens of the sliding window", minimum=1)
    seed: int | None = None

    def __post_init__(self) -> None:
        check_minimums(self)


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """`doctor` takes no flags of its own."""

    seed: int = 0


def _multiturn(options: MultiturnOptions, output: Output) -> Outcome:
    with output.bar("turns") as advance:
        report = asyncio.run(run_multiturn(options, advance))
    return Outcome(report.as_json(), report.present("multiturn"), report.ok)


def _shared_prefix(options: SharedPrefixOptions, output: Output) -> Outcome:
    with output.bar("prompts") as advance:
        report = asyncio.run(run_shared_prefix(options, advance))
    return Outcome(report.as_json(), report.present("shared prefix"), report.ok)


def _replay(options: ReplayOptions, output: Output) -> Outcome:
    with output.bar("requests") as advance:
        report = run_replay(options, advance)
    return Outcome(report.as_json(), report.present(Path(options.trace).name), report.ok)


def _tree(options: TreeOptions, output: Output) -> Outcome:
    with output.console.status(f"tree, {options.scenario}"):
        result = tree.run_tree(
            options.scenario, options.page_size, options.fill, options.window, options.seed
        )
    return Outcome(result, tree.present(result))


def _bridge(options: BridgeOptions, output: Output) -> Outcome:
    with output.console.status("crossing the bridge"):
        report = asyncio.run(run_bridge(options))
    return Outcome(report.as_json(), report.present())


def _stall(options: StallOptions, output: Output) -> Outcome:
    with output.console.status("moving pages"):
        report = asyncio.run(run_stall(options))
    return Outcome(report.as_json(), report.present())


def _transfer(options: TransferOptions, output: Output) -> Outcome:
    with output.bar("pools and layouts") as advance:
        report = asyncio.run(run_transfer(options, advance))
    return Outcome(report.as_json(), report.present(), report.ok)


def _overlap(options: OverlapOptions, output: Output) -> Outcome:
    with output.bar("shares") as advance:
        report = asyncio.run(run_overlap(options, advance))
    return Outcome(report.as_json(), report.present(), report.ok)


def _storage(options: StorageBenchOptions, output: Output) -> Outcome:
    with output.bar("rounds") as advance:
        report = asyncio.run(run_storage(options, advance))
    return Outcome(report.as_json(), report.present(), report.ok)


def _soak(options: SoakOptions, output: Output) -> Outcome:
    with output.bar("seconds") as advance, asyncio.Runner(loop_factory=_loop_factory(options.loop)) as runner:
        report = runner.run(run_soak(options, advance))
    return Outcome(report.as_json(), report.present(), report.ok)


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


def _doctor(options: DoctorOptions, output: Output) -> Outcome:
    checks = doctor.checks()
    return Outcome({"checks": [check._asdict() for check in checks]}, doctor.present(checks))


COMMANDS: tuple[AnyCommand, ...] = (
    Command[DemoOptions](
        ("demo",),
        "serve a small hybrid model four ways, and write a report that compares them",
        DemoOptions,
        demo.run,
    ),
    Command[MultiturnOptions](
        ("bench", "multiturn"),
        "conversations of many rounds: how much of each prompt is served from the cache",
        MultiturnOptions,
        _multiturn,
    ),
    Command[SharedPrefixOptions](
        ("bench", "shared-prefix"),
        "groups of prompts with a common beginning: does only the first one pay for it",
        SharedPrefixOptions,
        _shared_prefix,
    ),
    Command[TreeOptions](
        ("bench", "tree"),
        "turns of a chat through the tree alone: how fast it matches and inserts",
        TreeOptions,
        _tree,
    ),
    Command[BridgeOptions](
        ("bench", "bridge"),
        "what it costs the event loop to submit copies, and to be told of their end",
        BridgeOptions,
        _bridge,
    ),
    Command[StallOptions](
        ("bench", "stall"),
        "how long the event loop stands still while pages move between the tiers",
        StallOptions,
        _stall,
    ),
    Command[TransferOptions](
        ("bench", "transfer"),
        "pages between device and host, beside one plain copy of as many bytes",
        TransferOptions,
        _transfer,
    ),
    Command[OverlapOptions](
        ("bench", "overlap"),
        "a forward that starts on each layer as soon as it is loaded, and one that waits for all",
        OverlapOptions,
        _overlap,
    ),
    Command[StorageBenchOptions](
        ("bench", "storage"),
        "pages to a storage engine and back, beside the plainest client of the same medium",
        StorageBenchOptions,
        _storage,
    ),
    Command[SoakOptions](
        ("soak",),
        "conversations without end on real storage that fails: does anything break, block or grow",
        SoakOptions,
        _soak,
    ),
    Command[ServeBenchOptions](
        ("bench", "serve"),
        "conversations with `serve`, beside a server without hits, and with its storage killed",
        ServeBenchOptions,
        serve.bench,
    ),
    Command[stores.VerifyOptions](
        ("verify",),
        "read every page of a file store, and say what is damaged",
        stores.VerifyOptions,
        stores.verify,
    ),
    Command[stores.ClearOptions](
        ("clear",),
        "remove some pools of a file store, and nothing else",
        stores.ClearOptions,
        stores.clear,
    ),
    Command[ReplayOptions](
        ("replay",),
        "a trace through the cache's decisions: what would it hit with these pools, sizes and policies",
        ReplayOptions,
        _replay,
    ),
    Command[serve.ServeOptions](
        ("serve",),
        "an OpenAI-shaped server: a transformers model behind the cache",
        serve.ServeOptions,
        serve.run,
    ),
    Command[chaos.ChaosOptions](
        ("chaos",),
        "search for wrong bytes, hangs and leaks: random traffic, faults and orders of events, by seed",
        chaos.ChaosOptions,
        chaos.run,
    ),
    Command[DoctorOptions](
        ("doctor",),
        "what this machine has for the cache to use",
        DoctorOptions,
        _doctor,
    ),
)
