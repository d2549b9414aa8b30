"""Docstrings name the arguments and attributes that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import asynchicache
from house.sources import nodes, parse, shipped

PACKAGE = Path(asynchicache.__path__[0])
SECTION = re.compile(r"^( *)(Args|Attributes):\n((?:\1 {4,}.*\n|\s*\n)+)", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def named(docstring: str, section: str) -> set[str]:
    """What a section of a docstring has entries for."""
    found: set[str] = set()
    for match in SECTION.finditer(docstring + "\n"):
        if match[2] == section:
            entry = re.compile(rf"^{match[1]} {{4}}([\w*][\w, *]*):", re.M)
            found.update(name.strip(" *") for names in entry.findall(match[3]) for name in names.split(","))
    return found


def arguments(function: Function) -> set[str]:
    spec = function.args
    every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    return {one.arg for one in every if one is not None}


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields, properties and methods of a class, and what its methods assign to `self`."""
    found = {one.name for one in node.body if isinstance(one, Function)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            found.add(one.attr)
        elif isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.arg):
            found.add(one.arg)
    return found


def strangers(tree: ast.Module) -> Iterator[str]:
    for node in nodes(tree):
        if isinstance(node, Function):
            known, section = arguments(node), "Args"
        elif isinstance(node, ast.ClassDef) and not node.bases:
            known, section = attributes(node), "Attributes"
        else:
            continue
        docstring = ast.get_docstring(node, clean=True) or ""
        for name in sorted(named(docstring, section) - known):
            yield f"line {node.lineno}: {node.name} has no {name!r}"


def test_docstrings_name_what_is_there() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {words}"
        for path, source in shipped(PACKAGE).items()
        for words in strangers(parse(source))
    ]
    assert found == []


def test_a_name_that_is_gone_is_found() -> None:
    source = 'def f(a):\n    """Do.\n\n    Args:\n        a: one.\n        b, c: two.\n    """\n'
    assert list(strangers(ast.parse(source))) == ["line 1: f has no 'b'", "line 1: f has no 'c'"]
    source = (
        'class C:\n    """Be.\n\n    Attributes:\n        a: one.\n        b: two.\n    """\n\n    a: int\n'
    )
    assert list(strangers(ast.parse(source))) == ["line 1: C has no 'b'"]
