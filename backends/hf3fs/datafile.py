"""The preallocated file of one namespace, and what a data path is: the two ways to move its bytes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from asynchicache.errors import StorageError
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Frame(NamedTuple):
    """A header and a page on their way between the file's `slot` and the binding's slot `memory`."""

    slot: int
    memory: int


class DataPath(Protocol):
    """Moves frames. All methods block and may run side by side; a frame is one call's alone."""

    def read(self, frames: Sequence[Frame]) -> list[Outcome]:
        """HIT: the frame is in memory, not checked. MISS: the file ends before, or has a hole. FAILED."""
        ...

    def write(self, frames: Sequence[Frame]) -> list[Outcome]:
        """STORED: the frame is durable. REJECTED: no room. FAILED: it is not written, and will not be.
        TIMEOUT: nobody knows, and it may still be written.
        """
        ...

    def stop(self) -> None:
        """Let calls that wait for I/O that never ends give up."""
        ...

    def close(self) -> None:
        """Let go of everything; twice is harmless. No call may be running."""
        ...


class DataFile:
    """A file of slots, open for reading and writing, with room for all of them.

    Args:
        path: made if it is missing.
        frame_bytes: of one slot.
        slots: how many.
        direct: open it with O_DIRECT where the file system has it.
        reserve: take the room now, where the file system can; else the file is only made that long.

    Raises:
        StorageError: it cannot be opened, or there is no room for it.
    """

    def __init__(self, path: Path, frame_bytes: int, slots: int, *, direct: bool, reserve: bool) -> None:
        self.path = path
        self.frame_bytes = frame_bytes
        self.direct = direct
        self._descriptor: int | None = None
        try:
            made = self._open()
            self._allocate(slots * frame_bytes, made, reserve)
        except OSError as error:
            self.close()
            room = " (give it a smaller capacity_bytes)" if error.errno in _FULL else ""
            raise StorageError(f"{path} with {slots * frame_bytes} bytes: {error.strerror}{room}") from error

    @property
    def fileno(self) -> int:
        """
        Raises:
            OSError: the file is closed.
        """
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the file is closed", str(self.path))
        return self._descriptor

    def offset(self, slot: int) -> int:
        """Bytes from the file's start to a slot."""
        return slot * self.frame_bytes

    def use_kernel_cache(self) -> None:
        """Some file systems take O_DIRECT when a file is opened and refuse it when it is used."""
        logger.info(
            "%s: no O_DIRECT here, or memory that is not aligned; using the kernel's cache", self.path
        )
        flags = fcntl.fcntl(self.fileno, fcntl.F_GETFL)
        fcntl.fcntl(self.fileno, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def close(self) -> None:
        """Twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> bool:
        """Whether the file was made now, by us."""
        try:
            self._descriptor = self._opened(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self._descriptor = self._opened(0)
            return False
        return True

    def _opened(self, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                flags &= ~os.O_EXCL  # Linux makes the file before it refuses O_DIRECT
        return os.open(self.path, flags, 0o666)

    def _allocate(self, size: int, made: bool, reserve: bool) -> None:
        """Make it longer, and never shorter: other ranks may use what is behind."""
        try:
            if reserve:
                os.posix_fallocate(self.fileno, 0, size)
                return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                if made:
                    os.ftruncate(self.fileno, 0)  # give back what a failed preallocation has left behind
                raise
        # The length of a file that others write to may be out of date on 3FS, so that truncating to more
        # than it seems to have could cut it. Writes make it longer by themselves.
        if made:
            os.ftruncate(self.fileno, size)
