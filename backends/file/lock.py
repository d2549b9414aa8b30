"""The lock of a store's folder: it is the process's that took it, and no child's.

`flock` belongs to an open file, which a forked child shares: without more, a worker would hold the lock of a
parent that was killed. So a child closes its descriptor as soon as it is there; to unlock would unlock the
parent. Locks of `fcntl` are not inherited, but end when the process closes any descriptor of the file, and do
not keep a process from locking twice; those of open files (OFD) are shared as `flock` is.
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
    """Not taken at first.

    Args:
        folder: for messages.
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
        """
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
            file: made if it is missing, but not by a reader, who then has no lock.
            shared: with other readers.

        Raises:
            StorageLockedError: it is locked already, here or in another process.
            OSError: it cannot be opened or locked.
        """
        flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
        with _forking:  # so that no child is made that has the descriptor, and nobody to close it
            try:
                self._descriptor = os.open(file, flags | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                if shared:  # nobody has ever locked this folder, or it is a copy on read-only media
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
        """Unlock; twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if not self.forked:  # a child that was forked past Python has the same lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_taken: WeakSet[FolderLock] = WeakSet()
_forking = threading.Lock()


def _let_go() -> None:
    """In a child: what the parent has locked is the parent's."""
    for lock in list(_taken):
        with suppress(OSError):
            lock.close()
    _taken.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go)
