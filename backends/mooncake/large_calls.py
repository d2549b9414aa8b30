"""Limit concurrent large calls. Over TCP one Mooncake thread moves all bytes, so more than two large calls
at once add work but no throughput."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_BYTES = 8 << 20
"""Calls of at least this size are limited. Smaller calls mostly wait for the master, which works in parallel:
over loopback, limiting makes calls of 1 MiB slower and calls of 16 MiB up to 25% faster."""

_AT_ONCE = 2  # one moves bytes while another asks the master
_MAX_WAIT_SECONDS = 0.1  # bounds the delay that a hanging or slow call causes others


class LargeCallLimit:
    """Limit large calls in one direction. It only serves speed: after `max_wait` a call proceeds anyway.

    Args:
        large_bytes: minimum size of a limited call.
        max_wait: longest wait, in seconds.
    """

    def __init__(self, large_bytes: float = LARGE_BYTES, max_wait: float = _MAX_WAIT_SECONDS) -> None:
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        self._large_bytes = large_bytes
        self._patience = max_wait

    @contextmanager
    def limited(self, nbytes: int) -> Iterator[None]:
        """Hold a permit during a call that moves `nbytes`. Blocks for a permit if the call is large."""
        acquired = nbytes >= self._large_bytes and self._free.acquire(timeout=self._patience)
        try:
            yield
        finally:
            if acquired:
                self._free.release()
