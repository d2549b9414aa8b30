"""Commit pages and their entries durably, in an order that survives a crash at any point."""

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
    """Stamps reserved for pages that are being written.

    Attributes:
        first: the lowest stamp.
        mark: pages with lower stamps are durable.
        erased: slots of evicted pages, whose entries the commit clears.
    """

    first: int
    mark: int
    erased: Sequence[int]


class Commits:
    """Makes pages durable, together with the entries that name them, with one barrier.

    Before the barrier ends, the disk may write an entry and lose its page in a crash. So each entry records a
    mark: pages with lower stamps were durable when it was made. After a crash, pages with higher stamps are
    verified. An evicted slot's entry is erased durably before the slot is written again. One thread
    (`writer.GroupWriter`) commits pages; other threads may erase concurrently.

    Args:
        next_stamp: stamp of the next page; stamps only increase. All stored pages have lower stamps and are
            durable.
    """

    def __init__(self, segments: Segments, next_stamp: int) -> None:
        self.broken = False
        """A commit has failed; nothing is written until the pool is reopened."""
        self._segments = segments
        self._next_stamp = next_stamp
        self._pending: set[int] = set()  # first stamps of commits that have not succeeded
        self._lock = threading.Lock()

    def reserve(self, count: int, erased: Sequence[int] = ()) -> CommitStamp:
        """Reserve stamps for `count` pages to be written; the commit clears the entries of `erased`.

        A stamp that is neither committed nor withdrawn holds the mark back: pages stamped later are then
        verified after a crash.
        """
        with self._lock:
            first, self._next_stamp = self._next_stamp, self._next_stamp + count
            self._pending.add(first)
            return CommitStamp(first, min(self._pending), erased)

    def withdraw(self, stamp: CommitStamp) -> None:
        """Release a stamp: no entry names any of its pages, and none will."""
        with self._lock:
            self._pending.discard(stamp.first)

    def entries(self, stamp: CommitStamp, pages: Iterable[StoredPage]) -> dict[int, bytes]:
        """Packed entries, by slot, of the pages that `stamp` was reserved for."""
        return pack_entries(pages, stamp.first, stamp.mark, self._segments.identity)

    def blocks(self, stamp: CommitStamp, stored: Mapping[int, bytes]) -> list[EntryBlock]:
        """The blocks for `commit`, given the entries by slot of the pages that were written."""
        return self._blocks({**stored, **empty_entries(stamp.erased)})

    def commit(self, stamps: Sequence[CommitStamp], blocks: Sequence[EntryBlock]) -> None:
        """Write the entries of written pages, and return when pages and entries are durable.

        Args:
            blocks: the blocks of all stamps, from `blocks`.

        Raises:
            OSError: they may not be durable; every later commit fails too.
        """
        self._commit(blocks, partial(self._segments.sync, [block.slot for block in blocks]))
        with self._lock:
            self._pending.difference_update(stamp.first for stamp in stamps)

    def erase(self, slots: Sequence[int]) -> None:
        """Clear the entries of these slots, and return when that is durable.

        Raises:
            OSError: the entries may still be there; every later commit fails too.
        """
        with self._segments.barrier(slots) as sync:
            self._commit(self._blocks(empty_entries(slots)), sync)

    def mark_durable(self, pages: Sequence[StoredPage]) -> None:
        """Rewrite the entries of pages, the least recently used first, with a mark above all of them.

        The caller makes sure that no other commit runs and that every page with an entry is durable.

        Raises:
            OSError: the entries may not be durable.
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
