"""The preallocated file of one namespace, and the interface of the two data paths that move its bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from asynchicache.backends.direct_file import DirectFile
from asynchicache.errors import StorageError
from asynchicache.types import Outcome

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


class DataFile(DirectFile):
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
        super().__init__(path, direct=direct)
        self.frame_bytes = frame_bytes
        try:
            made = self._open()
            self._allocate(slots * frame_bytes, made, reserve)
        except OSError as error:
            self.close()
            room = " (give it a smaller capacity_bytes)" if error.errno in _FULL else ""
            raise StorageError(f"{path} with {slots * frame_bytes} bytes: {error.strerror}{room}") from error

    def offset(self, slot: int) -> int:
        """Byte offset of a slot in the file."""
        return slot * self.frame_bytes

    def _open(self) -> bool:
        """Open the file; return whether this call created it."""
        try:
            self._descriptor = self._opened(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self._descriptor = self._opened(self.path, os.O_RDWR)
            return False
        return True

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
