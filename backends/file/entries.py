"""On-disk entries that say which page each slot holds: one per slot, at the beginning of each file.

Entries are written in place. A crash cannot tear an entry, because none crosses a sector. An entry also
holds the checksum of its page, which detects a page that was lost, torn or overwritten. A pool that is opened
has all that its entries name, except pages that a crash has torn.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

from asynchicache.backends.direct_file import divide
from asynchicache.backends.file.folder import Manifest
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.segments import ENTRY_BYTES, Segments
from asynchicache.storage.binding import page_checksum

logger = logging.getLogger(__name__)


_ENTRY = Struct("<40sQQ8s56x")  # page digest, stamp, mark, page checksum; the entry's own checksum follows
_EMPTY = bytes(ENTRY_BYTES)
_MAX_STAMP = 1 << 62  # more pages than any disk will ever store


class SlotEntry(NamedTuple):
    """A slot and its page; entries sort by use, the least recent first.

    Attributes:
        stamp: order of use; a later use has a higher stamp.
        slot: number of the slot in the pool.
        mark: all pages with lower stamps were durable when this entry was written.
    """

    stamp: int
    slot: int
    digest: bytes
    mark: int
    checksum: bytes


class LoadedEntries(NamedTuple):
    """All entries of a pool.

    Attributes:
        pages: valid entries, the least recently used first.
        trusted: pages with lower stamps were durable; a crash may have torn the others.
        stamp: stamp of the next page: above all stamps in use, and not below `trusted`.
    """

    pages: list[SlotEntry]
    damaged: list[int]
    trusted: int
    stamp: int


class EntryBlock(NamedTuple):
    """Packed entries of neighbouring slots of one file; `slot` is the first slot."""

    slot: int
    data: bytes


def load_entries(segments: Segments) -> LoadedEntries:
    """Read all entries, but no pages.

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
    """Pack entries, by slot; their stamps count up from `stamp`."""
    return {
        slot: _pack(SlotEntry(used, slot, digest, mark, checksum), identity)
        for used, (digest, slot, checksum) in enumerate(pages, stamp)
    }


def empty_entries(slots: Iterable[int]) -> dict[int, bytes]:
    """Packed entries of empty slots, by slot."""
    return dict.fromkeys(slots, bytes(ENTRY_BYTES))


def entry_blocks(stored: Mapping[int, bytes], file_slots: int) -> list[EntryBlock]:
    """Join the entries of neighbouring slots into blocks."""
    return list(_contiguous((EntryBlock(slot, data) for slot, data in stored.items()), file_slots))


def write_blocks(segments: Segments, blocks: Iterable[EntryBlock]) -> None:
    """Write entries, neighbours in one system call; durable after a `Segments.barrier`.

    Raises:
        OSError: some entries may not be written.
    """
    for block in _contiguous(blocks, segments.shape.slots):
        segments.write_entries(block.slot, block.data)


def _used(data: memoryview) -> list[int]:
    """Positions of entries that are not empty."""
    starts = range(0, len(data), ENTRY_BYTES)
    return [place for place, start in enumerate(starts) if data[start : start + ENTRY_BYTES] != _EMPTY]


def _parse(slot: int, raw: bytes, identity: bytes) -> SlotEntry | None:
    digest, stamp, mark, checksum = _ENTRY.unpack_from(raw)
    entry = SlotEntry(stamp, slot, digest, mark, checksum)
    return entry if _pack(entry, identity) == raw and max(stamp, mark) < _MAX_STAMP else None


def _pack(entry: SlotEntry, identity: bytes) -> bytes:
    """Pack an entry. Its checksum includes slot and pool, so it is invalid in any other slot or pool."""
    fixed = _ENTRY.pack(entry.digest, entry.stamp, entry.mark, entry.checksum)
    return fixed + xxh3_64_digest(fixed + identity, entry.slot)


def _contiguous(blocks: Iterable[EntryBlock], file_slots: int) -> Iterator[EntryBlock]:
    """Join blocks in ascending order; a new one starts at a gap and at the beginning of a file."""

    def joins(run: list[EntryBlock], block: EntryBlock) -> bool:
        following = run[-1].slot + len(run[-1].data) // ENTRY_BYTES
        return block.slot == following and following % file_slots != 0

    for run in divide(sorted(blocks), joins):
        yield EntryBlock(run[0].slot, b"".join(block.data for block in run))


class PageReader:
    """Reads slots, one at a time, and checks them against their entries.

    Args:
        manifest: the pool's manifest, for page and slot sizes.
    """

    def __init__(self, segments: Segments, manifest: Manifest) -> None:
        self._segments = segments
        self._manifest = manifest

    def holds(self, entry: SlotEntry) -> bool:
        """Whether the slot can be read and holds the entry's page undamaged."""
        if not self._segments.holds(entry.slot):
            return False
        try:
            self._segments.read(entry.slot, [self._memory])
        except OSError:
            return False
        return page_checksum(self._memory[: self._manifest.page_bytes]) == entry.checksum

    @cached_property
    def _memory(self) -> memoryview:
        return memoryview(mmap.mmap(-1, self._manifest.slot_bytes))


class RecoveredPages(NamedTuple):
    """The result of a recovery.

    Attributes:
        pages: all valid pages, the least recently used first.
        checked: the pages among them that were read, because a crash may have interrupted their write.
        stale: slots whose entries are damaged or name a page that cannot be served.
        unfinished: number of pages that a crash has torn.
    """

    pages: list[StoredPage]
    checked: list[StoredPage]
    stale: list[int]
    unfinished: int
    stamp: int


def recover(segments: Segments, reader: PageReader) -> RecoveredPages:
    """Read all entries, and verify the pages that may not have been durable when the last writer ended.

    Raises:
        OSError: the entries cannot be read.
    """
    found = load_entries(segments)
    doubtful = {entry.slot for entry in found.pages if entry.stamp >= found.trusted}
    torn = {entry.slot for entry in found.pages if entry.slot in doubtful and not reader.holds(entry)}
    if torn:
        logger.warning("%d pages of the last writes are not whole, and forgotten", len(torn))
    whole = (entry for entry in found.pages if entry.slot not in torn and segments.holds(entry.slot))
    latest = {entry.digest: entry for entry in whole}  # a crash may leave one page stored by two calls
    pages = sorted(latest.values())
    held = {entry.slot for entry in pages}
    stale = [slot for slot in [*found.damaged, *(e.slot for e in found.pages)] if slot not in held]
    checked = [entry for entry in pages if entry.slot in doubtful]
    return RecoveredPages(_stored(pages), _stored(checked), stale, len(torn), found.stamp)


def _stored(found: list[SlotEntry]) -> list[StoredPage]:
    return [StoredPage(entry.digest, entry.slot, entry.checksum) for entry in found]
