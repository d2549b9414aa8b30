"""One pool's files and what is in them: which slots are free, what a page's slot is, what is durable.

All methods block, and may be called from any thread. The lock is held for looks into memory only.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from asynchicache.backends.file.budget import Budget
from asynchicache.backends.file.commits import Commits
from asynchicache.backends.file.dependencies import PoolDependencies
from asynchicache.backends.file.index import PageIndex, StoredPage
from asynchicache.backends.file.manifest import Manifest
from asynchicache.backends.file.recovery import PageReader, recover
from asynchicache.backends.file.segments import Segments
from asynchicache.backends.file.writer import GroupWriter, WriteBatch

logger = logging.getLogger(__name__)

_AHEAD = 64  # a full store keeps one slot of so many free for the next call, and not more than a call's
_LEAST_AHEAD = 1024  # slots below which each one counts, and none is kept free


class PoolStore:
    """The pages of one folder of a pool.

    A slot is free, holds a page, or is taken by a call; it is free only when its entry on disk is
    empty. So whatever a crash leaves in a slot that is written, no entry names it that `recover` trusts.

    Args:
        folder: of the pool.
        manifest: whose pages they are, and their sizes.
        budget: what the folder of all pools may take.
        standing: which of the folder's pools stand on which; by default this one on none, and none on it.
        depends_on: the pool without whose page of the same digest a page here is useless; None for none.
        limit: most bytes of this pool's files; None for no limit of its own.
        read_only: nothing is written.
        direct: go around the kernel's cache where the file system lets us.
        now: seconds on a clock that never goes back.

    Raises:
        StorageFormatError: the files cannot be those of a pool.
        OSError: a file cannot be opened or read.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        budget: Budget,
        *,
        dependencies: PoolDependencies | None = None,
        depends_on: str | None = None,
        limit: int | None = None,
        read_only: bool = False,
        direct: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = manifest.pool
        self.depends_on = depends_on
        self.read_only = read_only
        self.unfinished = 0
        """Pages of the last writes before a crash that were found in part, and forgotten."""
        self._folder = folder
        self._budget = budget
        self._dependencies = dependencies or PoolDependencies()
        self._limit = limit
        self._full = False
        self._freed = budget.freed
        self._lock = threading.Lock()
        self.index = PageIndex()
        with budget.opening(folder):
            self.segments = Segments(
                folder, manifest.slot_bytes, manifest.identity, read_only=read_only, direct=direct, now=now
            )
            try:
                self._load(PageReader(self.segments, manifest))
                if not read_only:
                    budget.shrink_to_limit(self)
            except OSError:
                self.segments.close()
                raise
            budget.pool_opened(folder, self)
        self._dependencies.join(self)

    @property
    def nbytes(self) -> int:
        return self.segments.nbytes

    @property
    def broken(self) -> bool:
        """Nothing is written any more until it is reopened."""
        return self._commits.broken

    @property
    def full(self) -> bool:
        """The disk refuses to let it grow; what there is, is reused."""
        return self.segments.full

    # Reading.

    def pin(self, digests: Iterable[bytes]) -> list[StoredPage | None]:
        """Pages, which stay until `unpin`; None where one is not there."""
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
            removed = self.index.take_removed()
        self._dependencies.pages_removed(self, removed)
        if not self.read_only:
            slots = [slot for (_, slot), there in zip(pages, dropped, strict=True) if there]
            self._try_to_free(slots)
        return dropped

    # The order of use.

    def touch(self, digests: Sequence[bytes]) -> None:
        """Count pages as used now, the last one most recently; not those that lack what they stand on."""
        self.use([digest for digest in digests if self._dependencies.useful(self, digest)])

    def use(self, digests: Iterable[bytes]) -> None:
        """Count pages as used now, the last one most recently; those that are not there are skipped."""
        with self._lock:
            for digest in digests:
                self.index.touch(digest)

    def demote(self, digests: Sequence[bytes]) -> None:
        """These are the first to be evicted, in this order."""
        with self._lock:
            self.index.demote(digests)

    def digests(self) -> list[bytes]:
        """Of all pages, the least recently used first."""
        with self._lock:
            return self.index.digests()

    def has(self, digest: bytes) -> bool:
        return digest in self.index

    # Writing.

    def missing(self, digests: Sequence[bytes]) -> list[int]:
        """Places in `digests` of pages that are not there, the first of equal ones."""
        first = {digest: place for place, digest in reversed(list(enumerate(digests)))}
        with self._lock:
            return sorted(place for digest, place in first.items() if not self.index.touch(digest))

    def take(self, count: int, keep: Collection[bytes] = frozenset()) -> list[int]:
        """Up to `count` slots to write to, ascending: free ones, new ones, then those of the oldest pages.

        Args:
            count: how many.
            keep: digests of pages that make no room.

        Raises:
            OSError: pages could not be given up durably.
        """
        with self._lock:
            short = count - self.index.free
        if short > 0:
            self._grow(short)
        with self._lock:
            evicted = self.index.evict(count - self.index.free, keep)
            removed = self.index.take_removed()
            self._full = bool(evicted) or (self._full and short <= 0)
            taken = sorted(evicted + self.index.take(count - len(evicted)))
        self._dependencies.pages_removed(self, removed)
        self._commits.erase(evicted)
        return taken

    def write(self, batch: WriteBatch, keep: Collection[bytes] = frozenset()) -> list[bool]:
        """Write pages to taken slots, durably, and make them visible; for each page that was written whether
        no other call came first.

        In a full store, unless it is small, slots for the next call are made free by the same barrier.

        Args:
            load: what is written.
            keep: digests of pages that make no room.

        Raises:
            OSError: they may not be durable.
        """
        count = sum(len(run.moves) for run in batch.runs)
        with self._lock:
            spare = self._full and self.index.slots >= _LEAST_AHEAD
            ahead = min(count, self.index.slots // _AHEAD) if spare else 0
            erased = self.index.evict(ahead - self.index.free, keep)
            removed = self.index.take_removed()
        self._dependencies.pages_removed(self, removed)
        batch.stamp = self._commits.reserve(count, erased)
        try:
            self._writer.write(batch)
            self.release(erased)
        except BaseException:
            if not batch.may_be_named:
                self._commits.withdraw(batch.stamp)
            self._try_to_free(erased)
            raise
        return self._publish(batch.stored)

    def _publish(self, pages: Sequence[StoredPage]) -> list[bool]:
        with self._lock:
            held = [self.index.add(page) for page in pages]
        self._try_to_free([page.slot for page, first in zip(pages, held, strict=True) if not first])
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
            removed = self.index.take_removed()
        self._dependencies.pages_removed(self, removed)
        self._erase_and_free([slot for slot in slots if slot is not None])
        return [slot is not None for slot in slots]

    def clear(self) -> int:
        """Forget every page, durably; how many there were.

        Raises:
            OSError: they are gone for now, and may come back when the pool is reopened.
        """
        with self._lock:
            slots = self.index.clear()
            removed = self.index.take_removed()
        self._dependencies.pages_removed(self, removed)
        self._erase_and_free(slots)
        return len(slots)

    def shrink(self, nbytes: int) -> int:
        """Forget the pages at the end of the pool, and cut its files; how many bytes that made free."""
        slots = max(0, self.segments.slots - -(-nbytes // self.segments.shape.slot_bytes))
        before, last = self.nbytes, self.segments.slots
        with self._lock:
            if self.broken or not self.index.truncate(slots):
                return 0
            removed = self.index.take_removed()
        self._dependencies.pages_removed(self, removed)
        try:
            self._commits.erase(range(slots, last))
            self._shrink(slots)
        except OSError as error:
            logger.warning("%s cannot give up %d slots: %s", self._folder, last - slots, error)
        return before - self.nbytes

    def close(self) -> None:
        """Write the order of use, and close the files; twice is harmless."""
        self._budget.pool_closed(self._folder, self)
        self._dependencies.leave(self)
        self._writer.close()
        try:
            if self.index.order_changed and not (self.read_only or self.broken):
                self.index.order_changed = False
                self._commits.mark_durable(self.index.in_order())
        except OSError as error:
            logger.warning("%s: the order of use is lost: %s", self._folder, error)
        finally:
            self.segments.close()

    def _load(self, reader: PageReader) -> None:
        if not self.read_only:
            self.segments.sync_all()  # a writer that was killed has left its last writes to the kernel
        found = recover(self.segments, reader)
        self.unfinished = found.unfinished
        self._commits = Commits(self.segments, found.stamp)
        self._writer = GroupWriter(self.segments, self._commits)
        if not self.read_only:
            self._commits.erase(found.stale)
            self._commits.mark_durable(found.checked)
            self.segments.mend()
        self.index.load(found.pages, self.segments.slots)
        if not self.read_only and self._limit is not None and self.nbytes > self._limit:
            self.shrink(self.nbytes - self._limit)

    def _shrink(self, slots: int) -> None:
        """Cut the files behind these slots; those that cannot be cut off are free: nothing is in them.

        Raises:
            OSError: some cannot.
        """
        try:
            self.segments.shrink(slots)
        finally:
            with self._lock:
                self.index.grow(self.segments.slots - slots)

    def _grow(self, wanted: int) -> None:
        with self._budget.lock:
            self._ask_again_if_freed()
            if self.segments.refused:  # or others would give way for nothing
                return
            allowed = self._allowed(wanted)
            gained = self.segments.grow(min(wanted, allowed), allowed) if allowed else 0
            with self._lock:
                self.index.grow(gained)

    def _ask_again_if_freed(self) -> None:
        """A pool has given back something since this one looked: the disk is asked at once."""
        if self._freed != self._budget.freed:
            self._freed = self._budget.freed
            self.segments.ask_again()

    def _allowed(self, wanted: int) -> int:
        """Slots that the pool may have more."""
        slots, shape = self.segments.slots, self.segments.shape
        taken = shape.pool_bytes(slots)
        room = self._budget.grant(
            self, shape.pool_bytes(slots + wanted) - taken, shape.pool_bytes(slots + 1) - taken
        )
        if self._limit is not None:
            own = self._limit - self.nbytes
            room = own if room is None else min(room, own)
        return sys.maxsize if room is None else max(0, shape.pool_slots(taken + room) - slots)

    def _erase_and_free(self, slots: Sequence[int]) -> None:
        self._commits.erase(slots)
        self.release(slots)

    def _try_to_free(self, slots: Sequence[int]) -> None:
        """Free slots whose pages nobody can use; they are lost until it is reopened if the disk refuses."""
        try:
            self._erase_and_free(slots)
        except OSError as error:
            logger.warning("%s: %d slots are lost for now: %s", self._folder, len(slots), error)
