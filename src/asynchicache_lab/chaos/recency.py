"""Check which pages a bounded store evicts: an LRU of paths, as far as the store can know the uses.

Using a path uses all its pages. If an evicted page would have fitted into the store together with all pages
used after it, it should not have been evicted.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from asynchicache.hashing import ObjectKey
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.store import ChaosStore

TOLD_SECONDS = 2.0
"""Time within which storage must be told of a use in memory."""

_ROOM = 0.9
"""The share of a store that must be filled."""


class StoredPath(NamedTuple):
    """A prefix that can be restored from a store.

    Attributes:
        digests: digests of its pages, in order.
        full: page by page, the keys in pools that cover every page.
        ends: the keys that its end needs in other pools.
    """

    digests: Sequence[bytes]
    full: Sequence[Sequence[ObjectKey]]
    ends: Sequence[ObjectKey]

    def every_key(self) -> Iterator[ObjectKey]:
        for page in self.full:
            yield from page
        yield from self.ends


class RecencyOracle:
    """Checks the eviction order of one bounded store against the times of use.

    A store with faults may miss a use; the oracle then expects nothing of it.
    """

    def __init__(self, store: ChaosStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger
        self._clock = asyncio.get_running_loop().time
        self._sizes: dict[ObjectKey, int] = {}
        self._latest: dict[ObjectKey, float] = {}
        self._moved: dict[ObjectKey, float] = {}
        self._touched: defaultdict[ObjectKey, list[float]] = defaultdict(list)
        self._paths: dict[ObjectKey, StoredPath] = {}
        self._above: dict[bytes, bytes] = {}
        store.keeper = self

    def used(self, key: ObjectKey, size: int) -> None:
        """The store itself handled a use."""
        self._sizes[key] = size
        self._latest[key] = self._moved[key] = self._clock()

    def restored(self, path: StoredPath, known: Callable[[ObjectKey], bool]) -> None:
        """A request got a path from memory, perhaps prefetched: all of its pages were used.

        `known`: returns whether the cache knows that a page is stored. If it does not, in any pool, it may be
            asking what storage has lost, and cannot report the use.
        """
        now = self._clock()
        self._know(path)
        unknown = {key.digest for key in path.every_key() if not known(key)}
        for key in path.every_key():
            self._latest[key] = now
            if key.digest not in unknown:
                self._touched[key].append(now)

    def asked(self, digests: Sequence[bytes]) -> None:
        """A path is requested."""
        for above, below in pairwise(digests):
            self._above[below] = above

    def _know(self, path: StoredPath) -> None:
        self.asked(path.digests)
        for key in path.every_key():
            self._paths[key] = path

    def forgot(self, key: ObjectKey) -> None:
        """A page is no longer expected, nor those of other pools that are worth nothing without it."""
        for other in [other for other in self._latest if other.digest == key.digest]:
            for known in (self._moved, self._touched, self._paths):
                known.pop(other, None)

    def restarted(self) -> None:
        """A cache has ended: it may not have reported its last uses."""
        reported = self._clock() - TOLD_SECONDS
        for times in self._touched.values():
            times[:] = times[: bisect_right(times, reported)]

    def evicted(self, key: ObjectKey, incoming_bytes: int) -> None:
        """A page was evicted for one of `incoming_bytes`; check that this was right."""
        path, capacity = self._paths.get(key), self._store.capacity_bytes
        if path is None or capacity is None or not self._restorable(path, key):
            return
        moment = self._reported_use(key)
        size = self._sizes.get(key, 0)
        rivals = sum(self._sizes.get(other, size) for other in self._used_since(key, moment))
        if size + rivals + incoming_bytes <= _ROOM * capacity:
            self._ledger.violations.append(
                f"forgotten: a page of {key.pool!r} made room, though all that was used since, {rivals} "
                f"bytes, and its own {size} are less than the {capacity} that storage holds"
            )

    def _used_since(self, key: ObjectKey, moment: float) -> list[ObjectKey]:
        """The pages that may count as used later than a page used at `moment`, each with those before it on
        its path."""
        since = moment - TOLD_SECONDS  # reports of other uses may have been this late
        used = {
            other.digest
            for other, latest in self._latest.items()
            if latest > since and not self._goes_before(other, key, moment)
        }
        path: set[bytes] = set()
        for digest in (key.digest, *used):
            above: bytes | None = digest
            while above is not None and above not in path:
                path.add(above)
                above = self._above.get(above)
        return [
            other
            for other, latest in self._latest.items()
            if other != key
            and (other.digest in path or (latest > since and not self._goes_before(other, key, moment)))
        ]

    def _reported_use(self, key: ObjectKey) -> float:
        """Time of the page's last use that storage must know."""
        reported = self._clock() - TOLD_SECONDS
        times = self._touched.get(key, [])
        count = bisect_right(times, reported)
        del times[: max(count - 1, 0)]
        return max(self._moved.get(key, 0.0), times[0] if times and times[0] <= reported else 0.0)

    def _restorable(self, path: StoredPath, key: ObjectKey) -> bool:
        """Whether the page made a prefix restorable: the store has lost no other page that it needs."""
        if path.ends:
            return all(other in self._store for other in path.every_key() if other != key)
        page = path.digests.index(key.digest)
        return all(other in self._store for keys in path.full[: page + 1] for other in keys if other != key)

    def _goes_before(self, other: ObjectKey, key: ObjectKey, moment: float) -> bool:
        """Whether `other` must be evicted before `key`, last used at `moment`: it follows on the path and was
        not used later."""
        if self._latest[other] > moment:
            return False
        digest: bytes | None = other.digest
        while digest is not None and digest != key.digest:
            digest = self._above.get(digest)
        return digest is not None
