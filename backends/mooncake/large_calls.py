"""Large calls wait for each other: over TCP one thread of Mooncake's moves all bytes, and more than two such
calls at once bring it more work and no more speed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_BYTES = 8 << 20
"""Bytes of a call that waits its turn. Smaller ones spend their time on asking the master, side by side:
measured over loopback, calls of 1 MiB are slower in turns, and calls of 16 MiB up to a quarter faster."""

_AT_ONCE = 2  # one moves bytes while another asks the master
_MAX_WAIT_SECONDS = 0.1  # seconds; a call that hangs, or crosses a slow network, holds others up no longer


class LargeCallLimit:
    """Who is next, among calls in one direction. A turn is for speed only: who waited too long goes without.

    Args:
        large_bytes: bytes of a call that waits its turn.
        max_wait: seconds that it waits at most.
    """

    def __init__(self, large_bytes: float = LARGE_BYTES, max_wait: float = _MAX_WAIT_SECONDS) -> None:
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._large_bytes = large_bytes
        self._patience = max_wait

    @contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        """For the time of a call that moves `nbytes`; blocks until its turn has come, if it is large."""
        acquired = nbytes >= self._large_bytes and self._free.acquire(timeout=self._patience)
        try:
            yield
        finally:
            if acquired:
                self._free.release()
