"""`make engines-e2e`: what it refuses, and that its environments hold what their lists say and no more."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytestmark = pytest.mark.skipif(not SCRIPTS.exists(), reason="a source distribution has no scripts")


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    """`scripts/engines_e2e.py`, which imports its neighbour: a folder of tests has the same name."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "conformance"}
    sys.path.insert(0, str(SCRIPTS))
    yield import_module("engines_e2e")
    sys.path.remove(str(SCRIPTS))
    sys.modules.pop("conformance")
    sys.modules.update(ours)


def test_every_engine_has_tests_and_a_pinned_list_of_packages(runner: ModuleType) -> None:
    for engine in runner.ENGINES:
        lines = [line for line in engine.requirements.read_text().splitlines() if line[0] != "#"]
        assert list(engine.suite.glob("test_*.py")), engine
        assert all(re.fullmatch(r"[\w.-]+==\S+", line) for line in lines), engine
        assert any(re.match(rf"{engine.name}(-cpu)?=={engine.version}\b", line) for line in lines), engine


@pytest.mark.parametrize("name", ["clients.txt", "clients-benchmarks.txt"])
def test_every_client_is_pinned_and_the_page_names_its_version(name: str) -> None:
    lines = [line for line in (SCRIPTS / name).read_text().splitlines() if line[0] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==\S+", line) for line in lines)
    page = (SCRIPTS.parent / "docs/howto/serve.md").read_text()
    pins = dict(line.split("==") for line in lines)
    for client in pins.keys() & {"openai", "guidellm", "lm_eval"}:
        assert f"| {client.replace('_', '-')} {pins[client]} |" in page


def test_an_unknown_engine_is_refused_by_name(
    runner: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as refused:
        runner.main(["tensorrt", "--folder", str(tmp_path)])

    assert refused.value.code == 2
    assert "no engine ['tensorrt']" in capsys.readouterr().err


def test_an_environment_is_made_once_for_each_state_of_its_list(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(runner.venv, "create", lambda *args, **_: Path(args[0]).mkdir(exist_ok=True))
    monkeypatch.setattr(runner, "pip", lambda *args: made.append(args))
    engine = runner.ENGINES[0]

    runner.make_environment(tmp_path, engine)
    runner.make_environment(tmp_path, engine)
    assert len(made) == 1
    assert "--no-deps" in made[0]

    (tmp_path / "venv" / ".installed").write_text("of an older list")
    runner.make_environment(tmp_path, engine)
    assert len(made) == 2


def test_engines_are_run_at_the_same_time_and_what_they_print_is_not_mixed(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=60)

    def runs(command: list[Any], *, stdout: Any, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        stdout.write(f"begin {cwd.name}\n")
        both.wait()  # one of them alone would wait in vain
        stdout.write(f"end {cwd.name}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(runner.subprocess, "run", runs)
    folders = {engine: tmp_path / engine.name for engine in runner.ENGINES}
    for folder in folders.values():
        folder.mkdir()

    assert len(runner.run_suites(folders, [])) == 2
    assert capsys.readouterr().out.split() == [
        word for engine in runner.ENGINES for word in ("begin", engine.name, "end", engine.name)
    ]


def test_a_run_that_does_not_end_is_a_failure(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(command: list[str], **_: Any) -> None:
        raise runner.subprocess.TimeoutExpired(command, runner.SECONDS)

    monkeypatch.setattr(runner.subprocess, "run", hangs)

    assert not runner.run_suite(tmp_path, runner.ENGINES[0], []).ok
