"""The documentation says nothing that does not run: examples, what they print, snippets, links, names."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple, TypeAlias

import pytest
import yaml

import asynchicache
import forking
from asynchicache.cli.commands import find_commands
from asynchicache.cli.parser import build_parser
from asynchicache.config import CacheConfig
from engines import free_port

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "examples" / "tutorial.py"
ROLES = DOCS / "examples" / "serve_roles.py"
GROUP = DOCS / "examples" / "transformers_ranks.py"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]

NEEDS = {
    "handover.py": "obstore",
    "litserve_api.py": "litserve",
    "serve_roles.py": "obstore",
    "transformers_ranks.py": "accelerate",
}
"""Packages that examples need beside the library's own; `make test` installs them."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

RANKS = """
import os, runpy, sys
children = []
for rank in "01":
    children.append(os.fork())
    if not children[-1]:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        runpy.run_path(sys.argv[1], run_name="__main__")
        sys.exit()
sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""

_BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_ELLIPSIS = "..."

Output: TypeAlias = Callable[[Path], str]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    kind: str
    text: str

    def __str__(self) -> str:
        first = next(iter(self.text.strip().splitlines()), "")
        return f"{self.page.relative_to(ROOT)}: {first.strip()[:50]}"


def blocks(kind: str) -> list[Block]:
    return [
        Block(page, kind, text)
        for page in PAGES
        for found, text in _BLOCK.findall(page.read_text("utf-8"))
        if found == kind
    ]


def run(example: Path, *how: str) -> tuple[int, str, str]:
    """The exit code and the output of an example in a process of its own, by arguments of Python."""
    done = subprocess.run(
        [sys.executable, *how, example.name],
        cwd=example.parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def environment() -> dict[str, str]:
    """The variables of an example."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ours | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def run_forked(example: Path) -> tuple[int, str, str]:
    """The same, without the imports; tests by `python -m pytest`."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if example.name.startswith("test_") else []
    done = forking.run([*words, example.name], cwd=example.parent, env=environment())
    return done.returncode, done.stdout, done.stderr


def run_in_group(example: Path) -> tuple[int, str, str]:
    """On two ranks of one launch, which are told by variables, as torchrun does it; what both say."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    done = forking.run(["-c", RANKS, example.name], cwd=example.parent, env=environment() | group)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    """What an example prints. Each runs once, whichever of pytest's processes asks first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes of this run

    def of(example: Path) -> str:
        kept = folder / f"{example.name}.json"
        with (folder / f"{example.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(json.dumps((run_in_group if example == GROUP else run_forked)(example)))
        code, out, err = json.loads(kept.read_text("utf-8"))
        assert code == 0, out + err
        return str(out)

    return of


def by_kinship(page: Path) -> list[Path]:
    """Examples; first those that a page shows code of."""
    shown = [passage for block in blocks("python") if block.page == page for passage in passages(block)]
    return sorted(
        EXAMPLES,
        key=lambda path: -sum(is_part(passage, path.read_text("utf-8")) for passage in shown),
    )


def lacks(example: Path) -> bool:
    """Whether a package that an example needs is not installed."""
    return example.name in NEEDS and find_spec(NEEDS[example.name]) is None


def passages(block: Block) -> Iterator[str]:
    """A block's runs of lines: `...` on a line of its own stands for lines left out."""
    passage: list[str] = []
    for line in [*block.text.splitlines(), _ELLIPSIS]:
        if line.strip() != _ELLIPSIS:
            passage.append(line)
        elif passage:
            yield "\n".join(passage).strip("\n")
            passage = []


def links(page: Path) -> list[str]:
    """Where a page's links into this repository lead, as they are written."""
    return [target for target, _ in _LINK.findall(page.read_text("utf-8")) if "://" not in target]


def undented(text: str) -> str:
    """Lines without their common indentation, and without blank lines around them."""
    return dedent(text).strip("\n")


def is_part(passage: str, source: str) -> bool:
    """Whether `source` has these lines one after the other, at whatever depth."""
    wanted = undented(passage).splitlines()
    lines = source.splitlines()
    return any(
        undented("\n".join(lines[start : start + len(wanted)])).splitlines() == wanted
        for start in range(len(lines) - len(wanted) + 1)
    )


@pytest.mark.parametrize(
    "example",
    # `test_tutorial.py` pastes what the tutorial shows of its own, and `test_serve_roles.py` has the proxy
    [pytest.param(path, marks=pytest.mark.soak) if path in (TUTORIAL, ROLES) else path for path in EXAMPLES],
    ids=lambda path: path.name,
)
def test_every_example_runs(example: Path, output: Output) -> None:
    if lacks(example):
        pytest.skip(f"{NEEDS[example.name]} is not installed")
    output(example)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["quickstart.py", "lifespan.py", "serve_engine.py"])
