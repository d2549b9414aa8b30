"""What files of every backend need: to be read in full, and to be where a restart looks for them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_MAX_IDLE = 3  # consecutive reads without progress before the end of the file


def leads_to(path: Path, descriptor: int) -> bool:
    """Whether a path names an open file, which may have been moved, removed or replaced, or unmounted."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def read_fully(
    read: Callable[[Sequence[memoryview], int], int],
    views: Sequence[memoryview],
    offset: int,
    size: Callable[[], int],
    block: int = 1,
) -> int:
    """Fill `views` with the bytes from `offset` on. One system call may return fewer before its end.

    Args:
        read: one system call, which may read fewer bytes than requested.
        size: returns the size of the file; called only after a short read.
        block: further reads start at a multiple of this many bytes from `offset`, as O_DIRECT requires.

    Returns:
        The number of bytes read; fewer than requested only at the end of the file.

    Raises:
        OSError: a read failed, or reads made no progress before the end of the file; this does not mean that
            the page is damaged.
    """
    wanted = sum(map(len, views))
    done, idle = read(views, offset), 0
    while done < wanted and offset + done < size():
        whole = done - done % block
        came = whole + read(list(_rest(views, whole)), offset + whole)
        idle = 0 if came > done else idle + 1
        if idle == _MAX_IDLE:
            raise OSError(errno.EIO, "reads end before the file does")
        done = max(done, came)
    return done


def _rest(views: Sequence[memoryview], skip: int) -> Iterator[memoryview]:
    """`views` without their first `skip` bytes in total."""
    for view in views:
        if skip < len(view):
            yield view[skip:]
        skip = max(0, skip - len(view))
