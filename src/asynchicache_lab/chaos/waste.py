"""Detect reads from storage that nobody waits for when they begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from asynchicache.types import Outcome
from asynchicache_lab.chaos.calls import Call
from asynchicache_lab.chaos.ledger import Ledger

MOST_FOR_NOBODY = 32
"""Pages that a cache may begin to read though their request has just gone: those of calls on their way."""


class WasteOracle:
    """Counts the pages whose read begins when no request waits for them, as long as storage never failed.

    If storage has failed, calls are retried later than anybody waits.
    """

    def __init__(
        self, ledger: Ledger, awaited: Callable[[Sequence[bytes]], int], calm: Callable[[], bool]
    ) -> None:
        """
        Args:
            ledger: receives counts and violations.
            awaited: how many of the pages with these digests a request waits for.
            calm: returns whether storage never failed.
        """
        self._ledger = ledger
        self._awaited = awaited
        self._calm = calm
        self._pages = 0

    def began(self, call: Call, running: Iterable[Call]) -> None:
        if call.verb != "get" or not self._calm():
            return
        for_nobody = len(call.digests) - self._awaited(call.digests)
        self._ledger.costs["read_for_nobody"] += for_nobody
        before, self._pages = self._pages, self._pages + for_nobody
        if before <= MOST_FOR_NOBODY < self._pages:
            self._ledger.violations.append(f"read for nobody: more than {MOST_FOR_NOBODY} pages")

    def ended(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        """It is over."""
