"""The commands as data: words, a line of help, and where flags and code are found when one is run."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from asynchicache.options import CommandOptions

if TYPE_CHECKING:
    from asynchicache.cli.output import CommandResult, Output

    Start: TypeAlias = Callable[[Any, Output], CommandResult]
    """Runs a command with its options."""


class Command(NamedTuple):
    """One command. Its modules are imported when it is asked for, so that no other command waits for them.

    Attributes:
        path: its words on the command line.
        help: one line.
        flags: `module:class` of its options.
        code: `module:function` that runs it with its options and an `Output`.
        needs: a module that the function imports when it is called; importing it first lets Ctrl-C end the
            command quietly meanwhile. Empty where a missing package must become a message.
    """

    path: tuple[str, ...]
    help: str
    flags: str
    code: str
    needs: str = ""

    @property
    def options(self) -> type[CommandOptions]:
        """The class of its options, imported now."""
        return cast("type[CommandOptions]", resolve_name(self.flags))

    def load(self) -> Start:
        """Import all that it needs; the function that runs it."""
        if self.needs:
            resolve_name(self.needs)
        return cast("Start", resolve_name(self.code))


_BENCH, _CLI = "asynchicache.bench", "asynchicache.cli"

COMMANDS: tuple[Command, ...] = (
    Command(
        ("demo",),
        "serve a small hybrid model four ways, and write a report that compares them",
        f"{_BENCH}.demo.options:DemoOptions",
        f"{_CLI}.demo:run",
    ),
    Command(
        ("bench", "multiturn"),
        "conversations of many rounds: how much of each prompt is served from the cache",
        f"{_BENCH}.options:MultiturnOptions",
        f"{_CLI}.benches:multiturn",
        f"{_BENCH}.multiturn",
    ),
    Command(
        ("bench", "shared-prefix"),
        "groups of prompts with a common beginning: does only the first one pay for it",
        f"{_BENCH}.options:SharedPrefixOptions",
        f"{_CLI}.benches:shared_prefix",
        f"{_BENCH}.shared_prefix",
    ),
    Command(
        ("bench", "tree"),
        "turns of a chat through the tree alone: how fast it matches and inserts",
        f"{_BENCH}.options:TreeOptions",
        f"{_CLI}.benches:tree",
        f"{_BENCH}.tree",
    ),
    Command(
        ("bench", "bridge"),
        "what it costs the event loop to submit copies, and to be told of their end",
        f"{_BENCH}.options:BridgeOptions",
        f"{_CLI}.benches:bridge",
        f"{_BENCH}.bridge",
    ),
    Command(
        ("bench", "stall"),
        "how long the event loop stands still while pages move between the tiers",
        f"{_BENCH}.options:StallOptions",
        f"{_CLI}.benches:stall",
        f"{_BENCH}.stall",
    ),
    Command(
        ("bench", "transfer"),
        "pages between device and host, beside one plain copy of as many bytes",
        f"{_BENCH}.options:TransferOptions",
        f"{_CLI}.benches:transfer",
        f"{_BENCH}.transfer",
    ),
    Command(
        ("bench", "overlap"),
        "a forward that starts on each layer as soon as it is loaded, and one that waits for all",
        f"{_BENCH}.options:OverlapOptions",
        f"{_CLI}.benches:overlap",
        f"{_BENCH}.overlap",
    ),
    Command(
        ("bench", "ranks"),
        "a leader and followers as processes: what a group adds to a step, beside a collective",
        f"{_BENCH}.ranks.options:RanksOptions",
        f"{_CLI}.benches:ranks",
        f"{_BENCH}.ranks.run",
    ),
    Command(
        ("bench", "storage"),
        "pages to a storage engine and back, beside the plainest client of the same medium",
        f"{_BENCH}.storage.options:StorageBenchOptions",
        f"{_CLI}.benches:storage",
        f"{_BENCH}.storage.run",
    ),
    Command(
        ("soak",),
        "run conversations against a real storage backend that fails; check for errors, stalls and leaks",
        f"{_BENCH}.soak.options:SoakOptions",
        f"{_CLI}.benches:soak",
        f"{_BENCH}.soak.run",
    ),
    Command(
        ("bench", "serve"),
        "conversations with `serve`, beside a server without hits, and with its storage killed",
        f"{_BENCH}.serve.options:ServeBenchOptions",
        f"{_CLI}.serve:bench",
    ),
    Command(
        ("verify",),
        "read every page of a file store, and report the damaged ones",
        f"{_CLI}.options:VerifyOptions",
        f"{_CLI}.stores:verify",
    ),
    Command(
        ("clear",),
        "remove some pools of a file store, and nothing else",
        f"{_CLI}.options:ClearOptions",
        f"{_CLI}.stores:clear",
    ),
    Command(
        ("replay",),
        "a trace through the cache's decisions: what would it hit with these pools, sizes and policies",
        f"{_BENCH}.replay.options:ReplayOptions",
        f"{_CLI}.benches:replay",
        f"{_BENCH}.replay.run",
    ),
    Command(
        ("serve",),
        "an OpenAI-shaped server: a transformers model behind the cache",
        f"{_CLI}.options:ServeOptions",
        f"{_CLI}.serve:run",
    ),
    Command(
        ("top",),
        "a live view of a server's cache: tiers, hit rates, reasons of misses, storage, prefixes",
        f"{_CLI}.options:TopOptions",
        f"{_CLI}.top:run",
    ),
    Command(
        ("chaos",),
        "search for wrong bytes, hangs and leaks: random traffic, faults and orders of events, by seed",
        f"{_CLI}.options:ChaosOptions",
        f"{_CLI}.chaos:run",
    ),
    Command(
        ("doctor",),
        "what this machine has for the cache to use",
        f"{_CLI}.options:DoctorOptions",
        f"{_CLI}.doctor:run",
    ),
)
