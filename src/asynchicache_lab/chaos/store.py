"""A store of pages that reports what is written, read, evicted and deleted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

from asynchicache.backends.memory import MemoryStore
from asynchicache.hashing import ObjectKey

Gone: TypeAlias = Callable[[bytes, str], object]
"""Called with the digest and pool of a page that the store has lost."""


class StoreObserver(Protocol):
    """Called when pages are used, evicted or deleted."""

    def used(self, key: ObjectKey, size: int) -> None:
        """A page was written, read or touched."""
        ...

    def evicted(self, key: ObjectKey, incoming_bytes: int) -> None:
        """A page was evicted to make room for one of `incoming_bytes`."""
        ...

    def forgot(self, key: ObjectKey) -> None:
        """A page was deleted on request."""
        ...


class ChaosStore(MemoryStore):
    """A `MemoryStore` that reports its changes.

    Attributes:
        keeper: observer of every page; None for no observer.
        claims: who is to store a page, and until when.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.keeper: StoreObserver | None = None
        self.claims: dict[ObjectKey, tuple[object, float]] = {}
        self._placed: dict[bytes, tuple[bytes, int]] = {}
        self._watchers: list[Gone] = []
        self._making_room = False

    def misplaced(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Keys that say another place of their page than an earlier key did."""
        places = ((key, (key.group, key.place)) for key in keys)
        return [key for key, place in places if self._placed.setdefault(key.digest, place) != place]

    @contextmanager
    def watched(self, gone: Gone) -> Iterator[None]:
        """During the body, call `gone` for each lost page."""
        self._watchers.append(gone)
        try:
            yield
        finally:
            self._watchers.remove(gone)

    def make_room(self, nbytes: int, keep: Collection[ObjectKey] = frozenset(), kept_bytes: int = 0) -> bool:
        before = list(self) if self.capacity_bytes is not None else []
        self._making_room = True
        try:
            made = super().make_room(nbytes, keep, kept_bytes)
        finally:
            self._making_room = False
        for key in before if len(before) > len(self) else ():
            if key not in self:
                self._went(key, incoming_bytes=nbytes)
        return made

    def write(self, key: ObjectKey, header: bytes, page: bytes) -> bool:
        written = super().write(key, header, page)
        if self.keeper is not None and written:
            self.keeper.used(key, len(page))
        return written

    def touch(self, keys: Iterable[ObjectKey]) -> None:
        touched = [key for key in keys if key in self]
        super().touch(touched)
        if self.keeper is not None:
            for key in touched:
                self.keeper.used(key, self.size([key]))

    def drop(self, key: ObjectKey) -> bool:
        dropped = super().drop(key)
        if dropped and not self._making_room:
            self._went(key, incoming_bytes=None)
        return dropped

    def forget(self, keys: Sequence[ObjectKey]) -> None:
        """Lose some pages."""
        for key in keys:
            self.drop(key)

    def _went(self, key: ObjectKey, *, incoming_bytes: int | None) -> None:
        for watcher in self._watchers:
            watcher(key.digest, key.pool)
        if self.keeper is not None:
            if incoming_bytes is not None:
                self.keeper.evicted(key, incoming_bytes)
            else:
                self.keeper.forgot(key)
