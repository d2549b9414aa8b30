"""Files of whole blocks, read in full, with O_DIRECT where it works; and how to move neighbours together."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from asynchicache.layouts import ALIGNMENT

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_IDLE = 3  # consecutive reads without progress before the end of the file

BlockIo = Callable[[int, Sequence[memoryview], int], int]


class DirectFile:
    """A file that is read and written in whole blocks, with O_DIRECT if the file system allows it: host
    memory already caches its pages. All methods block; reads and writes may run concurrently.

    Args:
        direct: use O_DIRECT; offsets, lengths and addresses must then be multiples of 4,096.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._descriptor: int | None = None

    @property
    def fileno(self) -> int:
        """
        Raises:
            OSError: the file is closed.
        """
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the file is closed", str(self.path))
        return self._descriptor

    @property
    def size(self) -> int:
        return os.fstat(self.fileno).st_size

    def in_place(self) -> bool:
        """Whether the path leads to this file still, which may have been moved, removed or replaced."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.fileno))
        except OSError:
            return False

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill `views` from `offset` on; returns the bytes read, fewer only at the end of the file.

        Raises:
            OSError: a read failed, or reads made no progress before the end of the file; this does not mean
                that the page is damaged.
        """
        # O_DIRECT requires that further reads start at whole blocks.
        block = ALIGNMENT if self.direct else 1
        wanted = sum(map(len, views))
        read = partial(self._direct_or_not, os.preadv)
        done, idle = read(views, offset), 0
        while done < wanted and offset + done < self.size:
            whole = done - done % block
            came = whole + read(list(_rest(views, whole)), offset + whole)
            idle = 0 if came > done else idle + 1
            if idle == _MAX_IDLE:
                raise OSError(errno.EIO, "reads end before the file does")
            done = max(done, came)
        return done

    def write(self, views: Sequence[memoryview], offset: int) -> int:
        """Write `views` from `offset` on; returns the bytes written. Durable after a sync."""
        return self._direct_or_not(os.pwritev, views, offset)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _opened(self, path: str | Path, flags: int) -> int:
        if self.direct:
            try:
                return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                flags &= ~os.O_EXCL  # Linux creates the file before it refuses O_DIRECT
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def _direct_or_not(self, io: BlockIo, views: Sequence[memoryview], offset: int) -> int:
        """Run `io`; if it fails with EINVAL, turn O_DIRECT off and run it again.

        Some file systems accept O_DIRECT in `open` and reject it in reads and writes.
        """
        direct = self.direct  # read it first: another thread may turn it off during `io`
        try:
            return io(self.fileno, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
        logger.info(
            "%s: no O_DIRECT here, or memory that is not aligned; using the kernel's cache", self.path
        )
        flags = fcntl.fcntl(self.fileno, fcntl.F_GETFL)
        fcntl.fcntl(self.fileno, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False
        return io(self.fileno, views, offset)


def _rest(views: Sequence[memoryview], skip: int) -> Iterator[memoryview]:
    """`views` without their first `skip` bytes in total."""
    for view in views:
        if skip < len(view):
            yield view[skip:]
        skip = max(0, skip - len(view))


def divide(items: Iterable[T], joins: Callable[[list[T], T], bool]) -> Iterator[list[T]]:
    """Divide items, in order, into runs: `joins` tells whether an item belongs to the run before it."""
    run: list[T] = []
    for item in items:
        if run and not joins(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run
