"""`make house`: what it counts, and that one class name stands for one thing."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import forking
from house.sources import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "house.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no scripts")


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house_tool", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(**sources: str) -> dict[str, ast.Module]:
    return {f"asynchicache.{name}": ast.parse(source) for name, source in sources.items()}


def test_one_class_name_is_one_thing(house: ModuleType) -> None:
    trees = {name: parse(path.read_text("utf-8")) for name, path in house.modules_of(ROOT).items()}

    assert house.shared_names(trees) == {}


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings(house: ModuleType) -> None:
    code = 'x = [\n    1,\n]  # three lines\ntext = """a\nb"""\n'
    source = f'"""Module."""\n\n# a comment\n{code}"""About the text."""\n'

    assert house.code_lines(source) == 5


def test_circles_count_type_checking_but_no_imports_in_functions(house: ModuleType) -> None:
    modules = parsed(
        a="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from asynchicache.b import B",
        b="import asynchicache.a",
        c="def late():\n    import asynchicache.d",
        d="import asynchicache.c",
    )

    assert house.circles_of(house.imports_of(modules)) == [["asynchicache.a", "asynchicache.b"]]


def test_a_module_is_imported_through_its_package(house: ModuleType) -> None:
    inner = {"room.a": "from asynchicache.room import b", "room.b": ""}
    modules = parsed(room="from asynchicache.room.a import x", **inner)

    assert house.circles_of(house.imports_of(modules)) == [["asynchicache.room", "asynchicache.room.a"]]


def test_a_leading_underscore_makes_no_other_name(house: ModuleType) -> None:
    modules = parsed(
        a="class Batch: ...", b="class _Batch: ...", c="def make():\n    class Own: ...", d="class Own: ..."
    )

    assert house.shared_names(modules) == {"Batch": ["asynchicache.a", "asynchicache.b"]}


def test_an_alias_of_a_type_is_a_name_too(house: ModuleType) -> None:
    modules = parsed(
        a="class Move: ...",
        b="_Move = Callable[[int], None]",
        c='Page: TypeAlias = "array[int]"',
        d="Page = tuple[str, int]\nPAGE = pages[0]",
        e="PAGE = pages[1]\nfirst = pages[0]",
        f="first = pages[1]",
    )

    assert house.shared_names(modules) == {
        "Move": ["asynchicache.a", "asynchicache.b"],
        "Page": ["asynchicache.c", "asynchicache.d"],
    }


def test_arrows_stay_inside_the_package(house: ModuleType) -> None:
    modules = parsed(
        **{
            "tree.a": "import asynchicache.tree.b, asynchicache.other",
            "tree.b": "",
            "tree": "import asynchicache.tree.a",
            "other": "import asynchicache.tree.a",
        }
    )

    assert house.arrows_in("tree", house.imports_of(modules)) == (2, 1)


def test_a_checkout_is_counted(house: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, source in {"__init__": "", "a": "import asynchicache.b\nx = 1\n", "b": "# nothing\n"}.items():
        path = tmp_path / "src" / "asynchicache" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    house.main(["--root", str(tmp_path), "--no-trace", "--json"])

    figures = json.loads(capsys.readouterr().out)
    assert (figures["files"], figures["lines"], figures["lines of code"]) == (3, 3, 2)


def test_four_pages_are_followed_to_a_file_and_back(
    house: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.subprocess, "run", lambda words, *, env, **_: forking.run(words[1:], env=env))

    figures = house.trace(ROOT, details=True)

    assert any(name.startswith("backends/file/") for name in figures["functions"])
    assert any(name.startswith("controller/") for name in figures["frames"])
    assert any(name.startswith("asynchicache.transfer.") for name in figures["types"])
