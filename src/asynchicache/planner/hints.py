"""What only the client knows about a request's pages, and how much of the memory it may claim. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import isfinite

from asynchicache.errors import ConfigError
from asynchicache.options import check_fields
from asynchicache.tree.keeps import HintShare

MAX_KEEP_SECONDS = 3600.0
"""The longest that a hint can ask to keep pages."""

MAX_REPEATS = 4
"""The most lengths of `CacheHint.repeats`: each costs a state."""

_FULL_HINT = 2.0


@dataclass(frozen=True, slots=True)
class CacheHint:
    """What a client knows about the future of a request's pages; advice that changes the order of eviction.

    A hint never evicts what is locked, and all hints together count for at most `HINTED_SHARE` of the memory
    (`tree.keeps`).

    Attributes:
        continues: another request will continue this one: it counts as used later, by two usual returns.
        over: nobody will ask for it again: it counts as used earlier by as much.
        keep_seconds: nothing of it is evicted for so long, unless there is nothing else to evict; at most
            `MAX_KEEP_SECONDS`.
        transient: keep nothing that this request computes.
        repeats: lengths in tokens up to which later prompts repeat this one, ascending; states are kept there
            instead of at the end of the prompt. A chat template may end a prompt with an invitation to answer
            that the next turn does not repeat. Lengths beyond the prompt count as all of it. Default: all.
    """

    continues: bool = False
    over: bool = False
    keep_seconds: float = 0.0
    transient: bool = False
    repeats: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, "hint ")
        if not isfinite(self.keep_seconds) or not 0 <= self.keep_seconds <= MAX_KEEP_SECONDS:
            raise ConfigError(
                f"hint keep_seconds {self.keep_seconds} must be 0 to {MAX_KEEP_SECONDS:g} seconds"
            )
        if (self.over or self.transient) and (self.continues or self.keep_seconds > 0):
            raise ConfigError("a hint says that a request is over or transient, or that it returns, not both")
        if len(self.repeats) > MAX_REPEATS or min(self.repeats, default=0) < 0:
            raise ConfigError(
                f"hint repeats {self.repeats} must be {MAX_REPEATS} lengths at most, of 0 tokens or more"
            )

    @property
    def halves(self) -> float:
        """Usual returns by which the request counts as used later, from -2 to 2."""
        return _FULL_HINT * (self.continues - self.over)


NO_HINT = CacheHint()


class HintLedger:
    """Pages that `continues` favours now: they count as used later than they were.

    Attributes:
        share: the pages, by namespace.
        refused: requests, and publications, whose hint did not count.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: pages of the larger tier."""
        self.share = HintShare(capacity)
        self.refused = 0
        self._ends: list[tuple[float, bytes, int]] = []

    def allow(self, seed: bytes, pages: int, clock: float, until: float) -> bool:
        """Favour so many pages more, if the namespace may have them; else count a refusal.

        Args:
            seed: of the namespace.
            pages: of the request; nothing is noted of none.
            until: the clock at which they are as old as they would be without the hint.
        """
        ends = self._ends
        while ends and ends[0][0] <= clock:
            _, of_seed, count = heappop(ends)
            self.share.give_back(of_seed, count)
        if pages <= 0:
            return True
        if not self.share.take(seed, pages):
            self.refused += 1
            return False
        heappush(ends, (until, seed, pages))
        return True
