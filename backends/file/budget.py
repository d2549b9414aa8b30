"""How many bytes the files of a folder may have in all, and what each pool has of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from asynchicache.backends.file.folder import pages_files
from asynchicache.layouts import ALIGNMENT

logger = logging.getLogger(__name__)

FIXED_BYTES = 4 * ALIGNMENT
"""Counted for what is small: FORMAT, and the pools' manifests."""


class BudgetedPool(Protocol):
    """A pool that has files in the folder."""

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        ...

    def shrink(self, nbytes: int) -> int:
        """Forget pages and cut files by about so many bytes; how many it were, 0 if it is busy."""
        ...


class ClosedPool:
    """A pool that is in the folder but not open: of other weights, most likely.

    Args:
        folder: the pool's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def nbytes(self) -> int:
        return sum(_size(path) for path in self._folder.glob("*") if path.is_file())

    def shrink(self, nbytes: int) -> int:
        """Removes whole files of pages, the last ones first: to cut them would take a look at each page."""
        freed = 0
        for path in reversed(pages_files(self._folder)):
            if freed < nbytes:
                freed += _size(path)
                path.unlink(missing_ok=True)
        return freed


def _size(path: Path) -> int:
    """Bytes of a file; 0 if it has gone: people remove the pools of old weights by hand."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


class Budget:
    """Shares a folder's bytes among its pools. Methods may be called from any thread.

    A pool takes what is free, then what pools have that are not open. Where nothing is left, one that has
    less than its equal share gets room from the one that has most: so the first pool to write does not
    shut out the others for ever.

    Args:
        limit: most bytes; None for as many as the disk has.
    """

    def __init__(self, limit: int | None) -> None:
        self.lock = threading.Lock()
        """Held by a pool that grows, from asking until it has grown."""
        self.freed = 0
        """Bytes that pools have given back: where it has grown, a full disk may have room."""
        self._limit = limit
        self._open: list[BudgetedPool] = []
        self._closed: dict[Path, ClosedPool] = {}
        self._opening: set[Path] = set()
        self._undeletable: set[Path] = set()  # by the system, which does not let us remove their files

    def add_closed(self, folder: Path) -> None:
        """There is a pool that nobody has opened."""
        with self.lock:
            self._closed[folder] = ClosedPool(folder)

    @contextmanager
    def opening(self, folder: Path) -> Iterator[None]:
        """While a pool is opened its files count, and stay: it will write to them."""
        with self.lock:
            self._opening.add(folder)
        try:
            yield
        finally:
            with self.lock:
                self._opening.remove(folder)

    def shrink_to_limit(self, pool: BudgetedPool) -> None:
        """Where there is more than the limit, as it was lowered: pools that are not open give way, then
        `holder`, which is being opened.

        Raises:
            OSError: a file cannot be cut or looked at.
        """
        with self.lock:
            if self._limit is None:
                return
            free = self._free(self._limit)
            if free >= -FIXED_BYTES:  # what is small is there, and counted twice
                return
            free += self._reclaim_from_closed(-free)
            if free < 0:
                self.freed += pool.shrink(-free)

    def pool_opened(self, folder: Path, pool: BudgetedPool) -> None:
        """A pool was opened."""
        with self.lock:
            self._closed.pop(folder, None)
            self._open.append(pool)

    def pool_closed(self, folder: Path, pool: BudgetedPool) -> None:
        """A pool was closed; twice is harmless."""
        with self.lock:
            if pool in self._open:
                self._open.remove(pool)
                self._closed[folder] = ClosedPool(folder)

    def grant(self, pool: BudgetedPool, wanted: int, least: int) -> int | None:
        """How many bytes `holder`'s files may grow; None for no limit. `lock` is held.

        Args:
            holder: who asks.
            wanted: bytes that it would like to have.
            least: bytes of its next page; with fewer it could do nothing, so nobody loses pages for it.

        Raises:
            OSError: a file cannot be cut or looked at.
        """
        if self._limit is None:
            return None
        free = self._free(self._limit)
        free += self._reclaim_from_closed(wanted - free)
        if free < wanted:
            share = max(self._limit // max(1, len(self._open)), 0 if pool.nbytes else least)
            allowed = min(wanted, share - pool.nbytes)
            if allowed >= least:
                free += self._reclaim_from_largest(pool, share, allowed - free, least - free)
        return max(free, 0)

    def _free(self, limit: int) -> int:
        """Bytes that no pool has; below 0 where they have too many."""
        return limit - FIXED_BYTES - sum(one.nbytes for one in [*self._open, *self._closed.values()])

    def _reclaim_from_closed(self, missing: int) -> int:
        """How many bytes pools gave back that are not open."""
        freed = 0
        for folder, closed in self._closed.items():
            if freed < missing and folder not in self._opening | self._undeletable:
                freed += self._shrink_closed(folder, closed, missing - freed)
        return freed

    def _shrink_closed(self, folder: Path, closed: ClosedPool, nbytes: int) -> int:
        """About so many bytes of a pool that is not open; 0 if its files are another user's, say."""
        try:
            freed = closed.shrink(nbytes)
        except OSError as error:
            logger.warning("%s takes room and cannot be removed: %s", folder, error)
            self._undeletable.add(folder)
            return 0
        self.freed += freed
        return freed

    def _reclaim_from_largest(self, pool: BudgetedPool, share: int, missing: int, least: int) -> int:
        others = [other for other in self._open if other is not pool]
        if not others:
            return 0
        largest = max(others, key=lambda other: other.nbytes)
        taken = min(missing, largest.nbytes - share)
        freed = largest.shrink(taken) if taken >= max(least, 1) else 0
        self.freed += freed
        return freed
