"""Every `asynchicache[extra]` that users are told to install is one that there is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"src": "*.py", "backends": "*.py", "kernels": "*.py", "scripts": "*.py", "docs": "*.*"}
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
EXTRAS = frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def strange(text: str) -> list[str]:
    """Extras that a text names and that there are not; one that is put together where it runs is none."""
    named = re.findall(r"asynchicache\[([^\]]*)\]", text)
    return [extra for names in named for extra in re.split(r",\s*", names) if extra not in EXTRAS]


def texts() -> Iterator[tuple[Path, str]]:
    found = [path for folder, kind in FOLDERS.items() for path in sorted((ROOT / folder).rglob(kind))]
    for path in [*found, *(ROOT / page for page in PAGES)]:
        if path.suffix in {".py", ".md", ".toml", ".txt"} or path.name == "Makefile":
            yield path, path.read_text("utf-8")


def test_every_extra_that_is_named_exists() -> None:
    missing = {str(path.relative_to(ROOT)): bad for path, text in texts() if (bad := strange(text))}

    assert missing == {}


def test_all_kinds_of_places_are_looked_at() -> None:
    places = {path.relative_to(ROOT).parts[0] for path, text in texts() if "asynchicache[" in text}

    assert {"src", "backends", "docs", "CHANGELOG.md", "pyproject.toml"} <= places


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install 'asynchicache[file]'", ["file"]),
        ("asynchicache[redis,tape, otel]", ["tape"]),
        ('f"asynchicache[{name}]"', ["{name}"]),
        ("asynchicache[serve]", []),
    ],
)
def test_the_rule_can_fail(text: str, found: list[str]) -> None:
    assert strange(text) == found
