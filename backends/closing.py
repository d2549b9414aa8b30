"""How an engine ends what would block the loop."""

from __future__ import annotations

from collections.abc import Callable

from asynchicache.ports import Port


async def off_the_loop(port: Port, close: Callable[[], object], at_worst: Callable[[], object]) -> None:
    """Run `close` in a thread; `at_worst` here, if whoever closed has given up and the threads are gone."""
    try:
        await port.run_blocking(close)
    except RuntimeError:
        at_worst()
