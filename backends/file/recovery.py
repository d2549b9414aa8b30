"""Recover a pool's pages when it is opened: all that entries name, except pages that a crash has torn."""

from __future__ import annotations

import logging
import mmap
from functools import cached_property
from typing import NamedTuple

from asynchicache.backends.file.entries import SlotEntry, load_entries
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.manifest import Manifest
from asynchicache.backends.file.segments import Segments
from asynchicache.storage.binding import page_checksum

logger = logging.getLogger(__name__)


class PageReader:
    """Reads slots, one at a time, and checks them against their entries.

    Args:
        segments: the pool's files.
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
        stamp: stamp of the next page.
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
