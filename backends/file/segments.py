"""The slots of one pool, in preallocated files with a fixed number of slots each.

Slots are contiguous and start on 4,096-byte boundaries, so that one `preadv` or `pwritev` moves a run of
them without a copy in the kernel. A page's metadata is in its entry, not in a header before the page: headers
made the same calls 5 % slower, and a page could not be written before its checksum was known.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from asynchicache.backends.direct_file import DirectFile
from asynchicache.backends.file.folder import check_file, sync_folder
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.failure_log import FailureLog
from asynchicache.layouts import round_up

ENTRY_BYTES = 128
"""Bytes of an entry, which says what a slot holds; no entry crosses a sector."""

_SEGMENT_BYTES = 4 << 30
_FEWEST_SLOTS, _MAX_SLOTS = 64, 4096
_CACHE_PAGE = 1 << 16  # the largest page size of a page cache, so that no cache page holds entries and a slot


class SegmentShape(NamedTuple):
    """The layout of every segment of a pool: first the entries of its slots, then the slots, one page each.
    It depends only on the slot size.

    Attributes:
        slot_bytes: bytes of a page with its padding, a multiple of 4,096.
        slots: slots per segment: about 4 GiB of them, but 64 to 4,096.
        entries_bytes: bytes of the entries of a segment, padded.
    """

    slot_bytes: int
    slots: int
    entries_bytes: int

    @classmethod
    def of(cls, slot_bytes: int) -> SegmentShape:
        wanted = round_up(_SEGMENT_BYTES // slot_bytes, _FEWEST_SLOTS)
        slots = min(max(wanted, _FEWEST_SLOTS), _MAX_SLOTS)
        return cls(slot_bytes, slots, round_up(slots * ENTRY_BYTES, _CACHE_PAGE))

    def file_bytes(self, slots: int) -> int:
        """Bytes of a segment with its first `slots` slots."""
        return self.entries_bytes + slots * self.slot_bytes

    def file_slots(self, nbytes: int) -> int:
        """Whole slots in a segment of `nbytes` bytes."""
        return min(max(nbytes - self.entries_bytes, 0) // self.slot_bytes, self.slots)

    def pool_bytes(self, slots: int) -> int:
        """Bytes of all segments of a pool with `slots` slots."""
        full, rest = divmod(slots, self.slots)
        return full * self.file_bytes(self.slots) + (self.file_bytes(rest) if rest else 0)

    def pool_slots(self, nbytes: int) -> int:
        """Most slots of a pool whose segments have `nbytes` bytes in total."""
        full, rest = divmod(max(nbytes, 0), self.file_bytes(self.slots))
        return full * self.slots + self.file_slots(rest)


logger = logging.getLogger(__name__)

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_FLAGS = os.O_NOFOLLOW  # a link may lead to a file outside the store


class BlockFile(DirectFile):
    """A file of the store, which can grow.

    Args:
        path: the file; created if it is missing. A reader sees a missing file as empty.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool, direct: bool) -> None:
        super().__init__(path, direct=direct)
        self._failures = FailureLog(logger)
        self._descriptor = self._open(os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)

    def sync(self) -> None:
        """Make all previous writes durable."""
        os.fdatasync(self.fileno)

    def open_again(self) -> int:
        """A new descriptor of the same file, even if it was renamed or removed; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fileno}", os.O_RDONLY | os.O_CLOEXEC)

    def expect_random_reads(self) -> None:
        """Disable the kernel's read-ahead, which would read parts that others access with O_DIRECT."""
        with suppress(OSError):  # only a hint
            os.posix_fadvise(self.fileno, 0, 0, os.POSIX_FADV_RANDOM)

    def grow(self, size: int) -> bool:
        """Preallocate up to `size` bytes; if the disk refuses, return False and leave the size unchanged."""
        start = self.size
        try:
            os.posix_fallocate(self.fileno, start, size - start)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return self._grow_sparse(size)
            self._refused(error)
            self.truncate(start)  # frees the blocks of the failed preallocation
            return False
        return True

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        os.ftruncate(self.fileno, size)

    def _open(self, flags: int) -> int:
        check_file(self.path)
        reads_nothing = flags == os.O_RDONLY and not self.path.exists()
        path = os.devnull if reads_nothing else self.path
        try:
            return self._opened(path, flags | _FLAGS)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error

    def _grow_sparse(self, size: int) -> bool:
        try:
            self.truncate(size)
        except OSError as error:
            self._refused(error)
            return False
        return True

    def _refused(self, error: OSError) -> None:
        self._failures.warning(error.errno, "%s cannot grow: %s", self.path, error.strerror)


