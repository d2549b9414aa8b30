"""`make mutants`: what it mutates, what it leaves alone, and how it tells what the tests made of it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from house.sources import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutants.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no scripts")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script
    spec = importlib.util.spec_from_file_location("mutants_tool", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules[spec.name], sys.modules["mutations"]


def becomes(tool: ModuleType, source: str) -> set[str]:
    """What the changed lines of each mutant are."""
    return {mutant.becomes for mutant in tool.Mutations("tree/file.py", source).found}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"(a <= b)", "(a >= b)"}),
        ("a == b", {"(a != b)"}),
        ("a is b in c", {"(a is not b in c)", "(a is b not in c)"}),
        ("a and b", {"(a or b)", "a", "b"}),
        ("not a", {"a"}),
        ("a + b", {"(a - b)"}),
        ("a[5]", {"a[6]", "a[4]"}),
        ("a = True", {"a = False"}),
        ("a = max(b, c)", {"a = min(b, c)"}),
        ("a()", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass", "a -= b"}),
        ("del a[b]", {"pass"}),
        ("raise a", {"pass"}),
        ("b if a else c", {"b if True else c", "b if False else c"}),
        ("[a for a in b if a]", {"[a for a in b if True]", "[a for a in b if False]"}),
        ("def f(): return a", {"def f(): return None"}),
        ("def f() -> bool: return a", {"def f() -> bool: return not a"}),
    ],
)
def test_each_kind_of_mistake_is_planted(tool: ModuleType, source: str, expected: set[str]) -> None:
    assert becomes(tool, source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Words."""',
        "a = 'b' f'{c + 1}'",
        "a = 0.5",
        "a = 512, 32 << 20",
        "assert a < b",
        "a = zip(b, c, strict=True)",
        "logger.info(a < b)",
        "if TYPE_CHECKING: import a",
        "a: dict[int | None, Literal[1]]",
        "def __repr__(self): return a",
        "class A:\n def __init__(self): self.a = b",
    ],
)
def test_what_no_test_is_asked_to_see_is_left_alone(tool: ModuleType, source: str) -> None:
    assert becomes(tool, source) == set()


def test_a_mutant_differs_in_its_own_lines_only(tool: ModuleType) -> None:
    source = "# é\ndef f(a, b):\n    é = (a +\n        b)  # why\n    return é\n"

    [one] = [one for one in tool.Mutations("tree/file.py", source).found if "-" in one.becomes]

    assert (one.name, one.line, one.was) == ("f", 3, "é = (a + b) # why")
    assert one.applied(source) == "# é\ndef f(a, b):\n    é = ((a - b))  # why\n    return é\n"


def test_every_mutant_of_the_package_is_python(tool: ModuleType) -> None:
    mutants = tool.all_mutants(["storage"])

    assert len(mutants) > 500
    for mutant in mutants[::20]:
        source = (tool.PACKAGE / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(parse(source))


def test_known_equivalents_have_a_reason_and_a_file(tool: ModuleType) -> None:
    for (file, *_), reason in tool.equivalents().items():
        assert (tool.PACKAGE / file).is_file()
        assert len(reason.split()) > 3


def test_the_nearest_tests_come_first(tool: ModuleType) -> None:
    [mutant, *_] = [one for one in tool.all_mutants(["tree"]) if one.file == "tree/invariants.py"]

    names = [Path(path).name for path in tool.tests_for(mutant)]

    assert names[0] == "test_tree_invariants.py"
    assert set(names) == {path.name for path in (ROOT / "tests" / "tree").glob("test_*.py")}


@pytest.mark.parametrize(
    ("output", "code", "verdict", "by"),
    [
        ("3 passed", 0, "survived", ""),
        (
            "ERROR  log: x\nFAILED tests/a.py::test[b c] - assert 1 == 2\n1 failed",
            1,
            "killed",
            "tests/a.py::test[b c]",
        ),
        ("ImportError: x", 1, "killed", "ImportError: x"),
        ("+++ Timeout +++", 1, "hung", ""),
        ("...", None, "hung", ""),
    ],
)
def test_how_the_tests_ended_is_the_verdict(
    tool: ModuleType, output: str, code: int | None, verdict: str, by: str
) -> None:
    assert tool.outcome(code, output, 1.0) == tool.Outcome(verdict, by, 1.0)


def test_tests_that_were_not_found_kill_nothing(tool: ModuleType) -> None:
    with pytest.raises(SystemExit, match="found no tests"):
        tool.outcome(5, "no tests ran", 1.0)
