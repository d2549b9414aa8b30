"""Turns the operations of one tick into transfers: merges independent ones, and finds what each must wait
for.

Used by one thread at a time. The arithmetic is numpy's, for a whole tick at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from asynchicache.errors import CacheError
from asynchicache.transfer.plan import (
    CacheOperation,
    Columns,
    Direction,
    PoolShape,
    Slots,
    columns_of,
    plan_of,
    slot_numbers,
)
from asynchicache.transfer.record import Submission, TransferRecord
from asynchicache.types import Tier

_TIERS = (Tier.DEVICE, Tier.HOST)
_READERS = {
    Tier.DEVICE: (Direction.BACKUP, Direction.FORK),
    Tier.HOST: (Direction.LOAD,),
    Tier.STORAGE: (),
}


class HazardTable:
    """The last users of every slot, by transfer number; numbers are positive and ascend.

    A transfer must wait for the writers of what it reads, and for the readers and writers of what it writes.
    The table holds, for every slot, the number of the last transfer that wrote it, and of the last that read
    it in each direction. The last is enough: transfers of one direction run in the order of their numbers on
    one stream, and each waits for the writer before it. Numbers of completed transfers are skipped by
    `since`, so nothing is removed when a transfer ends.
    """

    def __init__(self, extents: Mapping[str, PoolShape]) -> None:
        self._writers = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
        }
        self._readers = {
            (pool, tier, direction): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
            for direction in _READERS[tier]
        }

    def writers(self, pool: str, tier: Tier, slots: Slots | Sequence[int], since: int) -> set[int]:
        """Transfers numbered `since` or later that write one of `slots`."""
        return _recent([self._writers[pool, tier]], slot_numbers(slots), since)

    def writers_of_sources(self, direction: Direction, columns: Columns, since: int) -> set[int]:
        """Transfers numbered `since` or later that write what is read here."""
        found: set[int] = set()
        for pool, (sources, _) in columns.items():
            found |= self.writers(pool, direction.source, sources, since)
        return found

    def users_of_destinations(self, direction: Direction, columns: Columns, since: int) -> set[int]:
        """Transfers numbered `since` or later that read or write what is written here."""
        tier = direction.destination
        found: set[int] = set()
        for pool, (_, destinations) in columns.items():
            found |= _recent(self._users(pool, tier), destinations, since)
        return found

    def mark(self, direction: Direction, columns: Columns, number: int) -> None:
        """Record that transfer `number` moves `columns`."""
        for pool, (sources, destinations) in columns.items():
            self._readers[pool, direction.source, direction][sources] = number
            self._writers[pool, direction.destination][destinations] = number

    def _users(self, pool: str, tier: Tier) -> list[Slots]:
        """The last writers of each slot, then its last readers, by direction."""
        return [self._writers[pool, tier], *(self._readers[pool, tier, one] for one in _READERS[tier])]


class IndependenceCheck:
    """Whether operations may run in any order: no slot is written twice, or read and written.

    Every slot that is written gets a stamp. Stamps only ascend, so those of earlier calls need no clearing.
    """

    def __init__(self, extents: Mapping[str, PoolShape]) -> None:
        self._stamps = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
        }
        self._next = 1

    def holds(self, operations: Sequence[CacheOperation]) -> bool:
        first = self._next
        moved = [
            (direction, columns_of([one for one in operations if one.direction is direction]))
            for direction in Direction
        ]
        for direction, columns in moved:
            for pool, (_, written) in columns.items():
                if not self._stamp(self._stamps[pool, direction.destination], written, first):
                    return False
        return not any(
            (self._stamps[pool, direction.source][read] >= first).any()
            for direction, columns in moved
            for pool, (read, _) in columns.items()
        )

    def _stamp(self, table: Slots, slots: Slots, first: int) -> bool:
        """Stamp `slots`; False if one of them had a stamp of this call already, or comes twice."""
        if (table[slots] >= first).any():
            return False
        stamps = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)
        table[slots] = stamps
        return not (table[slots] != stamps).any()


def _recent(tables: Iterable[Slots], slots: Slots, since: int) -> set[int]:
    found: set[int] = set()
    for table in tables:
        numbers = table[slots]
        found.update(numbers[numbers >= since].tolist())
    return found


_MAX_URGENT_FIRST = (Direction.FORK, Direction.LOAD, Direction.BACKUP)
"""Forks are small, and forwards wait for them and for loads."""


class Scheduler:
    """Turns submissions into transfers, numbered in the order of enqueueing, with what each must wait for.

    Attributes:
        group_bytes: bytes that make a group of a load's layers worth a launch.
    """

    def __init__(
        self,
        extents: Mapping[str, PoolShape],
        layers: int,
        group_bytes: int,
        watch: Callable[[TransferRecord, int], None],
    ) -> None:
        """
        Args:
            extents: by pool.
            layers: layers of the model, those without a cache included.
            group_bytes: as the attribute.
            watch: as `TransferRecord` has it.
        """
        self._extents = extents
        self._layers = layers
        self.group_bytes = group_bytes
        self._watch = watch
        self._hazards = HazardTable(extents)
        self._unmarked: deque[tuple[Direction, Columns, int]] = deque()  # transfers that it does not know yet
        self._independence = IndependenceCheck(extents)
        self._live: dict[int, TransferRecord] = {}
        self._scheduled: list[TransferRecord] = []  # by the call that runs, or ran last
        self._number = 0

    def schedule(self, submissions: Sequence[Submission]) -> list[TransferRecord]:
        """The transfers of one tick, in the order to enqueue them; resolves every submission.

        Independent operations of one direction become one transfer. Among independent transfers forks and
        loads go before backups. A transfer without others takes no longer for many pages than for few, other
        than `settle`.
        """
        self.settle()
        self._forget_finished()
        self._scheduled = []
        moving = [submission for submission in submissions if not submission.operation.empty]
        records = [record for some in self._rounds(moving) for record in self._schedule_round(some)]
        for record in records:
            for submission in record.submissions:
                others = [writer for writer in self._writers(submission) if writer is not record]
                submission.resolve(record, others)
        for submission in submissions:
            if submission.operation.empty:
                submission.resolve(None, self._writers(submission))
        return records

    def settle(self) -> None:
        """Note which slots the transfers use that were scheduled last; it may come once they are enqueued."""
        while self._unmarked:
            self._hazards.mark(*self._unmarked[0])
            self._unmarked.popleft()

    def abandon(self, error: Exception) -> list[TransferRecord]:
        """The transfers of a `schedule` that raised: they count as live, as later ones may already wait for
        them, but will not be enqueued."""
        for record in self._scheduled:
            record.error = error
            record.release()
        return self._scheduled

    def _forget_finished(self) -> None:
        self._live = {number: record for number, record in self._live.items() if not record.finished}

    def _rounds(self, submissions: Sequence[Submission]) -> Iterator[Sequence[Submission]]:
        """Split before each operation that depends on an earlier one: copies of one round have no order."""
        while submissions:
            size = self._independent_prefix(submissions)
            yield submissions[:size]
            submissions = submissions[size:]

    def _independent_prefix(self, submissions: Sequence[Submission]) -> int:
        operations = [submission.operation for submission in submissions]
        if len(operations) == 1 or self._independence.holds(operations):
            return len(operations)
        # Every prefix of independent operations is independent, and a single operation always is.
        sizes = range(2, len(operations))
        return 1 + bisect_left(sizes, True, key=lambda size: not self._independence.holds(operations[:size]))

    def _schedule_round(self, submissions: Iterable[Submission]) -> list[TransferRecord]:
        merged: dict[Direction, list[Submission]] = {direction: [] for direction in _MAX_URGENT_FIRST}
        for submission in submissions:
            merged[submission.operation.direction].append(submission)
        return [self._record(together) for together in merged.values() if together]

    def _record(self, submissions: Sequence[Submission]) -> TransferRecord:
        operations = [submission.operation for submission in submissions]
        direction, columns = operations[0].direction, columns_of(operations)
        self.settle()
        since = self._oldest
        self._number += 1
        record = TransferRecord(self._number, direction, submissions, self._watch)
        self._scheduled.append(record)
        if self._live:
            record.reads_from = self._records(self._hazards.writers_of_sources(direction, columns, since))
            record.runs_after = self._records(self._hazards.users_of_destinations(direction, columns, since))
        self._unmarked.append((direction, columns, record.number))
        self._live[record.number] = record
        group_bytes = self.group_bytes if direction is Direction.LOAD else None
        try:
            record.start(plan_of(operations, columns, self._extents, self._layers, group_bytes))
        except CacheError as error:
            record.error = error
        return record

    def _writers(self, submission: Submission) -> list[TransferRecord]:
        """The transfers in flight that write what a submitter will read."""
        if submission.reads:
            self.settle()
        numbers: set[int] = set()
        for pool, slots in submission.reads:
            numbers |= self._hazards.writers(pool, Tier.DEVICE, slots, self._oldest)
        return list(self._records(numbers))

    @property
    def _oldest(self) -> int:
        """The number of the oldest transfer in flight; above all numbers if there is none."""
        return next(iter(self._live), self._number + 1)

    def _records(self, numbers: Iterable[int]) -> set[TransferRecord]:
        return {self._live[number] for number in numbers if number in self._live}
