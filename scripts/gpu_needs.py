"""What `make gpu` runs first: is everything here that its report needs? Standard library only.

Says in words what is missing and how to get it, with a network and without. Installs and fetches nothing.
"""
# ruff: noqa: T201  # it prints for people

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements-gpu.txt"


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036  any Python may run this
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make gpu PYTHON=python3.11")
        return 1
    if find_spec("torch") is None:
        print(f"{sys.executable} has no torch: name the Python that has it, make gpu PYTHON=/path/to/python")
        return 1
    if missing := list(missing_packages()):
        print(f"{sys.executable} lacks {', '.join(missing)}. With a network: make dev, which takes torch as")
        print("constraints.txt pins it, or, to keep the torch that is there:")
        print("    pip install --no-deps --target packages --requirement requirements-gpu.txt")
        print("    PYTHONPATH=$PWD/packages make gpu")
        print("Without one: docs/howto/gpu.md says how to bring these packages along.")
        return 1
    if find_spec("triton") is None:
        print(
            "triton is not installed: the tests of kernels are skipped, and pages are not copied by kernels"
        )
    return 0


def missing_packages() -> Iterator[str]:
    """Those of `requirements-gpu.txt` that are not installed, in whatever version."""
    for name in re.findall(r"^([\w-]+)==", REQUIREMENTS.read_text("utf-8"), re.MULTILINE):
        try:
            distribution(name)
        except PackageNotFoundError:
            yield name


if __name__ == "__main__":
    sys.exit(main())
