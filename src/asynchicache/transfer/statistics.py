"""Counts of transfers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asynchicache.histograms import Distribution, Histogram
from asynchicache.transfer.audit import AuditStatistics
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import Direction
from asynchicache.transfer.record import Submission


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts since the transfers were opened.

    Attributes:
        operations: operations submitted, without empty ones.
        launches: transfers that they were merged into.
        failed: transfers that failed, or were given up after they were planned.
        in_flight: operations whose `done` has not been called.
        nbytes: bytes landed, by direction.
        paths: bytes enqueued, by pool and copy path.
        choice: by direction, which path runs of which length take, in words.
        audit: pages fingerprinted and compared.
        latencies: by direction, from the submission of operations until their bytes had landed.
    """

    operations: int
    launches: int
    failed: int
    in_flight: int
    nbytes: Mapping[Direction, int]
    paths: Mapping[str, Mapping[CopyPath, int]]
    choice: Mapping[Direction, str]
    audit: AuditStatistics
    latencies: Mapping[Direction, Distribution]


class CompletionCounters:
    """Bytes that landed and latencies, by direction.

    Attributes:
        nbytes: bytes of completed transfers.
    """

    def __init__(self) -> None:
        self.nbytes = dict.fromkeys(Direction, 0)
        self._latencies = {direction: Histogram() for direction in Direction}

    def count(self, direction: Direction, submissions: Iterable[Submission], now: float) -> None:
        """Count submissions that landed at `now`, by the port's clock."""
        for submission in submissions:
            if submission.tick is not None:
                self._latencies[direction].observe(now - submission.tick.started)

    def latencies(self) -> dict[Direction, Distribution]:
        return {direction: histogram.snapshot() for direction, histogram in self._latencies.items()}
