"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through up to the first stop string; holds back text that may begin one.

    Args:
        stops: non-empty stop strings.

    Attributes:
        found: whether a stop string was found; no more text passes then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add `text`, and return the text that can be shown."""
        if self.found:
            return ""
        self._held += text
        begins = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(begins)
        ready = min(begins) if begins else len(self._held) - self._unsure()
        shown, self._held = self._held[:ready], self._held[ready:]
        return shown

    def finish(self) -> str:
        """Return the text held back, unless a stop string was found."""
        rest, self._held = self._held, ""
        return "" if self.found else rest

    def _unsure(self) -> int:
        """Return the number of characters at the end that may begin a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._held))
        ends = (self._held[-count:] for count in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
