"""What `make conformance` runs: our adapters inside the engines' own classes, from the published wheels.

Wheels are unpacked, never installed: their pins would bring CUDA. What they import goes into an
environment of its own, and every engine runs in a process of its own. The second run finds all ready.
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
import zipfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Protocol
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "scripts" / "conformance-requirements.txt"
SUITES = ROOT / "tests" / "conformance"
RECORDS = ROOT / "tests" / "data"
FOLDER = ROOT / ".conformance"
SECONDS = 900
"""Most that one engine may take: importing one takes up to half a minute, its tests about a minute."""

NEWEST = "newest"
"""In place of a version: what a nightly run asks, to hear of a new release before users do."""

Row = tuple[str, ...]


class Engine(NamedTuple):
    """One engine that we plug into.

    Attributes:
        name: of its package, and of its folder of tests.
        version: the one that is fetched, unless another is asked for.
        left_out: files of the wheel that nobody needs without a GPU; they may be a gigabyte.
    """

    name: str
    version: str
    left_out: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name}-{self.version}"


ENGINES = (
    Engine("vllm", "0.33.0", left_out=("*.so",)),
    Engine("sglang", "0.5.23"),
)


class Tested(Protocol):
    """An engine as results name it."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...


class Result(NamedTuple):
    """What became of one engine's tests."""

    engine: Tested
    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def ok(self) -> bool:
        return self.passed > 0 and not self.failed

    def row(self) -> Row:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return (
            self.engine.name,
            self.engine.version,
            counts,
            f"{self.seconds:.0f} s",
            "ok" if self.ok else "FAILED",
        )


def python_of(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def pip(folder: Path, *arguments: str) -> None:
    """
    Raises:
        subprocess.CalledProcessError: pip failed; it has said why.
    """
    command = [python_of(folder), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, cwd=folder)


def ready(stamp: Path, content: str) -> bool:
    return stamp.exists() and stamp.read_text() == content


def make_environment(folder: Path) -> None:
    """The packages that engines import, once for each state of the list."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    stamp = folder / "venv" / ".installed"
    if ready(stamp, wanted):
        return
    print(f"installing {REQUIREMENTS.name} into {folder / 'venv'}; torch alone takes minutes", flush=True)
    if not python_of(folder).exists():
        venv.create(folder / "venv", with_pip=True)
    pip(folder, "install", "--requirement", str(REQUIREMENTS))
    stamp.write_text(wanted)


def unpack(folder: Path, engine: Engine) -> None:
    """The engine's wheel, fetched and unpacked, once for each version."""
    target = folder / engine.title
    stamp = target / ".unpacked"
    if ready(stamp, repr(engine)):
        return
    print(f"fetching {engine.name} {engine.version}", flush=True)
    wheels = folder / "wheels"
    pip(folder, "download", "--no-deps", "--dest", str(wheels), f"{engine.name}=={engine.version}")
    wheel = next(wheels.glob(f"{engine.title}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if not any(fnmatch(name, no) for no in engine.left_out)]
        archive.extractall(target, wanted)
    stamp.write_text(repr(engine))


def environment(folder: Path, engine: Engine) -> dict[str, str]:
    """Of the engine's process: where its wheel is, and our package from the source tree."""
    return os.environ | {
        "ASYNCHICACHE_ENGINE_WHEEL": str(folder / engine.title),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", SUITES, SUITES / engine.name, ROOT / "tests"))),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def run_suite(folder: Path, engine: Engine, more: Sequence[str]) -> Result:
    """Its tests, in a process of their own; those that did not even begin count as one failure."""
    report = folder / f"{engine.name}.xml"
    report.unlink(missing_ok=True)
    # From the root, modules are `tests.conformance.vllm...`; from their own folder they would be `vllm...`.
    where = ["-c", SUITES / "pytest.ini", "--rootdir", ROOT, "--confcutdir", SUITES]
    command = [python_of(folder), "-m", "pytest", *where, SUITES / engine.name]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [*command, f"--junitxml={report}", *more],
            env=environment(folder, engine),
            cwd=folder,  # the root would bring `kernels`, which transformers takes for another package
            timeout=SECONDS,
            check=False,
        )
        whole = done.returncode == 0
    except subprocess.TimeoutExpired:
        whole = False
    return read_report(engine, report, time.monotonic() - started, whole=whole)


def read_report(engine: Tested, report: Path, seconds: float, *, whole: bool) -> Result:
    """Counts of a JUnit report; a process that failed without a failed test is a failure too."""
    if not report.exists():
        return Result(engine, 0, 1, 0, seconds)
    suites = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314 - pytest wrote it
    names = ("tests", "failures", "errors", "skipped")
    counts = [[int(suite.get(name, 0)) for name in names] for suite in suites]
    tests, failures, errors, skipped = (sum(column) for column in zip(*counts, strict=True))
    failed = failures + errors
    return Result(engine, tests - failed - skipped, failed or int(not whole), skipped, seconds)


def record(folder: Path, engine: Engine) -> None:
    """Write down the engine's signatures, and its calls in a scenario, for tests that have no engine."""
    write_output(folder, engine, SUITES / "seams.py", RECORDS / "seams" / f"{engine.title}.json")
    scenario = SUITES / engine.name / "scenario.py"
    if scenario.exists():
        write_output(folder, engine, scenario, RECORDS / "calls" / f"{engine.title}.json")


def write_output(folder: Path, engine: Engine, script: Path, target: Path) -> None:
    """What a script prints in the engine's environment, as a file."""
    command = [python_of(folder), script, engine.name]
    done = subprocess.run(
        command, env=environment(folder, engine), cwd=folder, check=True, stdout=subprocess.PIPE
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(done.stdout)
    print(f"wrote {target.relative_to(ROOT)}")


def table(rows: Iterable[Row]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def engine_of(text: str) -> Engine:
    """An engine by its name, in a version if one is named.

    Raises:
        argparse.ArgumentTypeError: there is no such engine.
    """
    name, _, version = text.partition("==")
    for engine in ENGINES:
        if engine.name == name:
            return engine._replace(version=version or engine.version)
    raise argparse.ArgumentTypeError(f"no engine {name!r}; there are {[engine.name for engine in ENGINES]}")


def settled(folder: Path, engine: Engine) -> Engine:
    """The engine with a number for `newest`."""
    if engine.version != NEWEST:
        return engine
    command = [python_of(folder), "-m", "pip", "index", "versions", engine.name]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return engine._replace(version=listed.stdout.partition("(")[2].partition(")")[0])


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    names = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser(
        description="Run our adapters inside the engines' own classes, on a CPU."
    )
    parser.add_argument(
        "engines",
        nargs="*",
        type=engine_of,
        metavar="ENGINE[==VERSION]",
        help=f"some of {names}, also in other versions, `newest` for what the index has; all by default",
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where wheels and packages go")
    parser.add_argument("--record", action="store_true", help="write signatures and calls to tests/data")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Returns:
        0 if every engine's tests passed, 1 if not. What pip or a wheel lacks is an error of its own.
    """
    options, more = parse(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_environment(folder)
    chosen = [settled(folder, engine) for engine in options.engines or ENGINES]
    for engine in chosen:
        unpack(folder, engine)
    if options.record:
        for engine in chosen:
            record(folder, engine)
        return 0
    results = [run_suite(folder, engine, more) for engine in chosen]
    print(table([("engine", "version", "tests", "took", ""), *(result.row() for result in results)]))
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
