"""`make conformance`: how it reads what an engine's tests reported, and what it refuses."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "conformance.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no scripts")


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conformance_runner", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple looks its module up
    spec.loader.exec_module(module)
    return module


def report(folder: Path, tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> Path:
    """A JUnit report as pytest writes it."""
    path = folder / "report.xml"
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
    path.write_text(f'<testsuites><testsuite name="pytest" {counts}/></testsuites>')
    return path


@pytest.mark.parametrize(
    ("counts", "whole", "passed", "failed", "ok"),
    [
        ({"tests": 5, "skipped": 1}, True, 4, 0, True),
        ({"tests": 5, "failures": 1, "errors": 1}, False, 3, 2, False),
        ({"tests": 5}, False, 5, 1, False),  # every test passed, and then the process crashed
        ({"tests": 0}, True, 0, 0, False),  # nothing was run, so nothing was shown
        ({"tests": 2, "skipped": 2}, True, 0, 0, False),
    ],
)
def test_an_engine_passes_only_if_tests_ran_and_all_was_well(
    runner: ModuleType,
    tmp_path: Path,
    counts: dict[str, int],
    whole: bool,
    passed: int,
    failed: int,
    ok: bool,
) -> None:
    result = runner.read_report(runner.ENGINES[0], report(tmp_path, **counts), 1.0, whole=whole)

    assert (result.passed, result.failed, result.ok) == (passed, failed, ok)


def test_a_process_that_died_before_its_first_test_is_a_failure(runner: ModuleType, tmp_path: Path) -> None:
    result = runner.read_report(runner.ENGINES[0], tmp_path / "missing.xml", 1.0, whole=False)

    assert not result.ok


def test_an_unknown_engine_is_refused_by_name(
    runner: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as refused:
        runner.main(["tensorrt", "--folder", str(tmp_path)])

    assert refused.value.code == 2
    assert "no engine 'tensorrt'" in capsys.readouterr().err


def test_every_engine_has_tests_and_a_record_of_its_seam(runner: ModuleType) -> None:
    for engine in runner.ENGINES:
        assert list((runner.SUITES / engine.name).glob("test_*.py")), engine
        assert (runner.RECORDS / "seams" / f"{engine.title}.json").exists(), engine


def test_the_environment_is_pinned(runner: ModuleType) -> None:
    lines = [line for line in runner.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]

    assert lines
    assert all("==" in line for line in lines)
