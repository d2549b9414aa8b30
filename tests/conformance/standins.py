"""Lets an engine be imported from its unpacked wheel, where packages for a GPU are missing.

A missing package becomes modules whose every name is a class that does nothing. Only what is imported
and never used may be replaced so: a package that is installed always wins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

WHEEL = "ASYNCHICACHE_ENGINE_WHEEL"
"""Names the folder of the unpacked wheel; `scripts/conformance.py` sets it."""


class _Names(type):
    """Of a class whose attributes are such classes too, so that it serves wherever a name is looked up."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_Names):
    """Stands for a class, a function, a decorator, a type or a constant that nobody uses here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type[Nothing]:
        return cls

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Class arguments, such as a metaclass's, mean nothing either."""

    def __call__(self, *args: Any, **kwargs: object) -> Any:
        return (
            args[0] if len(args) == 1 and callable(args[0]) else self
        )  # a decorator gives what it decorates

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _StandIn(ModuleType):
    """A module that has every public name."""

    __version__ = "0"
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class _Finder(MetaPathFinder, Loader):
    """Comes after all others, so it is asked for what nobody has."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        found = fullname.partition(".")[0] in self._packages
        return ModuleSpec(fullname, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def stand_in(packages: Collection[str]) -> None:
    """Make top-level packages importable where they are missing."""
    sys.meta_path.append(_Finder(packages))


def enter_wheel(standins: Collection[str]) -> Path:
    """Make the engine importable in this process.

    Args:
        standins: top-level packages that it imports, and that need not be there.

    Returns:
        The folder of the unpacked wheel.

    Raises:
        RuntimeError: nobody said where it is.
    """
    if WHEEL not in os.environ:
        raise RuntimeError(f"{WHEEL} is not set: these tests are run by `make conformance`")
    wheel = Path(os.environ[WHEEL])
    if str(wheel) not in sys.path:
        sys.path.insert(0, str(wheel))
        stand_in(standins)
    return wheel
