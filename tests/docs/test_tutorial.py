"""The tutorial can be pasted, block by block, into the Python that it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forking

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"

_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPTS = re.compile(r"^(?:(?:>>>|\.\.\.) )+", re.MULTILINE)


def paste(blocks: list[str], folder: Path) -> tuple[str, str]:
    """What Python prints, and complains about, when blocks are pasted, with Enter after each.

    Standard input is read line by line, as from a terminal without bracketed paste: an empty line ends a
    compound statement, and a statement that follows one without an empty line is an error.
    """
    done = forking.run(["-m", "asyncio"], cwd=folder, typed="".join(block + "\n" for block in blocks))
    return _PROMPTS.sub("", done.stdout), done.stderr


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    blocks = _BLOCK.findall(PAGE.read_text("utf-8"))
    return {kind: [text for known, text in blocks if known == kind] for kind in ("python", "text")}


def test_the_tutorial_pasted_prints_what_it_shows(found: dict[str, list[str]], tmp_path: Path) -> None:
    printed, complaints = paste(found["python"], tmp_path)
    assert "Traceback" not in complaints, complaints
    assert "Error" not in complaints, complaints
    assert printed.strip() == "".join(found["text"]).strip()


def test_the_commands_before_it_start_that_python() -> None:
    assert "$ .venv/bin/python -m asyncio\n" in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "block",
    ["def f():\n    a = 1\n\n    return a\n", "for a in (1, 2):\n    b = a\nprint(b)\n"],
    ids=["an empty line within", "none behind"],
)
def test_what_cannot_be_pasted_is_found(block: str, tmp_path: Path) -> None:
    assert "Error" in paste([block], tmp_path)[1]
