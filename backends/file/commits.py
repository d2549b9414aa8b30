"""What makes changes durable, in an order that no crash can turn around; many calls share one commit."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from asynchicache.backends.file.names import NameFile
from asynchicache.backends.file.segments import Segments

logger = logging.getLogger(__name__)


class Change(NamedTuple):
    """A slot holds a page from now on, or, without a digest, nothing."""

    slot: int
    digest: bytes | None = None


class _Waiting:
    """The changes of one caller."""

    __slots__ = ("changes", "done", "error")

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes
        self.done = False
        self.error: OSError | None = None


class Commits:
    """Two barriers: pages are durable before the entries that name them are written.

    So an entry on disk always names a whole page, and whoever gives a slot away commits an empty entry
    before the slot is written again. Callers that come while a commit runs share the next one
    (group commit: DeWitt et al., "Implementation Techniques for Main Memory Database Systems", 1984).

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
        self._turn = threading.Condition()
        self._leading = False
        self._queue: list[_Waiting] = []

    def commit(self, changes: Sequence[Change]) -> None:
        """Return when `changes` are durable.

        Raises:
            OSError: they may not be, and no later commit will be.
        """
        if not changes:
            return
        mine = _Waiting(changes)
        with self._turn:
            self._queue.append(mine)
            self._turn.wait_for(lambda: mine.done or not self._leading)
            if not mine.done:
                self._leading = True
                group, self._queue = self._queue, []
        if not mine.done:
            self._lead(group)
        if mine.error is not None:
            raise mine.error

    def _lead(self, group: list[_Waiting]) -> None:
        error = self._attempt([change for waiting in group for change in waiting.changes])
        with self._turn:
            for waiting in group:
                waiting.error = error
                waiting.done = True
            self._leading = False
            self._turn.notify_all()

    def _attempt(self, changes: Sequence[Change]) -> OSError | None:
        if self.broken:
            return OSError(errno.EIO, "a commit has failed before")
        try:
            self._segments.sync(change.slot for change in changes if change.digest is not None)
            for change in changes:
                self._apply(change)
            self._names.flush()
        except OSError as error:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            logger.exception("nothing is written any more until the pool is reopened")
            self.broken = True
            return error
        return None

    def _apply(self, change: Change) -> None:
        if change.digest is None:
            self._names.clear(change.slot)
            return
        self._names.set(change.slot, change.digest, self._stamp)
        self._stamp += 1

    def save_order(self, pages: Sequence[tuple[bytes, int]]) -> None:
        """Write how recently each page was used, the oldest first; nobody commits meanwhile.

        Raises:
            OSError: it may not be durable.
        """
        for digest, slot in pages:
            self._apply(Change(slot, digest))
        self._names.flush()
