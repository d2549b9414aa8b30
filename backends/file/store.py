"""One pool's files and what is in them: which slots are free, what a page's slot is, what is durable.

All methods block, and may be called from any thread. The lock is held for looks into memory only.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from asynchicache.backends.file.blocks import BlockFile
from asynchicache.backends.file.budget import Budget
from asynchicache.backends.file.commits import Change, Commits
from asynchicache.backends.file.folder import NAMES
from asynchicache.backends.file.index import PageIndex
from asynchicache.backends.file.names import ENTRY_BYTES, NameFile
from asynchicache.backends.file.segments import Segments
from asynchicache.layouts import ALIGNMENT

logger = logging.getLogger(__name__)


class PageStore:
    """The pages of one folder of a pool.

    A slot is free, holds a page, or is taken by a call; it is free only when its entry on disk is
    empty. So whatever a crash leaves in a slot that is written, no entry names it.

    Args:
        folder: of the pool.
        frame_bytes: of a slot, header and page.
        budget: what the folder of all pools may take.
        limit: most bytes of this pool's files; None for no limit of its own.
        read_only: nothing is written.
        direct: go around the kernel's cache where the file system lets us.

    Raises:
        OSError: a file cannot be opened or read.
    """

    def __init__(
        self,
        folder: Path,
        frame_bytes: int,
        budget: Budget,
        *,
        limit: int | None = None,
        read_only: bool = False,
        direct: bool = True,
    ) -> None:
        self.read_only = read_only
        self._folder = folder
        self._budget = budget
        self._limit = limit
        self._lock = threading.Lock()
        self._names = NameFile(BlockFile(folder / NAMES, read_only=read_only, direct=False))
        try:
            self.segments = Segments(folder, frame_bytes, read_only=read_only, direct=direct)
        except OSError:
            self._names.close()
            raise
        self.index = PageIndex()
        try:
            self._load()
        except OSError:
            self._close_files()
            raise
        budget.join(folder, self)

    @property
    def nbytes(self) -> int:
        return self.segments.nbytes + self._names.nbytes

    @property
    def broken(self) -> bool:
        """Nothing is written any more until it is reopened."""
        return self._commits.broken

    # Reading.

    def pin(self, digests: Iterable[bytes]) -> list[int | None]:
        """The slots of pages, which stay until `unpin`; None where a page is not there."""
        with self._lock:
            return [self.index.pin(digest) for digest in digests]

    def unpin(self, slots: Iterable[int]) -> None:
        with self._lock:
            for slot in slots:
                self.index.unpin(slot)

    def drop(self, pages: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Forget damaged pages; for each, whether the slot still held it."""
        with self._lock:
            dropped = [self.index.forget(digest, slot) for digest, slot in pages]
        if not self.read_only:
            slots = [slot for (_, slot), there in zip(pages, dropped, strict=True) if there]
            self._give_up(slots)
        return dropped

    # Writing.

    def missing(self, digests: Sequence[bytes]) -> list[int]:
        """Places in `digests` of pages that are not there, the first of equal ones."""
        first = {digest: place for place, digest in reversed(list(enumerate(digests)))}
        with self._lock:
            return sorted(place for digest, place in first.items() if not self.index.touch(digest))

    def take(self, count: int) -> list[int]:
        """Up to `count` slots to write to, ascending: free ones, new ones, then those of the oldest pages.

        Raises:
            OSError: pages could not be given up durably.
        """
        with self._lock:
            short = count - self.index.free
        if short > 0:
            self._grow(short)
        with self._lock:
            evicted = self.index.evict(count - self.index.free)
            taken = sorted(evicted + self.index.take(count - len(evicted)))
        self._commits.commit([Change(slot) for slot in evicted])
        return taken

    def publish(self, pages: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Make pages in taken slots durable, then visible; for each, whether no other call came first.

        Raises:
            OSError: they may not be durable, and are not visible.
        """
        self._commits.commit([Change(slot, digest) for digest, slot in pages])
        with self._lock:
            held = [self.index.hold(slot, digest) for digest, slot in pages]
        self._give_up([slot for (_, slot), first in zip(pages, held, strict=True) if not first])
        return held

    def release(self, slots: Iterable[int]) -> None:
        """Taken slots without an entry are free again."""
        with self._lock:
            for slot in slots:
                self.index.release(slot)

    def remove(self, digests: Sequence[bytes]) -> list[bool]:
        """Forget pages, durably; for each, whether it was there.

        Raises:
            OSError: they are gone for now, and may come back when the pool is reopened.
        """
        with self._lock:
            slots = [self.index.remove(digest) for digest in digests]
        self._empty([slot for slot in slots if slot is not None])
        return [slot is not None for slot in slots]

    def clear(self) -> int:
        """Forget every page, durably; how many there were.

        Raises:
            OSError: they are gone for now, and may come back when the pool is reopened.
        """
        with self._lock:
            slots = self.index.clear()
        self._empty(slots)
        return len(slots)

    def give_back(self, nbytes: int) -> int:
        """Forget the pages at the end of the pool, and cut its files; how many bytes that made free."""
        slots = max(0, self.segments.slots - -(-nbytes // self.segments.frame_bytes))
        before, last = self.nbytes, self.segments.slots
        with self._lock:
            if self.broken or not self.index.cut(slots):
                return 0
        try:
            self._commits.commit([Change(slot) for slot in range(slots, last)])
            self.segments.shrink(slots)
            self._names.shrink(slots)
        except OSError as error:
            logger.warning("%s cannot give up %d slots: %s", self._folder, last - slots, error)
        return before - self.nbytes

    def close(self) -> None:
        """Write the order of use, and close the files; twice is harmless."""
        self._budget.leave(self._folder, self)
        try:
            if self.index.used and not (self.read_only or self.broken):
                self.index.used = False
                self._commits.save_order(self.index.in_order())
        except OSError as error:
            logger.warning("%s: the order of use is lost: %s", self._folder, error)
        finally:
            self._close_files()

    def _close_files(self) -> None:
        self._names.close()
        self.segments.close()

    def _load(self) -> None:
        found = self._names.load()
        stale = found.damaged
        pages: dict[bytes, int] = {}
        for digest, slot in found.pages:
            if not self.segments.holds(slot):
                stale.append(slot)
                continue
            if digest in pages:  # two calls stored the same page, and a crash came
                stale.append(pages.pop(digest))
            pages[digest] = slot
        self._commits = Commits(self.segments, self._names, found.stamp)
        if not self.read_only:
            self._names.grow(self.segments.slots)
            self._commits.commit([Change(slot) for slot in stale])
            self.segments.mend()
        slots = min(self.segments.slots, self._names.slots) if not self.read_only else self.segments.slots
        self.index.load(pages.items(), slots)
        if not self.read_only and self._limit is not None and self.nbytes > self._limit:
            self.give_back(self.nbytes - self._limit)

    def _grow(self, wanted: int) -> None:
        with self._budget.lock:
            before = self.segments.slots
            allowed = self._allowed(wanted)
            gained = self.segments.grow(min(wanted, allowed), allowed) if allowed else 0
            if gained and not self._names.grow(before + gained):
                self.segments.shrink(before)
                gained = 0
            with self._lock:
                self.index.grow(gained)

    def _allowed(self, wanted: int) -> int:
        """Slots that the pool may have more."""
        room = self._budget.room(self, self._cost(wanted))
        if self._limit is not None:
            own = self._limit - self.nbytes
            room = own if room is None else min(room, own)
        if room is None:
            return sys.maxsize
        count = max(0, (room - ALIGNMENT) // (self.segments.frame_bytes + ENTRY_BYTES))
        while self._cost(count + 1) <= room:  # entries come in blocks, so there may be room for some more
            count += 1
        return count

    def _cost(self, count: int) -> int:
        """Bytes that the files grow by for `count` slots more."""
        entries = NameFile.size_for(self.segments.slots + count) - self._names.nbytes
        return count * self.segments.frame_bytes + max(entries, 0)

    def _empty(self, slots: Sequence[int]) -> None:
        self._commits.commit([Change(slot) for slot in slots])
        self.release(slots)

    def _give_up(self, slots: Sequence[int]) -> None:
        """Free slots whose pages nobody can use; they are lost until it is reopened if the disk refuses."""
        try:
            self._empty(slots)
        except OSError as error:
            logger.warning("%s: %d slots are lost for now: %s", self._folder, len(slots), error)
