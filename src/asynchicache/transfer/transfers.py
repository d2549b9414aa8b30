"""What carries out copies, as the executor sees it: in this process, or handed out to others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from asynchicache.streams.base import Event
from asynchicache.transfer.audit import PageAudit
from asynchicache.transfer.plan import CacheOperation
from asynchicache.transfer.record import Done, OnWait, Reads
from asynchicache.transfer.statistics import TransferStatistics
from asynchicache.transfer.ticket import Ticket


class Transfers(Protocol):
    """Carries out copies. `LocalTransfers` does it in this process, `RemoteCopies` hands them out."""

    @property
    def audit(self) -> PageAudit | None:
        """Compares a sample of the pages; None if there is no audit."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether the copies run here, so that streams of this process can order them."""
        ...

    def submit(
        self,
        operation: CacheOperation,
        *,
        after: Sequence[Event] = (),
        reads: Reads = (),
        done: Done,
        on_wait: OnWait | None = None,
    ) -> Ticket:
        """Start an operation; see `LocalTransfers.submit`."""
        ...

    def statistics(self) -> TransferStatistics: ...

    def in_flight(self) -> Collection[CacheOperation]:
        """Operations whose `done` has not been called."""
        ...

    def end_unstarted(self) -> None:
        """Fail what has not been started and never will be, because the cache closes."""
        ...

    async def aclose(self, deadline_seconds: float) -> int:
        """Refuse new operations and wait for those in flight; see `LocalTransfers.aclose`."""
        ...
