"""Options of benches: dataclasses whose fields carry what the command line says about them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from asynchicache.errors import ConfigError
from asynchicache.options import parse_value

T = TypeVar("T", bool, int, float, str, tuple[str, ...])
Value: TypeAlias = bool | int | float | str | tuple[str, ...]


class Options(Protocol):
    """A frozen dataclass; every field that can be set from outside is made by `option`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Setting(NamedTuple):
    """One field that can be set from outside.

    Attributes:
        name: of the field; `flag` is what it is called on the command line.
        default: its value if nobody says otherwise; its type is the field's. A tuple is a flag that may
            be given again and again.
        help: one line for people.
        minimum: the least value that means something, or None.
        choices: the values that there are; empty if the type alone decides.
        positional: whether it is a word of its own on the command line, and must be there.
    """

    name: str
    default: Value
    help: str
    minimum: int | None
    choices: tuple[str, ...]
    positional: bool = False

    @property
    def flag(self) -> str:
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")


def option(
    default: T,
    help: str,  # noqa: A002  argparse's own word
    *,
    minimum: int | None = None,
    choices: Iterable[str] = (),
    positional: bool = False,
) -> T:
    """A dataclass field that can be set from outside; see `Setting`.

    Returns:
        a `dataclasses.Field`, typed as its default so that the dataclass reads as usual.
    """
    metadata = {"help": help, "minimum": minimum, "choices": tuple(choices), "positional": positional}
    return field(default=default, metadata=metadata)


def settings(kind: type[Options]) -> list[Setting]:
    """What of `kind` can be set from outside, in the order of its fields."""
    found = [f for f in fields(kind) if "help" in f.metadata]
    return [Setting(f.name, cast("Value", f.default), **f.metadata) for f in found]


def check_minimums(options: Options) -> None:
    """Refuse values below their minimum; for `__post_init__`.

    Raises:
        ConfigError: names the flag, the value and the rule.
    """
    for setting in settings(type(options)):
        value = getattr(options, setting.name)
        if setting.minimum is not None and not setting.minimum <= value < math.inf:
            raise ConfigError(f"{setting.flag} {value}: must be a number, at least {setting.minimum}")


def check_folder(flag: str, folder: Path, *, made: bool = False) -> None:
    """Refuse, before the work, what is no folder to write to.

    Args:
        flag: for the message.
        folder: need not be there yet if it will be `made`.

    Raises:
        ConfigError: names the flag and the folder.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists()) if made else folder
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {there} is no folder that can be written to")


def named_values(flag: str, pairs: Sequence[str]) -> Mapping[str, object]:
    """What a flag that is given as `name=value`, again and again, says; values are TOML where they are not
    plain words.

    Raises:
        ConfigError: one has no name or no value.
    """
    parted = [text.partition("=") for text in pairs]
    for text, (name, _, value) in zip(pairs, parted, strict=True):
        if not name or not value:
            raise ConfigError(f"{flag} {text}: must be name=value")
    return {name: parse_value(value) for name, _, value in parted}
