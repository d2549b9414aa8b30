"""Remember which pages a shared engine has, to save `exists` calls, and which pages were found damaged."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from asynchicache.hashing import ObjectKey
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.types import Outcome


class ExpiringKeys:
    """A bounded set of keys that expire; when it is full, the oldest goes first.

    Args:
        most: most members; 0 keeps none.
        seconds: how long a member is kept.
        now: monotonic clock, in seconds.
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
    """Counts of remembered pages.

    Attributes:
        there: pages remembered as existing, including expired ones.
        damaged: pages found damaged and not stored again since.
        recalled: keys answered without asking the engine, since the start.
    """

    there: int
    damaged: int
    recalled: int


class PresenceCache:
    """Remembers which of an engine's pages exist and which are damaged.

    Args:
        limits: how many pages to remember, and for how long.
        shared: whether other processes use the same pages. Only then are existing pages remembered.
        now: monotonic clock, in seconds.
    """

    def __init__(self, limits: PoolLimits, *, shared: bool, now: Callable[[], float]) -> None:
        self._there = ExpiringKeys(limits.known_pages if shared else 0, limits.known_seconds, now)
        self._damaged = ExpiringKeys(limits.known_pages, float("inf"), now)
        self._shared = shared
        self._recalled = 0

    def __bool__(self) -> bool:
        return bool(self._there or self._damaged)

    def recall(self, key: ObjectKey, *, damaged_only: bool = False) -> Outcome | None:
        """HIT or MISS from memory, or None if the engine must be asked.

        A damaged page is a miss until it is stored again.

        Args:
            key: the page.
            damaged_only: answer only for damaged pages, never HIT.
        """
        if key in self._damaged:
            self._recalled += 1
            return Outcome.MISS
        if not damaged_only and key in self._there:
            self._recalled += 1
            return Outcome.HIT
        return None

    def damaged(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """The keys in `keys` that were found damaged."""
        return [key for key in keys if key in self._damaged] if self._damaged else []

    def learn(self, keys: Sequence[ObjectKey], batch: BatchResult) -> None:
        """Record from a batch which pages exist, which do not, and which are damaged."""
        if Outcome.CORRUPT in batch.outcomes:
            self._damaged.add(_keys_with(keys, batch, Outcome.CORRUPT))
        if self._damaged:
            self._damaged.discard(_keys_with(keys, batch, Outcome.STORED))
        if self._shared and keys:
            self._there.discard(_keys_with(keys, batch, Outcome.MISS, Outcome.CORRUPT))
            self._there.add(_keys_with(keys, batch, Outcome.HIT, Outcome.STORED, Outcome.EXISTS))

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Pages were deleted: no longer remember them as existing."""
        self._there.discard(keys)

    def repaired(self, keys: Iterable[ObjectKey]) -> None:
        """Pages are stored anew by someone else: no longer remember them as damaged."""
        self._damaged.discard(keys)

    def invalidate(self) -> None:
        """Any page may be gone: forget existing pages, but keep damaged ones, which may still be there."""
        self._there.clear()

    def clear(self) -> None:
        """Every page is gone: forget everything."""
        self._there.clear()
        self._damaged.clear()

    def statistics(self) -> PresenceStatistics:
        return PresenceStatistics(len(self._there), len(self._damaged), self._recalled)


def _keys_with(keys: Sequence[ObjectKey], batch: BatchResult, *wanted: Outcome) -> list[ObjectKey]:
    """The keys whose outcome is one of `wanted`."""
    return [key for key, outcome in zip(keys, batch.outcomes, strict=True) if outcome in wanted]
