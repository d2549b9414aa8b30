"""The lock of a store's folder. It belongs to the process that took it, not to forked children.

A `flock` belongs to an open file description, which a forked child shares: a worker could keep the lock of a
killed parent. So each child closes its descriptor right after the fork; it must not unlock, because that
would unlock the parent. The alternatives are worse: `fcntl` locks are not inherited, but they end when the
process closes any descriptor of the file, and a process can take one twice; OFD locks are shared as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from asynchicache.errors import StorageLockedError, UsageError

_BLOCKED = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})


class FolderLock:
    """The lock of one folder, not taken until `take`.

    Args:
        folder: the folder, for messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._descriptor: int | None = None

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the folder."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Check that this process opened the folder.

        Raises:
            UsageError: this process is a child of the one that opened the folder.
        """
        if self.forked:
            raise UsageError(
                f"{self._folder} was opened by process {self._process}, and this one was forked from it: "
                "let each process open a store of its own, after the fork"
            )

    def take(self, file: Path, *, shared: bool) -> None:
        """Lock `file`.

        Args:
            file: the lock file. A writer creates it if it is missing; a reader then goes without a lock.
            shared: share the lock with other readers.

        Raises:
            StorageLockedError: the file is already locked, in this or another process.
            OSError: the file cannot be opened or locked.
        """
        flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
        with _forking:  # a fork between `open` and `_taken.add` would leak the descriptor into the child
            try:
                self._descriptor = os.open(file, flags | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                if shared:  # no writer has opened this folder, or it is a copy on read-only media
                    return
                raise
            _taken.add(self)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BLOCKED:
                raise
            raise StorageLockedError(
                f"{self._folder} is open already, here or in another process: close that one, "
                "or give each its own folder"
            ) from None

    def close(self) -> None:
        """Unlock; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if not self.forked:  # children forked outside Python share the lock: closing is not enough
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_taken: WeakSet[FolderLock] = WeakSet()
_forking = threading.Lock()


def _let_go() -> None:
    """In a forked child: close the descriptors of the parent's locks."""
    for lock in list(_taken):
        with suppress(OSError):
            lock.close()
    _taken.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go)
