"""Keys that this engine is writing, so that a second writer waits for the first.

Mooncake reports success to the second writer immediately, although the page is not readable yet.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from asynchicache.hashing import ObjectKey


class WritesInFlight:
    """Claims on keys, from any thread. A thread that claims a key must settle it, even after an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[ObjectKey, Future[int]] = {}

    def claim(self, keys: Sequence[ObjectKey]) -> tuple[list[int], dict[int, Future[int]]]:
        """Return indices of keys that the caller must write, and by index the future codes of the rest."""
        mine: list[int] = []
        others: dict[int, Future[int]] = {}
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._codes:
                    others[place] = self._codes[key]
                else:
                    self._codes[key] = Future()
                    mine.append(place)
        return mine, others

    def settle(self, keys: Sequence[ObjectKey], codes: Sequence[int]) -> None:
        """Publish the codes of claimed keys, written or not, and end their claims."""
        with self._lock:
            settled = [self._codes.pop(key) for key in keys]
        for future, code in zip(settled, codes, strict=True):
            future.set_result(code)
