"""How many files three kinds of change open, counted at what the library has of each kind today.

An order of eviction by tenant, an optional verb of storage engines, and a bound by namespace: each was once
a change of a dozen files or more.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import asynchicache
from cache import test_tenants
from house.sources import nodes, parse, shipped

SOURCE = Path(asynchicache.__path__[0])


def files_with(pattern: str) -> list[str]:
    """Files of the library in which a name of the code, not of a comment or docstring, matches."""
    return [
        str(path.relative_to(SOURCE))
        for path, source in shipped(SOURCE).items()
        if any(re.fullmatch(pattern, name) for name in _names(parse(source)))
    ]


@cache
def _names(tree: ast.Module) -> set[str]:
    found = set[str]()
    for node in nodes(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found


def test_an_order_of_eviction_by_tenant_opens_no_file_of_ours():
    """Its author reads three: what a policy is told, a node, and the seed that names a tenant."""
    source = ast.parse(Path(test_tenants.__file__).read_text())
    policy = next(one for one in source.body if isinstance(one, ast.ClassDef))
    used = _names(ast.Module([policy], []))
    read = {
        one.module
        for one in source.body
        if isinstance(one, ast.ImportFrom) and used & {alias.name for alias in one.names}
        if (one.module or "").startswith("asynchicache")
    }
    assert read == {"asynchicache.tree.node", "asynchicache.tree.policies"}


@pytest.mark.parametrize("verb", ["touch", "confirm"])
def test_an_optional_verb_opens_nine_files(verb: str):
    """The list of verbs, the guard, who asks, and what stands around an engine; then the engines with it."""
    ours = [name for name in files_with(rf"_?{verb}") if name.startswith(("storage/", "testing/"))]
    asks = [name for name in files_with(verb) if name.startswith("controller/storage")]
    assert {"storage/protocol.py", "storage/guard.py"} <= set(ours)
    assert len(ours) + len(asks) <= 9, (ours, asks)


def test_a_bound_by_namespace_opens_eight_files():
    """As the share of hints is: the bound, who asks it, and what tells it of pages that come and go."""
    opened = files_with("HintShare|HintLedger|favour|bound_hint|shelf")
    assert {"tree/keeps.py", "planner/hints.py"} <= set(opened)
    assert len(opened) <= 8, opened
