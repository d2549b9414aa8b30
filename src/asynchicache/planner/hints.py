"""What only the client knows about a request's pages, and how much of the memory it may claim. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite

from asynchicache.errors import ConfigError

MAX_KEEP_SECONDS = 3600.0
"""The longest that a hint can ask to keep pages."""

HINTED_SHARE = 0.25
"""The share of a cache's pages that hints of one namespace can favour at a time; more have no effect."""

_FULL_HINT = 2.0


@dataclass(frozen=True, slots=True)
class CacheHint:
    """What a client knows about the future of a request's pages; advice that changes the order of eviction.

    A hint never evicts what is locked, and counts for at most `HINTED_SHARE` of the memory in each namespace.

    Attributes:
        continues: another request will continue this one: it counts as used later, by two usual returns.
        over: nobody will ask for it again: it counts as used earlier by as much.
        keep_seconds: it counts as used that much later; at most `MAX_KEEP_SECONDS`.
        transient: keep nothing that this request computes.
    """

    continues: bool = False
    over: bool = False
    keep_seconds: float = 0.0
    transient: bool = False

    def __post_init__(self) -> None:
        if not isfinite(self.keep_seconds) or not 0 <= self.keep_seconds <= MAX_KEEP_SECONDS:
            raise ConfigError(
                f"hint keep_seconds {self.keep_seconds} must be 0 to {MAX_KEEP_SECONDS:g} seconds"
            )
        if (self.over or self.transient) and self.favours:
            raise ConfigError("a hint says that a request is over or transient, or that it returns, not both")

    @property
    def favours(self) -> bool:
        """Whether it asks to keep pages for longer than others."""
        return self.continues or self.keep_seconds > 0

    @property
    def halves(self) -> float:
        """Usual returns by which the request counts as used later, from -2 to 2."""
        return _FULL_HINT * (self.continues - self.over)


NO_HINT = CacheHint()


class HintLedger:
    """Pages that hints favour now, by namespace."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: pages of the larger tier."""
        self._most = HINTED_SHARE * capacity
        self._favoured: dict[bytes, deque[tuple[float, int]]] = {}
        self.refused = 0

    def allows(self, seed: bytes, pages: int, clock: float) -> bool:
        """Whether a namespace may favour this many pages more. Counts refusals.

        Args:
            seed: of the namespace.
            pages: of the request.
            clock: the tree's.
        """
        held = self._favoured.get(seed)
        while held and held[0][0] <= clock:
            held.popleft()
        if held is not None and not held:
            del self._favoured[seed]
        allowed = pages + sum(count for _, count in held or ()) <= self._most
        self.refused += not allowed
        return allowed

    def note(self, seed: bytes, pages: int, until: float) -> None:
        """Pages are favoured until the tree's clock gets to `until`."""
        self._favoured.setdefault(seed, deque()).append((until, pages))
