"""Options as structs: each field has its type, its rule, its default and its line of help in one place.

The command line, configuration files, the environment and storage engines read their options through
`Options`. A field is checked against its annotation however the struct is made:

    class Limits(Options, frozen=True):
        deadline: Annotated[Seconds, about("seconds one call may take")] = 10.0
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta
from msgspec import inspect as kinds

from asynchicache.errors import ConfigError

Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(gt=0)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]

LARGEST_FLOAT = sys.float_info.max
"""The bound of a number that must be finite: `Meta(le=LARGEST_FLOAT)`."""
FiniteSeconds: TypeAlias = Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]

T = TypeVar("T")
G = TypeVar("G")


class Given(Generic[T, G]):
    """The type of an option that reads as `T` and may also be given as `G`, which a file has.

    Type checkers take an annotation with `__set__` for what `__init__` accepts. Rules and conversion are
    those of `T`, which is all that is left when the program runs.
    """

    if TYPE_CHECKING:

        def __get__(self, options: object, owner: object = None) -> T: ...
        def __set__(self, options: object, value: T | G) -> None: ...

    else:

        def __class_getitem__(cls, kinds: tuple[Any, Any]) -> Any:
            return kinds[0]


def default(value: T) -> Given[T, Any]:
    """The default of a `Given` option."""
    return cast("Given[T, Any]", value)


_SECRETS = frozenset({"password", "sentinel_password", "storage_options"})


class Option(NamedTuple):
    """One field of a struct.

    Attributes:
        name: of the field.
        type: its annotation, constraints included.
        kind: what msgspec knows of the annotation, without `None`.
        nullable: whether None is a value.
        default: its value if it is not given; `msgspec.NODEFAULT` if it must be.
        help: one line for people; empty if the command line does not show it.
        positional: on the command line it is a word of its own, without a flag.
    """

    name: str
    type: Any
    kind: kinds.Type
    nullable: bool
    default: Any
    help: str
    positional: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that there are; empty if the type alone decides."""
        return tuple(map(str, self.kind.values)) if isinstance(self.kind, kinds.LiteralType) else ()

    @property
    def counts_bytes(self) -> bool:
        """Whether a size such as `"10GiB"` is a value."""
        return self.name.endswith("_bytes") and not isinstance(self.kind, kinds.BoolType)

    @property
    def flag(self) -> str:
        """What it is called on the command line."""
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")


class _OptionsMeta(msgspec.StructMeta):
    """Makes a misspelt option an error that names the right one; msgspec itself raises a bare `TypeError`."""

    if not TYPE_CHECKING:  # type checkers would take its arguments for those of every set of options

        def __call__(cls, *args: Any, **given: Any) -> Any:  # noqa: N805  a metaclass
            known = getattr(cls, "__struct_fields__", ())
            for name in given:
                if name not in known:
                    raise cast("type[Options]", cls).unknown(name, sorted(known))
            return super().__call__(*args, **given)


class Options(msgspec.Struct, metaclass=_OptionsMeta, frozen=True, forbid_unknown_fields=True):
    """Base of every set of options.

    Values may be given as a file has them: an enum by its value (`"write_back"`), nested options as a
    mapping, a path as text, and an option whose name ends in `_bytes` as a size (`"10GiB"`).

    Attributes:
        subject: what stands before an option's name in messages.
    """

    subject: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            given = getattr(self, option.name)
            value = self._checked(option, given)
            if value is not given:
                msgspec.structs.force_setattr(self, option.name, value)
        self.check()

    def check(self) -> None:
        """Check rules that a single field cannot express; for subclasses.

        Raises:
            ConfigError: names the options and the rule.
        """

    @classmethod
    def read(cls, given: Mapping[str, object], *, strict: bool = True) -> Self:
        """Options as a file, the environment or a caller's mapping has them.

        Args:
            given: by name. Nested options are mappings, enums their values.
            strict: numbers and booleans in quotes are refused.

        Raises:
            ConfigError: an option is unknown, missing, or outside its rule; names it and the rule.
        """
        values = cls.read_some(given, strict=strict)
        for option in options_of(cls):
            if option.default is msgspec.NODEFAULT and option.name not in values:
                raise cls.missing(option.name, rule_of(option))
        return cls(**values)

    @classmethod
    def read_some(cls, given: Mapping[str, object], *, strict: bool = True) -> dict[str, Any]:
        """The values of options that may not be all; see `read`."""
        known = {option.name: option for option in options_of(cls)}
        for name in given:
            if name not in known:
                raise cls.unknown(name, sorted(known))
        return {name: cls.read_one(known[name], value, strict=strict) for name, value in given.items()}

    @classmethod
    def read_one(cls, option: Option, value: object, *, strict: bool = True) -> Any:
        """The value of one option, converted to its type.

        Raises:
            ConfigError: it does not fit.
        """
        nested = option.kind.cls if isinstance(option.kind, kinds.StructType) else None
        if nested is not None and issubclass(nested, Options) and isinstance(value, Mapping):
            return nested.read(value, strict=strict)
        try:
            return msgspec.convert(_in_bytes(option, value), option.type, strict=strict, dec_hook=_as_path)
        except msgspec.ValidationError as error:
            rule = str(error) if isinstance(option.kind, kinds.CustomType) else rule_of(option)
            raise cls.refused(option.name, value, rule) from error

    @classmethod
    def refused(cls, name: str, value: object, rule: str) -> ConfigError:
        """The error that names an option, its value and the rule that it breaks."""
        return ConfigError(f"{cls.subject}{name} {shown(name, value)} {rule}")

    @classmethod
    def missing(cls, name: str, rule: str) -> ConfigError:
        """The error for an option that must be given."""
        return ConfigError(f"{cls.subject}{name} is missing; it {rule}")

    @classmethod
    def unknown(cls, name: str, known: Sequence[str]) -> ConfigError:
        """The error for an option that does not exist."""
        return ConfigError(f"{cls.subject}{name!r} is not an option; {did_you_mean(name, known)}")

    @classmethod
    def _checked(cls, option: Option, value: object) -> object:
        """The value of an option that code passed, converted to its type."""
        made = isinstance(option.kind, kinds.EnumType | kinds.StructType) and isinstance(
            value, option.kind.cls
        )
        return value if made else cls.read_one(option, value)


