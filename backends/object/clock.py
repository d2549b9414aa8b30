"""What time it is by a store's clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf

from asynchicache.backends.object.requests import failed
from asynchicache.backends.object.stores import FAILURES
from asynchicache.errors import StorageError

logger = logging.getLogger(__name__)

SKEW_SECONDS = 60.0
"""By how much a machine's clock may differ from the store's before anybody minds."""
_KNOWN_SECONDS = 3600.0
_PAUSE_SECONDS = 60.0
"""After an answer, and after none, until the store is asked again."""


class ObjectClock:
    """The clock of one store. It costs requests to ask, so nobody does before this machine's says it is time.

    Between two answers a clock goes on that does not jump, so a machine's time may be set meanwhile.

    Args:
        place: the store, for the log.
        ask: asks it for the Unix time.
        now: a clock that does not jump, in seconds.
        wall: this machine's Unix time.
    """

    def __init__(
        self,
        place: str,
        ask: Callable[[], Awaitable[float]],
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._place = place
        self._ask = ask
        self._now = now
        self._wall = wall
        self._asking = asyncio.Lock()
        self._until = -inf  # what follows counts
        self._offset: float | None = None  # from `now` to the store's time; None: it did not say
        self._warned = False

    async def is_past(self, when: float) -> bool:
        """Whether a Unix time is past by the store's clock; not where the store does not say."""
        if self._now() >= self._until and self._wall() <= when:
            return False
        async with self._asking:
            if self._now() >= self._until:
                await self._compare()
        return self._offset is not None and self._now() + self._offset > when

    async def _compare(self) -> None:
        self._offset = None
        try:
            told = await self._ask()
        except (StorageError, *FAILURES) as error:
            failed(error)
            self._until = self._now() + _PAUSE_SECONDS
            return
        self._offset = told - self._now()
        self._until = self._now() + _KNOWN_SECONDS
        skew = self._wall() - told
        if abs(skew) > SKEW_SECONDS and not self._warned:
            self._warned = True
            logger.warning(
                "%s: this machine's clock is %.0f s %s the store's: claims are as old as the store says",
                self._place,
                abs(skew),
                "ahead of" if skew > 0 else "behind",
            )
