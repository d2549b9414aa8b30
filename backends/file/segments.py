"""The slots of one pool, in preallocated files of a fixed number of slots each.

Slots lie one behind the other, on 4,096-byte boundaries, so that one `preadv` or `pwritev` moves a run of
them without a copy by the kernel. What else there is to say of a page stands in its entry: with a header
before each page the same calls were slower by a twentieth, and a page could not be written before its
checksum was known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from asynchicache.backends.file.folder import sync_folder
from asynchicache.backends.file.segment import Segment
from asynchicache.backends.file.shape import SegmentShape
from asynchicache.errors import StorageFormatError

_MOST_VIEWS = 1000  # IOV_MAX is 1,024 on Linux
_MOST_BYTES = 32 << 20  # half of what calls write at once: the disk has one half, the other one gets ready
_LONG_BYTES = 8 << 20
_LONG_READS = 2
_FIRST_BYTES = 1 << 20
_LARGEST_BYTES = 256 << 20
_MOST_MISSING = 64  # files that were lost, not a name that a stranger chose
ASK_AGAIN_SECONDS = 30.0
"""How long a disk that has refused to let a pool grow is not asked again, unless something was given back."""


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.pages"


class Segments:
    """Slots, numbered through all files. All methods block; reads and writes may run side by side.

    Long reads take turns, two at a time. The disk is as busy as with more; but calls that share it end
    together, and then all threads compute checksums while the disk has nothing to do.

    Args:
        folder: of the pool.
        slot_bytes: of a slot, a multiple of 4,096.
        identity: whose pages these are; entries of any other are damaged.
        read_only: nothing is written.
        direct: go around the kernel's cache where the file system lets us.
        now: seconds on a clock that never goes back.

    Raises:
        StorageFormatError: the name of a file stands far behind all others.
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
        self.most_slots = max(1, min(_MOST_VIEWS, _MOST_BYTES // slot_bytes))
        self._folder = folder
        self._read_only = read_only
        self._direct = direct
        self._now = now
        self._refused_at: float | None = None
        self._files: list[Segment] = []
        self._read_turns = threading.Semaphore(_LONG_READS)
        try:
            for number in range(_count(folder)):
                self._files.append(self._file(number))
        except OSError:
            self.close()
            raise
        self.slots = 0
        if self._files:  # a file that was cut has holes where slots were
            self.slots = (len(self._files) - 1) * self.shape.slots + self._files[-1].slots

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self._files)

    @property
    def refused(self) -> bool:
        """The disk has refused to let the pool grow, and is not asked again yet."""
        return self._refused_at is not None and self._now() - self._refused_at < ASK_AGAIN_SECONDS

    @property
    def full(self) -> bool:
        """The disk refused when it was asked last."""
        return self._refused_at is not None

    def ask_again(self) -> None:
        """Something was given back to the disk: it may be asked at once."""
        self._refused_at = None

    def holds(self, slot: int) -> bool:
        """Whether the slot lies within its file, which may have been cut."""
        number, place = divmod(slot, self.shape.slots)
        return number < len(self._files) and place < self._files[number].slots

    def mend(self) -> None:
        """Files that were cut get their length back, without what was in them.

        Raises:
            OSError: the disk refuses.
        """
        for file in self._files[:-1]:
            if file.slots < self.shape.slots:
                file.resize(self.shape.slots)

    def read(self, slot: int, views: Sequence[memoryview]) -> int:
        """Read slots from `slot` on into `views`, one each.

        Returns:
            How many slots were read whole, from the first, 1 at least; fewer where a file ends.

        Raises:
            OSError: none was; ENODATA if the file ends before.
        """
        file, place, count = self._place(slot, len(views))
        with self._read_turns if self.is_long(count) else nullcontext():
            return file.read(place, views[:count])

    def write(self, slot: int, views: Sequence[memoryview]) -> int:
        """Write slots from `slot` on from `views`, one each; durable after a `barrier`.

        Returns:
            How many slots were written whole, from the first, 1 at least; fewer where a file ends.

        Raises:
            OSError: none was; ENOSPC if the disk is full.
        """
        file, place, count = self._place(slot, len(views))
        return file.write(place, views[:count])

    def read_entries(self) -> list[memoryview]:
        """The entries of each file.

        Raises:
            OSError: they cannot be read.
        """
        return [file.read_entries() for file in self._files]

    def write_entries(self, slot: int, data: bytes) -> None:
        """Overwrite entries from that of `slot` on, all of one file; durable after a `barrier`.

        Raises:
            OSError: some may not be written.
        """
        number, place = divmod(slot, self.shape.slots)
        self._files[number].write_entries(place, data)

    def is_long(self, count: int) -> bool:
        """Whether a call of the kernel that moves so many slots keeps a disk busy by itself."""
        return count * self.shape.slot_bytes >= _LONG_BYTES

    def sync(self, slots: Iterable[int]) -> None:
        """Make everything durable that was written to these slots, and to their entries; for one thread
        alone, others have `barrier`.

        Raises:
            OSError: it may not be.
        """
        for file in self._holding(slots):
            file.sync()

    @contextmanager
    def barrier(self, slots: Iterable[int]) -> Iterator[Callable[[], None]]:
        """What makes durable what is written to these slots and their entries in the body before it is
        called; raises OSError if it may not be.
        """
        with ExitStack() as stack:
            syncs = [stack.enter_context(file.barrier()) for file in self._holding(slots)]
            yield lambda: _call_all(syncs)

    def sync_all(self) -> None:
        """Make everything durable that was written, by those before us too.

        Raises:
            OSError: it may not be.
        """
        for file in self._files:
            file.sync()

    def grow(self, wanted: int, allowed: int) -> int:
        """Preallocate `wanted` more slots, and some ahead, as far as the disk lets us.

        The pool grows by half of itself, so that there are few extents and few calls. A disk that has
        refused is not asked again for a while: what there is, is reused.

        Args:
            wanted: slots.
            allowed: most slots more.

        Returns:
            How many slots there are more.
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
        return gained

    def shrink(self, slots: int) -> None:
        """Give back what lies behind the first `slots`; nobody may use it.

        Raises:
            OSError: a file cannot be cut; `self.slots` are there still.
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
        """Twice is harmless."""
        for file in self._files:
            file.close()

    def _place(self, slot: int, count: int) -> tuple[Segment, int, int]:
        """The file of a slot, the slot's number there, and how many of `count` lie in that file."""
        number, place = divmod(slot, self.shape.slots)
        return self._files[number], place, min(count, self.shape.slots - place)

    def _holding(self, slots: Iterable[int]) -> list[Segment]:
        return [self._files[number] for number in sorted({slot // self.shape.slots for slot in slots})]

    def _new_file(self, number: int) -> Segment:
        """A file whose name is durable.

        Raises:
            OSError: it is not.
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
        """Up to `count` slots more in the last file, or in a new one."""
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
    """Segments up to the last one that is there; a missing one before it is as if it were empty."""
    numbers = [int(path.stem) for path in folder.glob("[0-9][0-9][0-9][0-9][0-9].pages")]
    count = max(numbers, default=-1) + 1
    missing = count - len(numbers)
    if missing > _MOST_MISSING:
        last = segment_path(folder, count - 1)
        raise StorageFormatError(f"{last} is no file of ours: {missing} before it are missing; remove it")
    return count
