"""The parser, made from the commands; each command's flags are added when it is the one that is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asynchicache.cli.commands import LABORATORY, Command, find_commands
from asynchicache.cli.interrupts import raising_interrupts
from asynchicache.errors import CacheError, UsageError
from asynchicache.options import Option, flags_of

OK, VIOLATION, BAD_ARGUMENTS = 0, 1, 2
STANDARD_OUTPUT = "-"
_WHERE_THE_LABORATORY_IS = "comes with a checkout, not with the wheel: `make setup` in its folder installs it"


def run(arguments: Sequence[str] | None) -> int:
    """Parse the words and run the command; the exit code.

    Raises:
        SystemExit: with 2 on bad arguments, with 0 after help or version.
    """
    words = sys.argv[1:] if arguments is None else arguments
    first = words[0] if words else ""
    commands = find_commands(first)
    if first in LABORATORY and all(command.path[0] != first for command in commands):
        print(f"asynchicache: {first!r} {_WHERE_THE_LABORATORY_IS}", file=sys.stderr)
        return BAD_ARGUMENTS
    values = build_parser(commands).parse_args(words)
    parser: CommandParser = values.parser
    try:
        return _execute(values)
    except UsageError as error:
        parser.exit(BAD_ARGUMENTS, f"{parser.prog}: error: {error}\n")  # without a page of usage before it
    except (CacheError, OSError) as error:
        print(f"asynchicache: {error}", file=sys.stderr)
        return VIOLATION


def _execute(values: argparse.Namespace) -> int:
    from asynchicache.cli.output import Output

    command: Command = values.command
    names = {option.name for option in flags_of(command.options)} | {"seed"}
    given = {name: value for name in names if (value := getattr(values, name)) is not None}
    options = command.options(**given)
    start = command.load()  # imports what the command needs, before any of its work
    output = Output(values.json)
    with raising_interrupts():
        outcome = start(options, output)
        output.show(outcome.view)
        output.write_json(outcome.result)
    return OK if outcome.ok else VIOLATION


class CommandParser(argparse.ArgumentParser):
    """Parser of one command. Its flags are added at its first use, because they need an import."""

    command: Command | None = None
    _complete = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self._complete:
            self._complete = True
            _add_flags(self)
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    """Print the version. Reading the package's metadata takes longer than all else here, so it waits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(version("asynchicache"))
        parser.exit()


def build_parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asynchicache", description="Hierarchical cache for hybrid models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    top = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    benches = None
    for command in commands:
        group = top
        if command.path[0] == "bench":
            if benches is None:
                bench = top.add_parser("bench", help="measure one part of the cache, and check its bytes")
                benches = bench.add_subparsers(required=True, metavar="BENCH")
            group = benches
        group.add_parser(command.path[-1], help=command.help).command = command
    return parser


def _add_flags(parser: CommandParser) -> None:
    """Add the flags of the parser's command, and those that every command has."""
    command = parser.command
    if command is None:
        return
    parser.description = command.help[0].upper() + command.help[1:] + "."
    parser.set_defaults(parser=parser, command=command)
    for option in flags_of(command.options):
        _add_flag(parser, option)
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of everything random (default: a fixed one)"
    )
    parser.add_argument(
        "--json", type=_json_target, metavar="FILE", help="write the result as JSON; - for standard output"
    )


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    kind = type(option.default)
    shown = ("yes" if option.default else "no") if kind is bool else option.default
    text = option.help if shown == "" else f"{option.help} (default: {shown})"
    if option.positional:
        parser.add_argument(option.name, metavar=option.flag, help=option.help)
    elif isinstance(option.default, bool):
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
    elif isinstance(option.default, tuple):
        again = f"{option.help}; may be given again"
        parser.add_argument(option.flag, action="append", metavar="TEXT", help=again)
    elif option.choices:
        parser.add_argument(option.flag, choices=option.choices, help=text)
    else:
        parser.add_argument(option.flag, type=kind, metavar="TEXT" if kind is str else "N", help=text)


def _json_target(text: str) -> str:
    """The value of `--json`, checked before any work is done.

    Raises:
        ArgumentTypeError: no file can be written there.
    """
    path = Path(text)
    if text != STANDARD_OUTPUT and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists, or -")
    return text
