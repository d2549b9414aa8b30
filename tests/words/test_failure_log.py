"""What fails again and again is logged once a minute of a kind, with counts."""

from __future__ import annotations

import logging

import pytest

from asynchicache.failure_log import PAUSE_SECONDS, FailureLog

logger = logging.getLogger("asynchicache.test")


def test_of_each_kind_one_line_a_minute_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    seconds = 0.0
    failures = FailureLog(logger, lambda: seconds)
    for number in range(600):
        for kind in ("get", "put"):
            failures.warning(kind, "%s failed: %s", kind, f"cause {number}", pages=5)
        seconds += PAUSE_SECONDS / 480

    assert caplog.messages == [
        "get failed: cause 0",
        "put failed: cause 0",
        "get failed: cause 480 (479 more failures of this kind, of 2395 pages, were not logged before)",
        "put failed: cause 480 (479 more failures of this kind, of 2395 pages, were not logged before)",
    ]


def test_failures_that_are_rare_are_all_logged_at_their_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seconds = 0.0
    failures = FailureLog(logger, lambda: seconds)
    for number in range(3):
        failures.warning("get", "%d failed", number, level=logging.INFO)
        seconds += PAUSE_SECONDS

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"{number} failed") for number in range(3)
    ]
