"""Where an engine that lives on the loop computes the checksum of a page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asynchicache.ports import Port

T = TypeVar("T")

INLINE_BYTES = 1 << 20
"""A checksum over this much takes the loop a tenth of a millisecond; a larger one goes to a thread."""


async def over_page(port: Port, page_bytes: int, work: Callable[[], T]) -> T:
    """Run `work`, which reads a page and its header, while they are in the processor's cache; if the page
    is large, in a thread, which a cancellation waits for.
    """
    if page_bytes <= INLINE_BYTES:
        return work()
    running = asyncio.ensure_future(port.run_blocking(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
