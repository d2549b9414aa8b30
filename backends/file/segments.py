"""The slots of one pool, in preallocated files of a fixed number of slots each.

A slot is a header and a page, one behind the other, on 4,096-byte boundaries, so that one `preadv`
or `pwritev` moves a run of slots without a copy by the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from asynchicache.backends.file.folder import sync_folder
from asynchicache.backends.file.segment import Segment
from asynchicache.backends.file.shape import SegmentShape
from asynchicache.errors import StorageFormatError

_MOST_VIEWS = 1000  # IOV_MAX is 1,024 on Linux
_MOST_BYTES = 64 << 20  # longer calls gain nothing, and Linux moves 2 GiB at most
_LONG_BYTES = 8 << 20
_LONG_READS = 2
_FIRST_BYTES = 1 << 20
_LARGEST_BYTES = 256 << 20
_MOST_MISSING = 64  # files that were lost, not a name that a stranger chose


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.pages"


class Segments:
    """Slots, numbered through all files. All methods block; reads and writes may run side by side.

    Long reads take turns, two at a time. The disk is as busy as with more; but calls that share it end
    together, and then all threads compute checksums while the disk has nothing to do. Long writes are all
    one thread's (`writer.GroupWriter`).

    Args:
        folder: of the pool.
        frame_bytes: of a slot: header and page, a multiple of 4,096.
        read_only: nothing is written.
        direct: go around the kernel's cache where the file system lets us.

    Raises:
        StorageFormatError: the name of a file stands far behind all others.
        StorageError: a file cannot be opened.
    """

    def __init__(self, folder: Path, frame_bytes: int, *, read_only: bool, direct: bool) -> None:
        self.shape = SegmentShape.of(frame_bytes)
        self.most_frames = max(1, min(_MOST_VIEWS // 2, _MOST_BYTES // frame_bytes))
        self._folder = folder
        self._read_only = read_only
        self._direct = direct
        self._full = False
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
        """Read slots from `slot` on into `views`: header, page, header, page.

        Returns:
            How many slots were read whole, from the first, 1 at least; fewer where a file ends.

        Raises:
            OSError: none was; ENODATA if the file ends before.
        """
        file, place, frames = self._place(slot, len(views) // 2)
        with self._read_turns if self.is_long(frames) else nullcontext():
            return file.read(place, views[: 2 * frames])

    def write(self, slot: int, views: Sequence[memoryview]) -> int:
        """Write slots from `slot` on from `views`: header, page, header, page; durable after `sync`.

        Returns:
            How many slots were written whole, from the first, 1 at least; fewer where a file ends.

        Raises:
            OSError: none was; ENOSPC if the disk is full.
        """
        file, place, frames = self._place(slot, len(views) // 2)
        return file.write(place, views[: 2 * frames])

    def is_long(self, frames: int) -> bool:
        """Whether a call of the kernel that moves so many slots keeps a disk busy by itself."""
        return frames * self.shape.frame_bytes >= _LONG_BYTES

    def read_entries(self) -> list[memoryview]:
        """The entries of each file.

        Raises:
            OSError: they cannot be read.
        """
        return [file.read_entries() for file in self._files]

    def write_entries(self, slot: int, data: bytes) -> None:
        """Overwrite entries from that of `slot` on, all of one file; durable after `sync`.

        Raises:
            OSError: some may not be written.
        """
        number, place = divmod(slot, self.shape.slots)
        self._files[number].write_entries(place, data)

    def sync(self, slots: Iterable[int]) -> None:
        """Make everything durable that was written to these slots, and to their entries; for one caller at a
        time, others have `sync_entries`.

        Raises:
            OSError: it may not be.
        """
        for file in self._holding(slots):
            file.sync()

    def sync_entries(self, slots: Iterable[int]) -> None:
        """Make durable what was written to the entries of these slots; beside a `sync`, too.

        Raises:
            OSError: it may not be.
        """
        for file in self._holding(slots):
            file.sync_entries()

    def sync_all(self) -> None:
        """Make everything durable that was written, by those before us too.

        Raises:
            OSError: it may not be.
        """
        for file in self._files:
            file.sync()

    def grow(self, wanted: int, allowed: int) -> int:
        """Preallocate `wanted` more slots, and some ahead, as far as the disk lets us.

        The pool grows by half of itself, so that there are few extents and few calls. Once the disk
        has refused, it is not asked again until the pool is reopened: what there is, is reused.

        Args:
            wanted: slots.
            allowed: most slots more.

        Returns:
            How many slots there are more.
        """
        ahead = min(max(self.nbytes // 2, _FIRST_BYTES), _LARGEST_BYTES) // self.shape.frame_bytes
        gained = 0
        for count in (max(wanted, ahead), wanted, 1):
            while not self._full and gained < min(count, allowed):
                more = self._extend(min(count, allowed) - gained)
                if not more:
                    break
                gained += more
            if gained:
                return gained
        self._full = self._full or allowed > 0
        return gained

    def shrink(self, slots: int) -> None:
        """Give back what lies behind the first `slots`; nobody may use it.

        Raises:
            OSError: a file cannot be cut.
        """
        keep = -(-slots // self.shape.slots)
        for number in reversed(range(keep, len(self._files))):
            segment_path(self._folder, number).unlink()
            self._files.pop().close()
        if self._files:
            self._files[-1].resize(slots - (keep - 1) * self.shape.slots)
        self.slots = slots
        self._full = False

    def close(self) -> None:
        """Twice is harmless."""
        for file in self._files:
            file.close()

    def _place(self, slot: int, frames: int) -> tuple[Segment, int, int]:
        """The file of a slot, the slot's number there, and how many of `frames` lie in that file."""
        number, place = divmod(slot, self.shape.slots)
        return self._files[number], place, min(frames, self.shape.slots - place)

    def _holding(self, slots: Iterable[int]) -> list[Segment]:
        return [self._files[number] for number in sorted({slot // self.shape.slots for slot in slots})]

    def _file(self, number: int) -> Segment:
        path = segment_path(self._folder, number)
        return Segment(path, self.shape, read_only=self._read_only, direct=self._direct)

    def _extend(self, count: int) -> int:
        """Up to `count` slots more in the last file, or in a new one."""
        number, place = divmod(self.slots, self.shape.slots)
        if number == len(self._files):
            self._files.append(self._file(number))
            sync_folder(self._folder)
        more = min(count, self.shape.slots - place)
        if not self._files[number].grow(place + more):
            return 0
        self.slots += more
        return more


def _count(folder: Path) -> int:
    """Segments up to the last one that is there; a missing one before it is as if it were empty."""
    numbers = [int(path.stem) for path in folder.glob("[0-9][0-9][0-9][0-9][0-9].pages")]
    count = max(numbers, default=-1) + 1
    missing = count - len(numbers)
    if missing > _MOST_MISSING:
        last = segment_path(folder, count - 1)
        raise StorageFormatError(f"{last} is no file of ours: {missing} before it are missing; remove it")
    return count