def test_examples_print_the_same_on_uvloop(name: str, output: Output) -> None:
    pytest.importorskip("uvloop")
    script = (
        "import asyncio, runpy, sys, uvloop; asyncio.run = lambda main: uvloop.run(check(main))\n"
        "async def check(main):\n"
        "    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)\n"
        "    return await main\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    example = DOCS / "examples" / name

    code, out, err = run(example, "-c", script)

    assert code == 0, err
    assert out == output(example)


@pytest.mark.soak
def test_ranks_print_the_same_by_torchrun(output: Output) -> None:
    code, out, err = run(GROUP, *TORCHRUN)

    assert code == 0, err
    assert out == output(GROUP)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_in_pages_is_part_of_an_example(block: Block) -> None:
    for passage in passages(block):
        assert any(is_part(passage, path.read_text("utf-8")) for path in EXAMPLES), passage


@pytest.mark.parametrize(
    "block", [block for block in blocks("text") if block.page != DOCS / "tutorial.md"], ids=str
)
def test_output_in_pages_is_what_an_example_prints(block: Block, output: Output) -> None:
    lacking = [path for path in EXAMPLES if lacks(path)]
    candidates = [path for path in by_kinship(block.page) if path not in (*lacking, TUTORIAL, ROLES)]
    for passage in passages(block):
        found = any(is_part(passage, output(path)) for path in candidates)
        if not found and any(path.name in block.page.read_text("utf-8") for path in lacking):
            pytest.skip("an example of this page needs a package that is not installed")
        assert found, passage


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_configuration_in_pages_is_accepted(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(block.text, "utf-8")
    assert CacheConfig.load(file, {}) != CacheConfig()


def test_commands_in_pages_exist() -> None:
    pattern = re.compile(r"^\$ asynchicache (.*?)(?:\s+#.*)?$", re.MULTILINE)
    commands = [line for block in blocks("console") for line in pattern.findall(block.text)]
    assert commands
    for line in commands:
        build_parser(find_commands()).parse_args(line.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in links(page) if not (page.parent / target).exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        if page not in reached and page in PAGES:
            reached.add(page)
            waiting += [(page.parent / target).resolve() for target in links(page)]
    assert [page for page in PAGES if page not in reached] == []


def test_the_site_leads_to_every_page_once() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    named = [page for section in sections for entry in section.values() for page in pages_of(entry)]

    assert sorted(set(named)) == sorted(named)
    assert {ROOT / "docs" / page for page in named} >= set(DOCS.rglob("*.md"))


def pages_of(entry: object) -> list[str]:
    """The pages of a section: a list of them with titles, or a folder."""
    if isinstance(entry, str):
        return [str(page.relative_to(DOCS)) for page in (DOCS / entry).glob("*.md")]
    assert isinstance(entry, list)
    return [page for one in entry for page in one.values()]


# Reference pages name everything that there is.


def missing(page: str, names: list[str]) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return [name for name in names if f"`{name}" not in text and f".{name}" not in text]


def test_every_public_name_is_in_the_reference() -> None:
    assert missing("reference/api.md", asynchicache.__all__) == []


def test_every_option_is_in_the_reference() -> None:
    assert missing("reference/configuration.md", list(CacheConfig.__struct_fields__)) == []


def test_every_room_is_in_the_architecture() -> None:
    """Those within packages by their dotted names."""
    package = Path(asynchicache.__path__[0])
    packages = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}
    inner = {f"{path.parts[-3]}.{path.parts[-2]}" for path in package.glob("*/*/__init__.py")}
    inner |= {f"hf3fs.{path.parts[-2]}" for path in package.glob("backends/hf3fs/*/__init__.py")}
    shown = sorted(package for package in packages | inner if not package.startswith(("__", "backends.")))
    assert missing("explanation/architecture.md", shown) == []


def test_every_room_says_what_it_is_for() -> None:
    found = Path(asynchicache.__path__[0]).rglob("__init__.py")
    assert [str(path) for path in found if not ast.get_docstring(ast.parse(path.read_text("utf-8")))] == []


# The checks above can fail.


def test_a_passage_must_be_whole_and_in_order() -> None:
    source = "def f():\n    a = 1\n    b = 2\n    c = 3\n"
    assert is_part("a = 1\nb = 2", source)
    assert not is_part("a = 1\nc = 3", source)
    assert not is_part("b = 2\na = 1", source)
    assert not is_part("a = 1\n    b = 2", source)


def test_an_ellipsis_parts_passages() -> None:
    assert list(passages(Block(ROOT, "python", "a\n...\nb\nc\n"))) == ["a", "b\nc"]
