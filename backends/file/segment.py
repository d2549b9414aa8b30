"""One file of slots: what they hold, then the slots themselves."""

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
    """All methods block; reads and writes of different slots may run side by side.

    The file is open twice. Slots go around the kernel's cache. Entries go through it, which gathers small
    writes: alone, each would wait in the disk's queue behind pages. One barrier makes both durable.

    Args:
        path: the file; made if it is missing. A reader finds an empty one instead.
        shape: where its slots lie.
        read_only: nothing is written.
        direct: go around the kernel's cache where the file system lets us.

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
        """Slots that lie in the file, which may have been cut."""
        return self._shape.file_slots(self._pages.size)

    def read(self, place: int, views: Sequence[memoryview]) -> int:
        """Fill `views` from slot number `place` on; how many slots were read whole, 1 at least.

        Raises:
            OSError: none was; ENODATA if the file ends before.
        """
        done = self._pages.read(views, self._shape.file_bytes(place)) // self._shape.slot_bytes
        if done == 0:
            raise OSError(errno.ENODATA, "the file ends before the page", str(self._pages.path))
        return done

    def write(self, place: int, views: Sequence[memoryview]) -> int:
        """Write `views` to slot number `place` and on; how many slots were written whole, 1 at least.

        Raises:
            OSError: none was; ENOSPC if the disk is full.
        """
        done = self._pages.write(views, self._shape.file_bytes(place)) // self._shape.slot_bytes
        if done == 0:
            raise OSError(errno.ENOSPC, "the page was written in part", str(self._pages.path))
        return done

    def read_entries(self) -> memoryview:
        """The entries of all slots; zeros where the file ends before.

        Raises:
            OSError: they cannot be read.
        """
        data = memoryview(bytearray(self._shape.slots * ENTRY_BYTES))
        self._entries.read([data], 0)
        return data

    def write_entries(self, place: int, data: bytes) -> None:
        """Overwrite entries from slot number `place` on.

        Raises:
            OSError: some may not be written.
        """
        if self._entries.write([memoryview(data)], place * ENTRY_BYTES) != len(data):
            raise OSError(errno.ENOSPC, "entries were written in part", str(self._entries.path))

    def sync(self) -> None:
        """Make entries and slots durable that were written until now; for one thread alone, others have
        `barrier`.

        Raises:
            OSError: they may not be.
        """
        self._pages.sync()

    @contextmanager
    def barrier(self) -> Iterator[Callable[[], None]]:
        """What makes everything durable that is written in the body before it is called; raises OSError if
        something may not be. Any number at once.

        The kernel tells each open file of a lost write once (errseq_t), so each barrier opens the file for
        itself, and before something is written that it is to vouch for. Where that is refused, as when a
        process has too many files open, barriers take turns on one that is open.
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
        """Preallocate up to so many slots; False, and as before, if the disk refuses."""
        return self._pages.grow(self._shape.file_bytes(slots))

    def resize(self, slots: int) -> None:
        """Cut the file to so many slots, or let it grow with zeros.

        Raises:
            OSError: the disk refuses.
        """
        self._pages.truncate(self._shape.file_bytes(slots))

    def close(self) -> None:
        """Twice is harmless."""
        self._pages.close()
        self._entries.close()
