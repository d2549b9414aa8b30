"""Close an engine's resources without blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable

from asynchicache.ports import Port


async def off_the_loop(port: Port, close: Callable[[], object], at_worst: Callable[[], object]) -> None:
    """Run `close` in a thread; if the threads have already been shut down, run `at_worst` on the loop."""
    try:
        await port.run_blocking(close)
    except RuntimeError:
        at_worst()
