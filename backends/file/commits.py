"""What makes changes durable, in an order that no crash can turn around."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from asynchicache.backends.file import entries
from asynchicache.backends.file.entries import Block
from asynchicache.backends.file.index import Stored
from asynchicache.backends.file.segments import Segments

logger = logging.getLogger(__name__)


class Naming(NamedTuple):
    """Pages that are on their way.

    Attributes:
        first: the lowest of their stamps.
        mark: pages with lower stamps are durable.
        leaving: slots whose pages were given up, and whose entries will be empty.
    """

    first: int
    mark: int
    leaving: Sequence[int]


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

    def __init__(self, segments: Segments, stamp: int) -> None:
        self.broken = False
        """The disk has refused a commit; nothing is written any more until the pool is reopened."""
        self._segments = segments
        self._stamp = stamp
        self._pending: set[int] = set()  # the first stamps of commits that have not ended well
        self._lock = threading.Lock()

    def name(self, count: int, leaving: Sequence[int] = ()) -> Naming:
        """Stamps for so many pages that are about to be written; `leaving` will hold nothing.

        One that is neither committed nor withdrawn stops the mark: what is named after it will be read after
        a crash.
        """
        with self._lock:
            first, self._stamp = self._stamp, self._stamp + count
            self._pending.add(first)
            return Naming(first, min(self._pending), leaving)

    def withdraw(self, naming: Naming) -> None:
        """No entry names any of its pages, and none will."""
        with self._lock:
            self._pending.discard(naming.first)

    def entries(self, naming: Naming, pages: Iterable[Stored]) -> dict[int, bytes]:
        """Entries as they are stored, by slot, for all pages that `naming` is for."""
        return entries.packed(pages, naming.first, naming.mark, self._segments.identity)

    def blocks(self, naming: Naming, stored: Mapping[int, bytes]) -> list[Block]:
        """What `commit` writes if `stored` are the entries, by slot, of the pages that were written."""
        return self._blocks({**stored, **entries.empty(naming.leaving)})

    def commit(self, namings: Sequence[Naming], blocks: Sequence[Block]) -> None:
        """Return when pages, which were written, and their entries are durable.

        Args:
            namings: of the pages.
            blocks: of each of them, from `blocks`.

        Raises:
            OSError: they may not be, and no later commit will be.
        """
        self._commit(blocks, partial(self._segments.sync, [block.slot for block in blocks]))
        with self._lock:
            self._pending.difference_update(naming.first for naming in namings)

    def erase(self, slots: Sequence[int]) -> None:
        """Return when these slots hold nothing, durably.

        Raises:
            OSError: they may hold what they held, and no later commit will be durable.
        """
        with self._segments.barrier(slots) as sync:
            self._commit(self._blocks(entries.empty(slots)), sync)

    def vouch(self, pages: Sequence[Stored]) -> None:
        """Name pages anew, the least recently used first, and say that all are durable.

        Nobody else commits meanwhile, and every page that has an entry is durable.

        Raises:
            OSError: the entries may not be.
        """
        first, self._stamp = self._stamp, self._stamp + len(pages)
        with self._segments.barrier(page.slot for page in pages) as sync:
            named = entries.packed(pages, first, self._stamp, self._segments.identity)
            entries.put(self._segments, self._blocks(named))
            sync()

    def _blocks(self, stored: Mapping[int, bytes]) -> list[Block]:
        return entries.blocks(stored, self._segments.shape.slots)

    def _commit(self, blocks: Sequence[Block], sync: Callable[[], None]) -> None:
        if not blocks:
            return
        self._check()
        try:
            entries.put(self._segments, blocks)
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
