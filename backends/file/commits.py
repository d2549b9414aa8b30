"""What makes changes durable, in an order that no crash can turn around."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from asynchicache.backends.file.entries import (
    EntryBlock,
    empty_entries,
    entry_blocks,
    pack_entries,
    write_blocks,
)
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.segments import Segments

logger = logging.getLogger(__name__)


class CommitStamp(NamedTuple):
    """Pages that are on their way.

    Attributes:
        first: the lowest of their stamps.
        mark: pages with lower stamps are durable.
        leaving: slots whose pages were given up, and whose entries will be empty.
    """

    first: int
    mark: int
    erased: Sequence[int]


class Commits:
    """One barrier makes pages durable together with the entries that name them.

    Within it the disk may do an entry and lose its page. So each entry says up to which stamp all pages
    were durable when it was made, and after a crash those with higher stamps are looked at. Whoever
    gives a slot away erases its entry, durably, before the slot is written again. Pages are committed by
    one thread (`writer.GroupWriter`), and others erase beside it.

    Args:
        segments: the files.
        stamp: of the next page; stamps only go up. All that is stored has lower ones, and is durable.
    """

    def __init__(self, segments: Segments, next_stamp: int) -> None:
        self.broken = False
        """The disk has refused a commit; nothing is written any more until the pool is reopened."""
        self._segments = segments
        self._next_stamp = next_stamp
        self._pending: set[int] = set()  # the first stamps of commits that have not ended well
        self._lock = threading.Lock()

    def reserve(self, count: int, erased: Sequence[int] = ()) -> CommitStamp:
        """Stamps for so many pages that are about to be written; `leaving` will hold nothing.

        One that is neither committed nor withdrawn stops the mark: what is named after it will be read after
        a crash.
        """
        with self._lock:
            first, self._next_stamp = self._next_stamp, self._next_stamp + count
            self._pending.add(first)
            return CommitStamp(first, min(self._pending), erased)

    def withdraw(self, stamp: CommitStamp) -> None:
        """No entry names any of its pages, and none will."""
        with self._lock:
            self._pending.discard(stamp.first)

    def entries(self, stamp: CommitStamp, pages: Iterable[StoredPage]) -> dict[int, bytes]:
        """Entries as they are stored, by slot, for all pages that `naming` is for."""
        return pack_entries(pages, stamp.first, stamp.mark, self._segments.identity)

    def blocks(self, stamp: CommitStamp, stored: Mapping[int, bytes]) -> list[EntryBlock]:
        """What `commit` writes if `stored` are the entries, by slot, of the pages that were written."""
        return self._blocks({**stored, **empty_entries(stamp.erased)})

    def commit(self, stamps: Sequence[CommitStamp], blocks: Sequence[EntryBlock]) -> None:
        """Return when pages, which were written, and their entries are durable.

        Args:
            namings: of the pages.
            blocks: of each of them, from `blocks`.

        Raises:
            OSError: they may not be, and no later commit will be.
        """
        self._commit(blocks, partial(self._segments.sync, [block.slot for block in blocks]))
        with self._lock:
            self._pending.difference_update(stamp.first for stamp in stamps)

    def erase(self, slots: Sequence[int]) -> None:
        """Return when these slots hold nothing, durably.

        Raises:
            OSError: they may hold what they held, and no later commit will be durable.
        """
        with self._segments.barrier(slots) as sync:
            self._commit(self._blocks(empty_entries(slots)), sync)

    def mark_durable(self, pages: Sequence[StoredPage]) -> None:
        """Name pages anew, the least recently used first, and say that all are durable.

        Nobody else commits meanwhile, and every page that has an entry is durable.

        Raises:
            OSError: the entries may not be.
        """
        first, self._next_stamp = self._next_stamp, self._next_stamp + len(pages)
        with self._segments.barrier(page.slot for page in pages) as sync:
            packed = pack_entries(pages, first, self._next_stamp, self._segments.identity)
            write_blocks(self._segments, self._blocks(packed))
            sync()

    def _blocks(self, stored: Mapping[int, bytes]) -> list[EntryBlock]:
        return entry_blocks(stored, self._segments.shape.slots)

    def _commit(self, blocks: Sequence[EntryBlock], sync: Callable[[], None]) -> None:
        if not blocks:
            return
        self._check()
        try:
            write_blocks(self._segments, blocks)
            sync()
        except BaseException:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            self.broken = True
            logger.exception("nothing is written any more until the pool is reopened")
            raise
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "a commit has failed before")