def check_kind(name: str, value: object, kind: type, cure: str) -> None:
    """
    Raises:
        ConfigError: an argument is of another class; names it, and what to pass.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name} {value!r:.200} is a {type(value).__name__}: {cure}")


def check_fields(record: Any, subject: str = "") -> None:
    """Ensure that the fields of a frozen dataclass are of their types; lists become tuples.

    Args:
        record: the dataclass, in its `__post_init__`.
        subject: what stands before a field's name in messages; ends with a space.

    Raises:
        ConfigError: names the field, its value and its type.
    """
    cls: Any = type(record)
    for name, kind in _kinds_of(cls).items():
        value = getattr(record, name)
        if get_origin(kind) is tuple and isinstance(value, list | range):
            value = tuple(value)
            object.__setattr__(record, name, value)
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            words = str(error).replace("`", "").replace(" - at $", " in ")
            raise ConfigError(f"{subject}{name} {value!r:.200}: {words[0].lower()}{words[1:]}") from None


@cache
def _kinds_of(cls: type) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(cls).items() if not name.startswith("_")}


class CommandOptions(Options, frozen=True):
    """Base of a command's options: messages name the flags."""

    @classmethod
    def refused(cls, name: str, value: object, rule: str) -> ConfigError:
        flag = next(option.flag for option in options_of(cls) if option.name == name)
        return ConfigError(f"{flag} {value}: {rule}")


def shown(name: str, value: object) -> str:
    """The value of an option for a message; hidden where it is, or may hold, a password."""
    if name in _SECRETS:
        return "***"
    return f"{without_login(value) if isinstance(value, str) else value!r:.200}"


def without_login(text: str) -> str:
    """Cut what stands before the `@` of a URL, whatever else is wrong with it."""
    if "@" not in text:
        return text
    scheme, found, rest = text.partition("://")
    return f"{scheme if found else ''}{found}***@{(rest or text).rpartition('@')[2]}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The known name that is most like `name`; all of them if none is."""
    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"


def about(help_text: str, *, positional: bool = False) -> Meta:
    """What the command line says about a field: a line of help, and whether it needs no flag."""
    return Meta(description=help_text, extra={"positional": positional})


@cache
def options_of(cls: type[msgspec.Struct]) -> tuple[Option, ...]:
    """The fields of a struct, in their order."""
    return tuple(map(_described, msgspec.structs.fields(cls)))


def flags_of(cls: type[Options]) -> tuple[Option, ...]:
    """The fields that the command line shows: those with a line of help."""
    return tuple(option for option in options_of(cls) if option.help)


def _described(field: msgspec.structs.FieldInfo) -> Option:
    info = kinds.type_info(field.type)
    help_text, positional = "", False
    while isinstance(info, kinds.Metadata):
        help_text = (info.extra_json_schema or {}).get("description", help_text)
        positional = (info.extra or {}).get("positional", positional)
        info = info.type
    parts = info.types if isinstance(info, kinds.UnionType) else (info,)
    some = [part for part in parts if not isinstance(part, kinds.NoneType)]
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    nullable = len(some) < len(parts)
    return Option(
        field.name, field.type, some[0] if len(some) == 1 else info, nullable, default, help_text, positional
    )


# Rules in words.


