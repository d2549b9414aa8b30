"""What a run of the tests shows and survives: see `tests/conftest.py` and `pyproject.toml`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import forking

ROOT = Path(__file__).parents[2]

SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(40))
def test_of_one_reason(number):
    pytest.skip("there is no such device")

@pytest.mark.parametrize("number", range(20))
def test_of_many_reasons(number):
    pytest.skip(f"reason {number}")

def test_fails():
    assert False
"""

HANGS = """
import asyncio, threading
import pytest

soon = pytest.mark.timeout(0.5, func_only=True)

@soon
@pytest.mark.asyncio
async def test_waits_for_ever():
    await asyncio.Event().wait()

@soon
@pytest.mark.asyncio
async def test_waits_while_callbacks_go_on():
    def again():
        loop.call_soon(again)
    loop = asyncio.get_running_loop()
    again()
    await asyncio.Event().wait()

@soon
@pytest.mark.asyncio
async def test_waits_while_a_task_goes_on():
    async def go_on():
        while True:
            await asyncio.sleep(0)
    task = asyncio.create_task(go_on())
    await asyncio.Event().wait()

@soon
def test_blocks_for_ever():
    threading.Event().wait()

def test_passes(): ...
"""

STUCK = """
import threading

def test_blocks_for_ever():
    threading.Event().wait()
"""


def run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file of tests, with the project's own options."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_sample.py").write_text(tests)
    ours = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider", *options]
    return forking.run(["-m", "pytest", *ours, folder])


def test_skips_are_counted_by_reason_and_failures_come_last(tmp_path: Path) -> None:
    lines = run(tmp_path, SKIPS).stdout.splitlines()

    skips = [line for line in lines if line.lower().startswith("skipped")]
    assert len(skips) == 7
    assert skips[0] == "skipped 40: there is no such device"
    assert skips[-1] == "skipped 15: for 15 other reasons (-rs names them)"
    assert lines[-2].startswith("FAILED")
    assert "1 failed, 60 skipped" in lines[-1]


def test_a_test_that_hangs_fails_and_the_run_goes_on(tmp_path: Path) -> None:
    assert "4 failed, 1 passed" in run(tmp_path, HANGS).stdout


def test_a_test_that_no_signal_ends_ends_the_process(tmp_path: Path) -> None:
    ended = run(tmp_path, STUCK, "--timeout=0", "-o", "faulthandler_timeout=1")

    assert ended.returncode == 1
    assert "Timeout (0:00:01)!" in ended.stderr
    assert "1 failed" not in ended.stdout
