"""What pages say of the code, where both could change: numbers, names, and what users are told to type."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest

from asynchicache.backends.file.folder import _VERSION as FILE_FORMAT
from asynchicache.hashing import ObjectKey
from asynchicache.integrations.serve.messages import (
    _UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    decode_request,
)
from asynchicache.integrations.serve.operators import OperatorEndpoints
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.storage.protocol import PoolEngine

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def text(page: str) -> str:
    return (DOCS / page).read_text("utf-8")


def test_the_file_format_is_that_of_the_code() -> None:
    named = re.findall(
        r"(?:^Version |file store |format of the file store is \[)(\d+)",
        text("reference/file_format.md") + text("reference/versions.md"),
        re.MULTILINE,
    )

    assert len(named) >= 3
    assert set(named) == {str(FILE_FORMAT)}


def test_every_call_of_a_backend_is_on_its_page() -> None:
    page = text("howto/storage_backend.md")
    calls = [name for name, member in vars(PoolEngine).items() if inspect.iscoroutinefunction(member)]

    assert set(calls) >= {"exists", "get", "put", "delete", "clear", "aclose"}
    assert [name for name in calls if f"`{name}(" not in page] == []


def test_every_name_of_a_key_is_on_the_page_of_backends() -> None:
    page = text("howto/storage_backend.md")
    names = [
        name for name, member in vars(ObjectKey).items() if inspect.isfunction(member) and name[0] != "_"
    ]

    assert set(names) >= {"text", "pattern"}
    assert [name for name in names if f"key.{name}()" not in page] == []


@pytest.mark.parametrize("field", _UNSUPPORTED)
def test_no_message_says_a_thing_twice(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_request(b'{"prompt": "a", "%s": {"x": 1}}' % field.encode(), CompletionRequest, context=9)
    clauses = re.split(r"[:;,] ", str(caught.value))

    assert len(clauses) == len(set(clauses))


def is_released() -> bool:
    """Whether the page on publishing says so."""
    return "Nothing is published yet" not in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_is_installed_from_where_it_is_not(page: Path) -> None:
    """Before there is a release, `pip install asynchicache` installs nothing, or a stranger's package."""
    told = re.findall(r"pip install [^`|\n]*\basynchicache\b", page.read_text("utf-8"))
    from_a_checkout = [line for line in told if "# in a checkout" in line]

    assert is_released() or told == from_a_checkout


def test_extras_on_the_install_page_are_those_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    page = text("howto/install.md")

    assert [name for name in extras if f"`{name}`" not in page] == []


def files_named(words: str) -> set[str]:
    """Paths of sources that a text names, in this repository."""
    return set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|txt|toml|yml|yaml|json|sh))`", words))


def is_here(path: str) -> bool:
    """From the root, or from a folder that pages are written in the view of."""
    views = (
        ROOT,
        DOCS,
        ROOT / "src",
        ROOT / "src/asynchicache",
        ROOT / "src/asynchicache_lab",
        ROOT / "deploy",
    )
    return any((view / path).exists() for view in views)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_files_and_targets_that_a_page_names_are_there(page: Path) -> None:
    words = page.read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))

    assert {path for path in files_named(words) if not is_here(path)} == set()
    assert set(re.findall(r"`make ([a-z][\w-]*)", words)) - targets == set()


def test_a_file_that_is_not_there_is_seen() -> None:
    assert not is_here("planner/fetch.py")
    assert files_named("as `planner/fetch.py`, `tree/tree.py` and `page.py` do") == {
        "planner/fetch.py",
        "tree/tree.py",
    }


def test_every_field_and_every_verb_of_the_server_is_on_its_page() -> None:
    page = text("howto/serve.md")
    fields = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    verbs = re.findall(r'"(\w+)": self\._', inspect.getsource(OperatorEndpoints.routes))

    assert [name for name in sorted(fields) if name not in page] == []
    assert len(verbs) >= 6
    assert [verb for verb in verbs if f"| `/{verb}` |" not in page] == []
