"""Which keys are being written by this engine, so that a second writer waits for the first.

Mooncake tells the second writer at once that all is well, although nobody can read the page yet.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from asynchicache.hashing import ObjectKey


class WritesInFlight:
    """Claims of keys, from any thread; who claims a key settles it, whatever happens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[ObjectKey, Future[int]] = {}

    def claim(self, keys: Sequence[ObjectKey]) -> tuple[list[int], dict[int, Future[int]]]:
        """Places of the keys that are the caller's to write, and of others the code that they will get."""
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
        """The claimed keys are written, or not."""
        with self._lock:
            settled = [self._codes.pop(key) for key in keys]
        for future, code in zip(settled, codes, strict=True):
            future.set_result(code)