def rule_of(option: Option) -> str:
    """What a value must be, for messages: `must be a whole number above 0`."""
    if isinstance(option.kind, kinds.CustomType):
        return _PATH_RULE
    size = f", or a size such as '10GiB' ({', '.join(_UNITS)})" if option.counts_bytes else ""
    return f"must be {_words(option.kind)}{size}" + (", or None" if option.nullable else "")


def _words(kind: kinds.Type) -> str:
    if isinstance(kind, kinds.Metadata):
        return _words(kind.type)
    if isinstance(kind, kinds.IntType | kinds.FloatType):
        return f"a {'whole number' if isinstance(kind, kinds.IntType) else 'number'}{_bounds(kind)}"
    if isinstance(kind, kinds.DictType):
        free = isinstance(kind.value_type, kinds.AnyType)
        return "a table" if free else f"a table with, for each name, {_words(kind.value_type)}"
    if isinstance(kind, kinds.CollectionType):
        return f"a list, each of it {_words(kind.item_type)}"
    if isinstance(kind, kinds.UnionType):
        some = [one for one in kind.types if not isinstance(one, kinds.NoneType)]
        return " or ".join(_words(one) for one in some)
    if isinstance(kind, kinds.LiteralType):
        return f"one of {', '.join(map(repr, kind.values))}"
    if isinstance(kind, kinds.EnumType):
        return f"one of {', '.join(repr(one.value) for one in kind.cls)}"
    if isinstance(kind, kinds.StructType):
        return f"a table of options, or a {kind.cls.__name__}"
    if isinstance(kind, kinds.StrType):
        return "text" if kind.pattern is None else f"text that matches {kind.pattern}"
    names = {kinds.BoolType: "true or false", kinds.AnyType: "anything"}
    return names.get(type(kind), "of another type")


def _bounds(kind: kinds.IntType | kinds.FloatType) -> str:
    if kind.ge is not None and kind.le not in (None, LARGEST_FLOAT):
        return f" from {kind.ge:g} to {kind.le:g}"
    least = "" if kind.gt is None else f" above {kind.gt:g}"
    least = least if kind.ge is None else f" of at least {kind.ge:g}"
    most = "" if kind.le is None else "finite" if kind.le == LARGEST_FLOAT else f"at most {kind.le:g}"
    return f"{least} and {most}" if least and most else least or most


# Sizes.

_UNITS: Mapping[str, int] = {
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)
_FACTORS = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_size(text: str) -> int | None:
    """The bytes of a size such as `10GiB` or `1.5 MB`; None if it is none."""
    found = _SIZE.fullmatch(text)
    factor = _FACTORS.get(found[2].lower()) if found else None
    return None if found is None or factor is None else int(Fraction(found[1]) * factor)


def _in_bytes(option: Option, value: object) -> object:
    """Replace sizes by numbers, where the option counts bytes."""
    if option.counts_bytes and isinstance(value, str):
        size = parse_size(value)
        return value if size is None else size
    if option.counts_bytes and isinstance(value, Mapping):
        return {name: _in_bytes(option, one) for name, one in value.items()}
    return value


# Paths and folders.

_PATH_RULE = "must name a folder or a file"


def _as_path(kind: type, value: object) -> object:
    """Convert what msgspec has no word for; the message of an error is the rule.

    A `~` at the beginning is the user's home: a shell would have replaced it, a file does not.
    """
    if kind is not Path:
        return value
    if isinstance(value, Path):  # converted before: what begins with `~` now was `./~`
        return value
    if not isinstance(value, str | os.PathLike) or not value:
        raise ValueError(_PATH_RULE)
    text = os.fsdecode(value)
    if "\0" in text:
        raise ValueError("must not contain a NUL")
    try:
        return Path(text).expanduser() if text.startswith("~") else Path(text)
    except RuntimeError:
        raise ValueError("begins with the home of a user that does not exist") from None


def check_folder(flag: str, folder: Path, *, made: bool = False) -> None:
    """Refuse a folder that cannot be written to, before any work is done.

    Args:
        flag: for the message.
        folder: may be missing if it will be `made`.

    Raises:
        ConfigError: names the flag and the folder.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists()) if made else folder
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {there} is not a folder that can be written to")


# Values as words.


def parse_value(text: str) -> object:
    """The value of a word as TOML (`3`, `true`, `{kv = 1024}`); the word itself where it is none."""
    try:
        return cast("dict[str, object]", msgspec.toml.decode(f"value = {text}"))["value"]
    except msgspec.DecodeError:
        return text


def named_values(flag: str, pairs: Iterable[str]) -> dict[str, object]:
    """The values of a flag that is given as `name=value`, any number of times.

    Raises:
        ConfigError: one has no name or no value.
    """
    found = {}
    for text in pairs:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"{flag} {text}: must be name=value")
        found[name] = parse_value(value)
    return found
