"""Keeps vLLM's scheduler from spinning while all its requests wait for storage.

A scheduler in the program's own process makes its next step at once if a step computed nothing. Thousands
of such steps a second compete for the interpreter with the threads that read from storage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeAlias

from msgspec import Meta

from asynchicache.integrations.bridge import LoopBridge

WaitMs: TypeAlias = Annotated[float, Meta(ge=0, le=100)]  # a request that arrives meanwhile waits as long
IDLE_WAIT_MS = 2.0
"""Default of the longest wait in one step."""

_EMPTY_STEP_S = 0.001
"""A step that follows the last one faster than this computed nothing: no model's forward is so short."""


class IdleWait:
    """Waits for jobs in steps that computed nothing.

    Args:
        bridge: the jobs.
        wait_ms: most milliseconds of one wait; 0 for none.
        clock: seconds.
    """

    def __init__(
        self, bridge: LoopBridge, wait_ms: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bridge = bridge
        self._wait_s = wait_ms / 1000
        self._clock = clock
        self._stepped = float("-inf")

    def end_step(self) -> None:
        """Wait for a job to end if this step came right after the last one."""
        if self._wait_s and self._clock() - self._stepped < _EMPTY_STEP_S:
            self._bridge.wait_finished(self._wait_s)
        self._stepped = self._clock()
