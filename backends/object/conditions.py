"""Whether a store's conditional writes can be believed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

logger = logging.getLogger(__name__)

_MOST_REFUSALS = 3
_DISTRUST_SECONDS = 300.0


class Conditions:
    """What one pool's writes on condition that nothing is there, or a known object, have come to.

    Some stores know no such writes, and say so. Some gateways refuse them all, by one status or another: no
    page is stored there, nobody gets a claim, and everybody may wait for one that nobody has.

    Args:
        place: where the pool is, for the log.
        now: a clock that does not jump, in seconds.
    """

    def __init__(self, place: str, now: Callable[[], float]) -> None:
        self._place = place
        self._now = now
        self._refusals = 0  # in a row
        self._until = -inf

    @property
    def useful(self) -> bool:
        return self._now() >= self._until

    def unknown(self) -> None:
        """The store says that it knows no conditions."""
        self._until = inf

    def kept(self) -> None:
        """A write was done, or refused because somebody was quicker."""
        self._refusals = 0

    def broken(self) -> None:
        """A write was refused though its condition holds. It may have held again by then, so a few in a row
        count; and after the pause, one."""
        self._refusals += 1
        if self._refusals >= _MOST_REFUSALS and self.useful:
            self._until = self._now() + _DISTRUST_SECONDS
            logger.warning(
                "%s: conditional writes are refused where nothing is: for %.0f s pages are written "
                "without them, and several writers of a prompt do not wait for each other",
                self._place,
                _DISTRUST_SECONDS,
            )
