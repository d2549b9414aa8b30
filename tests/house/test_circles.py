"""No two modules import each other, directly or through others.

import-linter keeps the layers between packages, but leaves out what is imported for annotations only, and
does not look within a package, nor at `from package import module`, which needs the package's `__init__`.
Here every import counts, wherever it stands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import asynchicache
from house.sources import nodes, parse, shipped

PACKAGE = Path(asynchicache.__path__[0])

# Each is in a circle that is being removed. The list may only become shorter.
KNOWN: set[str] = set()


def sources() -> dict[str, str]:
    """The source of every shipped module, by name; a package's name stands for its `__init__`."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): source
        for path, source in shipped(PACKAGE).items()
    }


def imports(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """By module, which others of `modules` it imports; also for annotations only, and within functions."""
    return {name: set(_imported(parse(source))) & (set(modules) - {name}) for name, source in modules.items()}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of modules of which each reaches each other: the strongly connected components of several."""
    behind = {name: _reachable(graph, name) for name in graph}
    found: list[set[str]] = []
    for name in sorted(graph):
        tied = {other for other in behind[name] if name in behind[other]}
        if len(tied) > 1 and tied not in found:
            found.append(tied)
    return found


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found, open_ = set(), [start]
    while open_:
        new = graph[open_.pop()] - found
        found |= new
        open_ += new
    return found


def test_no_modules_import_each_other() -> None:
    found = circles(imports(sources()))

    assert [circle for circle in found if not circle & KNOWN] == []
    assert KNOWN - set().union(*found) == set()  # mended: take it off the list


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"a": "import b", "b": "import a"}, [{"a", "b"}]),
        ({"a": "from b import x", "b": "def f():\n    import c", "c": "from a import y"}, [{"a", "b", "c"}]),
        ({"a": "if TYPE_CHECKING:\n    from b import B", "b": "from a import A"}, [{"a", "b"}]),
        ({"p": "from p.m import f", "p.m": "from p import n", "p.n": ""}, [{"p", "p.m"}]),
        ({"p": "", "p.m": "from p import n", "p.n": "from p.m import f"}, [{"p.m", "p.n"}]),
        ({"p": "from p.m import f", "p.m": "import p.n as n", "p.n": ""}, []),
        ({"a": "import b, c", "b": "import c", "c": "import json"}, []),
    ],
)
def test_circles_are_found(modules: dict[str, str], expected: list[set[str]]) -> None:
    assert circles(imports(modules)) == expected


def test_the_walk_reaches_every_room() -> None:
    names = set(sources())

    assert {"asynchicache", "asynchicache.transfer.record", "asynchicache.backends.file.engine"} <= names
    assert len(imports(sources())["asynchicache.transfer.local"]) > 5
