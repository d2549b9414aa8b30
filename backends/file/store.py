"""One pool's files and their index: free slots, the slot of each page, and durability.

All methods block, and may be called from any thread. The lock is held only for work in memory.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from asynchicache.backends.file.budget import Budget
from asynchicache.backends.file.commits import Commits
from asynchicache.backends.file.dependencies import PoolDependencies
from asynchicache.backends.file.entries import PageReader, recover
from asynchicache.backends.file.folder import MANIFEST, Manifest, write_label_file
from asynchicache.backends.file.index import PageIndex, StoredPage
from asynchicache.backends.file.segments import Segments
from asynchicache.backends.file.writer import GroupWriter, WriteBatch
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import ObjectKey

logger = logging.getLogger(__name__)

_AHEAD = 64  # a full store keeps 1/64 of its slots free for the next call, but at most a call's worth
_LEAST_AHEAD = 1024  # a store with fewer slots keeps none free


class PoolStore:
    """The pages in one pool's folder.

    A slot is free, holds a page, or is taken by a call; it is free only if its entry on disk is empty. So
    if a crash interrupts a write to a slot, no entry that `recover` trusts names the slot.

    Args:
        budget: the byte limit shared by all pools of the store.
        dependencies: dependencies between the store's pools; by default there are none.
        depends_on: the pool whose page of the same digest each page of this pool needs; None for none.
        limit: most bytes of this pool's files; None for no limit of its own.
        direct: bypass the page cache if the file system allows it.
        now: monotonic clock, in seconds.

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
        self._manifest = manifest
        self.depends_on = depends_on
        self.read_only = read_only
        self.unfinished = 0
        """Number of pages that a crash had torn, and that were dropped on opening."""
        self.failures = FailureLog(logger)
        self._folder = folder
        self._budget = budget
        self._dependencies = dependencies or PoolDependencies()
        self._limit = limit
        self._full = False
        self._nothing = False  # the last call that asked for slots got none
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
        """A commit failed: nothing is written until the store is reopened."""
        return self._commits.broken

    @property
    def full(self) -> bool:
        """The disk refused to let the store grow, or keeps the rest; it reuses its slots, if it has any."""
        return self.segments.full or self._nothing

    # Reading.

    def pin(self, digests: Iterable[bytes]) -> list[StoredPage | None]:
        """Look pages up and protect them until `unpin`; None for each missing page."""
        with self._lock:
            return [self.index.pin(digest) for digest in digests]

    def unpin(self, slots: Iterable[int]) -> None:
        with self._lock:
            for slot in slots:
                self.index.unpin(slot)

    def drop(self, pages: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Remove damaged pages; returns for each page whether its slot still held it."""
        with self._removing():
            dropped = [self.index.forget(digest, slot) for digest, slot in pages]
        if not self.read_only:
            slots = [slot for (_, slot), there in zip(pages, dropped, strict=True) if there]
            self._try_to_free(slots)
        return dropped

    def drop_cut(self) -> int:
        """Drop the pages of files that others have cut, and give the files their length back; returns how
        many pages were lost.

        Raises:
            OSError: the disk reported an error.
        """
        with self._lock:  # the index never has slots that the files have not got yet, or have no more
            if self.read_only or not self.segments.are_cut(self.index.slots):
                return 0
            lost = [(digest, slot) for digest, slot in self.index.pages() if not self.segments.holds(slot)]
            self.segments.lengthen(self.index.slots)
        return sum(self.drop(lost))

    def label(self, label: bytes) -> None:
        """Keep the pool's label.

        Raises:
            OSError: it cannot be written.
        """
        write_label_file(self._folder, label)

    def in_place(self) -> bool:
        """Whether the files are where a restart looks for them."""
        return (self._folder / MANIFEST).exists() and self.segments.in_place()

    # The order of use.

    def touch(self, digests: Sequence[bytes]) -> None:
        """Count pages as used now, the last one most recently; skip pages whose dependency is missing."""
        self.use([digest for digest in digests if self._dependencies.useful(self, digest)])

    def use(self, digests: Iterable[bytes]) -> None:
        """Count pages as used now, the last one most recently; missing pages are skipped."""
        with self._lock:
            for digest in digests:
                self.index.touch(digest)

    def demote(self, digests: Sequence[bytes]) -> None:
        """Make these pages the first to be evicted, in this order."""
        with self._lock:
            self.index.demote(digests)

    def digests(self) -> list[bytes]:
        """Digests of all pages, the least recently used first."""
        with self._lock:
            return self.index.digests()

    def has(self, digest: bytes) -> bool:
        return digest in self.index

    # Writing.

    def missing(self, digests: Sequence[bytes]) -> list[int]:
        """Positions in `digests` of pages that are missing; of equal digests only the first.

        Pages that exist count as used.
        """
        first = {digest: place for place, digest in reversed(list(enumerate(digests)))}
        with self._lock:
            return sorted(place for digest, place in first.items() if not self.index.touch(digest))

    def take(self, count: int, keep: Collection[bytes] = frozenset()) -> list[int]:
        """Take up to `count` slots for writing, ascending: free ones, new ones, then those of evicted pages.

        Args:
            keep: digests of pages not to evict.

        Raises:
            OSError: the entries of evicted pages could not be erased durably.
        """
        with self._lock:
            short = count - self.index.free
        if short > 0:
            self._grow(short)
        with self._removing():
            evicted = self.index.evict(count - self.index.free, keep)
            self._full = bool(evicted) or (self._full and short <= 0)
            taken = sorted(evicted + self.index.take(count - len(evicted)))
            self._nothing = count > 0 and not taken
        self._commits.erase(evicted)
        return taken

    def leaving(self, count: int) -> list[ObjectKey]:
        """The pages that would be evicted for `count` more, the first to go first; maybe too many. Also pages
        of the pool that would give up its last slots for them.

        Raises:
            OSError: the folder is gone.
        """
        with self._lock:
            slots, short = self.segments.slots, count - self.index.free
            short += min(count, slots // _AHEAD) if slots >= _LEAST_AHEAD else 0
        if short <= 0 or self.read_only:
            return []
        shape, room, others = self.segments.shape, 0, list[ObjectKey]()
        taken = shape.pool_bytes(slots)
        if not self.segments.refused:
            wanted, least = shape.pool_bytes(slots + short) - taken, shape.pool_bytes(slots + 1) - taken
            room, other, nbytes = self._budget.foresee(self, wanted, least)
            others = other.last(nbytes) if nbytes and isinstance(other, PoolStore) else []
        if self._limit is not None:
            room = min(room, self._limit - self.nbytes)
        with self._lock:
            going = self.index.digests()[: max(0, short - (shape.pool_slots(taken + room) - slots))]
        return others + list(map(self._key, going))

    def last(self, nbytes: int) -> list[ObjectKey]:
        """The pages that `shrink` would remove."""
        slots = self._slots_without(nbytes)
        with self._lock:
            return [self._key(digest) for digest, slot in self.index.pages() if slot >= slots]

    def _key(self, digest: bytes) -> ObjectKey:
        return ObjectKey(bytes.fromhex(self._manifest.fingerprint), digest, self.pool, self._manifest.shard)

    def _slots_without(self, nbytes: int) -> int:
        return max(0, self.segments.slots - -(-nbytes // self.segments.shape.slot_bytes))

    def write(self, batch: WriteBatch, keep: Collection[bytes] = frozenset()) -> list[bool]:
        """Write pages to taken slots, durably, and make them visible.

        In a full store, unless it is small, the same barrier frees slots for the next call.

        Args:
            keep: digests of pages not to evict.

        Returns:
            For each page written, False if another call stored the same page first.

        Raises:
            OSError: the pages may not be durable.
        """
        count = sum(len(run.moves) for run in batch.runs)
        with self._removing():
            spare = self._full and self.index.slots >= _LEAST_AHEAD
            ahead = min(count, self.index.slots // _AHEAD) if spare else 0
            erased = self.index.evict(ahead - self.index.free, keep)
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
        """Free taken slots that have no entry."""
        with self._lock:
            for slot in slots:
                self.index.release(slot)

    def remove(self, digests: Sequence[bytes]) -> list[bool]:
        """Remove pages durably; returns for each page whether it existed.

        Raises:
            OSError: the pages are gone for now, but may come back when the pool is reopened.
        """
        with self._removing():
            slots = [self.index.remove(digest) for digest in digests]
        self._erase_and_free([slot for slot in slots if slot is not None])
        return [slot is not None for slot in slots]

    def clear(self) -> int:
        """Remove every page durably; returns how many there were.

        Raises:
            OSError: the pages are gone for now, but may come back when the pool is reopened.
        """
        with self._removing():
            slots = self.index.clear()
        self._erase_and_free(slots)
        return len(slots)

    def shrink(self, nbytes: int) -> int:
        """Remove the pages in the last slots and cut the files by about `nbytes`; returns the bytes freed."""
        slots = self._slots_without(nbytes)
        before, last = self.nbytes, self.segments.slots
        with self._removing():
            if self.broken or not self.index.truncate(slots):
                return 0
        try:
            self._commits.erase(range(slots, last))
            self._shrink(slots)
        except OSError as error:
            message, count = "%s cannot give up %d slots: %s", last - slots
            self.failures.warning("shrink", message, self._folder, count, error, pages=count)
        return before - self.nbytes

    def close(self) -> None:
        """Store the order of use, and close the files; closing twice is harmless."""
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

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """Hold the lock; afterwards, pages that depend on those removed meanwhile go first."""
        with self._lock:
            yield
            removed = self.index.take_removed()
        self._dependencies.pages_removed(self, removed)

    def _load(self, reader: PageReader) -> None:
        if not self.read_only:
            self.segments.sync_all()  # last writes of a killed writer may be in the page cache
        found = recover(self.segments, reader)
        self.unfinished = found.unfinished
        self._commits = Commits(self.segments, found.stamp)
        self._writer = GroupWriter(self.segments, self._commits)
        if not self.read_only:
            self._commits.erase(found.stale)
            self._commits.mark_durable(found.checked)
            self.segments.lengthen(self.segments.slots)
        self.index.load(found.pages, self.segments.slots)
        if not self.read_only and self._limit is not None and self.nbytes > self._limit:
            self.shrink(self.nbytes - self._limit)

    def _shrink(self, slots: int) -> None:
        """Cut the files after `slots` slots; slots that cannot be cut off become free, since they are empty.

        Raises:
            OSError: a file could not be cut.
        """
        try:
            self.segments.shrink(slots)
        finally:
            with self._lock:
                self.index.grow(self.segments.slots - slots)

    def _grow(self, wanted: int) -> None:
        with self._budget.lock:
            self._ask_again_if_freed()
            if self.segments.refused:  # else other pools would shrink for nothing
                return
            allowed = self._allowed(wanted)
            gained = self.segments.grow(min(wanted, allowed), allowed) if allowed else 0
            with self._lock:
                self.index.grow(gained)

    def _ask_again_if_freed(self) -> None:
        """If a pool has freed bytes since the last check, allow this one to try to grow again."""
        if self._freed != self._budget.freed:
            self._freed = self._budget.freed
            self.segments.ask_again()

    def _allowed(self, wanted: int) -> int:
        """Number of slots that the pool may add."""
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
        """Free slots of unusable pages; if the disk fails, the slots are lost until the pool is reopened."""
        try:
            self._erase_and_free(slots)
        except OSError as error:
            message, count = "%s: %d slots are lost for now: %s", len(slots)
            self.failures.warning("lost", message, self._folder, count, error, pages=count)
