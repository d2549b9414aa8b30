"""Leases: hold pages until closed. `close` is idempotent; a lease dropped unclosed warns and releases."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Self

from asynchicache.errors import LeaseWarning


class Lease:
    """Holds a resource until `close`, then releases it exactly once.

    A lease is confined to the thread of the loop that made it. The transfer or request that needs the pages
    owns the lease, not the coroutine that waits for them.
    """

    __slots__ = ("__weakref__", "_release")
    _words = "a lease was lost, not closed"

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    @property
    def closed(self) -> bool:
        return self._release is None

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._release is not None:
            self.close()  # first: a warning may be an error here
            warnings.warn(self._words, LeaseWarning, stacklevel=2)
