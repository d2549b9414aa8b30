"""The reference names only what is there, with arguments that are taken, and counts what it lists."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest

from asynchicache.types import MissReason

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
_SECTION = re.compile(r"^## [^\n`]*`(asynchicache[\w.]*)`\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"^\| name \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_NAMED = re.compile(r"`(?:await )?(?:ticket(?=\.))?([\w.]+)(?:\(([^`]*?)\))?[.`]")


class Named(NamedTuple):
    """What a row names: `module:Class.attribute`, and the arguments where they are shown."""

    path: str
    arguments: str

    def __str__(self) -> str:
        return self.path

    def found(self) -> Any:
        """The thing itself; None for an attribute that only instances have.

        Raises:
            AttributeError: there is no such thing.
        """
        owner, _, name = self.path.replace(":", ".").rpartition(".")
        home = resolve_name(owner)
        if inspect.isclass(home) and f"self.{name} = " in inspect.getsource(home):
            return None
        return getattr(home, name)


def named() -> Iterator[Named]:
    """What the tables of names have; a name that begins with a dot is of the class before it."""
    for module, section in _SECTION.findall(API):
        owner = ""
        for row in (row for table in _TABLE.findall(section) for row in table.splitlines()):
            for path, arguments in _NAMED.findall(row.split(" | ")[0]):
                if path[0] == ".":
                    yield Named(owner + path, arguments)
                elif path.split(".")[0] == owner.rpartition(":")[2]:  # `HybridCache.open`
                    yield Named(owner.rpartition(":")[0] + ":" + path, arguments)
                elif path != "ticket":
                    base = "" if path.startswith("asynchicache.") else f"{module.removesuffix('.errors')}."
                    base += "errors." if module.endswith("errors") and "errors." not in path else ""
                    owner = ":".join(f"{base}{path}".rsplit(".", 1))
                    yield Named(owner, arguments)


@pytest.mark.parametrize("one", sorted(set(named())), ids=str)
def test_what_the_reference_names_is_there(one: Named) -> None:
    found = one.found()
    shown = {part.split("=")[0].strip() for part in one.arguments.split(",")} - {"", "*", "n"}
    assert shown <= set(inspect.signature(found).parameters) if shown else True


@pytest.mark.parametrize(
    "one", [Named("asynchicache.cache:HybridCache.nothing", ""), Named("asynchicache.cache:Nothing", "")]
)
def test_what_is_not_there_is_seen(one: Named) -> None:
    with pytest.raises(AttributeError):
        one.found()


def is_there(path: str) -> bool:
    try:
        return bool(resolve_name(path))
    except (AttributeError, ImportError):
        return False


def test_classes_for_authors_are_in_the_modules_of_their_row() -> None:
    rows = re.findall(
        r"^\| (`asynchicache[^|]*) \| (.*) \|$", API.partition("## For authors")[2], re.MULTILINE
    )
    for cell, words in rows:
        modules = re.sub("`[.]", "`asynchicache.", cell).replace("`", "").split(", ")
        for name in re.findall(r"`((?:[a-z_]+\.)*[A-Z]\w+)", words):
            assert any(is_there(f"{module}.{name}") for module in modules), name


def test_every_reason_of_a_miss_is_in_the_reference() -> None:
    rows = API.partition("| `MissReason` | |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`([A-Z_]+)`", rows)) == set(MissReason.__members__)


def test_pages_count_the_model_classes_of_the_table() -> None:
    count = len(re.findall(r"^\| `\w+ForCausalLM` \|", API, re.MULTILINE))
    for page in ("README.md", "CHANGELOG.md"):
        told = re.findall(r"(\d+) model classes", (ROOT / page).read_text("utf-8").replace("\n", " "))
        assert told == [str(count)]


def test_every_extra_is_on_the_page_of_the_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (ROOT / "docs" / "howto" / "install.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(
        project["optional-dependencies"]
    )
