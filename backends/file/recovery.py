"""What a pool holds when it is opened: what its entries name, less what a crash has left in part."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from asynchicache.backends.file import entries
from asynchicache.backends.file.entries import Entry
from asynchicache.backends.file.manifest import Manifest
from asynchicache.backends.file.segments import Segments
from asynchicache.hashing import ObjectKey

logger = logging.getLogger(__name__)

Identify = Callable[[memoryview, memoryview], ObjectKey | None]
"""The page that a header and a page were sealed as; None if one of them is damaged."""


class PageReader:
    """Reads slots, one at a time, and says what lies in them.

    Attributes:
        strangers: slots so far that held a whole page, of another pool than the manifest says.

    Args:
        segments: the files.
        manifest: whose pages they hold.
        identify: of any pool's pages, or of this one's.
    """

    def __init__(self, segments: Segments, manifest: Manifest, identify: Identify) -> None:
        self._segments = segments
        self._manifest = manifest
        self._identify = identify
        self.strangers = 0

    def digest_in(self, slot: int) -> bytes | None:
        """The page of this pool that lies whole in a slot; None if there is none, or it cannot be read."""
        if not self._segments.holds(slot):
            return None
        try:
            self._segments.read(slot, self._memory)
        except OSError:
            return None
        found = self._identify(*self._memory)
        if found is None:
            return None
        if found != self._manifest.key(found.digest):
            self.strangers += 1
            return None
        return found.digest

    @cached_property
    def _memory(self) -> tuple[memoryview, memoryview]:
        sizes = self._manifest.header_bytes, self._manifest.slot_bytes
        header, page = (memoryview(mmap.mmap(-1, size)) for size in sizes)
        return header, page


class Recovered(NamedTuple):
    """What is there.

    Attributes:
        pages: digests and slots, the least recently used first.
        checked: those of `pages` that were read, because a crash may have cut off their write.
        stale: slots whose entries name nothing, or nothing that may be served.
        unfinished: how many of these a crash has left in part.
        stamp: of the next page.
    """

    pages: list[tuple[bytes, int]]
    checked: list[tuple[bytes, int]]
    stale: list[int]
    unfinished: int
    stamp: int


def recover(segments: Segments, reader: PageReader) -> Recovered:
    """Read all entries, and pages that may not have been durable when the last writer ended.

    Raises:
        OSError: the entries cannot be read.
    """
    found = entries.load(segments)
    doubtful = {entry.slot for entry in found.pages if entry.stamp >= found.trusted}
    torn = {e.slot for e in found.pages if e.slot in doubtful and reader.digest_in(e.slot) != e.digest}
    if torn:
        logger.warning("%d pages of the last writes are not whole, and forgotten", len(torn))
    whole = (entry for entry in found.pages if entry.slot not in torn and segments.holds(entry.slot))
    latest = {entry.digest: entry for entry in whole}  # two calls may have stored one page when a crash came
    pages = sorted(latest.values())
    held = {entry.slot for entry in pages}
    stale = [slot for slot in [*found.damaged, *(e.slot for e in found.pages)] if slot not in held]
    checked = [entry for entry in pages if entry.slot in doubtful]
    return Recovered(_named(pages), _named(checked), stale, len(torn), found.stamp)


def _named(found: list[Entry]) -> list[tuple[bytes, int]]:
    return [(entry.digest, entry.slot) for entry in found]
