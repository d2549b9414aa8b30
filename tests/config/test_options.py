"""The base of all options: a rule is kept however a struct is made, and told in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest

from asynchicache.errors import ConfigError
from asynchicache.options import (
    CommandOptions,
    FiniteSeconds,
    Natural,
    Options,
    Positive,
    Share,
    about,
    check_folder,
    flags_of,
    named_values,
    options_of,
    parse_size,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Inner(Options, frozen=True):
    subject: ClassVar[str] = "inner "

    pages: Positive = 3


class Sample(Options, frozen=True, kw_only=True):
    name: str
    count: Annotated[Natural, about("how many")] = 1
    share: Share = 0.5
    wait: FiniteSeconds = 2.0
    colour: Colour = Colour.RED
    word: Annotated[Literal["a", "b"], about("which")] = "a"
    sizes: Mapping[str, Positive] = {}
    limit: Positive | None = None
    folder: Path = Path()
    inner: Inner = Inner()
    password: str = ""


class Flags(CommandOptions, frozen=True):
    page_size: Annotated[Positive, about("tokens of a page")] = 64
    path: Annotated[str, about("a folder", positional=True)] = ""
    seed: int = 0


RULES: list[tuple[dict[str, Any], str]] = [
    ({"count": -1}, "count -1 must be a whole number of at least 0"),
    ({"count": True}, "count True must be a whole number of at least 0"),
    ({"count": 1.5}, r"count 1\.5 must be a whole number"),
    ({"share": 2}, "share 2 must be a number from 0 to 1"),
    ({"wait": math.inf}, "wait inf must be a number above 0 and finite"),
    ({"wait": math.nan}, "wait nan must be a number above 0 and finite"),
    ({"wait": 10**400}, "wait 10+ must be a number above 0 and finite"),
    ({"word": "c"}, "word 'c' must be one of 'a', 'b'"),
    ({"sizes": {"kv": 0}}, "sizes {'kv': 0} must be a table with, for each name, a whole number above 0"),
    ({"limit": 0}, "limit 0 must be a whole number above 0, or None"),
    ({"name": 5}, "name 5 must be text"),
    ({"password": 5}, r"password \*\*\* must be text"),
]


@pytest.mark.parametrize(("change", "words"), RULES)
def test_a_rule_holds_for_code_and_for_files(change: dict[str, Any], words: str) -> None:
    given = {"name": "x", **change}

    for make in (lambda: Sample(**given), lambda: Sample.read(given)):
        with pytest.raises(ConfigError, match=f"^{words}"):
            make()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "green"}, "colour 'green' must be one of 'red', 'blue'"),
        ({"inner": {"page": 1}}, "inner 'page' is not an option; did you mean 'pages'"),
        ({"inner": None}, "inner None must be a table of options, or a Inner"),
        ({"nmae": "x"}, "'nmae' is not an option; did you mean 'name'"),
    ],
)
def test_code_is_told_what_fits(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sample(name="x", **change)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"colour": "green"}, "colour 'green' must be one of 'red', 'blue'"),
        ({"inner": {"pages": 0}}, "inner pages 0 must be a whole number above 0"),
        ({"inner": {"page": 1}}, "inner 'page' is not an option; did you mean 'pages'"),
        ({"inner": 3}, "inner 3 must be a table of options"),
        ({"folder": ""}, "folder '' must name a folder or a file"),
        ({"folder": "a\0b"}, "must not contain a NUL"),
        ({"folder": "~no-such-user/x"}, "begins with the home of a user that does not exist"),
        ({"size": {}}, "'size' is not an option; did you mean 'sizes'"),
        ({"xyz": 1}, "'xyz' is not an option; the options are colour, count"),
    ],
)
def test_files_have_words(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sample.read({"name": "x", **given})


@pytest.mark.parametrize("make", [Sample.read, lambda given: Sample(**given)])
def test_words_become_values(make: Callable[[dict[str, Any]], Sample]) -> None:
    made = make({"name": "x", "colour": "blue", "inner": {"pages": 7}, "folder": "a/b"})

    assert made == Sample(name="x", colour=Colour.BLUE, inner=Inner(7), folder=Path("a/b"))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 << 30),
        ("1.5 MB", 1_500_000),
        ("0.1kib", 102),
        ("7 tib", 7 << 40),
        ("10", None),
        ("10G", None),
        ("-1GB", None),
        ("1e3MB", None),
        ("MB", None),
        ("٣MB", None),
    ],
)
def test_sizes_have_units(text: str, size: int | None) -> None:
    assert parse_size(text) == size


class Sized(Options, frozen=True):
    room_bytes: Positive | dict[str, Positive] | None = None
    move_bytes: bool = False


def test_sizes_stand_in_tables_too_and_only_where_bytes_are_counted() -> None:
    given: Any = {"kv": "1KiB", "mamba": 5}
    assert Sized(room_bytes=given).room_bytes == {"kv": 1024, "mamba": 5}
    for wrong in ({"room_bytes": {"kv": "1KiB?"}}, {"move_bytes": "1KiB"}, {"room_bytes": "0MB"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} .* must be"):
            Sized(**wrong)
    assert Sample.read({"name": "x", "count": "3"}, strict=False).count == 3


def test_a_required_option_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="name is missing; it must be text"):
        Sample.read({})


def test_defaults_are_not_shared() -> None:
    assert next(one for one in options_of(Sample) if one.name == "sizes").default == {}
    assert Sample(name="x").sizes is not Sample(name="y").sizes


def test_flags_are_the_fields_with_help() -> None:
    assert [(one.flag, one.default, one.help, one.positional) for one in flags_of(Flags)] == [
        ("--page-size", 64, "tokens of a page", False),
        ("PATH", "", "a folder", True),
    ]
    assert [one.choices for one in flags_of(Sample)] == [(), ("a", "b")]


def test_a_command_names_its_flags() -> None:
    with pytest.raises(ConfigError, match=r"^--page-size 0: must be a whole number above 0"):
        Flags(page_size=0)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_folder("--out", tmp_path / "new" / "deep", made=True)

    for folder in (tmp_path / "file", tmp_path / "new"):
        with pytest.raises(ConfigError, match=r"--out: .* is not a folder that can be written to"):
            check_folder("--out", folder)


def test_pairs_are_values_by_name() -> None:
    assert named_values("--set", ["a=1", "b=x=y", "c={d = 2}"]) == {"a": 1, "b": "x=y", "c": {"d": 2}}
    for wrong in ("a", "=1", "a="):
        with pytest.raises(ConfigError, match=f"--set {wrong}: must be name=value"):
            named_values("--set", [wrong])
