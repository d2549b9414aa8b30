"""`make gpu` says in words what a machine lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_needs.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a source distribution has no scripts")


def look(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it; `-S` leaves out every installed package, and `path` has some again."""
    return subprocess.run(
        [sys.executable, *options, str(SCRIPT)],
        env={} if path is None else {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_torch_it_asks_for_the_python_that_has_it() -> None:
    found = look("-S")

    assert found.returncode == 1
    assert "has no torch: name the Python that has it, make gpu PYTHON=" in found.stdout
    assert found.stderr == ""


def test_missing_packages_are_named_with_what_brings_them(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "rich-15.0.0.dist-info").mkdir()
    (tmp_path / "rich-15.0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: rich\nVersion: 1\n"
    )

    found = look("-S", path=tmp_path)

    assert found.returncode == 1
    assert " lacks aiofiles, anyio, " in found.stdout
    assert "pytest-timeout" in found.stdout
    assert "rich" not in found.stdout  # in whatever version
    assert "pip install --no-deps --target packages --requirement requirements-gpu.txt" in found.stdout
    assert "docs/howto/gpu.md" in found.stdout


def test_a_whole_environment_lacks_nothing() -> None:
    found = look()

    assert (found.returncode, found.stderr) == (0, "")
    assert "lacks" not in found.stdout
