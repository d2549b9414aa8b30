"""What a transfer engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.transfer.audit import AuditStatistics
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import Direction


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts since the engine was made.

    Attributes:
        operations: operations submitted, without empty ones.
        launches: transfers that they were merged into.
        failed: transfers that failed, or were given up after they were planned.
        in_flight: operations whose `done` has not been called.
        nbytes: bytes landed, by direction.
        paths: bytes enqueued, by pool and by the path that they took.
        choice: by direction, which path runs of which length take, in words.
        audit: pages whose fingerprints were taken and compared.
    """

    operations: int
    launches: int
    failed: int
    in_flight: int
    nbytes: Mapping[Direction, int]
    paths: Mapping[str, Mapping[CopyPath, int]]
    choice: Mapping[Direction, str]
    audit: AuditStatistics
