"""What makes changes durable, in an order that no crash can turn around."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from asynchicache.backends.file import entries
from asynchicache.backends.file.segments import Segments

logger = logging.getLogger(__name__)


class Naming(NamedTuple):
    """Pages that are on their way.

    Attributes:
        first: the lowest of their stamps.
        entries: by slot, as they will be stored; whoever could not write a page takes its entry out.
        leaving: slots whose pages were given up, and whose entries will be empty.
    """

    first: int
    entries: dict[int, bytes]
    leaving: Sequence[int] = ()


class Commits:
    """One barrier makes pages durable together with the entries that name them.

    Within it the disk may do an entry and lose its page. So each entry says up to which stamp all pages
    were durable when it was written, and after a crash those with higher stamps are looked at. Whoever
    gives a slot away erases its entry, durably, before the slot is written again. Pages are committed by
    one thread (`writer.GroupWriter`), and others erase beside it.

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

    def name(self, pages: Sequence[tuple[bytes, int]], leaving: Sequence[int] = ()) -> Naming:
        """Entries for pages, by digest and slot, that are about to be written; `leaving` will hold nothing.

        One that is never committed stops the mark: what is named after it will be read after a crash.
        """
        with self._lock:
            first, self._stamp = self._stamp, self._stamp + len(pages)
            self._pending.add(first)
            mark = min(self._pending)
        return Naming(first, entries.packed(pages, first, mark) | entries.empty(leaving), leaving)

    def commit(self, namings: Sequence[Naming]) -> None:
        """Return when their pages, which were written, and their entries are durable.

        Raises:
            OSError: they may not be, and no later commit will be.
        """
        stored = {slot: entry for naming in namings for slot, entry in naming.entries.items()}
        self._commit(stored, self._segments.sync)
        with self._lock:
            self._pending.difference_update(naming.first for naming in namings)

    def erase(self, slots: Sequence[int]) -> None:
        """Return when these slots hold nothing, durably.

        Raises:
            OSError: they may hold what they held, and no later commit will be durable.
        """
        self._commit(entries.empty(slots), self._segments.sync_entries)

    def vouch(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Name pages anew, the least recently used first, and say that all are durable.

        Nobody else commits meanwhile, and every page that has an entry is durable.

        Raises:
            OSError: the entries may not be.
        """
        first, self._stamp = self._stamp, self._stamp + len(pages)
        entries.put(self._segments, entries.packed(pages, first, self._stamp))
        self._segments.sync(slot for _, slot in pages)

    def _commit(self, stored: Mapping[int, bytes], sync: Callable[[Iterable[int]], None]) -> None:
        if not stored:
            return
        self._check()
        try:
            entries.put(self._segments, stored)
            sync(stored)
        except OSError:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            self.broken = True
            logger.exception("nothing is written any more until the pool is reopened")
            raise
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "a commit has failed before")
