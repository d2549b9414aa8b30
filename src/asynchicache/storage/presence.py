"""Keys that were seen, for a while: what a far engine need not be asked again, and what it has damaged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from asynchicache.hashing import ObjectKey
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.types import Outcome


class ExpiringKeys:
    """A bounded set whose members are forgotten after some time, the oldest first.

    Args:
        most: members; 0 keeps none.
        seconds: how long one is kept.
        now: seconds on a clock that never goes back.
    """

    __slots__ = ("_most", "_now", "_seconds", "_until")

    def __init__(self, most: int, seconds: float, now: Callable[[], float]) -> None:
        self._most = most
        self._seconds = seconds
        self._now = now
        self._until: OrderedDict[ObjectKey, float] = OrderedDict()

    def add(self, keys: Iterable[ObjectKey]) -> None:
        until = self._now() + self._seconds
        for key in keys:
            self._until[key] = until
            self._until.move_to_end(key)
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def discard(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()

    def __contains__(self, key: ObjectKey) -> bool:
        until = self._until.get(key)
        return until is not None and self._now() < until

    def __len__(self) -> int:
        return len(self._until)


@dataclass(frozen=True, slots=True)
class PresenceStatistics:
    """What is known of an engine's pages.

    Attributes:
        there: pages that are remembered to be there, stale ones included.
        damaged: pages that were found damaged and not written anew.
        recalled: keys that the engine was not asked for, since the start.
    """

    there: int
    damaged: int
    recalled: int


class PresenceCache:
    """What is known of an engine's pages without asking it.

    Args:
        limits: how many pages, for how long.
        shared: the engine is asked over a network, and others change what it has.
        now: seconds on a clock that never goes back.
    """

    def __init__(self, limits: PoolLimits, *, shared: bool, now: Callable[[], float]) -> None:
        self._there = ExpiringKeys(limits.known_pages if shared else 0, limits.known_seconds, now)
        self._damaged = ExpiringKeys(limits.known_pages, float("inf"), now)
        self._shared = shared
        self._recalled = 0

    def __bool__(self) -> bool:
        return bool(self._there or self._damaged)

    def recall(self, key: ObjectKey, *, damaged_only: bool = False) -> Outcome | None:
        """HIT or MISS, or None if the engine must be asked; a damaged page is a miss until it is stored
        again. `damaged_only`: that a page was there is no answer."""
        if key in self._damaged:
            self._recalled += 1
            return Outcome.MISS
        if not damaged_only and key in self._there:
            self._recalled += 1
            return Outcome.HIT
        return None

    def damaged(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Those of `keys` that were found damaged."""
        return [key for key in keys if key in self._damaged] if self._damaged else []

    def learn(self, keys: Sequence[ObjectKey], batch: BatchResult) -> None:
        """Which pages are there, which are not, and which are not what was sealed."""
        if Outcome.CORRUPT in batch.outcomes:
            self._damaged.add(_keys_with(keys, batch, Outcome.CORRUPT))
        if self._damaged:
            self._damaged.discard(_keys_with(keys, batch, Outcome.STORED))
        if self._shared and keys:
            self._there.discard(_keys_with(keys, batch, Outcome.MISS, Outcome.CORRUPT))
            self._there.add(_keys_with(keys, batch, Outcome.HIT, Outcome.STORED, Outcome.EXISTS))

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Pages that were deleted."""
        self._there.discard(keys)

    def invalidate(self) -> None:
        """Pages may be gone; those that are damaged may still be there."""
        self._there.clear()

    def clear(self) -> None:
        """Every page is gone."""
        self._there.clear()
        self._damaged.clear()

    def statistics(self) -> PresenceStatistics:
        return PresenceStatistics(len(self._there), len(self._damaged), self._recalled)


def _keys_with(keys: Sequence[ObjectKey], batch: BatchResult, *wanted: Outcome) -> list[ObjectKey]:
    """The keys that came to one of the wanted outcomes."""
    return [key for key, outcome in zip(keys, batch.outcomes, strict=True) if outcome in wanted]
