"""What the hops of one get or put share: slots, for the beginning of its path first, and the order of use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from asynchicache.backends.file.store import PoolStore
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)


class SlotClaim(NamedTuple):
    """What one hop of a put is to write.

    Attributes:
        slots: of the store, by the places of pages in the call.
        refused: places of pages that get none.
        refusal: the outcome of those.
    """

    slots: dict[int, int]
    refused: list[int]
    refusal: Outcome


class PathCall:
    """One call. Hops run in threads, in any order.

    Args:
        store: the pool.
        digests: of the pages, in the order of their path.
        hops: parts of the call; each ends with `end`.
    """

    def __init__(self, store: PoolStore, digests: Sequence[bytes], hops: int) -> None:
        self.own = frozenset(digests)
        """Pages that make no room for each other."""
        self._store = store
        self._digests = digests
        self._hops = hops
        self._lock = threading.Lock()
        self._slots: dict[int, int] | None = None
        self._refused: set[int] = set()
        self._refusal = Outcome.REJECTED

    def claim(self, places: range) -> SlotClaim:
        """Slots for those of the pages at `places` that are not there. Whichever hop comes first takes them
        for the whole call: if there are too few, it is the end of the path that gets none."""
        with self._lock:
            if self._slots is None:
                self._slots = self._take()
            slots = {place: self._slots.pop(place) for place in places if place in self._slots}
            return SlotClaim(slots, [place for place in places if place in self._refused], self._refusal)

    def end(self) -> None:
        """A hop has ended. With the last one the call's pages count as used, the first most recently."""
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
            logger.warning("no slots for %d pages: %s", len(fresh), error)
            self._refusal = Outcome.FAILED
        self._refused = set(fresh[len(taken) :])
        return dict(zip(fresh, taken, strict=False))
