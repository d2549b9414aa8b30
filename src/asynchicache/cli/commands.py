"""The commands as data: words, a line of help, and where flags and code are found when one is run.

Other packages bring commands by entry points of the group `asynchicache.commands`: each names a tuple.
"""

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


_CLI = "asynchicache.cli"

COMMANDS: tuple[Command, ...] = (
    Command(
        ("verify",),
        "read every page of a file store, and report the damaged ones",
        f"{_CLI}.options:VerifyOptions",
        f"{_CLI}.stores:verify",
    ),
    Command(
        ("ls",),
        "what a store has: pools, models, weights, pages, and until when they are in use",
        f"{_CLI}.options:ListOptions",
        f"{_CLI}.stores:list_pools",
    ),
    Command(
        ("gc",),
        "remove the pools of a store that no cache has used for a while",
        f"{_CLI}.options:GcOptions",
        f"{_CLI}.stores:collect",
    ),
    Command(
        ("clear",),
        "remove some pools of a store, and nothing else",
        f"{_CLI}.options:ClearOptions",
        f"{_CLI}.stores:clear",
    ),
    Command(
        ("replay",),
        "a trace through the cache's decisions: what would it hit with these pools, sizes and policies",
        "asynchicache.replay.options:ReplayOptions",
        f"{_CLI}.replay:run",
        "asynchicache.replay.run",
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
        ("doctor",),
        "what this machine has for the cache to use",
        f"{_CLI}.options:DoctorOptions",
        f"{_CLI}.doctor:run",
    ),
)

LABORATORY = frozenset({"bench", "chaos", "demo", "soak"})
"""First words of commands that come with a checkout, not with the wheel."""


def find_commands(first_word: str = "") -> tuple[Command, ...]:
    """The library's own commands, and unless `first_word` is one of theirs, those of other packages."""
    if any(command.path[0] == first_word for command in COMMANDS):
        return COMMANDS  # looking for packages takes longer than all else before a command runs
    from importlib.metadata import entry_points

    found = sorted(entry_points(group="asynchicache.commands"))
    return COMMANDS + tuple(command for point in found for command in point.load())
