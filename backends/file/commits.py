"""What makes changes durable, in an order that no crash can turn around."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from asynchicache.backends.file import entries
from asynchicache.backends.file.entries import Entry
from asynchicache.backends.file.segments import Segments

logger = logging.getLogger(__name__)


class Commits:
    """One barrier makes pages durable together with the entries that name them.

    Within it the disk may do an entry and lose its page. So each entry says up to which stamp all pages
    were durable when it was written, and after a crash those with higher stamps are looked at. Whoever
    gives a slot away erases its entry, durably, before the slot is written again. Commits run side by
    side, and the kernel merges what they ask of the disk.

    Args:
        segments: the files.
        stamp: of the next page; stamps only go up. All that is stored has lower ones, and is durable.
    """

    def __init__(self, segments: Segments, stamp: int) -> None:
        self.broken = False
        """The disk has refused a commit; nothing is written any more until the pool is reopened."""
        self._segments = segments
        self._stamp = stamp
        self._pending: set[int] = set()  # the first stamps of commits that have not ended well
        self._lock = threading.Lock()

    def name(self, pages: Sequence[tuple[bytes, int]], leaving: Sequence[int] = ()) -> None:
        """Return when pages, by digest and slot, and their entries are durable, and `leaving` hold nothing.

        Raises:
            OSError: they may not be, and no later commit will be.
        """
        if not pages:
            return
        with self._lock:
            first, self._stamp = self._stamp, self._stamp + len(pages)
            self._pending.add(first)
            mark = min(self._pending)
        slots = [*leaving, *(slot for _, slot in pages)]
        self._commit(slots, partial(self._write, pages, first, mark, leaving))
        with self._lock:
            self._pending.remove(first)

    def erase(self, slots: Sequence[int]) -> None:
        """Return when these slots hold nothing, durably.

        Raises:
            OSError: they may hold what they held, and no later commit will be durable.
        """
        if slots:
            self._commit(slots, partial(entries.erase, self._segments, slots))

    def vouch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Name pages anew, the least recently used first, and say that all are durable.

        Nobody else commits meanwhile, and every page that has an entry is durable.

        Raises:
            OSError: the entries may not be.
        """
        first, self._stamp = self._stamp, self._stamp + len(pages)
        self._write(pages, first, self._stamp)
        self._segments.sync(slot for _, slot in pages)

    def _commit(self, slots: Sequence[int], write: Callable[[], None]) -> None:
        self._check()
        try:
            write()
            self._segments.sync(slots)
        except OSError:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            self.broken = True
            logger.exception("nothing is written any more until the pool is reopened")
            raise
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "a commit has failed before")

    def _write(
        self, pages: Sequence[tuple[bytes, int]], first: int, mark: int, leaving: Sequence[int] = ()
    ) -> None:
        entries.erase(self._segments, leaving)
        named = [Entry(stamp, slot, digest, mark) for stamp, (digest, slot) in enumerate(pages, first)]
        entries.write(self._segments, named)
