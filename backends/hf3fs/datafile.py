"""The preallocated file of one namespace, and the interface of the two data paths that move its bytes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from asynchicache.backends.reads import leads_to
from asynchicache.errors import StorageError
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Frame(NamedTuple):
    """A header and a page, moved between the file's `slot` and the binding's slot `memory`."""

    slot: int
    memory: int


class DataPath(Protocol):
    """Moves frames. All methods block. Calls may run concurrently if they share no frame."""

    def read(self, frames: Sequence[Frame]) -> list[Outcome]:
        """Read frames into memory.

        Returns:
            HIT: the frame was read; its checksum is not verified. MISS: the file ends before the frame, or
            has a hole there. FAILED: an I/O error.
        """
        ...

    def write(self, frames: Sequence[Frame]) -> list[Outcome]:
        """Write frames from memory.

        Returns:
            STORED: the frame is durable. REJECTED: no space. FAILED: the frame is not written, and will not
            be. TIMEOUT: unknown; the write may still happen.
        """
        ...

    def in_place(self) -> bool:
        """Whether the file is where a restart looks for it."""
        ...

    def stop(self) -> None:
        """Make calls give up if they wait for I/O that never ends."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent. No call may be running."""
        ...


class DataFile:
    """A file of slots, opened for reading and writing, and large enough for all slots.

    Args:
        path: created if missing.
        frame_bytes: size of one slot.
        direct: use O_DIRECT if the file system supports it.
        reserve: allocate the space now if the file system can; else only extend the file.

    Raises:
        StorageError: the file cannot be opened, or there is no space for it.
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

    def in_place(self) -> bool:
        """Whether the path leads to this file still."""
        return leads_to(self.path, self.fileno)

    def offset(self, slot: int) -> int:
        """Byte offset of a slot in the file."""
        return slot * self.frame_bytes

    def use_kernel_cache(self) -> None:
        """Turn O_DIRECT off. Some file systems accept it in `open` but refuse it in reads or writes."""
        logger.info(
            "%s: no O_DIRECT here, or memory that is not aligned; using the kernel's cache", self.path
        )
        flags = fcntl.fcntl(self.fileno, fcntl.F_GETFL)
        fcntl.fcntl(self.fileno, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.direct = False

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self) -> bool:
        """Open the file; return whether this call created it."""
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
                flags &= ~os.O_EXCL  # Linux creates the file before it refuses O_DIRECT
        return os.open(self.path, flags, 0o666)

    def _allocate(self, size: int, made: bool, reserve: bool) -> None:
        """Extend the file. Never shorten it: other ranks may use the rest."""
        try:
            if reserve:
                os.posix_fallocate(self.fileno, 0, size)
                return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                if made:
                    os.ftruncate(self.fileno, 0)  # free what a failed preallocation allocated
                raise
        # On 3FS the reported length can be stale while other ranks write, so extending by truncation could
        # cut the file. Writes extend it anyway.
        if made:
            os.ftruncate(self.fileno, size)
