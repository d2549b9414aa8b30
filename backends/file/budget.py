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


class Holder(Protocol):
    """A pool that has files in the folder."""

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        ...

    def give_back(self, nbytes: int) -> int:
        """Forget pages and cut files by about so many bytes; how many it were, 0 if it is busy."""
        ...


class DormantPool:
    """A pool that is in the folder but not open: of other weights, most likely.

    Args:
        folder: the pool's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def nbytes(self) -> int:
        return sum(_size(path) for path in self._folder.glob("*") if path.is_file())

    def give_back(self, nbytes: int) -> int:
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
        self._open: list[Holder] = []
        self._dormant: dict[Path, DormantPool] = {}
        self._opening: set[Path] = set()
        self._kept: set[Path] = set()  # by the system, which does not let us remove their files

    def found(self, folder: Path) -> None:
        """There is a pool that nobody has opened."""
        with self.lock:
            self._dormant[folder] = DormantPool(folder)

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

    def fit(self, holder: Holder) -> None:
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
            free += self._from_the_dormant(-free)
            if free < 0:
                self.freed += holder.give_back(-free)

    def join(self, folder: Path, holder: Holder) -> None:
        """A pool was opened."""
        with self.lock:
            self._dormant.pop(folder, None)
            self._open.append(holder)

    def leave(self, folder: Path, holder: Holder) -> None:
        """A pool was closed; twice is harmless."""
        with self.lock:
            if holder in self._open:
                self._open.remove(holder)
                self._dormant[folder] = DormantPool(folder)

    def room(self, holder: Holder, wanted: int, least: int) -> int | None:
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
        free += self._from_the_dormant(wanted - free)
        if free < wanted:
            share = max(self._limit // max(1, len(self._open)), 0 if holder.nbytes else least)
            allowed = min(wanted, share - holder.nbytes)
            if allowed >= least:
                free += self._from_the_richest(holder, share, allowed - free, least - free)
        return max(free, 0)

    def _free(self, limit: int) -> int:
        """Bytes that no pool has; below 0 where they have too many."""
        return limit - FIXED_BYTES - sum(one.nbytes for one in [*self._open, *self._dormant.values()])

    def _from_the_dormant(self, missing: int) -> int:
        """How many bytes pools gave back that are not open."""
        freed = 0
        for folder, dormant in self._dormant.items():
            if freed < missing and folder not in self._opening | self._kept:
                freed += self._take_back(folder, dormant, missing - freed)
        return freed

    def _take_back(self, folder: Path, dormant: DormantPool, nbytes: int) -> int:
        """About so many bytes of a pool that is not open; 0 if its files are another user's, say."""
        try:
            freed = dormant.give_back(nbytes)
        except OSError as error:
            logger.warning("%s takes room and cannot be removed: %s", folder, error)
            self._kept.add(folder)
            return 0
        self.freed += freed
        return freed

    def _from_the_richest(self, holder: Holder, share: int, missing: int, least: int) -> int:
        others = [other for other in self._open if other is not holder]
        if not others:
            return 0
        richest = max(others, key=lambda other: other.nbytes)
        taken = min(missing, richest.nbytes - share)
        freed = richest.give_back(taken) if taken >= max(least, 1) else 0
        self.freed += freed
        return freed
