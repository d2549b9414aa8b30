"""What `make engines-e2e` runs: our adapters in whole engines that serve tiny models on a CPU.

Every engine has an environment of its own below `.engines`, installed once from a pinned list, and its tests
run in a process of their own. `make conformance` needs no running engine, and is quicker.
"""
# ruff: noqa: S603, T201  # it runs our own commands, and prints for people

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TextIO

from conformance import Result, pip, python_of, read_report, ready, table

ROOT = Path(__file__).parents[1]
SUITES = ROOT / "tests" / "engines"
FOLDER = ROOT / ".engines"
OUTPUT = "output.txt"
SECONDS = 1800
"""Most that one engine's tests may take; with models made and classes inspected they need a tenth of that."""


class WholeEngine(NamedTuple):
    """An engine that runs here.

    Attributes:
        name: of its folder of tests, its folder below `.engines`, and its list of packages in `scripts`.
        version: the one in that list.
        environment: variables of its processes.
    """

    name: str
    version: str
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def requirements(self) -> Path:
        return ROOT / "scripts" / f"engines-{self.name}.txt"

    @property
    def suite(self) -> Path:
        return SUITES / self.name


ENGINES = (
    WholeEngine(
        "vllm",
        "0.32.0",
        (
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),  # `LLM` keeps all of an engine in its process
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("HF_HUB_OFFLINE", "1"),
            ("OMP_NUM_THREADS", "1"),
        ),
    ),
    WholeEngine(
        "sglang",
        "0.5.23",
        (
            ("SGLANG_USE_CPU_ENGINE", "1"),
            ("SGLANG_RUST_BUILD_MODE", "never"),  # the tree in the wheel is built
            ("SGLANG_MAMBA_CONV_DTYPE", "float32"),
            ("TORCHDYNAMO_DISABLE", "1"),  # compiling costs a minute, for models that compute in milliseconds
            ("TOKENIZERS_PARALLELISM", "false"),
            ("HF_HUB_OFFLINE", "1"),
            ("OMP_NUM_THREADS", "1"),
        ),
    ),
)


def make_environment(folder: Path, engine: WholeEngine) -> None:
    """Install the engine's packages, once for each state of its list.

    The list is complete, and pip must not add to it: engines' pins bring builds for CUDA.
    """
    wanted = hashlib.sha256(engine.requirements.read_bytes()).hexdigest()
    stamp = folder / "venv" / ".installed"
    if ready(stamp, wanted):
        return
    print(
        f"installing {engine.requirements.name} into {folder / 'venv'}, 2.5 GB; this takes minutes",
        flush=True,
    )
    venv.create(folder / "venv", with_pip=True, clear=True)
    pip(folder, "install", "--no-deps", "--requirement", str(engine.requirements))
    stamp.write_text(wanted)


def environment(folder: Path, engine: WholeEngine) -> dict[str, str]:
    """Of the tests and of all processes that they start: our package comes from the source tree."""
    paths = (
        ROOT / "src",
        engine.suite / "site",
        engine.suite,
        SUITES,
        ROOT / "tests" / "conformance",
        ROOT / "tests",
    )
    return (
        os.environ
        | dict(engine.environment)
        | {
            "ASYNCHICACHE_ENGINE_FOLDER": str(folder),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),  # what an engine finds out about model classes
        }
    )


def run_suites(folders: Mapping[WholeEngine, Path], more: Sequence[str]) -> list[Result]:
    """Run the tests of several engines at the same time, each mostly in one thread; print what they print."""
    with ThreadPoolExecutor(len(folders)) as pool:
        runs = [pool.submit(_run_aside, folder, engine, more) for engine, folder in folders.items()]
        results = []
        for folder, run in zip(folders.values(), runs, strict=True):
            results.append(run.result())
            sys.stdout.write((folder / OUTPUT).read_text(errors="replace"))
    return results


def _run_aside(folder: Path, engine: WholeEngine, more: Sequence[str]) -> Result:
    with (folder / OUTPUT).open("w") as output:
        return run_suite(folder, engine, more, output)


def run_suite(folder: Path, engine: WholeEngine, more: Sequence[str], output: TextIO | None = None) -> Result:
    """Run an engine's tests; those that did not even begin count as one failure.

    Args:
        folder: of the engine.
        engine: the engine.
        more: arguments of pytest.
        output: takes what the tests print. Default: the terminal.
    """
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    where = ["-c", SUITES / "pytest.ini", "--rootdir", ROOT, "--confcutdir", SUITES]
    command = [python_of(folder), "-m", "pytest", *where, engine.suite, f"--junitxml={report}", *more]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment(folder, engine),
            cwd=folder,
            timeout=SECONDS,
            check=False,
            stdout=output,
            stderr=output and subprocess.STDOUT,
        )
        whole = done.returncode == 0
    except subprocess.TimeoutExpired:
        whole = False
    return read_report(engine, report, time.monotonic() - started, whole=whole)


def run_file(folder: Path, engine: WholeEngine, file: str, more: Sequence[str]) -> int:
    """Run a file of an engine's suite in its environment; returns its exit status."""
    command = [python_of(folder), engine.suite / file, *more]
    return subprocess.run(command, env=environment(folder, engine), cwd=folder, check=False).returncode


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    names = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser(description="Run our adapters in whole engines, on a CPU.")
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE", help=f"some of {names}; all of them by default"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where environments and models go")
    parser.add_argument(
        "--run", metavar="FILE", help="run a file of the suite, such as speed.py, and no tests"
    )
    parser.add_argument("--install", action="store_true", help="make the environments, and run nothing")
    options, more = parser.parse_known_args(arguments)
    unknown = set(options.engines) - set(names)
    if unknown:
        parser.error(f"no engine {sorted(unknown)}; there are {names}")
    return options, more


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Returns:
        0 if every engine's tests passed, 1 if not. What pip lacks is an error of its own.
    """
    options, more = parse(arguments)
    chosen = [engine for engine in ENGINES if engine.name in (options.engines or [engine.name])]
    folders = {engine: options.folder.resolve() / engine.name for engine in chosen}
    for engine, folder in folders.items():
        folder.mkdir(parents=True, exist_ok=True)
        make_environment(folder, engine)
    if options.install:
        return 0
    if options.run:
        runs = [run_file(folder, engine, options.run, more) for engine, folder in folders.items()]
        return max(runs)
    if len(folders) == 1:
        results = [run_suite(folder, engine, more) for engine, folder in folders.items()]
    else:
        results = run_suites(folders, more)
    print(table([("engine", "version", "tests", "took", ""), *(result.row() for result in results)]))
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
