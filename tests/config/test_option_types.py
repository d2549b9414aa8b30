"""What type checkers are told of options is what the options take."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from asynchicache.config import CacheConfig
from asynchicache.options import Options
from asynchicache.planner.options import PrefetchOptions


def told(cls: type[Options]) -> dict[str, ast.expr]:
    """Arguments of the `__init__` that only type checkers see, with their annotations."""
    tree = ast.parse(Path(inspect.getfile(cls)).read_text("utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    made = next(
        node for node in ast.walk(body) if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    return {argument.arg: argument.annotation for argument in made.args.kwonlyargs if argument.annotation}


def words(annotation: ast.expr) -> set[str]:
    """Those of its `Literal`."""
    return {
        word.value
        for part in ast.walk(annotation)
        if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id == "Literal"
        for word in ast.walk(part.slice)
        if isinstance(word, ast.Constant)
    }


def enum_of(kind: Any) -> type[Enum] | None:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, Enum)), None)


@pytest.mark.parametrize("cls", [CacheConfig, PrefetchOptions])
def test_type_checkers_know_every_option_and_no_other(cls: type[Options]) -> None:
    assert set(told(cls)) == set(cls.__struct_fields__)


@pytest.mark.parametrize("cls", [CacheConfig, PrefetchOptions])
def test_type_checkers_know_every_word_of_an_enum(cls: type[Options]) -> None:
    hints, found = typing.get_type_hints(cls), told(cls)
    enums = {name: kind for name in found if (kind := enum_of(hints[name]))}

    assert enums
    assert {name: words(found[name]) for name in enums} == {
        name: {member.value for member in kind} for name, kind in enums.items()
    }


@pytest.mark.parametrize("cls", [CacheConfig, PrefetchOptions])
def test_type_checkers_take_sizes_as_text(cls: type[Options]) -> None:
    sizes = {name: annotation for name, annotation in told(cls).items() if name.endswith("_bytes")}

    assert all("str" in ast.unparse(annotation).split(" | ") for annotation in sizes.values())
