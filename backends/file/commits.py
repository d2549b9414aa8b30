"""What makes changes durable, in an order that no crash can turn around."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from asynchicache.backends.file.names import Entry, NameFile
from asynchicache.backends.file.segments import Segments

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """A slot holds a page from now on, or, without a digest, nothing."""

    slot: int
    digest: bytes | None = None


class Commits:
    """Two barriers: pages are durable before the entries that name them are written.

    So an entry on disk always names a whole page, and whoever gives a slot away commits an empty entry
    before the slot is written again. Commits run side by side: each waits for its own pages only,
    and the kernel merges what they ask of the disk.

    Args:
        segments: the pages.
        names: the entries.
        stamp: of the next page; stamps only go up.
    """

    def __init__(self, segments: Segments, names: NameFile, stamp: int) -> None:
        self.broken = False
        """The disk has refused a commit; nothing is written any more until the pool is reopened."""
        self._segments = segments
        self._names = names
        self._stamp = stamp
        self._lock = threading.Lock()

    def commit(self, changes: Sequence[Change]) -> None:
        """Return when `changes` are durable.

        Raises:
            OSError: they may not be, and no later commit will be.
        """
        if not changes:
            return
        if self.broken:
            raise OSError(errno.EIO, "a commit has failed before")
        try:
            self._segments.sync(change.slot for change in changes if change.digest is not None)
            self._write(changes)
        except OSError:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            logger.exception("nothing is written any more until the pool is reopened")
            self.broken = True
            raise

    def save_order(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Write how recently each page was used, the oldest first; nobody commits meanwhile.

        Raises:
            OSError: it may not be durable.
        """
        self._write([Change(slot, digest) for digest, slot in pages])

    def _write(self, changes: Sequence[Change]) -> None:
        with self._lock:
            first, self._stamp = self._stamp, self._stamp + len(changes)
        entries = [Entry(first + age, slot, digest) for age, (slot, digest) in enumerate(changes)]
        self._names.write(entries)
        self._names.sync()
