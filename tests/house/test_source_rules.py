"""Rules of the house that no tool checks, over everything that is shipped.

Each rule takes a module's syntax tree and source and returns what it minds. The samples below prove
that each one can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import asynchicache
import asynchicache_lab
from house.sources import nodes, parse, shipped

Rule = Callable[[ast.Module, str], list[str]]

SOURCE = Path(asynchicache.__path__[0]).parent
PACKAGES = [Path(one.__path__[0]) for one in (asynchicache, asynchicache_lab)]

MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60

# Where work of others, or a task of ours, ends: an error must become a value there.
TASK_BOUNDARIES = {
    "asynchicache/backends/file/writer.py",
    "asynchicache/backends/redis/pool.py",
    "asynchicache/controller/prefetcher.py",
    "asynchicache/controller/tasks.py",
    "asynchicache/integrations/bridge.py",
    "asynchicache/integrations/transformers/decoding.py",
    "asynchicache/storage/guard.py",
    "asynchicache/storage/labels.py",
    "asynchicache/storage/deadlines.py",
    "asynchicache/streams/cuda.py",
    "asynchicache/streams/emulated.py",
    "asynchicache/streams/reactor.py",
    "asynchicache/testing/seeded_loop.py",
    "asynchicache/transfer/local.py",
    "asynchicache/transfer/record.py",
    "asynchicache_lab/chaos/run.py",
    "asynchicache_lab/ranks/chaos.py",
}

# The environment is an option like any other, and options are read in one place.
ENVIRONMENT_READERS = {"asynchicache/config.py"}

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


PATCHING = {"setattr", "delattr", "patch", "MonkeyPatch"}
PUBLIC_THOUGH_PRIVATE = {"_asdict", "_replace", "_current_frames"}  # of named tuples, and of `sys`

# It times four public methods of one object: a clock in them would cost every leader that is not timed.
TIMERS = {"asynchicache_lab/bench/ranks/simulation.py"}
# It plays torch.cuda and the driver's library, by public names: what it measures is the library as it is.
PLAYERS = {"asynchicache_lab/bench/counting_driver.py"}

# The guard is around every engine, and divided storage is several as one: these know each verb.
VERB_KEEPERS = {f"asynchicache/storage/{name}.py" for name in ("protocol", "guard", "divided")}


def no_abstract_stubs(tree: ast.Module, source: str) -> list[str]:
    """An interface is a Protocol; a method that is not there yet is not there."""
    return [f"line {node.lineno}: {name}" for node, name in _names(tree) if name == "NotImplementedError"]


def no_blind_except(tree: ast.Module, source: str) -> list[str]:
    """A handler names what it expects. To tidy up and raise again is no handling."""
    handlers = (node for node in nodes(tree) if isinstance(node, ast.ExceptHandler))
    return [f"line {one.lineno}: catches everything" for one in handlers if _is_blind(one)]


def no_environment(tree: ast.Module, source: str) -> list[str]:
    return [f"line {node.lineno}: reads {name}" for node, name in _names(tree) if name in ENVIRONMENT]


def no_long_file(tree: ast.Module, source: str) -> list[str]:
    """A longer file says in its docstring why it has so many lines."""
    count = len(source.splitlines())
    explained = re.search(r"\b\d+ lines\b", ast.get_docstring(tree) or "") is not None
    return [] if count <= MAX_FILE_LINES or explained else [f"{count} lines, above {MAX_FILE_LINES}"]


def no_long_function(tree: ast.Module, source: str) -> list[str]:
    functions = (node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = ((one.name, (one.end_lineno or one.lineno) - one.lineno + 1) for one in functions)
    return [
        f"{name}: {length} lines, above {MAX_FUNCTION_LINES}"
        for name, length in lengths
        if length > MAX_FUNCTION_LINES
    ]


def no_equal_records(tree: ast.Module, source: str) -> list[str]:
    """A record that changes is compared by identity, or says that its value is meant: two copies in flight
    that look alike are two, and a list would remove the wrong one."""
    decorators = [
        decorator
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).startswith("dataclass")
    ]
    return [
        f"line {one.lineno}: neither frozen=True nor eq= is given"
        for one in decorators
        if not (isinstance(one, ast.Call) and {word.arg for word in one.keywords} & {"eq", "frozen"})
    ]


def no_wrapper_by_hand(tree: ast.Module, source: str) -> list[str]:
    """What wraps a storage engine is an `EngineWrapper`, which passes on the verbs that it does not know."""
    found = []
    for node in (node for node in nodes(tree) if isinstance(node, ast.ClassDef)):
        methods = {
            one.name: one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        takes = ast.unparse(methods["__init__"].args) if "__init__" in methods else ""
        keys = ast.unparse(methods["put"].args) if "put" in methods else ""
        if "Engine" in takes and "ObjectKey" in keys and "EngineWrapper" not in map(ast.unparse, node.bases):
            found.append(f"line {node.lineno}: {node.name} is no EngineWrapper")
    return found


def no_insides(tree: ast.Module, source: str) -> list[str]:
    """The laboratory looks at the library as anybody may: by public names, and patches nothing. Bugs are
    planted in tests."""
    found = [f"line {node.lineno}: {name}" for node, name in _names(tree) if name in PATCHING]
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            if not own and node.attr not in PUBLIC_THOUGH_PRIVATE:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            inner = [alias.name for alias in node.names if alias.name.startswith("_")]
            found += [f"line {node.lineno}: imports {name}" for name in inner]
            found += [f"line {node.lineno}: {node.module}"] * (node.module or "").startswith("unittest")
    return found


def _names(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.alias, str]]:
    """Every name that is read, looked up on something, or imported."""
    for node in nodes(tree):
        if isinstance(node, ast.Name):
            yield node, node.id
        elif isinstance(node, ast.Attribute):
            yield node, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias, alias.name) for alias in node.names)


def _is_blind(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    everything = any(
        one is None or (isinstance(one, ast.Name) and one.id in {"Exception", "BaseException"})
        for one in caught
    )
    last = handler.body[-1]
    return everything and not (isinstance(last, ast.Raise) and last.exc is None)


EXCUSED: dict[Rule, set[str]] = {
    no_abstract_stubs: set(),
    no_equal_records: set(),
    no_blind_except: TASK_BOUNDARIES,
    no_environment: ENVIRONMENT_READERS,
    no_long_file: set(),
    no_long_function: set(),
    no_insides: TIMERS | PLAYERS,
    no_wrapper_by_hand: VERB_KEEPERS,
}
RULES = pytest.mark.parametrize("rule", EXCUSED, ids=lambda rule: rule.__name__)


def shipped_files() -> Iterator[tuple[str, str]]:
    """The modules of both packages by name, and their source."""
    for package in PACKAGES:
        yield from (
            (path.relative_to(SOURCE).as_posix(), source) for path, source in shipped(package).items()
        )


def objections(rule: Rule, source: str) -> list[str]:
    return rule(parse(source), source)


@RULES
def test_every_shipped_file_keeps_the_rule(rule: Rule) -> None:
    found = {}
    for name, source in shipped_files():
        if name not in EXCUSED[rule] and (rule is not no_insides or name.startswith("asynchicache_lab/")):
            found[name] = objections(rule, source)

    assert {name: words for name, words in found.items() if words} == {}


def test_the_walk_reaches_both_linked_folders() -> None:
    names = {name for name, _ in shipped_files()}

    wanted = {"errors.py", "kernels/__init__.py", "backends/__init__.py", "tree/radix_tree.py"}
    assert {f"asynchicache/{name}" for name in wanted} <= names


@pytest.mark.parametrize("name", sorted(TASK_BOUNDARIES))
def test_every_excuse_is_still_needed(name: str) -> None:
    assert objections(no_blind_except, (SOURCE / name).read_text()) != []


def a_function(lines: int) -> str:
    return "def long():\n" + "    pass\n" * (lines - 1)


def a_wrapper(base: str) -> str:
    return (
        f"class Slow{base}:\n  def __init__(self, engine: PoolEngine): pass\n"
        "  async def put(self, keys: Sequence[ObjectKey], slots): pass\n"
    )


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (no_abstract_stubs, "def get(): raise NotImplementedError"),
        (no_equal_records, "@dataclass\nclass A: pass"),
        (no_equal_records, "@dataclass(slots=True)\nclass A: pass"),
        (no_abstract_stubs, "def get(): raise NotImplementedError('later')"),
        (no_blind_except, "try: f()\nexcept Exception: pass"),
        (no_blind_except, "try: f()\nexcept (ValueError, Exception) as error: log(error)"),
        (no_blind_except, "try: f()\nexcept BaseException: raise ValueError from None"),
        (no_blind_except, "try: f()\nexcept: pass"),
        (no_environment, "import os\nfolder = os.environ['HOME']"),
        (no_environment, "import os\nfolder = os.getenv('HOME')"),
        (no_environment, "from os import environ as settings"),
        (no_long_file, '"""A module."""\n' + "x = 1\n" * MAX_FILE_LINES),
        (no_insides, "from unittest.mock import patch"),
        (no_insides, "import unittest.mock\nunittest.mock.patch.object(state, 'make_room', refuse)"),
        (no_insides, "setattr(state, 'make_room', refuse)"),
        (no_insides, "state = request._state"),
        (no_insides, "class A:\n  def f(self): return self.cache._parts"),
        (no_insides, "from asynchicache.planner.inventory import _may_move"),
        (no_wrapper_by_hand, a_wrapper("")),
        (no_long_function, a_function(MAX_FUNCTION_LINES + 1)),
        (no_long_function, "class A:\n  async " + a_function(MAX_FUNCTION_LINES + 1).replace("\n", "\n  ")),
    ],
)
def test_a_rule_finds_a_planted_breach(rule: Rule, source: str) -> None:
    assert objections(rule, source) != []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (no_abstract_stubs, "def eq(): return NotImplemented"),
        (no_equal_records, "@dataclass(slots=True, eq=False)\nclass A: pass"),
        (no_equal_records, "@dataclass(frozen=True)\nclass A: pass"),
        (no_blind_except, "try: f()\nexcept BaseException:\n  tidy()\n  raise"),
        (no_blind_except, "try: f()\nexcept (OSError, ValueError): pass"),
        (no_environment, "import os\npath = os.path.join('a', 'b')"),
        (no_long_file, '"""One machine: its 902 lines stay together."""\n' + "x = 1\n" * MAX_FILE_LINES),
        (no_long_file, '"""A module."""\n' + "x = 1\n" * (MAX_FILE_LINES - 1)),
        (no_long_function, a_function(MAX_FUNCTION_LINES)),
        (no_wrapper_by_hand, a_wrapper("(EngineWrapper)")),
        (no_insides, "class A(B):\n  def f(self): return self._state, super()._state, self.hit._asdict()"),
    ],
)
def test_a_rule_lets_pass_what_is_right(rule: Rule, source: str) -> None:
    assert objections(rule, source) == []
