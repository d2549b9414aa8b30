"""The byte limit of a folder, what its disk must keep free, and how its pools share the rest."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from asynchicache.backends.file.folder import pages_files
from asynchicache.layouts import ALIGNMENT

logger = logging.getLogger(__name__)

FIXED_BYTES = 4 * ALIGNMENT
"""Reserved for the small files: FORMAT and the pools' manifests."""


class BudgetedPool(Protocol):
    """A pool that has files in the folder."""

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        ...

    def shrink(self, nbytes: int) -> int:
        """Evict pages and cut files by about `nbytes`; returns the bytes freed, 0 if the pool is busy."""
        ...


class ClosedPool:
    """A pool in the folder that is not open, usually one of another model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def nbytes(self) -> int:
        return sum(_size(path) for path in self._folder.glob("*") if path.is_file())

    def shrink(self, nbytes: int) -> int:
        """Remove whole page files, the last ones first; cutting files would require reading their entries."""
        freed = 0
        for path in reversed(pages_files(self._folder)):
            if freed < nbytes:
                freed += _size(path)
                path.unlink(missing_ok=True)
        return freed


def _size(path: Path) -> int:
    """Bytes of a file; 0 if it is missing: users remove the pools of old models by hand."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


class Disk:
    """The disk of a folder, a share of which stays free.

    Args:
        keep_free: the share, 0 to 1.
    """

    def __init__(self, path: Path, keep_free: float) -> None:
        self._path = path
        self._keep_free = keep_free
        self._told = False

    def room(self) -> int:
        """Bytes that files may still take; below 0 if others have filled the disk further.

        Raises:
            OSError: the folder is gone.
        """
        disk = os.statvfs(self._path)
        return disk.f_bavail * disk.f_frsize - int(disk.f_blocks * disk.f_frsize * self._keep_free)

    def tell_full(self) -> None:
        """Log, once, that the files do not grow any more."""
        if not self._told:
            self._told = True
            logger.warning(
                "%s: %g of the disk is to stay free, so the files grow no more and new pages take the place "
                "of old ones: make room, or lower keep_free",
                self._path,
                self._keep_free,
            )


