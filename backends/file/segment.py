"""One file of slots: their entries, then the slots themselves."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from asynchicache.backends.file.blocks import BlockFile
from asynchicache.backends.file.shape import ENTRY_BYTES, SegmentShape


class Segment:
    """A file of slots. All methods block; reads and writes of different slots may run concurrently.

    The file is open twice. Slots bypass the page cache. Entries go through it, because it merges small
    writes, which would otherwise wait in the disk's queue behind pages. One barrier makes both durable.

    Args:
        path: the file; created if it is missing. A reader sees a missing file as empty.
        shape: the layout of the file.
        read_only: write nothing.
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
        return self._pages.in_place

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
