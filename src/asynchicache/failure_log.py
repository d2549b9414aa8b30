"""Log what fails again and again: of each kind one line at once, then at most one a minute, with counts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

PAUSE_SECONDS = 60.0
"""The least time between two lines of one kind."""


@dataclass(slots=True, eq=False)
class _LeftOut:
    """What is known of one kind of failure: when it was last logged, and what was left out since."""

    logged: float
    failures: int = 0
    pages: int = 0


class FailureLog:
    """Warnings about one subject that works for many requests, e.g. one pool in storage.

    A store that is down fails each call of each request: lines must not grow with pages, calls or requests.
    Any thread may use it.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._lock = threading.Lock()
        self._kinds: dict[object, _LeftOut] = {}

    def warning(
        self, kind: object, message: str, *args: object, pages: int = 1, level: int = logging.WARNING
    ) -> bool:
        """Log a failure, or count it if one of its kind was logged in the last `PAUSE_SECONDS`.

        Args:
            kind: what makes failures the same, hashable; there must be few, so no key or text is part of it.
            message, args: as of `logging.Logger.warning`.
            pages: how many pages failed.

        Returns:
            Whether it was logged now.
        """
        with self._lock:
            now, before = self._now(), self._kinds.get(kind)
            if before is not None and now - before.logged < PAUSE_SECONDS:
                before.failures += 1
                before.pages += pages
                return False
            self._kinds[kind] = _LeftOut(now)
        if before is not None and before.failures:
            message += " (%d more failures of this kind, of %d pages, were not logged before)"
            args = (*args, before.failures, before.pages)
        self._logger.log(level, message, *args)
        return True
