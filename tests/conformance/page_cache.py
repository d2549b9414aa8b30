"""Takes files out of the kernel's page cache, so that reading them means reading the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def forget(folder: Path) -> int:
    """Have the kernel write back and forget every file below `folder`.

    Returns:
        bytes that it keeps nevertheless: of files that are mapped or being written.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        with path.open("r+b") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sum(map(resident_bytes, files))


def resident_bytes(path: Path) -> int:
    """Bytes of a file, of 1 at least, that the page cache holds, in whole pages (`mincore`).

    Raises:
        OSError: the kernel does not tell.
    """
    size = path.stat().st_size
    held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as view:
        start = ctypes.c_char.from_buffer(view)
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), held)
        del start  # a mapping that is looked at cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return sum(page & 1 for page in held) * mmap.PAGESIZE
