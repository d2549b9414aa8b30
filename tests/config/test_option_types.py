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
from asynchicache.planner.options import PlannerOptions, PrefetchOptions

STRUCTS = pytest.mark.parametrize("cls", [CacheConfig, PlannerOptions, PrefetchOptions])


def told(cls: type[Options]) -> dict[str, Any]:
    """What type checkers are told that an option may be given as, beside its own type: `Given[T, this]`.

    Of a class and its bases, those that only type checkers see included.
    """
    found: dict[str, Any] = {}
    for base in reversed([one for one in cls.__mro__ if issubclass(one, Options)]):
        names = vars(inspect.getmodule(base))
        body = next(
            node
            for node in ast.parse(Path(inspect.getfile(base)).read_text("utf-8")).body
            if isinstance(node, ast.ClassDef) and node.name == base.__name__
        )
        for field in (node for node in ast.walk(body) if isinstance(node, ast.AnnAssign)):
            kind = field.annotation
            if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Given":
                assert isinstance(kind.slice, ast.Tuple)
                found[ast.unparse(field.target)] = eval(ast.unparse(kind.slice.elts[1]), dict(names))
    return found


def enum_of(kind: Any) -> type[Enum] | None:
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return next((one for one in kinds if isinstance(one, type) and issubclass(one, Enum)), None)


@STRUCTS
def test_type_checkers_know_every_word_of_an_enum(cls: type[Options]) -> None:
    enums = {name: kind for name, one in typing.get_type_hints(cls).items() if (kind := enum_of(one))}

    assert enums
    assert {name: set(typing.get_args(told(cls)[name])) for name in enums} == {
        name: {member.value for member in kind} for name, kind in enums.items()
    }


@STRUCTS
def test_type_checkers_take_sizes_as_text(cls: type[Options]) -> None:
    sizes = {name for name in cls.__struct_fields__ if name.endswith("_bytes")}

    assert {name for name, kind in told(cls).items() if kind is str} == sizes


def test_an_option_that_is_told_again_is_the_one_that_is_inherited() -> None:
    """For mypy only: when the program runs, the class has the fields of its bases."""
    again = set(told(CacheConfig)) & set(PlannerOptions.__struct_fields__)

    assert {name: told(CacheConfig)[name] for name in again} == told(PlannerOptions)
    assert all(
        getattr(CacheConfig(), name) == getattr(PlannerOptions(), name)
        for name in PlannerOptions.__struct_fields__
    )
