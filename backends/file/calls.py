"""State shared by the hops of one get or put: its slots, given out from the beginning of the path, and its
order of use.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from asynchicache.backends.file.store import PoolStore
from asynchicache.types import Outcome


class SlotClaim(NamedTuple):
    """The slots that one hop of a put writes to.

    Attributes:
        slots: store slots, by the position of the page in the call.
        refused: positions of pages that get no slot.
        refusal: the outcome of the refused pages.
    """

    slots: dict[int, int]
    refused: list[int]
    refusal: Outcome


class PathCall:
    """One get or put. Its hops run in threads, in any order.

    Args:
        store: the pool's store.
        digests: digests of the pages, in path order.
        hops: number of hops; each calls `end` once.
    """

    def __init__(self, store: PoolStore, digests: Sequence[bytes], hops: int) -> None:
        self.own = frozenset(digests)
        """Digests of the call's pages, which are not evicted to make room for each other."""
        self._store = store
        self._digests = digests
        self._hops = hops
        self._lock = threading.Lock()
        self._slots: dict[int, int] | None = None
        self._refused: set[int] = set()
        self._refusal = Outcome.REJECTED

    def claim(self, places: range) -> SlotClaim:
        """Claim slots for the pages at `places` that the store does not have.

        The first hop takes slots for the whole call, so that a shortage always hits the end of the path.
        """
        with self._lock:
            if self._slots is None:
                self._slots = self._take()
            slots = {place: self._slots.pop(place) for place in places if place in self._slots}
            return SlotClaim(slots, [place for place in places if place in self._refused], self._refusal)

    def end(self) -> None:
        """End a hop. The last one counts the call's pages as used, the first page most recently."""
        with self._lock:
            self._hops -= 1
            if self._hops:
                return
            unused, self._slots = self._slots or {}, {}
        self._store.release(unused.values())
        self._store.use(self._digests[::-1])

    def _take(self) -> dict[int, int]:
        fresh, taken = self._store.missing(self._digests), []
        try:
            taken = self._store.take(len(fresh), self.own)
        except OSError as error:
            self._store.failures.warning(
                "slots", "no slots for %d pages: %s", len(fresh), error, pages=len(fresh)
            )
            self._refusal = Outcome.FAILED
        self._refused = set(fresh[len(taken) :])
        return dict(zip(fresh, taken, strict=False))
