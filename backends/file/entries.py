"""Which page lies in which slot, on disk: one entry a slot, before the slots of its file.

Entries are written in place. A crash tears none: none crosses a sector. An entry also has the checksum of
its page, so that a page that was lost, torn, or overwritten by another is no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.segments import Segments
from asynchicache.backends.file.shape import ENTRY_BYTES

_ENTRY = Struct("<32sQQ8s")  # page digest, stamp, mark, page checksum; then the checksum of these
_EMPTY = bytes(ENTRY_BYTES)
_MOST_STAMP = 1 << 62  # more than any disk will ever see


class SlotEntry(NamedTuple):
    """A slot and its page; entries sort by use, the least recent first.

    Attributes:
        stamp: of the use: the later, the higher.
        slot: in the pool.
        digest: of the page.
        mark: when this was written, all pages with lower stamps were durable.
        checksum: of the page.
    """

    stamp: int
    slot: int
    digest: bytes
    mark: int
    checksum: bytes


class LoadedEntries(NamedTuple):
    """What the entries of a pool say.

    Attributes:
        pages: the least recently used first.
        damaged: slots whose entries are damaged.
        trusted: pages with lower stamps were durable. Of the others a crash may have left a part.
        stamp: of the next page: above all that are in use, and not below `trusted`.
    """

    pages: list[SlotEntry]
    damaged: list[int]
    trusted: int
    stamp: int


class EntryBlock(NamedTuple):
    """Entries of neighbouring slots of one file, as they are stored; `slot` is the first."""

    slot: int
    data: bytes


def load_entries(segments: Segments) -> LoadedEntries:
    """Read all entries, and no page.

    Raises:
        OSError: they cannot be read.
    """
    pages: list[SlotEntry] = []
    damaged: list[int] = []
    for number, data in enumerate(segments.read_entries()):
        for place in _used(data):
            slot = number * segments.shape.slots + place
            raw = bytes(data[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
            entry = _parse(slot, raw, segments.identity)
            if entry is None:
                damaged.append(slot)
            else:
                pages.append(entry)
    pages.sort()
    trusted = max((entry.mark for entry in pages), default=0)
    following = pages[-1].stamp + 1 if pages else 0
    return LoadedEntries(pages, damaged, trusted, max(following, trusted))


def pack_entries(pages: Iterable[StoredPage], stamp: int, mark: int, identity: bytes) -> dict[int, bytes]:
    """Entries as they are stored, by slot; their stamps go up from `stamp`."""
    return {
        slot: _pack(SlotEntry(used, slot, digest, mark, checksum), identity)
        for used, (digest, slot, checksum) in enumerate(pages, stamp)
    }


def empty_entries(slots: Iterable[int]) -> dict[int, bytes]:
    """What the entries of slots that hold nothing are."""
    return dict.fromkeys(slots, bytes(ENTRY_BYTES))


def entry_blocks(stored: Mapping[int, bytes], file_slots: int) -> list[EntryBlock]:
    """Entries by slot, those of neighbours together."""
    return list(_contiguous((EntryBlock(slot, data) for slot, data in stored.items()), file_slots))


def write_blocks(segments: Segments, blocks: Iterable[EntryBlock]) -> None:
    """Write entries, neighbours in one call; durable after a `Segments.barrier`.

    Raises:
        OSError: some may not be written.
    """
    for block in _contiguous(blocks, segments.shape.slots):
        segments.write_entries(block.slot, block.data)


def _used(data: memoryview) -> list[int]:
    """Places of entries that are not empty."""
    starts = range(0, len(data), ENTRY_BYTES)
    return [place for place, start in enumerate(starts) if data[start : start + ENTRY_BYTES] != _EMPTY]


def _parse(slot: int, raw: bytes, identity: bytes) -> SlotEntry | None:
    digest, stamp, mark, checksum = _ENTRY.unpack_from(raw)
    entry = SlotEntry(stamp, slot, digest, mark, checksum)
    return entry if _pack(entry, identity) == raw and max(stamp, mark) < _MOST_STAMP else None


def _pack(entry: SlotEntry, identity: bytes) -> bytes:
    """An entry as it is stored; slot and pool are part of its checksum, so that it holds nowhere else."""
    fixed = _ENTRY.pack(entry.digest, entry.stamp, entry.mark, entry.checksum)
    return fixed + xxh3_64_digest(fixed + identity, entry.slot)


def _contiguous(blocks: Iterable[EntryBlock], file_slots: int) -> Iterator[EntryBlock]:
    """Blocks in ascending order, cut where one does not follow, and where a file ends."""
    run: list[EntryBlock] = []
    following = 0
    for block in sorted(blocks):
        if run and (block.slot != following or following % file_slots == 0):
            yield _as_one(run)
            run = []
        run.append(block)
        following = block.slot + len(block.data) // ENTRY_BYTES
    if run:
        yield _as_one(run)


def _as_one(run: Sequence[EntryBlock]) -> EntryBlock:
    return run[0] if len(run) == 1 else EntryBlock(run[0].slot, b"".join(block.data for block in run))
