"""The page of the command line has every command, and names flags that there are; `--help` lists the rest."""

from __future__ import annotations

import re
from pathlib import Path

from asynchicache.cli.commands import find_commands
from asynchicache.options import flags_of

COMMANDS = find_commands()
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
SECTION = re.compile(r"^## `([^`]+)`\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(bench [\w-]+)` \| [^|]+ \| [^|]*`\w+[^|]*\|$", re.MULTILINE)
SHARED = {"--help", "--version", "--json", "--seed"}


def test_every_command_has_its_place_and_says_what_its_json_holds() -> None:
    sections = dict(SECTION.findall(PAGE.read_text("utf-8")))
    benches = ROW.findall(sections.pop("bench"))

    assert sections.keys() | set(benches) == {" ".join(command.path) for command in COMMANDS}
    assert [name for name, text in sections.items() if "JSON" not in text] == []


def test_flags_on_the_page_are_those_of_a_command() -> None:
    known = {one.flag for command in COMMANDS for one in flags_of(command.options)}
    told = set(re.findall(r"`(--[\w-]+)", PAGE.read_text("utf-8")))

    assert told > {"--json", "--seed"}
    assert {name.replace("--no-", "--") for name in told} - SHARED <= known
