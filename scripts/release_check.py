"""What `make release-check` and `make release` run: is this checkout a release that could be published today?

Checks that the version, the changelog and the tag agree, builds the sdist and a wheel from it, and installs
the wheel in a clean environment of every Python that can be found. There the command line starts, a toy
engine runs, and a trace is replayed. `--to FOLDER` keeps what is published: both files, their hashes, a lock
of what `[serve]` installs, with hashes, and its bill of materials (CycloneDX).
"""
# ruff: noqa: S603, T201  # it runs our own commands, and prints for people

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tests" / "data" / "traces" / "mooncake_conversation_h1.jsonl.gz"
MINORS = (11, 12, 13, 14)
CORE = (
    "asynchicache.cache",
    "asynchicache.cli.parser",
    "asynchicache.testing.seeded",
    "asynchicache.backends.file",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", help="only this interpreter; may be given again")
    parser.add_argument("--offline", action="store_true", help="build and check the files, install nothing")
    parser.add_argument("--to", type=Path, help="keep what is published in this folder")
    options = parser.parse_args(arguments)
    problems = [*texts_that_disagree(ROOT), *tag_problems(ROOT)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        problems += contents_that_lack(sdist, wheel)
        pythons = [] if options.offline else options.python or list(find_pythons())
        for python in pythons:
            problems += try_wheel(python, wheel, folder)
        if options.to is not None and not problems:
            publish(sdist, wheel, options.to.resolve(), folder)
    for problem in problems:
        print(f"NOT OK: {problem}")
    tried = ", ".join(map(str, pythons)) or "no Python"
    print(f"{wheel.name}: {len(problems)} problems; installed with {tried}")
    return 1 if problems else 0


def release(root: Path) -> str:
    """The version that the checkout would be released as."""
    return str(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def texts_that_disagree(root: Path) -> Iterator[str]:
    """A version that the changelog does not have as its newest cut, or that a second place contradicts."""
    version, changelog = release(root), (root / "CHANGELOG.md").read_text("utf-8")
    cuts = re.findall(r"^## (\d\S*)(.*)$", changelog, re.MULTILINE)
    if not cuts or cuts[0][0] != version:
        newest = cuts[0][0] if cuts else "none"
        yield f"the changelog's newest version is {newest}, pyproject.toml says {version}"
    elif not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", cuts[0][1]):
        yield f"the changelog's {version} has no date: '## {version} - YYYY-MM-DD'"
    if not changelog.split("\n## ", 2)[1].startswith("Unreleased"):
        yield "the changelog does not begin with '## Unreleased', where the next changes go"


def tag_problems(root: Path) -> Iterator[str]:
    """A tag of this version that is on another commit: that version is published."""
    tag = f"v{release(root)}"
    found = _output("git", "-C", str(root), "tag", "--list", tag).strip()
    if found and _output("git", "-C", str(root), "rev-list", "-n1", tag) != _output(
        "git", "-C", str(root), "rev-parse", "HEAD"
    ):
        yield f"{tag} is a tag of another commit: raise the version"


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist of the checkout, and a wheel built from that sdist, as an installer would."""
    environment = _environment(Path(sys.executable), folder / "build")
    _run(environment, "-m", "pip", "install", "--quiet", "build")
    _run(environment, "-m", "build", "--outdir", str(folder), str(ROOT))  # the wheel comes from the sdist
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def contents_that_lack(sdist: Path, wheel: Path) -> Iterator[str]:
    """Files that must be in both; links in the source tree may have been lost."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "__init__.py",
        "__init__.pyi",
        "py.typed",
        "kernels/__init__.py",
        "backends/file/__init__.py",
        "cli/main.py",
    ):
        if f"asynchicache/{name}" not in inside:
            yield f"the wheel lacks asynchicache/{name}"
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        if name not in source:
            yield f"the sdist lacks {name}"
    if any(name.startswith(("tests/", "docs/")) for name in inside):
        yield "the wheel has tests or docs"


def find_pythons() -> Iterator[str]:
    """Interpreters of the supported versions: on the path, and those of pyenv."""
    for minor in MINORS:
        name = f"python3.{minor}"
        pyenv = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        found = shutil.which(name)
        if pyenv or found:
            yield str(pyenv[-1]) if pyenv else str(found)
        else:
            print(f"{name} is not here: not tried")


def try_wheel(python: str, wheel: Path, folder: Path) -> Iterator[str]:
    """Install the wheel in a clean environment, and use it there."""
    version = _output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    print(f"installing {wheel.name} with Python {version}", flush=True)
    place = folder / f"python{version}"
    try:
        environment = _environment(Path(python), place)
        _run(environment, "-m", "pip", "install", "--quiet", str(wheel))
        _run(environment, "-m", "pip", "check")
        _run(environment, "-m", "asynchicache", "--version")
        _run(environment, "-m", "asynchicache", "doctor", "--report")
        _run(environment, "-c", f"import {', '.join(CORE)}")
        _run(environment, "-m", "asynchicache", "replay", str(TRACE))
        _run(environment, str(ROOT / "docs" / "examples" / "toy.py"))
    except subprocess.CalledProcessError as error:
        yield f"Python {version}: {' '.join(map(str, error.cmd[1:]))}: {error.stderr or error.stdout}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def publish(sdist: Path, wheel: Path, to: Path, folder: Path) -> None:
    """Put into a folder what a release consists of."""
    to.mkdir(parents=True, exist_ok=True)
    for file in (sdist, wheel):
        shutil.copy(file, to)
    (to / "NOTES.md").write_text(notes(ROOT), "utf-8")
    tools = _environment(Path(sys.executable), folder / "tools")
    _run(tools, "-m", "pip", "install", "--quiet", "cyclonedx-bom")
    report = folder / "report.json"
    resolve = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
    _run(tools, "-m", "pip", *resolve, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[serve]")
    lock = to / "requirements.lock"
    lock.write_text("".join(sorted(locked(json.loads(report.read_text("utf-8"))))), "utf-8")
    sbom = ["requirements", str(lock), "--pyproject", str(ROOT / "pyproject.toml")]
    _run(tools, "-m", "cyclonedx_py", *sbom, "--output-file", str(to / "sbom.cdx.json"))
    names = sorted(path.name for path in to.iterdir() if path.name != "SHA256SUMS")
    sums = (f"{hashlib.sha256((to / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (to / "SHA256SUMS").write_text("".join(sums), "utf-8")


def notes(root: Path) -> str:
    """What the changelog says of the version."""
    changelog = (root / "CHANGELOG.md").read_text("utf-8")
    of_version = changelog.split(f"\n## {release(root)}", 1)[1].split("\n## ", 1)[0]
    return of_version.partition("\n")[2].strip() + "\n"


def locked(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a lock, of what pip would install: names, versions, hashes; ours is the wheel itself."""
    for item in report["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        if name != "asynchicache":
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            yield f"{name}=={version} --hash=sha256:{digest}\n"


def _environment(python: Path, folder: Path) -> Path:
    """A clean virtual environment; its interpreter."""
    subprocess.run([str(python), "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
    return folder / "bin" / "python"


def _run(python: Path, *arguments: str) -> None:
    """Run in an empty folder: the checkout must not be importable."""
    subprocess.run(
        [str(python), "-P", *arguments], check=True, capture_output=True, text=True, cwd=python.parents[1]
    )


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
