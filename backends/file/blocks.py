"""A file that is read and written in whole blocks, with O_DIRECT if the file system allows it.

Host memory already caches the pages of this file; the kernel's page cache would hold a second copy.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from asynchicache.backends.file.folder import check_file
from asynchicache.backends.reads import leads_to, read_fully
from asynchicache.errors import StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.layouts import ALIGNMENT

logger = logging.getLogger(__name__)

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW  # a link may lead to a file outside the store

BlockIo = Callable[[int, Sequence[memoryview], int], int]


class BlockFile:
    """A file with direct I/O. All methods block; reads and writes may run concurrently.

    Args:
        path: the file; created if it is missing. A reader sees a missing file as empty.
        read_only: write nothing.
        direct: use O_DIRECT; offsets, lengths and addresses must then be multiples of 4,096.

    Raises:
        StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, read_only: bool, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._failures = FailureLog(logger)
        self._descriptor: int | None = self._open(os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT)

    @property
    def size(self) -> int:
        return os.fstat(self._fileno).st_size

    @property
    def in_place(self) -> bool:
        """Whether the path leads to this file still."""
        return leads_to(self.path, self._fileno)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill `views` from `offset` on; returns the bytes read, fewer only at the end of the file."""
        block = ALIGNMENT if self.direct else 1
        return read_fully(partial(self._direct_or_not, os.preadv), views, offset, lambda: self.size, block)

    def write(self, views: Sequence[memoryview], offset: int) -> int:
        """Write `views` from `offset` on; returns the bytes written. Durable after `sync`."""
        return self._direct_or_not(os.pwritev, views, offset)

    def sync(self) -> None:
        """Make all previous writes durable."""
        os.fdatasync(self._fileno)

    def open_again(self) -> int:
        """A new descriptor of the same file, even if it was renamed or removed; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fileno}", os.O_RDONLY | os.O_CLOEXEC)

    def expect_random_reads(self) -> None:
        """Disable the kernel's read-ahead, which would read parts that others access with O_DIRECT."""
        with suppress(OSError):  # only a hint
            os.posix_fadvise(self._fileno, 0, 0, os.POSIX_FADV_RANDOM)

    def grow(self, size: int) -> bool:
        """Preallocate up to `size` bytes; if the disk refuses, return False and leave the size unchanged."""
        start = self.size
        try:
            os.posix_fallocate(self._fileno, start, size - start)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return self._grow_sparse(size)
            self._refused(error)
            self.truncate(start)  # frees the blocks of the failed preallocation
            return False
        return True

    def truncate(self, size: int) -> None:
        """Cut the file, or extend it with zeros."""
        os.ftruncate(self._fileno, size)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @property
    def _fileno(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the file is closed", str(self.path))
        return self._descriptor

    def _open(self, flags: int) -> int:
        check_file(self.path)
        reads_nothing = flags == os.O_RDONLY and not self.path.exists()
        path = os.devnull if reads_nothing else self.path
        try:
            if self.direct:
                try:
                    return os.open(path, flags | _FLAGS | os.O_DIRECT, 0o666)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct = False
            return os.open(path, flags | _FLAGS, 0o666)
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error

    def _direct_or_not(self, io: BlockIo, views: Sequence[memoryview], offset: int) -> int:
        """Run `io`; if it fails with EINVAL, turn O_DIRECT off and run it again.

        Some file systems accept O_DIRECT in `open` and reject it in reads and writes.
        """
        direct = self.direct  # read it first: another thread may turn it off during `io`
        try:
            return io(self._fileno, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
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

    def _grow_sparse(self, size: int) -> bool:
        try:
            self.truncate(size)
        except OSError as error:
            self._refused(error)
            return False
        return True

    def _refused(self, error: OSError) -> None:
        self._failures.warning(error.errno, "%s cannot grow: %s", self.path, error.strerror)
