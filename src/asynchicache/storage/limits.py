"""Timeouts and limits of one storage pool, and the result of one batch."""

from __future__ import annotations

import asyncio
from typing import ClassVar, NamedTuple

from asynchicache.options import FiniteSeconds, Natural, Options, Positive, Seconds
from asynchicache.types import Outcome


class PoolLimits(Options, frozen=True):
    """Timeouts and limits of calls to one pool's engine.

    Attributes:
        deadline: seconds that one engine call may take. It also limits the wait for a permit, counted from
            the start of the call or from its last answered batch: pages that wait longer are TIMEOUT, and
            the engine is not asked for them. Puts wait without a limit. Default: 10.
        batch_bytes: most bytes of pages in one call, in addition to `Capabilities.batch_pages`. Times
            `Capabilities.concurrency`, it bounds the bytes in flight. Default: 64 MiB.
        retries: times that failed pages are retried. Only calls that are safe to repeat are retried, and
            only before their deadline. Default: 1.
        failures: consecutive failed or late calls that open the breaker. Default: 5.
        cooldown: seconds that the breaker stays open before it allows a trial call. Default: 5.
        closing: seconds that `aclose` waits for running calls, and for the engine. Default: 10.
        clearing: seconds that a backend may take to clear one pool. Default: 300.
        opening: seconds that a backend may take to open one pool. Default: 60.
        claim_seconds: how long a write leaves pages to another process that has claimed to send them, from
            the first refusal on; and how long the claims of this one hold. Default: 5.
        label_seconds: how long after its last use a pool counts as in use, for `asynchicache gc`. Default: 7
            days.
        known_pages: most pages of a shared engine to remember as existing, which saves `exists` calls, and
            most pages to remember as damaged; 0 for none. Default: 65536.
        known_seconds: seconds to remember that a page exists: other processes may delete it. Default: 30.
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
    claim_seconds: FiniteSeconds = 5.0
    label_seconds: Seconds = 7 * 86400.0
    known_pages: Natural = 1 << 16
    known_seconds: Seconds = 30.0


class BatchResult(NamedTuple):
    """The result of one call.

    Attributes:
        outcomes: one per key.
        lingering: None if the caller may reuse the slots now. Otherwise a future that is done when the
            engine no longer touches them, or cancelled if the pool was closed first: the slots are then
            never safe to reuse.
        sources: of a read from a chain of stores, the number of the stage that each page came from.
    """

    outcomes: list[Outcome]
    lingering: asyncio.Future[None] | None = None
    sources: bytes = b""

    @property
    def present(self) -> bytes:
        """One byte per key, 1 if the outcome is HIT; input of `storage.hits`."""
        return bytes([outcome is Outcome.HIT for outcome in self.outcomes])
