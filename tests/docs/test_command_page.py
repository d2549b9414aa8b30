"""The page of the command line says of each command what the command itself says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asynchicache.cli.commands import COMMANDS, Command
from asynchicache.options import Option, flags_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
SECTION = re.compile(r"^## `([^`]+)`\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (`[^|]*`) \|([^|]*)\|", re.MULTILINE)


def rows(section: str) -> dict[str, str]:
    """What the tables of a section call the defaults of flags and arguments."""
    found = ((name, cell.strip(" `")) for names, cell in ROW.findall(section) for name in names.split("`"))
    return {name.split(" ")[0]: cell for name, cell in found if name.strip(", ")}


def says(cell: str, setting: Option) -> bool:
    """Whether a cell names the default; where nothing is the default it may say so in words."""
    if isinstance(setting.default, bool):
        return cell == ("on" if setting.default else "off")
    if isinstance(setting.default, float | int) and cell:
        return float(cell) == setting.default
    return cell == setting.default or not setting.default


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.path))
def test_flags_and_defaults_are_in_the_section_of_their_command(command: Command) -> None:
    shown = rows(dict(SECTION.findall(PAGE.read_text("utf-8")))[" ".join(command.path)])
    known = {one.flag: one for one in flags_of(command.options)}
    assert [name for name in known if name not in shown] == []
    assert [name for name, one in known.items() if not says(shown[name], one)] == []
    assert [name for name in shown.keys() - known if name[:2] == "--" and name[:5] != "--no-"] == []
