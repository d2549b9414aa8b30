"""The command line: `asynchicache demo | bench | replay | chaos | verify | clear | serve | doctor`.

Exit codes: 0 it ran and what it checked held; 1 a violation, or it could not run; 2 bad arguments;
130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from asynchicache.bench.options import Setting, settings
from asynchicache.cli.commands import COMMANDS, AnyCommand
from asynchicache.cli.output import Output, json_target
from asynchicache.errors import CacheError, UsageError

OK, VIOLATION, BAD_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: words after the program's name; by default those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: with 2 on bad arguments, with 0 after help or version.
    """
    values = build_parser().parse_args(arguments)
    parser: argparse.ArgumentParser = values.parser
    try:
        return _execute(values)
    except KeyboardInterrupt:
        return INTERRUPTED
    except UsageError as error:
        parser.exit(BAD_ARGUMENTS, f"{parser.prog}: error: {error}\n")  # without a page of usage before it
    except (CacheError, OSError) as error:
        print(f"asynchicache: {error}", file=sys.stderr)
        return VIOLATION


def _execute(values: argparse.Namespace) -> int:
    command: AnyCommand = values.command
    names = {setting.name for setting in settings(command.options)} | {"seed"}
    output = Output(values.json)
    given = {name: value for name in names if (value := getattr(values, name)) is not None}
    outcome = command.execute(given, output)
    output.show(outcome.view)
    output.write_json(outcome.result)
    return OK if outcome.ok else VIOLATION


# The parser, made from the commands.


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asynchicache", description="Hierarchical cache for hybrid models.")
    parser.add_argument("--version", action="version", version=version("asynchicache"))
    top = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = top.add_parser("bench", help="measure one part of the cache, and check its bytes")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    for command in COMMANDS:
        group = benches if command.path[0] == "bench" else top
        _add_command(group.add_parser(command.path[-1], help=command.help), command)
    return parser


def _add_command(parser: argparse.ArgumentParser, command: AnyCommand) -> None:
    parser.description = command.help[0].upper() + command.help[1:] + "."
    parser.set_defaults(command=command, parser=parser)
    for setting in settings(command.options):
        _add_flag(parser, setting)
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of everything random (default: a fixed one)"
    )
    parser.add_argument(
        "--json", type=json_target, metavar="FILE", help="write the result as JSON; - for standard output"
    )


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    kind = type(setting.default)
    shown = ("yes" if setting.default else "no") if kind is bool else setting.default
    text = setting.help if shown == "" else f"{setting.help} (default: {shown})"
    if setting.positional:
        parser.add_argument(setting.name, metavar=setting.flag, help=setting.help)
    elif isinstance(setting.default, bool):
        parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=text)
    elif isinstance(setting.default, tuple):
        again = f"{setting.help}; may be given again"
        parser.add_argument(setting.flag, action="append", metavar="TEXT", help=again)
    elif setting.choices:
        parser.add_argument(setting.flag, choices=setting.choices, help=text)
    else:
        parser.add_argument(setting.flag, type=kind, metavar="TEXT" if kind is str else "N", help=text)


if __name__ == "__main__":
    sys.exit(main())
