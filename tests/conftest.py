"""What all tests share: the path, one thread of torch, hypothesis profiles, engines that CI must not skip."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# `python -m pytest` puts the repository's root on the path. There `kernels` is ours, but transformers
# looks for Hugging Face's package of that name, imports what it finds, and meets our refusal.
ROOT = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

# Tests are small tensors: more threads cost more than they bring, much more where cores are shared, and
# results differ by their number. Not by a variable: tests see to it that new threads are told.
torch.set_num_threads(1)

# "ci" tries the same examples every time; "soak" (`make soak`) looks for new ones. Neither measures time.
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "soak",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

ENGINES_REQUIRED = os.environ.get("ASYNCHICACHE_REQUIRE_ENGINES") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test marked `engine(name)` that skips where engines are required.

    It must skip in its body or in a fixture: a module that skips as a whole has no marks yet.
    """
    report = yield
    engines = [mark.args[0] for mark in item.iter_markers("engine")]
    if engines and ENGINES_REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
        reason = call.excinfo.value if call.excinfo else "no reason"
        report.outcome = "failed"
        report.longrepr = f"{', '.join(engines)} is required here, but the test skipped: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many suspensions were interrupted; see `tests/cache/test_interruptions.py`."""
    passed = terminalreporter.stats.get("passed", [])
    found = [value for report in passed for name, value in report.user_properties if name == "suspensions"]
    if found:
        terminalreporter.write_line(f"interrupted at {sum(found):,} suspensions of public coroutines")
