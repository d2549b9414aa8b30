"""One name for every module, and deciding code that stays free of machinery."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Not `threading`, which the layers contract forbids as well: numpy imports it, and the words that all
# deciding code uses hold numpy. Reading sys.modules finds what import-linter cannot, a dependency that
# brings in another.
MACHINERY = {"asyncio", "torch", "triton"}

LIST_MACHINERY = """
import importlib, json, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(json.loads(sys.argv[1])) & set(sys.modules))))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter in the repository root, which `-c` puts first on its path."""
    return subprocess.run(
        [sys.executable, "-c", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def machinery_behind(*modules: str) -> list[str]:
    run = python(LIST_MACHINERY, json.dumps(sorted(MACHINERY)), *modules)
    assert run.returncode == 0, run.stderr
    found: list[str] = json.loads(run.stdout)
    return found


def deciding_modules() -> list[str]:
    """The modules that the contract in pyproject.toml names, those of its packages included."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    names = next(one["source_modules"] for one in contracts if one["name"] == "deciding is sans-io")
    modules = []
    for name in names:
        paths = getattr(import_module(name), "__path__", [])
        modules += [name, *(module.name for module in pkgutil.walk_packages(paths, f"{name}."))]
    return modules


@pytest.mark.parametrize("line", ["import backends", "from kernels import batch", "import kernels.batch"])
def test_one_name_only(line: str) -> None:
    folder = "kernels" if "kernels" in line else "backends"
    if not (ROOT / folder).is_dir():
        pytest.skip("a source distribution has these folders inside the package only")

    run = python(line)

    assert run.returncode == 1
    advice = f"import this folder as asynchicache.{folder}, not as {folder}"
    assert advice in run.stderr or "No module named 'kernels.batch'" in run.stderr


def test_transformers_does_not_take_our_kernels_for_another_package() -> None:
    run = python("from transformers.utils import is_kernels_available as there; raise SystemExit(there())")

    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("folder", ["kernels", "backends"])
def test_the_links_lead_to_the_folders(folder: str) -> None:
    module = import_module(f"asynchicache.{folder}")

    assert module.__name__ == f"asynchicache.{folder}"


def test_deciding_code_brings_in_no_machinery() -> None:
    assert machinery_behind(*deciding_modules()) == []


def test_machinery_is_seen_where_there_is_some() -> None:
    assert machinery_behind("asynchicache.ports") == ["asyncio"]
