"""Measure how long the event loop is blocked, with a one-millisecond ticker beside some work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

TICK_SECONDS = 0.001


async def longest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """Longest time between two ticks while `work` runs, in seconds."""
    longest = 0.0
    running = asyncio.ensure_future(work())
    last = time.perf_counter()
    while not running.done():
        await asyncio.sleep(TICK_SECONDS)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await running
    return longest
