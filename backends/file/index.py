"""The in-memory index of which file slot holds which page, so that `exists` never reads the disk."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple


class StoredPage(NamedTuple):
    """A page in the store.

    Attributes:
        slot: number of the slot that holds it.
        checksum: checksum of its bytes, 8 bytes.
    """

    digest: bytes
    slot: int
    checksum: bytes


class PageIndex:
    """File slots of one pool: each is free, holds a page, or is taken by a write in flight.

    Not thread-safe: the store holds its lock around every call except `in` and `len`.

    Slots are handed out in ascending order, so that pages written together form one run.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.evicted = 0
        self.order_changed = False
        """Whether the order of use has changed since `load`."""
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, least recently used first
        self._checksums = array("Q")  # by slot
        self._free: list[int] = []  # a heap
        self._readers: Counter[int] = Counter()
        self._free_when_read: set[int] = set()  # released while being read; freed after the last read
        self._removed: list[bytes] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def free(self) -> int:
        """Slots that can be taken without evicting a page."""
        return len(self._free)

    def grow(self, count: int) -> None:
        """Add `count` free slots."""
        for slot in range(self.slots, self.slots + count):
            heapq.heappush(self._free, slot)
        self._checksums.extend([0] * count)
        self.slots += count

    def load(self, pages: Iterable[StoredPage], slots: int) -> None:
        """Load the pages of a pool with `slots` slots, the least recently used first."""
        self._checksums = array("Q", [0]) * slots
        for digest, slot, checksum in pages:
            self._pages[digest] = slot
            self._checksums[slot] = int.from_bytes(checksum)
        held = set(self._pages.values())
        self._free = [slot for slot in range(slots) if slot not in held]
        self.slots = slots

    def pages(self) -> list[tuple[bytes, int]]:
        """The digest and slot of each page."""
        return list(self._pages.items())

    def touch(self, digest: bytes) -> bool:
        """Make a page the most recently used; False if it does not exist."""
        if digest not in self._pages:
            return False
        self._pages.move_to_end(digest)
        self.order_changed = True
        return True

    def demote(self, digests: Sequence[bytes]) -> None:
        """Make these pages the first to be evicted, in this order; missing ones are skipped."""
        for digest in reversed(digests):
            if digest in self._pages:
                self._pages.move_to_end(digest, last=False)
                self.order_changed = True

    def take_removed(self) -> list[bytes]:
        """Digests of pages evicted or removed since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def pin(self, digest: bytes) -> StoredPage | None:
        """Look a page up and protect its slot from eviction until `unpin`; None if it does not exist."""
        slot = self._pages.get(digest)
        if slot is None:
            return None
        self._pages.move_to_end(digest)
        self._readers[slot] += 1
        self.order_changed = True
        return self._stored(digest, slot)

    def unpin(self, slot: int) -> None:
        """End a read of a slot."""
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
            if slot in self._free_when_read:
                self._free_when_read.remove(slot)
                heapq.heappush(self._free, slot)

    def take(self, count: int) -> list[int]:
        """Take up to `count` free slots for writing, ascending."""
        return [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]

    def evict(self, count: int, keep: Collection[bytes] = frozenset()) -> list[int]:
        """Evict up to `count` pages that are not being read, the least recently used; their slots are taken.

        Args:
            count: most pages to evict; below 1 for none.
            keep: digests of pages not to evict.
        """
        idle = (
            (digest, slot)
            for digest, slot in self._pages.items()
            if slot not in self._readers and digest not in keep
        )
        victims = list(islice(idle, max(count, 0)))
        self._drop(digest for digest, _ in victims)
        self.evicted += len(victims)
        return [slot for _, slot in victims]

    def truncate(self, slots: int) -> bool:
        """Remove the slots from number `slots` on, with their pages.

        Returns:
            False if one of the slots is being read or written; nothing changes then.
        """
        going = [(digest, slot) for digest, slot in self._pages.items() if slot >= slots]
        free = [slot for slot in self._free if slot >= slots]
        if len(going) + len(free) < self.slots - slots or any(slot in self._readers for _, slot in going):
            return False
        self._drop(digest for digest, _ in going)
        self.evicted += len(going)
        self._free = [slot for slot in self._free if slot < slots]
        heapq.heapify(self._free)
        del self._checksums[slots:]
        self.slots = slots
        return True

    def clear(self) -> list[int]:
        """Remove every page; returns their slots, which stay taken until `release`."""
        slots = list(self._pages.values())
        self._drop(list(self._pages))
        return slots

    def in_order(self) -> list[StoredPage]:
        """All pages, the least recently used first."""
        return [self._stored(digest, slot) for digest, slot in self._pages.items()]

    def add(self, page: StoredPage) -> bool:
        """Put a page into its taken slot; False if another slot already holds the page."""
        if page.digest in self._pages:
            return False
        self._pages[page.digest] = page.slot
        self._checksums[page.slot] = int.from_bytes(page.checksum)
        self.order_changed = True
        return True

    def release(self, slot: int) -> None:
        """Free a taken slot, once no read uses it."""
        if slot in self._readers:
            self._free_when_read.add(slot)
        else:
            heapq.heappush(self._free, slot)

    def remove(self, digest: bytes) -> int | None:
        """Remove a page; its slot stays taken until `release`. None if the page does not exist."""
        slot = self._pages.get(digest)
        if slot is not None:
            self._drop([digest])
        return slot

    def forget(self, digest: bytes, slot: int) -> bool:
        """Remove a damaged page if `slot` still holds it; the slot stays taken until `release`."""
        if self._pages.get(digest) != slot:
            return False
        self._drop([digest])
        return True

    def digests(self) -> list[bytes]:
        """Digests of all pages, the least recently used first."""
        return list(self._pages)

    def _drop(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            del self._pages[digest]
            self._removed.append(digest)

    def _stored(self, digest: bytes, slot: int) -> StoredPage:
        return StoredPage(digest, slot, self._checksums[slot].to_bytes(8))