class Segment:
    """A file of slots. All methods block; reads and writes of different slots may run concurrently.

    The file is open twice. Slots bypass the page cache. Entries go through it, because it merges small
    writes, which would otherwise wait in the disk's queue behind pages. One barrier makes both durable.

    Args:
        path: the file; created if it is missing. A reader sees a missing file as empty.
        direct: bypass the page cache for slots if the file system allows it.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, shape: SegmentShape, *, read_only: bool, direct: bool) -> None:
        self._shape = shape
        self._pages = BlockFile(path, read_only=read_only, direct=direct)
        try:
            self._entries = BlockFile(path, read_only=read_only, direct=False)
        except OSError:
            self._pages.close()
            raise
        self._turn = threading.Lock()
        self._lost = False
        self._entries.expect_random_reads()

    @property
    def nbytes(self) -> int:
        return self._pages.size

    @property
    def slots(self) -> int:
        """Number of whole slots in the file, which may have been cut."""
        return self._shape.file_slots(self._pages.size)

    @property
    def in_place(self) -> bool:
        """Whether the path leads to this file still."""
        return self._pages.in_place()

    def read(self, place: int, views: Sequence[memoryview]) -> int:
        """Fill `views` from slot number `place` on; returns the number of whole slots read, at least 1.

        Raises:
            OSError: no slot was read; ENODATA if the file ends before the first slot does.
        """
        done = self._pages.read(views, self._shape.file_bytes(place)) // self._shape.slot_bytes
        if done == 0:
            raise OSError(errno.ENODATA, "the file ends before the page", str(self._pages.path))
        return done

    def write(self, place: int, views: Sequence[memoryview]) -> int:
        """Write `views` from slot number `place` on; returns the number of whole slots written, at least 1.

        Raises:
            OSError: no slot was written; ENOSPC if the disk is full.
        """
        done = self._pages.write(views, self._shape.file_bytes(place)) // self._shape.slot_bytes
        if done == 0:
            raise OSError(errno.ENOSPC, "the page was written in part", str(self._pages.path))
        return done

    def read_entries(self) -> memoryview:
        """Read the entries of all slots; zeros beyond the end of the file.

        Raises:
            OSError: they cannot be read.
        """
        data = memoryview(bytearray(self._shape.slots * ENTRY_BYTES))
        self._entries.read([data], 0)
        return data

    def write_entries(self, place: int, data: bytes) -> None:
        """Overwrite entries from slot number `place` on.

        Raises:
            OSError: some entries may not be written.
        """
        if self._entries.write([memoryview(data)], place * ENTRY_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "entries were written in part", str(self._entries.path))

    def sync(self) -> None:
        """Make all entries and slots written so far durable. Only one thread may use this; others use
        `barrier`.

        Raises:
            OSError: some may not be durable.
        """
        self._pages.sync()

    @contextmanager
    def barrier(self) -> Iterator[Callable[[], None]]:
        """Yield a function that makes everything written in the body durable, or raises OSError.

        Any number of barriers may run concurrently. The kernel reports a lost write once per open file
        (errseq_t), so each barrier opens the file itself, before the writes that it covers. If that fails,
        e.g. because too many files are open, barriers take turns on a descriptor that is already open.
        """
        try:
            descriptor = self._pages.open_again()
        except OSError:
            descriptor = None
        if descriptor is None:
            yield self._sync_in_turn
            return
        try:
            yield partial(os.fdatasync, descriptor)
        finally:
            os.close(descriptor)

    def _sync_in_turn(self) -> None:
        with self._turn:
            try:
                self._entries.sync()
            except OSError:
                self._lost = True
                raise
            if self._lost:
                raise OSError(errno.EIO, "a barrier has failed before", str(self._entries.path))

    def grow(self, slots: int) -> bool:
        """Preallocate the file up to `slots` slots; if the disk refuses, return False and change nothing."""
        return self._pages.grow(self._shape.file_bytes(slots))

    def resize(self, slots: int) -> None:
        """Cut the file to `slots` slots, or extend it with zeros.

        Raises:
            OSError: the disk reported an error.
        """
        self._pages.truncate(self._shape.file_bytes(slots))

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._pages.close()
        self._entries.close()


_MAX_VIEWS = 1000  # IOV_MAX is 1,024 on Linux
_MAX_BYTES = 32 << 20  # half of the bytes in flight: the disk writes one half while the other is prepared
_LONG_BYTES = 8 << 20
_LONG_READS = 2
_FIRST_BYTES = 1 << 20
_LARGEST_BYTES = 256 << 20
_MAX_MISSING = 64  # with more files missing, the one with the highest number is not ours
ASK_AGAIN_SECONDS = 30.0
"""How long a pool waits after the disk refused to let it grow, unless the disk was full and has room again. A
quota cannot be asked for."""


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.pages"


class Segments:
    """Slots, numbered across all files. All methods block; reads and writes may run concurrently.

    At most two long reads run at once, which is enough to keep the disk busy. More reads would share the disk
    and end together, and then all threads would compute checksums while the disk is idle.

    Args:
        slot_bytes: bytes of a slot, a multiple of 4,096.
        identity: identity of the pool; entries of another pool count as damaged.
        direct: bypass the page cache if the file system allows it.
        now: monotonic clock, in seconds.

    Raises:
        StorageFormatError: the number of a file is far above all others.
        StorageError: a file cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        slot_bytes: int,
        identity: bytes,
        *,
        read_only: bool,
        direct: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = SegmentShape.of(slot_bytes)
        self.identity = identity
        self.most_slots = max(1, min(_MAX_VIEWS, _MAX_BYTES // slot_bytes))
        self._folder = folder
        self._read_only = read_only
        self._direct = direct
        self._now = now
        self._refused_at: float | None = None
        self._disk_full = False
        self._files: list[Segment] = []
        self._read_turns = threading.Semaphore(_LONG_READS)
        try:
            for number in range(_count(folder)):
                self._files.append(self._file(number))
        except OSError:
            self.close()
            raise
        self.slots = 0
        if self._files:  # slots missing from a cut file still count
            self.slots = (len(self._files) - 1) * self.shape.slots + self._files[-1].slots

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self._files)

    @property
    def refused(self) -> bool:
        """The disk refused to let the pool grow less than `ASK_AGAIN_SECONDS` ago, and has no room since."""
        if self._refused_at is None or self._now() - self._refused_at >= ASK_AGAIN_SECONDS:
            return False
        return not (self._disk_full and self._disk_has_room())

    @property
    def full(self) -> bool:
        """The disk refused the last attempt to grow."""
        return self._refused_at is not None

    def ask_again(self) -> None:
        """Space was freed: allow the next attempt to grow at once."""
        self._refused_at = None

    def holds(self, slot: int) -> bool:
        """Whether the slot is within its file, which may have been cut."""
        number, place = divmod(slot, self.shape.slots)
        return number < len(self._files) and place < self._files[number].slots

    def in_place(self) -> bool:
        """Whether all files are where a restart looks for them."""
        return all(file.in_place for file in self._files)

    def are_cut(self, slots: int) -> bool:
        """Whether a file is shorter than the first `slots` slots need."""
        return any(
            file.slots < min(slots - number * self.shape.slots, self.shape.slots)
            for number, file in enumerate(self._files)
        )

    def lengthen(self, slots: int) -> None:
        """Extend files that are shorter than the first `slots` slots need, with zeros.

        Raises:
            OSError: the disk reported an error.
        """
        for number, file in enumerate(self._files):
            wanted = min(slots - number * self.shape.slots, self.shape.slots)
            if file.slots < wanted:
                file.resize(wanted)

    def read(self, slot: int, views: Sequence[memoryview]) -> int:
        """Read slots from `slot` on into `views`, one slot per view.

        Returns:
            The number of whole slots read, at least 1; fewer than asked for if a file ends.

        Raises:
            OSError: no slot was read; ENODATA if the file ends before the first slot does.
        """
        file, place, count = self._place(slot, len(views))
        with self._read_turns if self.is_long(count) else nullcontext():
            return file.read(place, views[:count])

    def write(self, slot: int, views: Sequence[memoryview]) -> int:
        """Write `views` to slots from `slot` on, one slot per view; durable after a `barrier`.

        Returns:
            The number of whole slots written, at least 1; fewer than asked for if a file ends.

        Raises:
            OSError: no slot was written; ENOSPC if the disk is full.
        """
        file, place, count = self._place(slot, len(views))
        return file.write(place, views[:count])

    def read_entries(self) -> list[memoryview]:
        """Read the entries of each file.

        Raises:
            OSError: they cannot be read.
        """
        return [file.read_entries() for file in self._files]

    def write_entries(self, slot: int, data: bytes) -> None:
        """Overwrite entries from that of `slot` on, all in one file; durable after a `barrier`.

        Raises:
            OSError: some entries may not be written.
        """
        number, place = divmod(slot, self.shape.slots)
        self._files[number].write_entries(place, data)

    def is_long(self, count: int) -> bool:
        """Whether one system call that moves `count` slots keeps a disk busy by itself."""
        return count * self.shape.slot_bytes >= _LONG_BYTES

    def sync(self, slots: Iterable[int]) -> None:
        """Make all writes to these slots and their entries durable. Only one thread may use this; others use
        `barrier`.

        Raises:
            OSError: some writes may not be durable.
        """
        for file in self._holding(slots):
            file.sync()

    @contextmanager
    def barrier(self, slots: Iterable[int]) -> Iterator[Callable[[], None]]:
        """Yield a function that makes writes in the body to these slots and their entries durable, or raises
        OSError.
        """
        with ExitStack() as stack:
            syncs = [stack.enter_context(file.barrier()) for file in self._holding(slots)]
            yield lambda: _call_all(syncs)

    def sync_all(self) -> None:
        """Make all writes to the files durable, including those of earlier processes.

        Raises:
            OSError: some writes may not be durable.
        """
        for file in self._files:
            file.sync()

    def grow(self, wanted: int, allowed: int) -> int:
        """Preallocate `wanted` more slots and some ahead, as far as the disk allows.

        The pool grows by half of its size, which gives few extents and few calls. After the disk refused, the
        pool does not try again for a while and reuses its slots.

        Args:
            wanted: slots needed now.

        Returns:
            The number of slots added.
        """
        if self.refused:
            return 0
        ahead = min(max(self.nbytes // 2, _FIRST_BYTES), _LARGEST_BYTES) // self.shape.slot_bytes
        gained = 0
        for count in (max(wanted, ahead), wanted, 1):
            while gained < min(count, allowed):
                more = self._extend(min(count, allowed) - gained)
                if not more:
                    break
                gained += more
            if gained:
                self._refused_at = None
                return gained
        if allowed > 0:
            self._refused_at = self._now()
            self._disk_full = not self._disk_has_room()
        return gained

    def _disk_has_room(self) -> bool:
        """Whether the file system says that there is room for another slot."""
        wanted = self.shape.pool_bytes(self.slots + 1) - self.shape.pool_bytes(self.slots)
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize >= wanted

    def shrink(self, slots: int) -> None:
        """Cut the files after the first `slots` slots; no other call may use the slots cut off.

        Raises:
            OSError: a file cannot be cut; `self.slots` says how many slots remain.
        """
        self.ask_again()
        keep = -(-slots // self.shape.slots)
        for number in reversed(range(keep, len(self._files))):
            segment_path(self._folder, number).unlink(missing_ok=True)
            self.slots = number * self.shape.slots
            self._files.pop().close()
        if self._files:
            self._files[-1].resize(slots - (keep - 1) * self.shape.slots)
        self.slots = slots

    def close(self) -> None:
        """Close all files; closing twice is harmless."""
        for file in self._files:
            file.close()

    def _place(self, slot: int, count: int) -> tuple[Segment, int, int]:
        """The file of a slot, the slot's number in it, and how many of `count` slots are in that file."""
        number, place = divmod(slot, self.shape.slots)
        return self._files[number], place, min(count, self.shape.slots - place)

    def _holding(self, slots: Iterable[int]) -> list[Segment]:
        return [self._files[number] for number in sorted({slot // self.shape.slots for slot in slots})]

    def _new_file(self, number: int) -> Segment:
        """Create a file and make its directory entry durable.

        Raises:
            OSError: it may not be durable.
        """
        file = self._file(number)
        try:
            sync_folder(self._folder)
        except OSError:
            file.close()
            raise
        return file

    def _file(self, number: int) -> Segment:
        path = segment_path(self._folder, number)
        return Segment(path, self.shape, read_only=self._read_only, direct=self._direct)

    def _extend(self, count: int) -> int:
        """Add up to `count` slots to the last file, or to a new one; returns how many."""
        number, place = divmod(self.slots, self.shape.slots)
        if number == len(self._files):
            self._files.append(self._new_file(number))
        more = min(count, self.shape.slots - place)
        if not self._files[number].grow(place + more):
            return 0
        self.slots += more
        return more


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _count(folder: Path) -> int:
    """Number of segments up to the last existing one; a missing one before it counts as empty."""
    numbers = [int(path.stem) for path in folder.glob("[0-9][0-9][0-9][0-9][0-9].pages")]
    count = max(numbers, default=-1) + 1
    missing = count - len(numbers)
    if missing > _MAX_MISSING:
        last = segment_path(folder, count - 1)
        raise StorageFormatError(f"{last} is no file of ours: {missing} before it are missing; remove it")
    return count
