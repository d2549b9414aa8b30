"""What all tests share: the path, one thread of torch, hypothesis profiles, engines that CI must not skip."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

import forking

# `python -m pytest` puts the repository's root on the path. There `kernels` is ours, but transformers
# looks for Hugging Face's package of that name, imports what it finds, and meets our refusal.
ROOT = Path(__file__).parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

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

AGAIN_SECONDS = 30.0
REASONS_SHOWN = 6
ENGINES_REQUIRED = os.environ.get("ASYNCHICACHE_REQUIRE_ENGINES") == "1"


def pytest_configure(config: pytest.Config) -> None:
    forking.forget_full_disk()
    if not config.getoption("numprocesses", None):  # others run the tests, and wait for this process
        prepare_torch()


def prepare_torch() -> None:
    import torch

    # Tests are small tensors: more threads cost more than they bring, much more where cores are shared, and
    # results differ by their number. Not by a variable: tests see to it that new threads are told.
    torch.set_num_threads(1)

    # pytest puts its handlers on each logger that does not propagate, six times a test; torch has fifty.
    for name, one in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(one, logging.Logger):
            one.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave all that is imported and collected, half a million objects, out of each look for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


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


class HungError(pytest.fail.Exception, SystemExit):
    """A test has taken too long. A loop takes any other exception for a callback's own, and goes on."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    """Let a time-out end a test that runs a loop between two callbacks.

    An exception that a signal raises within the loop's own code may lose a callback, and then the loop does
    not close. Where no callback runs any more, the next signal raises where it is; signals come again and
    again, since one that another thread took does not wake this one.
    """
    answer = yield
    fail = signal.getsignal(signal.SIGALRM)
    asked: list[asyncio.AbstractEventLoop] = []

    def end(number: int, frame: FrameType | None) -> None:
        loop = asyncio._get_running_loop()
        try:
            fail(number, frame)
        except pytest.fail.Exception as error:
            hung = HungError(f"{error}\n{task_stacks(loop)}" if loop else str(error))
        if loop is None or asked:
            raise hung
        asked.append(loop)
        loop.call_soon_threadsafe(raise_this, hung)

    if callable(fail):
        signal.signal(signal.SIGALRM, end)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        signal.setitimer(signal.ITIMER_REAL, left, AGAIN_SECONDS)
    return answer


def raise_this(error: BaseException) -> None:
    raise error


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where each task of a loop waits."""
    text = io.StringIO()
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=text)
    return text.getvalue()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what was skipped, and the suspensions that `cache/test_interruptions.py` interrupted."""
    for line in skip_lines(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)
    passed = terminalreporter.stats.get("passed", [])
    found = [value for report in passed for name, value in report.user_properties if name == "suspensions"]
    if found:
        terminalreporter.write_line(f"interrupted at {sum(found):,} suspensions of public coroutines")


def skip_lines(reports: Sequence[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """Count skips by reason, the most frequent first; a line for each test would hide the failures."""
    counts = Counter(skip_reason(report) for report in reports)
    shown = counts.most_common(REASONS_SHOWN)
    lines = [f"skipped {count}: {reason}" for reason, count in shown]
    if others := counts.total() - sum(count for _, count in shown):
        lines.append(f"skipped {others}: for {len(counts) - len(shown)} other reasons (-rs names them)")
    return lines


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or a module as a whole."""
    match report.longrepr:
        case (_, _, str(reason)):
            return reason.removeprefix("Skipped: ")
        case reason:
            return str(reason)


@pytest.fixture(autouse=True)
def _log_as_imported() -> None:
    """`serve` sets levels of the package's log for its process, which here is that of other tests too. A
    fixture of a whole module may have, so that a look at the end of a test is not enough."""
    for name in [one for one in logging.root.manager.loggerDict if one.partition(".")[0] == "asynchicache"]:
        logger = logging.getLogger(name)
        if logger.level != logging.NOTSET:  # it looks at all loggers, of which there are hundreds
            logger.setLevel(logging.NOTSET)
        logger.disabled, logger.propagate = False, True
