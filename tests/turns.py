"""Turns of the loop, for tests that want to see that nothing more happens."""

from __future__ import annotations

import asyncio


async def turns(count: int = 100) -> None:
    """Everything on the loop that can go on has done so; what is on threads may have not."""
    for _ in range(count):
        await asyncio.sleep(0)
