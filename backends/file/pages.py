"""A file of fixed slots, moved straight between disk and the caller's memory.

A slot is a header and a page, one behind the other, on 4,096-byte boundaries, so that one `preadv`
or `pwritev` with O_DIRECT moves a run of slots without a copy by the kernel. The pages are cached in
host memory already; the kernel's cache would be a second copy.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from asynchicache.errors import StorageError

logger = logging.getLogger(__name__)

_MOST_VIEWS = 1000  # IOV_MAX is 1,024 on Linux
_MOST_BYTES = 64 << 20  # longer calls gain nothing, and Linux moves 2 GiB at most
_SCAN_BYTES = 256 << 10
_FIRST_BYTES = 1 << 20
_LARGEST_BYTES = 256 << 20
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

Io = Callable[[int, Sequence[memoryview], int], int]


class PageFile:
    """Slots of one pool's file. All methods block; reads and writes may run side by side.

    Args:
        path: the file; if it is missing and `read_only`, it has no slots.
        header_bytes, page_bytes: of a slot, multiples of 4,096.
        read_only: nothing is written.
        direct: go around the kernel's cache where the file system lets us.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(
        self, path: Path, header_bytes: int, page_bytes: int, *, read_only: bool, direct: bool
    ) -> None:
        self.path = path
        self.frame_bytes = header_bytes + page_bytes
        self.most_frames = max(1, min(_MOST_VIEWS // 2, _MOST_BYTES // self.frame_bytes))
        self.direct = direct
        self._header_bytes = header_bytes
        self._empty_header = memoryview(mmap.mmap(-1, header_bytes))
        self._full = False
        self._descriptor: int | None = self._open(os.O_RDONLY if read_only else os.O_RDWR)
        self.slots = os.fstat(self._descriptor).st_size // self.frame_bytes

    def close(self) -> None:
        """Twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def read(self, slot: int, views: Sequence[memoryview]) -> int:
        """Read slots from `slot` on into `views`: header, page, header, page.

        Returns:
            How many slots were read whole, from the first, 1 at least.

        Raises:
            OSError: none was; ENODATA if the file ends before.
        """
        done = self._move(os.preadv, slot, views)
        if done == 0:
            raise OSError(errno.ENODATA, "the file ends before the page", str(self.path))
        return done

    def write(self, slot: int, views: Sequence[memoryview]) -> int:
        """Write slots from `slot` on from `views`: header, page, header, page; durable after `sync`.

        Returns:
            How many slots were written whole, from the first, 1 at least.

        Raises:
            OSError: none was; ENOSPC if the disk is full.
        """
        done = self._move(os.pwritev, slot, views)
        if done == 0:
            raise OSError(errno.ENOSPC, "the page was written in part", str(self.path))
        return done

    def clear(self, slot: int) -> None:
        """Overwrite a slot's header, so that nobody finds a page there; durable after `sync`."""
        self._direct_or_not(os.pwritev, [self._empty_header], slot * self.frame_bytes)

    def sync(self) -> None:
        """Make everything written so far durable."""
        os.fdatasync(self._fileno)

    def grow(self, wanted: int, limit: int | None) -> int:
        """Preallocate `wanted` more slots at least, as far as disk and limit let us.

        The file grows by half of itself, so that there are few extents and few calls. Once the disk
        has refused, it is not asked again until the file is reopened: what there is, is reused.

        Args:
            wanted: slots.
            limit: most slots that the file may have; None for no limit.

        Returns:
            How many slots there are more.
        """
        size = self.slots * self.frame_bytes
        ahead = min(max(size // 2, _FIRST_BYTES), _LARGEST_BYTES) // self.frame_bytes
        for count in (max(wanted, ahead), wanted, 1):
            allowed = count if limit is None else min(count, limit - self.slots)
            if allowed > 0 and not self._full and self._extend(allowed):
                self.slots += allowed
                return allowed
        self._full = True
        return 0

    def headers(self) -> Iterator[tuple[int, memoryview]]:
        """Every slot's header that can be read; the view is good until the next one."""
        frames = max(1, _SCAN_BYTES // self.frame_bytes)
        length = (frames - 1) * self.frame_bytes + self._header_bytes
        buffer = memoryview(mmap.mmap(-1, length))  # its own pages, hence aligned
        for first in range(0, self.slots, frames):
            count = min(frames, self.slots - first)
            room = buffer[: (count - 1) * self.frame_bytes + self._header_bytes]
            yield from self._headers(first, count, room)

    def _headers(self, first: int, count: int, room: memoryview) -> Iterator[tuple[int, memoryview]]:
        try:
            got = self._direct_or_not(os.preadv, [room], first * self.frame_bytes)
        except OSError as error:
            logger.warning("%s: headers of slots %d to %d: %s", self.path, first, first + count - 1, error)
            return
        for index in range(count):
            start = index * self.frame_bytes
            if start + self._header_bytes <= got:
                yield first + index, room[start : start + self._header_bytes]

    @property
    def _fileno(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the file is closed", str(self.path))
        return self._descriptor

    def _open(self, flags: int) -> int:
        # A reader finds nothing where a pool was never written.
        path = os.devnull if flags == os.O_RDONLY and not self.path.exists() else self.path
        try:
            if self.direct:
                try:
                    return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct = False
            return os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error

    def _move(self, io: Io, slot: int, views: Sequence[memoryview]) -> int:
        return self._direct_or_not(io, views, slot * self.frame_bytes) // self.frame_bytes

    def _direct_or_not(self, io: Io, views: Sequence[memoryview], offset: int) -> int:
        """Some file systems take O_DIRECT when a file is opened and refuse it when it is used."""
        try:
            return io(self._fileno, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
        self._use_kernel_cache()
        return io(self._fileno, views, offset)

    def _use_kernel_cache(self) -> None:
        logger.info(
            "%s: no O_DIRECT here, or memory that is not aligned; using the kernel's cache", self.path
        )
        flags = fcntl.fcntl(self._fileno, fcntl.F_GETFL)
        fcntl.fcntl(self._fileno, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def _extend(self, count: int) -> bool:
        start, size = self.slots * self.frame_bytes, count * self.frame_bytes
        try:
            os.posix_fallocate(self._fileno, start, size)
        except OSError as error:
            return (
                self._extend_sparse(start + size)
                if error.errno in _UNSUPPORTED
                else self._shrink(start, error)
            )
        return True

    def _extend_sparse(self, size: int) -> bool:
        try:
            os.ftruncate(self._fileno, size)
        except OSError as error:
            logger.warning("%s cannot grow: %s", self.path, error.strerror)
            return False
        return True

    def _shrink(self, size: int, error: OSError) -> bool:
        """Give back what a failed preallocation has left behind."""
        logger.warning("%s cannot grow: %s", self.path, error.strerror)
        os.ftruncate(self._fileno, size)
        return False
