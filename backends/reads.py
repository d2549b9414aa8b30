"""Reads to the end: the kernel may bring fewer bytes than it was asked for, and that alone means nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence

_MOST_IDLE = 3  # reads in a row that bring nothing, before the end of the file


def read_fully(
    read: Callable[[Sequence[memoryview], int], int],
    views: Sequence[memoryview],
    offset: int,
    size: Callable[[], int],
    block: int = 1,
) -> int:
    """Fill `views` with what lies from `offset` on.

    Args:
        read: one call of the kernel, which may be cut short.
        views: where to.
        offset: where from.
        size: of the file; asked only when a read was short.
        block: a further read begins at a multiple of so many bytes from `offset`, as O_DIRECT wants it.

    Returns:
        How many bytes there were; fewer than asked for only if the file ends there.

    Raises:
        OSError: reading failed, or ended before the file does; no page is damaged by that.
    """
    wanted = sum(map(len, views))
    done, idle = read(views, offset), 0
    while done < wanted and offset + done < size():
        whole = done - done % block
        came = whole + read(list(_rest(views, whole)), offset + whole)
        idle = 0 if came > done else idle + 1
        if idle == _MOST_IDLE:
            raise OSError(errno.EIO, "reads end before the file does")
        done = max(done, came)
    return done


def _rest(views: Sequence[memoryview], skip: int) -> Iterator[memoryview]:
    """Views without their first `skip` bytes."""
    for view in views:
        if skip < len(view):
            yield view[skip:]
        skip = max(0, skip - len(view))
