"""Which page lies in which slot, on disk: one entry of 64 bytes a slot, in a file of their own.

Entries are written in place. A crash tears none: none crosses a sector.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from asynchicache.backends.file.blocks import BlockFile
from asynchicache.layouts import ALIGNMENT, round_up

ENTRY_BYTES = 64
_ENTRY = Struct("<32sQ16x")  # page digest, stamp; then the checksum of both, seeded with the slot
_NOTHING = bytes(ENTRY_BYTES)


class Entry(NamedTuple):
    """A slot and its page, None for nothing; entries sort by use, the least recent first."""

    stamp: int
    slot: int
    digest: bytes | None


class Names(NamedTuple):
    """What a file of entries says.

    Attributes:
        pages: digest and slot of each page, the least recently used first.
        damaged: slots whose entries are damaged.
        stamp: above all that are in use.
    """

    pages: list[tuple[bytes, int]]
    damaged: list[int]
    stamp: int


class NameFile:
    """The entries of one pool. Calls may run side by side, but for the same slot.

    Args:
        file: the entries, nothing else; through the kernel's cache, which gathers small writes.
    """

    def __init__(self, file: BlockFile) -> None:
        self._file = file

    @staticmethod
    def size_for(slots: int) -> int:
        """Bytes of the file for so many slots."""
        return round_up(slots * ENTRY_BYTES, ALIGNMENT)

    @property
    def nbytes(self) -> int:
        return self._file.size

    @property
    def slots(self) -> int:
        """How many entries there is room for."""
        return self._file.size // ENTRY_BYTES

    def load(self) -> Names:
        """Read the file.

        Raises:
            OSError: it cannot be read.
        """
        data = memoryview(bytearray(round_up(self._file.size, ENTRY_BYTES)))
        if len(data):
            self._file.read([data], 0)
        found: list[Entry] = []
        damaged: list[int] = []
        for slot in _used(data):
            entry = _parse(slot, bytes(data[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]))
            if entry is None:
                damaged.append(slot)
            else:
                found.append(entry)
        found.sort()
        pages = [(entry.digest, entry.slot) for entry in found if entry.digest is not None]
        return Names(pages, damaged, found[-1].stamp + 1 if found else 0)

    def grow(self, slots: int) -> bool:
        """Make room for entries of `slots` slots in all; False, and as before, if the disk refuses."""
        size = self.size_for(slots)
        return size <= self._file.size or self._file.grow(size)

    def shrink(self, slots: int) -> None:
        """Cut what lies behind the entries of the first `slots`.

        Raises:
            OSError: the file cannot be cut.
        """
        self._file.truncate(self.size_for(slots))

    def write(self, entries: Sequence[Entry]) -> None:
        """Overwrite entries, neighbours in one call; durable after `sync`.

        Raises:
            OSError: some may not be written.
        """
        for run in _runs(sorted(entries, key=lambda entry: entry.slot)):
            data = b"".join(map(_packed, run))
            if self._file.write([memoryview(data)], run[0].slot * ENTRY_BYTES) != len(data):
                raise OSError(errno.ENOSPC, "entries were written in part", str(self._file.path))

    def sync(self) -> None:
        """Make everything durable that was written until now.

        Raises:
            OSError: it may not be.
        """
        self._file.sync()

    def close(self) -> None:
        """Twice is harmless."""
        self._file.close()


def _used(data: memoryview) -> list[int]:
    """Slots whose entries are not empty."""
    words = np.frombuffer(data, np.uint64).reshape(-1, ENTRY_BYTES // 8)
    slots: list[int] = np.flatnonzero(words.any(axis=1)).tolist()
    return slots


def _parse(slot: int, raw: bytes) -> Entry | None:
    digest, stamp = _ENTRY.unpack_from(raw)
    entry = Entry(stamp, slot, digest)
    return entry if _packed(entry) == raw else None


def _packed(entry: Entry) -> bytes:
    """An entry as it is stored; the slot is part of its checksum, so that it holds nowhere else."""
    if entry.digest is None:
        return _NOTHING
    fixed = _ENTRY.pack(entry.digest, entry.stamp)
    return fixed + xxh3_64_digest(fixed, seed=entry.slot)


def _runs(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries in ascending order of slots, cut where one does not follow."""
    run: list[Entry] = []
    for entry in entries:
        if run and entry.slot != run[-1].slot + 1:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
