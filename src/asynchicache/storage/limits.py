"""How much patience the core has with an engine, and what it answers for one."""

from __future__ import annotations

import asyncio
from typing import ClassVar, NamedTuple

from asynchicache.options import Natural, Options, Positive, Seconds
from asynchicache.types import Outcome


class PoolLimits(Options, frozen=True):
    """How much patience the core has with an engine.

    Attributes:
        deadline: seconds for one call of the engine. Also for what comes before it: pages that wait for
            their turn so long since they were asked for, or since another part of the same call was
            answered, are TIMEOUT, and the engine is not asked for them. Puts wait as long as it takes.
            Default: 10.
        batch_bytes: bytes of pages that one call moves at most, besides `Capabilities.batch_pages`; with
            `Capabilities.concurrency` calls at once it bounds what is under way. Default: 64 MiB.
        retries: times that pages are asked for again whose call failed at once. Only calls that change
            nothing are repeated, and none whose deadline has passed. Default: 1.
        failures: failed or late calls in a row that open the breaker. Default: 5.
        cooldown: seconds that the breaker stays open before one call may try. Default: 5.
        closing: seconds that `aclose` waits for calls that still run, and for the engine. Default: 10.
        clearing: seconds that a backend may take to clear one pool. Default: 300.
        opening: seconds that a backend may take to open one pool. Default: 60.
        known_pages: pages of a shared engine that are remembered to be there, so that it need not be
            asked again, and pages that were found damaged; 0 for none. Default: 65536.
        known_seconds: how long a page is remembered to be there: others may delete it. Default: 30.
    """

    subject: ClassVar[str] = "storage limit "

    deadline: Seconds = 10.0
    batch_bytes: Positive = 64 << 20
    retries: Natural = 1
    failures: Positive = 5
    cooldown: Seconds = 5.0
    closing: Seconds = 10.0
    clearing: Seconds = 300.0
    opening: Seconds = 60.0
    known_pages: Natural = 1 << 16
    known_seconds: Seconds = 30.0


class BatchResult(NamedTuple):
    """What became of a call's pages.

    Attributes:
        outcomes: one a key.
        lingering: None if the slots are the caller's again. Else done as soon as the engine has let
            go of them, or cancelled if the pool was closed first: then they are never safe again.
    """

    outcomes: list[Outcome]
    lingering: asyncio.Future[None] | None = None

    @property
    def present(self) -> bytes:
        """One byte a key, 1 where the outcome is HIT: what `storage.hits` reads."""
        return bytes([outcome is Outcome.HIT for outcome in self.outcomes])
