"""Run one script and collect all violations: exceptions, logged errors, warnings and broken invariants."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType

from asynchicache.testing.seeded import run_seeded
from asynchicache_lab.chaos.ledger import Ledger, error_text
from asynchicache_lab.chaos.lives import run_lives
from asynchicache_lab.chaos.script import Script

MAX_STEPS = 50_000
"""Callbacks of a run that is taken for one that never ends; usual are 2,000."""

BLOCKING_SECONDS = 2e-4
"""The mean time until a blocking call begins, and again until it is told of: less than storage takes."""

CPU_SECONDS = 20.0
"""Time after which a run that does not come back to its loop is taken for one that never will."""

MORE_LINES = 10
"""Lines in the log about storage, for each life, beside one for each of its calls that failed: late ones too
open a breaker, which closes again."""

_EXPECTED = ("closed with copies in flight", "audit: ")
"""Errors in the log that faults on purpose lead to."""


@dataclass(frozen=True, slots=True)
class ScriptReport:
    """The result of a run.

    Attributes:
        seed: the script's seed.
        ledger: operations, faults and violations.
        seconds: processor time.
    """

    seed: int
    ledger: Ledger
    seconds: float

    @property
    def violations(self) -> list[str]:
        return self.ledger.violations


def run_script(script: Script) -> ScriptReport:
    """Run a script in virtual time. The same script gives the same run."""
    ledger = Ledger()
    began = time.process_time()
    log_watched = partial(_log_watched, lives=len(script.every_life))
    watches = (log_watched, warnings_watched, collection_watched)
    with ExitStack() as stack:
        for watched in watches:
            stack.enter_context(watched(ledger))
        stack.enter_context(_limited(CPU_SECONDS))
        try:
            run_seeded(
                script.seed,
                partial(run_lives, script=script, ledger=ledger),
                blocking_seconds=BLOCKING_SECONDS,
                max_steps=MAX_STEPS,
            )
        except (Exception, _Stuck) as error:  # noqa: BLE001 - every error of a run is a finding
            ledger.violations.append(error_text(error))
        gc.collect()  # leaked objects warn now, not during another run
    return ScriptReport(script.seed, ledger, time.process_time() - began)


class _Stuck(BaseException):
    """Not an `Exception`, so that the library does not catch it."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise in a run that spins without returning to its loop. Works on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stuck(f"no turn of the loop for {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    # Repeat: cleanup after the first interrupt may spin too.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _ErrorLog(logging.Handler):
    """Turns errors that the library caught and logged into violations, and counts lines about storage."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.WARNING)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        self._ledger.lines += record.name.startswith("asynchicache.storage")
        if record.levelno < logging.ERROR:
            return
        text = record.getMessage()
        if not text.startswith(_EXPECTED):
            error = record.exc_info[1] if record.exc_info else None
            cause = f": {error_text(error)}" if error is not None else ""
            self._ledger.violations.append(f"logged: {text}{cause}")


@contextmanager
def _log_watched(ledger: Ledger, lives: int) -> Iterator[None]:
    """Record logged errors, and keep the log of injected faults away from other handlers."""
    listener = _ErrorLog(ledger)
    loggers = [logging.getLogger("asynchicache"), logging.getLogger("asyncio")]
    before = [(one.propagate, one.level) for one in loggers]
    for logger in loggers:
        logger.addHandler(listener)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    try:
        yield
        if ledger.lines > ledger.calls_failed + MORE_LINES * lives:
            ledger.violations.append(
                f"log: {ledger.lines} lines, though {ledger.calls_failed} calls of storage failed"
            )
    finally:
        for logger, (propagate, level) in zip(loggers, before, strict=True):
            logger.removeHandler(listener)
            logger.propagate = propagate
            logger.setLevel(level)


@contextmanager
def collection_watched(ledger: Ledger) -> Iterator[None]:
    """Record errors in finalizers as violations, unless the run was interrupted there."""

    def note(found: sys.UnraisableHookArgs) -> None:
        if not ledger.violations and found.exc_value is not None:
            ledger.violations.append(f"collected: {error_text(found.exc_value)}")

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def warnings_watched(ledger: Ledger) -> Iterator[None]:
    """Record warnings about lost leases and never-awaited coroutines as violations."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ledger.violations += [f"warned: {warning.category.__name__}: {warning.message}" for warning in caught]
