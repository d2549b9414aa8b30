"""What `make mutants` runs: small mistakes are planted in the code that decides and moves, one at a time, and
the tests of the package are to find each. A mutant that no test finds has survived: a test is missing.

The checkout stays as it is: mutants are written to a copy of the package. Those that cannot be told from the
original are listed in `equivalent_mutants.toml`, by their text, so that an entry outlives moves.
"""
# ruff: noqa: S603, T201  # it runs our own commands, and prints for people

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mutations import Mutant, Mutations

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "asynchicache"
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.toml"
PACKAGES = {
    "tree": ["tests/tree"],
    "planner": ["tests/planner", "tests/controller", "tests/cache"],
    "controller": ["tests/controller", "tests/cache"],
    "transfer": ["tests/transfer"],
    "storage": ["tests/storage"],
}
"""Packages that are mutated, and the folders of tests that are to find it, nearest first."""
TEST_SECONDS = 30
"""A single test that takes longer hangs; the slowest takes 3 s."""
MEMORY = 12 << 30
"""Bytes that the tests of a mutant may take: a loop without an end also appends without end."""


def all_mutants(packages: Sequence[str]) -> list[Mutant]:
    files = [path for package in packages for path in sorted((PACKAGE / package).rglob("*.py"))]
    return [
        mutant
        for path in files
        for mutant in Mutations(path.relative_to(PACKAGE).as_posix(), path.read_text()).found
    ]


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Why known mutants cannot be told from the original, by their keys."""
    entries = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {
        (one["file"], one["name"], one["was"], becomes): one["reason"]
        for one in entries
        for becomes in one["becomes"]
    }


def tests_for(mutant: Mutant) -> list[str]:
    """Files of tests, the most promising first: they import the module, are named like it, are short."""
    module = "asynchicache." + mutant.file.removesuffix(".py").replace("/", ".")
    stem = Path(mutant.file).stem.rstrip("s")

    def distance(path: Path) -> tuple[bool, bool, int]:
        source = path.read_text()
        return re.search(rf"{re.escape(module)}\b", source) is None, stem not in path.stem, len(source)

    folders = [ROOT / folder for folder in PACKAGES[mutant.package]]
    return [str(path) for folder in folders for path in sorted(folder.glob("test_*.py"), key=distance)]


class Outcome(NamedTuple):
    """What the tests made of a mutant: `survived`, `killed` or `hung`, and the test that found it."""

    verdict: str
    by: str
    seconds: float


class Laboratory:
    """A copy of the package, in which mutants live one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output"
        shutil.copytree(PACKAGE, folder / "asynchicache", ignore=shutil.ignore_patterns("__pycache__"))
        self.bounds: dict[str, float] = {}

    def judge(self, mutant: Mutant) -> Outcome:
        if mutant.package not in self.bounds:
            sound = self._run(tests_for(mutant), 3600, write_bytecode=True)
            if sound.verdict != "survived":
                raise SystemExit(f"the tests of {mutant.package} fail without a mutant: {sound.by}")
            self.bounds[mutant.package] = 4 * sound.seconds + TEST_SECONDS
        path = self.folder / "asynchicache" / mutant.file
        sound_source = path.read_bytes()
        path.write_text(mutant.applied(sound_source.decode()))
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # it might pass for that of the mutant
        try:
            return self._run(tests_for(mutant), self.bounds[mutant.package])
        finally:
            path.write_bytes(sound_source)

    def _run(self, tests: list[str], bound: float, *, write_bytecode: bool = False) -> Outcome:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        environment["PYTHONDONTWRITEBYTECODE"] = "" if write_bytecode else "1"
        start = time.monotonic()
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--timeout", str(TEST_SECONDS)], cwd=ROOT, env=environment,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
            try:
                code = process.wait(bound)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # servers of a test that was killed as well
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return outcome(code, self.output.read_text(errors="replace"), time.monotonic() - start)


def outcome(code: int | None, output: str, seconds: float) -> Outcome:
    """What pytest's exit status, None if it was killed, and its output mean."""
    if code == 0:
        return Outcome("survived", "", seconds)
    if code in (4, 5):
        raise SystemExit(f"pytest found no tests:\n{output}")
    if code is None or "+ Timeout +" in output:
        return Outcome("hung", "", seconds)
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
    return Outcome("killed", found[1] if found else output.strip().splitlines()[-1][:100], seconds)


def diff(mutant: Mutant) -> str:
    name = f"src/asynchicache/{mutant.file}"
    old = (PACKAGE / mutant.file).read_text()
    new = mutant.applied(old)
    return "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, name, n=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant mistakes, and see which the tests do not find.")
    parser.add_argument("--count", type=int, default=100, help="mutants that are drawn (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument(
        "--package", action="append", choices=PACKAGES, help="leave the others out; may be repeated"
    )
    parser.add_argument("--only", metavar="FILE:LINE", help="all mutants of one line: tree/radix_tree.py:173")
    parser.add_argument("--json", type=Path, help="file that results are written to")
    return parser.parse_args()


def drawn(options: argparse.Namespace) -> list[Mutant]:
    mutants = all_mutants(options.package or list(PACKAGES))
    if options.only:
        file, line = options.only.rsplit(":", 1)
        file = file.removeprefix("src/asynchicache/")
        return [one for one in mutants if (one.file, one.line) == (file, int(line))]
    known = equivalents()
    for key in known.keys() - {one.key for one in mutants}:
        if key[0].split("/")[0] in (options.package or PACKAGES):
            print(f"equivalent_mutants.toml: no such mutant any more: {key}")
    random.Random(options.seed).shuffle(mutants)  # before known ones are left out: a draw stays as it was
    return [one for one in mutants if one.key not in known][: options.count]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the tests that run end as well
    options = arguments()
    mutants = drawn(options)
    results: list[tuple[Mutant, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        laboratory = Laboratory(Path(folder))
        for number, mutant in enumerate(mutants, 1):
            found = laboratory.judge(mutant)
            results.append((mutant, found))
            place = f"{mutant.file}:{mutant.line}"
            print(f"{number:4}/{len(mutants)} {found.verdict:8} {place} {found.by}", flush=True)
            if found.verdict == "survived":
                print(diff(mutant), flush=True)
    survivors = sum(found.verdict == "survived" for _, found in results)
    print(f"{len(mutants) - survivors} of {len(mutants)} found, seed {options.seed}")
    if options.json:
        rows = [{**mutant._asdict(), **found._asdict()} for mutant, found in results]
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
