"""Which page lies in which slot, on disk: one entry of 64 bytes a slot, in a file of their own.

Entries are written in place, a block of 64 at a time. A crash tears no entry: none crosses a sector,
and a block is rewritten with the bytes that it had, but for the entries that change.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from asynchicache.backends.file.blocks import BlockFile
from asynchicache.layouts import ALIGNMENT, round_up

ENTRY_BYTES = 64
_ENTRY = Struct("<32sQ16x")  # page digest, stamp; then the checksum of both, seeded with the slot
_NOTHING = bytes(ENTRY_BYTES)
_BLOCK_ENTRIES = ALIGNMENT // ENTRY_BYTES
_CHUNK_BYTES = 64 * ALIGNMENT
_CHUNK_ENTRIES = _CHUNK_BYTES // ENTRY_BYTES


class Entry(NamedTuple):
    """A slot and its page; entries sort by how recently the page was used, the oldest first."""

    stamp: int
    slot: int
    digest: bytes


class NameFile:
    """The entries of one pool: a copy in memory, written through by `flush`. Not locked.

    Args:
        file: the entries, nothing else.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self._chunks: list[memoryview] = []
        self._changed: set[int] = set()  # blocks
        self._size = file.size

    @property
    def slots(self) -> int:
        """How many entries there is room for."""
        return self._size // ENTRY_BYTES

    @staticmethod
    def size_for(slots: int) -> int:
        """Bytes of the file for so many slots."""
        return round_up(slots * ENTRY_BYTES, ALIGNMENT)

    def load(self) -> tuple[list[Entry], list[int]]:
        """Read the file.

        Returns:
            The entries, the least recently used page first, and the slots whose entries are damaged.

        Raises:
            OSError: it cannot be read.
        """
        self._reserve(self._size)
        for number, chunk in enumerate(self._chunks):
            self._file.read([chunk], number * _CHUNK_BYTES)
        found: list[Entry] = []
        damaged: list[int] = []
        for slot in self._used():
            entry = self._parse(slot)
            if entry is None:
                damaged.append(slot)
            else:
                found.append(entry)
        return sorted(found), damaged

    def grow(self, slots: int) -> bool:
        """Make room for entries of `slots` slots in all; False, and as before, if the disk refuses."""
        size = self.size_for(slots)
        if size > self._size and not self._file.grow(size):
            return False
        self._size = max(size, self._size)
        self._reserve(size)
        return True

    def shrink(self, slots: int) -> None:
        """Cut what lies behind the entries of the first `slots`; those were cleared.

        Raises:
            OSError: the file cannot be cut.
        """
        self._size = self.size_for(slots)
        self._file.truncate(self._size)

    def set(self, slot: int, digest: bytes, stamp: int) -> None:
        """The slot holds a page; on disk after `flush`."""
        self._write(slot, _sealed(slot, _ENTRY.pack(digest, stamp)))

    def clear(self, slot: int) -> None:
        """The slot holds nothing; on disk after `flush`."""
        self._write(slot, _NOTHING)

    def flush(self) -> None:
        """Make every change durable.

        Raises:
            OSError: it is not; what is on disk then is not known before the file is opened again.
        """
        for first, last in _runs(sorted(self._changed)):
            self._flush(first, last)
        if self._changed:
            self._file.sync()
        self._changed.clear()

    def close(self) -> None:
        """Twice is harmless."""
        self._file.close()

    def _flush(self, first: int, last: int) -> None:
        """Write the blocks from `first` to `last`, which lie in one chunk."""
        chunk, start = divmod(first * ALIGNMENT, _CHUNK_BYTES)
        view = self._chunks[chunk][start : start + (last + 1 - first) * ALIGNMENT]
        if self._file.write([view], first * ALIGNMENT) != len(view):
            raise OSError(errno.ENOSPC, "entries were written in part", str(self._file.path))

    def _reserve(self, size: int) -> None:
        while len(self._chunks) * _CHUNK_BYTES < size:
            self._chunks.append(memoryview(mmap.mmap(-1, _CHUNK_BYTES)))

    def _used(self) -> Iterator[int]:
        """Slots whose entries are not empty."""
        for number, chunk in enumerate(self._chunks):
            words = np.frombuffer(chunk, np.uint64).reshape(_CHUNK_ENTRIES, -1)
            yield from (np.flatnonzero(words.any(axis=1)) + number * _CHUNK_ENTRIES).tolist()

    def _parse(self, slot: int) -> Entry | None:
        raw = bytes(self._view(slot))
        fixed = raw[: _ENTRY.size]
        if _sealed(slot, fixed) != raw:
            return None
        digest, stamp = _ENTRY.unpack(fixed)
        return Entry(stamp, slot, digest)

    def _write(self, slot: int, entry: bytes) -> None:
        self._view(slot)[:] = entry
        self._changed.add(slot // _BLOCK_ENTRIES)

    def _view(self, slot: int) -> memoryview:
        chunk, place = divmod(slot, _CHUNK_ENTRIES)
        return self._chunks[chunk][place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES]


def _sealed(slot: int, fixed: bytes) -> bytes:
    """An entry with its checksum; the slot's number is part of it, so that no entry holds elsewhere."""
    return fixed + xxh3_64_digest(fixed, seed=slot)


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last of blocks that follow one another within a chunk."""
    first = last = -1
    for block in blocks:
        if first >= 0 and (block != last + 1 or block % (_CHUNK_BYTES // ALIGNMENT) == 0):
            yield first, last
            first = block
        first = block if first < 0 else first
        last = block
    if first >= 0:
        yield first, last
