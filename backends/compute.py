"""Decide whether an engine that runs on the event loop computes a page's checksum there or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asynchicache.ports import Port

T = TypeVar("T")

INLINE_BYTES = 1 << 20
"""A checksum over this many bytes blocks the loop for 0.1 ms; larger pages go to a thread."""


async def over_page(port: Port, page_bytes: int, work: Callable[[], T]) -> T:
    """Run `work`, which reads a page and its header: inline, while they are in the CPU cache, or, if the page
    is large, in a thread. A cancellation waits for the thread.
    """
    if page_bytes <= INLINE_BYTES:
        return work()
    running = asyncio.ensure_future(port.run_blocking(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
