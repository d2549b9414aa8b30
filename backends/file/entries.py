"""Which page lies in which slot, on disk: one entry a slot, before the slots of its file.

Entries are written in place. A crash tears none: none crosses a sector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from asynchicache.backends.file.segments import Segments
from asynchicache.backends.file.shape import ENTRY_BYTES

_ENTRY = Struct("<32sQQ8x")  # page digest, stamp, mark; then the checksum of these, seeded with the slot
_MOST_STAMP = 1 << 62  # more than any disk will ever see


class Entry(NamedTuple):
    """A slot and its page; entries sort by use, the least recent first.

    Attributes:
        stamp: of the use: the later, the higher.
        slot: in the pool.
        digest: of the page.
        mark: when this was written, all pages with lower stamps were durable.
    """

    stamp: int
    slot: int
    digest: bytes
    mark: int = 0


class Entries(NamedTuple):
    """What the entries of a pool say.

    Attributes:
        pages: the least recently used first.
        damaged: slots whose entries are damaged.
        trusted: pages with lower stamps were durable. Of the others a crash may have left a part.
        stamp: of the next page: above all that are in use, and not below `trusted`.
    """

    pages: list[Entry]
    damaged: list[int]
    trusted: int
    stamp: int


def load(segments: Segments) -> Entries:
    """Read all entries, and no page.

    Raises:
        OSError: they cannot be read.
    """
    pages: list[Entry] = []
    damaged: list[int] = []
    for number, data in enumerate(segments.read_entries()):
        for place in _used(data):
            slot = number * segments.shape.slots + place
            entry = _parse(slot, bytes(data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES]))
            if entry is None:
                damaged.append(slot)
            else:
                pages.append(entry)
    pages.sort()
    trusted = max((entry.mark for entry in pages), default=0)
    following = pages[-1].stamp + 1 if pages else 0
    return Entries(pages, damaged, trusted, max(following, trusted))


def write(segments: Segments, entry: Entry) -> None:
    """Overwrite the entry of a slot; durable after `Segments.sync`.

    Raises:
        OSError: it may not be written.
    """
    put(segments, {entry.slot: _packed(*entry)})


def erase(segments: Segments, slots: Iterable[int]) -> None:
    """Empty the entries of slots; durable after `Segments.sync`.

    Raises:
        OSError: some may not be written.
    """
    put(segments, empty(slots))


def packed(pages: Iterable[tuple[bytes, int]], stamp: int, mark: int) -> dict[int, bytes]:
    """Entries as they are stored, by slot, of pages by digest and slot; their stamps go up from `stamp`."""
    return {slot: _packed(used, slot, digest, mark) for used, (digest, slot) in enumerate(pages, stamp)}


def empty(slots: Iterable[int]) -> dict[int, bytes]:
    """What the entries of slots that hold nothing are."""
    return dict.fromkeys(slots, bytes(ENTRY_BYTES))


def put(segments: Segments, stored: Mapping[int, bytes]) -> None:
    """Write entries by their slots, neighbours in one call; durable after `Segments.sync`.

    Raises:
        OSError: some may not be written.
    """
    for run in _runs(sorted(stored), segments.shape.slots):
        segments.write_entries(run[0], b"".join(stored[slot] for slot in run))


def _used(data: memoryview) -> list[int]:
    """Places of entries that are not empty."""
    words = np.frombuffer(data, np.uint64).reshape(-1, ENTRY_BYTES // 8)
    places: list[int] = np.flatnonzero(words.any(axis=1)).tolist()
    return places


def _parse(slot: int, raw: bytes) -> Entry | None:
    digest, stamp, mark = _ENTRY.unpack_from(raw)
    entry = Entry(stamp, slot, digest, mark)
    return entry if _packed(*entry) == raw and max(stamp, mark) < _MOST_STAMP else None


def _packed(stamp: int, slot: int, digest: bytes, mark: int) -> bytes:
    """An entry as it is stored; the slot is part of its checksum, so that it holds nowhere else."""
    fixed = _ENTRY.pack(digest, stamp, mark)
    return fixed + xxh3_64_digest(fixed, slot)


def _runs(slots: Sequence[int], file_slots: int) -> Iterator[list[int]]:
    """Ascending slots, cut where one does not follow, and where a file ends."""
    run: list[int] = []
    for slot in slots:
        if run and (slot != run[-1] + 1 or slot % file_slots == 0):
            yield run
            run = []
        run.append(slot)
    if run:
        yield run
