"""A store of pages that reports what is written, read, evicted and deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from asynchicache.backends.memory import MemoryStore
from asynchicache.hashing import ObjectKey

Gone: TypeAlias = Callable[[bytes, str], object]
"""Called with the digest and pool of a page that the store has lost."""


class StoreObserver(Protocol):
    """Called when pages are used, evicted or deleted."""

    def used(self, key: ObjectKey, size: int) -> None:
        """A page was written or read."""
        ...

    def evicted(self, key: ObjectKey, incoming: ObjectKey) -> None:
        """A page was evicted to make room for another one."""
        ...

    def forgot(self, key: ObjectKey) -> None:
        """A page was deleted on request."""
        ...


class ChaosStore(MemoryStore):
    """A `MemoryStore` that reports its changes.

    Attributes:
        keeper: observer of every page; None for no observer.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.keeper: StoreObserver | None = None
        self._watchers: list[Gone] = []
        self._making_room = False

    @contextmanager
    def watched(self, gone: Gone) -> Iterator[None]:
        """During the body, call `gone` for each lost page."""
        self._watchers.append(gone)
        try:
            yield
        finally:
            self._watchers.remove(gone)

    def write(self, key: ObjectKey, header: bytes, page: bytes, *more: Any, **named: Any) -> bool:
        before = list(self) if self.capacity_bytes is not None else []
        self._making_room = True
        try:
            written = super().write(key, header, page, *more, **named)
        finally:
            self._making_room = False
        if self.keeper is not None and written:
            self.keeper.used(key, len(page))
        for other in before if len(before) >= len(self) else ():
            if other not in self:
                self._went(other, by=key)
        return written

    def drop(self, key: ObjectKey) -> bool:
        dropped = super().drop(key)
        if dropped and not self._making_room:
            self._went(key, by=None)
        return dropped

    def forget(self, keys: Sequence[ObjectKey]) -> None:
        """Lose some pages."""
        for key in keys:
            self.drop(key)

    def _went(self, key: ObjectKey, *, by: ObjectKey | None) -> None:
        for watcher in self._watchers:
            watcher(key.digest, key.pool)
        if self.keeper is not None:
            if by is not None:
                self.keeper.evicted(key, by)
            else:
                self.keeper.forgot(key)