class Budget:
    """Shares a folder's bytes among its pools. Methods may be called from any thread.

    A pool takes free bytes first, then bytes of pools that are not open. If none are left, a pool below its
    equal share takes bytes from the largest pool, so the first pool to write cannot starve the others.

    Args:
        limit: most bytes; None for no limit but the disk.
        disk: the disk, if a share of it stays free.
    """

    def __init__(self, limit: int | None, disk: Disk | None = None) -> None:
        self.lock = threading.Lock()
        """Held by a growing pool, from `grant` until its files have grown."""
        self.freed = 0
        """Total bytes that pools have freed; if it increased, a full disk may have room again."""
        self._limit = limit
        self._disk = disk
        self._open: list[BudgetedPool] = []
        self._closed: dict[Path, ClosedPool] = {}
        self._opening: set[Path] = set()
        self._undeletable: set[Path] = set()  # the system refused to remove their files

    def add_closed(self, folder: Path) -> None:
        """Add a pool that is in the folder but not open."""
        with self.lock:
            self._closed[folder] = ClosedPool(folder)

    @contextmanager
    def opening(self, folder: Path) -> Iterator[None]:
        """Protect a pool's files while the pool is being opened: they count, and are not removed."""
        with self.lock:
            self._opening.add(folder)
        try:
            yield
        finally:
            with self.lock:
                self._opening.remove(folder)

    def shrink_to_limit(self, pool: BudgetedPool) -> None:
        """Free bytes if the files exceed the limit, e.g. because it was lowered.

        Pools that are not open shrink first, then `pool`, which is being opened.

        Raises:
            OSError: a file cannot be cut or inspected.
        """
        with self.lock:
            if self._limit is None:
                return
            free = self._free(self._limit)
            if free >= -FIXED_BYTES:  # the small files exist already, so they are counted twice
                return
            free += self._reclaim_from_closed(-free)
            if free < 0:
                self.freed += pool.shrink(-free)

    def pool_opened(self, folder: Path, pool: BudgetedPool) -> None:
        """Register an opened pool."""
        with self.lock:
            self._closed.pop(folder, None)
            self._open.append(pool)

    def pool_closed(self, folder: Path, pool: BudgetedPool) -> None:
        """Register a closed pool; calling twice is harmless."""
        with self.lock:
            if pool in self._open:
                self._open.remove(pool)
                self._closed[folder] = ClosedPool(folder)

    def grant(self, pool: BudgetedPool, wanted: int, least: int) -> int | None:
        """How many bytes the files of `pool` may grow; None for no limit. The caller holds `lock`.

        Args:
            wanted: bytes that it asks for.
            least: bytes of its next page; if fewer can be granted, no other open pool gives up pages.

        Raises:
            OSError: a file cannot be cut or inspected.
        """
        if self._limit is not None:
            self._reclaim_from_closed(wanted - self._free(self._limit))
        free, limit = self._room()
        if self._disk is not None and free < least and limit != self._limit:
            self._disk.tell_full()
        if limit is None:
            return None
        largest, nbytes = self._largest_gives(pool, wanted, least, free, limit)
        if nbytes:
            freed = largest.shrink(nbytes)
            self.freed += freed
            free += freed
        return max(free, 0)

    def foresee(self, pool: BudgetedPool, wanted: int, least: int) -> tuple[int, BudgetedPool, int]:
        """What `grant` would do, if closed pools give up nothing: the bytes that are free, and the pool that
        would give up how many of its own.

        Raises:
            OSError: the folder is gone.
        """
        with self.lock:
            free, limit = self._room()
            if limit is None:
                return free, pool, 0
            return max(free, 0), *self._largest_gives(pool, wanted, least, free, limit)

    def _room(self) -> tuple[int, int | None]:
        """Bytes that files may still take, and the limit of all files; None for none."""
        limit, free = self._limit, sys.maxsize
        if limit is not None:
            free = self._free(limit)
        if self._disk is not None and (room := self._disk.room()) < free:
            free, limit = room, sum(one.nbytes for one in self._open) + max(room, 0)
        return free, limit

    def _largest_gives(
        self, pool: BudgetedPool, wanted: int, least: int, free: int, limit: int
    ) -> tuple[BudgetedPool, int]:
        """The pool that gives up bytes for `pool`, and how many; 0 if none does."""
        share = max(limit // max(1, len(self._open)), 0 if pool.nbytes else least)
        allowed = min(wanted, share - pool.nbytes)
        others = [other for other in self._open if other is not pool]
        if free >= wanted or allowed < least or not others:
            return pool, 0
        largest = max(others, key=lambda other: other.nbytes)
        taken = min(allowed - free, largest.nbytes - share)
        return largest, taken if taken >= max(least - free, 1) else 0

    def _free(self, limit: int) -> int:
        """Bytes that no pool uses; below 0 if the files exceed the limit."""
        return limit - FIXED_BYTES - sum(one.nbytes for one in [*self._open, *self._closed.values()])

    def _reclaim_from_closed(self, missing: int) -> int:
        """Shrink pools that are not open; returns the bytes freed."""
        freed = 0
        for folder, closed in self._closed.items():
            if freed < missing and folder not in self._opening | self._undeletable:
                freed += self._shrink_closed(folder, closed, missing - freed)
        return freed

    def _shrink_closed(self, folder: Path, closed: ClosedPool, nbytes: int) -> int:
        """Free about `nbytes` of a pool that is not open; 0 if that fails, e.g. files of another user."""
        try:
            freed = closed.shrink(nbytes)
        except OSError as error:
            logger.warning("%s takes room and cannot be removed: %s", folder, error)
            self._undeletable.add(folder)
            return 0
        self.freed += freed
        return freed
