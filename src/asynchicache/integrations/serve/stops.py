"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through until a stop string begins; holds back what may be the beginning of one.

    Args:
        stops: none of them empty.

    Attributes:
        found: whether one came; nothing is let through any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What may be shown, now that `text` has come."""
        if self.found:
            return ""
        self._held += text
        begins = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(begins)
        ready = min(begins) if begins else len(self._held) - self._unsure()
        shown, self._held = self._held[:ready], self._held[ready:]
        return shown

    def finish(self) -> str:
        """What was held back, if no stop string came of it."""
        rest, self._held = self._held, ""
        return "" if self.found else rest

    def _unsure(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        ends = (count for count in range(longest, 0, -1) if self._may_begin(self._held[-count:]))
        return next(ends, 0)

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
