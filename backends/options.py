"""What the options of all storage backends have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Self, TypeAlias, TypeVar

from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.options import Options as CheckedOptions
from asynchicache.options import did_you_mean, shown

T = TypeVar("T")

Namespace: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
"""What every key of a backend begins with."""


class BackendOptions(CheckedOptions, frozen=True):
    """Base of a backend's options; messages name the backend, and hide passwords.

    Attributes:
        backend: its name.
    """

    backend: ClassVar[str]

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """The options in `given`, where None stands for the default.

        Raises:
            ConfigError: an option is missing, unknown, or outside its rule; names it.
        """
        return cls.read({name: value for name, value in given.items() if value is not None})

    @classmethod
    def refused(cls, name: str, value: object, rule: str) -> ConfigError:
        return ConfigError(f"storage backend {cls.backend!r}: option {name}={shown(name, value)} {rule}")

    @classmethod
    def missing(cls, name: str, rule: str) -> ConfigError:
        return ConfigError(f"storage backend {cls.backend!r}: option {name} is missing; it {rule}")

    @classmethod
    def unknown(cls, name: str, known: Sequence[str]) -> ConfigError:
        advice = did_you_mean(name, known)
        return ConfigError(f"storage backend {cls.backend!r} has no option {name!r}; {advice}")


class Options:
    """Takes options by name; `finish` refuses what is left.

    Args:
        backend: its name, for messages.
        given: what the user wrote.
    """

    def __init__(self, backend: str, given: Mapping[str, object]) -> None:
        self._backend = backend
        self._given = dict(given)

    def take(self, name: str, kind: type[T] | tuple[type[T], ...], default: T) -> T:
        """The option, or `default` where it is not given, or None.

        Raises:
            ConfigError: it is of another type.
        """
        value = self._given.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refused(name, value, _rule(kind))
        return value

    def positive(self, name: str) -> int | None:
        """A whole number above 0, or None where it is not given.

        Raises:
            ConfigError: it is something else.
        """
        if self._given.get(name) is None:
            self._given.pop(name, None)
            return None
        value = self.take(name, int, 1)
        if value < 1:
            raise self.refused(name, value, "must be above 0")
        return value

    def folder(self) -> Path:
        """The folder of option `path`, which must be named; `~` at its beginning is the user's home.

        Raises:
            ConfigError: it is missing, or cannot be one.
        """
        value = self.take("path", object, "")
        if not isinstance(value, str | os.PathLike) or not value:
            others = f"; also given: {sorted(self._given)}" if self._given else ""  # it may be misspelt there
            raise self.refused("path", value, f"must name a folder{others}")
        text = os.fsdecode(value)
        if "\0" in text:
            raise self.refused("path", value, "must not contain a NUL")
        try:  # a shell does it; from a file, a folder of the name ~ would be made
            return Path(text).expanduser() if text.startswith("~") else Path(text)
        except RuntimeError:
            raise self.refused("path", value, "begins with the home of a user whom nobody knows") from None

    def refused(self, name: str, value: object, rule: str) -> ConfigError:
        """The error that says which option has which value against which rule."""
        return ConfigError(f"storage backend {self._backend!r}: option {name}={shown(name, value)} {rule}")

    def finish(self) -> None:
        """
        Raises:
            ConfigError: options are left that nobody took.
        """
        if self._given:
            raise ConfigError(f"storage backend {self._backend!r} has no option {sorted(self._given)}")


def _rule(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return f"must be of type {' or '.join(each.__name__ for each in kinds)}"
