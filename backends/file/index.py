"""Which file slot holds which page: kept in memory, so that `exists` never touches the disk."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable


class PageIndex:
    """File slots of one pool: free, held by a page, or taken by a write that has not ended.

    Not locked: the engine holds its lock around every call, `in` and `len` excepted.

    Slots are given out in ascending order, so that pages that were written together lie in one run.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.evicted = 0
        self._pages: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, least recently used first
        self._free: list[int] = []  # a heap
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()  # given up while it is read; free once nobody reads it

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def free(self) -> int:
        """Slots that can be taken without evicting a page."""
        return len(self._free)

    def grow(self, count: int) -> None:
        """The file has `count` more slots, free ones."""
        for slot in range(self.slots, self.slots + count):
            heapq.heappush(self._free, slot)
        self.slots += count

    def load(self, pages: Iterable[tuple[bytes, int]], slots: int) -> None:
        """Start with what a file of `slots` slots holds: digests and slots, the last of two alike."""
        self._pages = OrderedDict(pages)
        held = set(self._pages.values())
        self._free = [slot for slot in range(slots) if slot not in held]
        self.slots = slots

    def touch(self, digest: bytes) -> bool:
        """Whether the page is there; it is the most recently used then."""
        if digest not in self._pages:
            return False
        self._pages.move_to_end(digest)
        return True

    def pin(self, digest: bytes) -> int | None:
        """The slot of a page, which is not evicted until `unpin`; None if it is not there."""
        slot = self._pages.get(digest)
        if slot is not None:
            self._pages.move_to_end(digest)
            self._readers[slot] += 1
        return slot

    def unpin(self, slot: int) -> None:
        """A read has ended."""
        self._readers[slot] -= 1
        if self._readers[slot] == 0:
            del self._readers[slot]
            if slot in self._leaving:
                self._leaving.remove(slot)
                heapq.heappush(self._free, slot)

    def take(self, count: int) -> list[int]:
        """Up to `count` slots to write to, ascending; pages that nobody reads are evicted for them."""
        while len(self._free) < count and self._evict():
            pass
        return [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]

    def hold(self, slot: int, digest: bytes) -> bool:
        """A taken slot holds a page from now on; False if another slot does already."""
        if digest in self._pages:
            return False
        self._pages[digest] = slot
        return True

    def release(self, slot: int) -> None:
        """A taken slot, or one that lost its page, is free, once nobody reads it."""
        if slot in self._readers:
            self._leaving.add(slot)
        else:
            heapq.heappush(self._free, slot)

    def remove(self, digest: bytes) -> int | None:
        """Forget a page; its slot is taken until `release`. None if it is not there."""
        return self._pages.pop(digest, None)

    def forget(self, digest: bytes, slot: int) -> bool:
        """Forget a damaged page; False if the slot does not hold it any more."""
        if self._pages.get(digest) != slot:
            return False
        del self._pages[digest]
        self.release(slot)
        return True

    def _evict(self) -> bool:
        victim = next((digest for digest, slot in self._pages.items() if slot not in self._readers), None)
        if victim is None:
            return False
        heapq.heappush(self._free, self._pages.pop(victim))
        self.evicted += 1
        return True
